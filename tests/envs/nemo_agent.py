"""NeMo-Gym's own simple agent, in its own Python: what a resources server gives for the same messages of a model.

    python nemo_agent.py URL '[[row, [["text", [["tool", {arguments}], ...], "stop"], ...], max_steps], ...]'

Each message of the model is its text, its calls, and why it ended; the package's converter makes items of it. Prints
for each episode the reward and the items of the response, or what failed.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

import aiohttp
from nemo_gym.base_resources_server import BaseVerifyRequest
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.responses_converter import ResponsesConverter
from pydantic import ConfigDict
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig


class Verify(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


def response(message: list) -> dict:
    text, calls, finish = message
    tools = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    converter = ResponsesConverter(return_token_id_information=False)
    items = converter.postprocess_assistant_message_dict({"role": "assistant", "content": text, "tool_calls": tools})
    return {
        "id": "resp",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": [item.model_dump() for item in items],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
    }


class Answer:
    """What the agent reads of aiohttp's answers."""

    def __init__(self, status: int, body: bytes, cookies: dict) -> None:
        self.status, self.ok, self.cookies, self._body = status, status < 400, cookies, body
        self.content = self

    async def read(self) -> bytes:
        return self._body


async def play(url: str, row: dict, messages: list, most: int) -> dict:
    said = iter(messages)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:

        async def post(server_name: str, url_path: str, json: object = None, cookies: object = None) -> Answer:
            if server_name == "model":
                return Answer(200, _json(response(next(said))), {})
            async with client.post(f"{url}{url_path}", json=json) as answer:
                return Answer(answer.status, await answer.read(), {})

        config = SimpleAgentConfig(
            host="", port=0, entrypoint="", name="agent", max_steps=most,
            resources_server={"type": "resources_servers", "name": "resources"},
            model_server={"type": "responses_api_models", "name": "model"},
        )  # fmt: skip
        agent = SimpleAgent.model_construct(config=config, server_client=SimpleNamespace(post=post))
        try:
            seeded = await post("resources", "/seed_session", json=row)
            assert seeded.ok, await seeded.read()
            params = NeMoGymResponseCreateParamsNonStreaming.model_validate(row["responses_create_params"])
            made, *_ = await agent._create_episode(params, model_url_path="/v1/responses")
            body = Verify.model_validate({**row, "response": made.model_dump()})
            verdict = await post("resources", "/verify", json=json.loads(body.model_dump_json()))
            assert verdict.ok, await verdict.read()
            told = json.loads(await verdict.read())
            keys = ("type", "name", "output", "content")
            items = [{key: item.get(key) for key in keys} for item in made.model_dump()["output"]]
            return {"reward": told["reward"], "items": items, "error": ""}
        except Exception as failure:
            return {"reward": None, "items": [], "error": f"{type(failure).__name__}: {failure}"}


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


async def main() -> None:
    print(json.dumps([await play(sys.argv[1], *case) for case in json.loads(sys.argv[2])]))


asyncio.run(main())
