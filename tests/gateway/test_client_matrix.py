"""Other people's clients, unchanged, over the gateway: a task with two tools each, which is one trajectory.

The programs are clients_py.py and clients_js.mjs. They run in environments of their own with the newest packages, and
with variables of the user's own around them: keys that must not be used, and a proxy that leads nowhere.
"""

import asyncio
import dataclasses
import json
import os
import pathlib

import pytest

from jaxagent.agents.base import Where
from jaxagent.agents.programs import client_variables
from jaxagent.gateway.session import SessionLimits
from tests import environments
from tests.gateway import world
from tests.gateway.scripted import Scripted

pytestmark = pytest.mark.slow  # installs packages, and starts a process per client

HERE = pathlib.Path(__file__).parent
LIMIT_S = 300.0
LIMITS = SessionLimits(turn_tokens=400, context_tokens=100_000, requests=20)
PYTHON = (
    *("openai", "anthropic", "langgraph", "langchain-openai", "pydantic-ai-slim[openai,anthropic]"),
    *("smolagents[openai]", "litellm", "openai-agents"),
)
NODE = ("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")
USERS = {  # of somebody who uses the same clients for something else
    "OPENAI_API_KEY": "sk-real",
    "OPENAI_API_BASE": "https://real.invalid/v1",
    "ANTHROPIC_API_KEY": "sk-ant-real",
    "ANTHROPIC_AUTH_TOKEN": "real",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def code(text):
    return f"Thought: I compute it.\n<code>\n{text}\n</code>"


STEPS = ["I multiply.\n" + call("multiply", a=6, b=7), call("add", a=42, b=8), "It is 50."]
PYTHON_CLIENTS = {  # name -> what the policy says, turn by turn
    **dict.fromkeys(("openai_chat", "openai_responses", "anthropic_messages", "langgraph"), STEPS),
    "anthropic_runner": [STEPS[0].replace("multiply", "multiply_text"), STEPS[1].replace("add", "add_text"), STEPS[2]],
    "langchain": [STEPS[0], call("Answer", number=50)],
    **dict.fromkeys(("pydantic_ai_chat", "pydantic_ai_responses", "pydantic_ai_anthropic"), STEPS),
    "pydantic_ai_output": [*STEPS[:2], call("final_result", number=50)],
    "smolagents_calls": [*STEPS[:2], call("final_answer", answer="50")],
    "smolagents_code": [code("x = multiply(a=6, b=7)\nprint(x)"), code("final_answer(add(a=42, b=8))")],
    **dict.fromkeys(("litellm_openai", "litellm_anthropic", "openai_agents_chat", "openai_agents_responses"), STEPS),
    "best_of_four": ["one", "two", "three", "four"],  # of one request
}
NODE_CLIENTS = ("ai_openai", "ai_openai_chat", "ai_anthropic", "openai", "anthropic")
ANEW = {"langchain": 2, "best_of_four": 4}  # trajectories of who changes the tools on the way, or asks for samples


@dataclasses.dataclass(frozen=True)
class Played:
    """What one client did: the answer, what went wrong, the session's trajectories, the policy and its turns."""

    answer: str
    wrong: str
    trajectories: tuple
    policy: Scripted


def play(argv, clients):
    """Lets one process play all clients (name -> replies), each with a session of its own. Returns `Played` by name."""

    async def scene():
        policies = {name: Scripted(world.tokenizer(), _saying(replies)) for name, replies in clients.items()}
        sessions = {name: world.session(policy, LIMITS) for name, policy in policies.items()}
        async with world.serving(*sessions.values()) as (gateway, tokens, _):
            told = [
                (name, client_variables(Where(gateway.url, token, "policy", "", "/", "/", 100_000, 400)))
                for name, token in zip(clients, tokens, strict=True)
            ]
            process = await asyncio.create_subprocess_exec(
                *map(str, argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **USERS},
            )
            try:
                printed, wrong = await asyncio.wait_for(process.communicate(json.dumps(told).encode()), LIMIT_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert process.returncode == 0, wrong.decode()[-3000:]
        done = json.loads(printed.splitlines()[-1])
        return {name: Played(*done[name], sessions[name].close(), policies[name]) for name in clients}

    return asyncio.run(scene())


def _saying(replies):
    left = iter(replies)
    return lambda context, turn: next(left)


@pytest.fixture(scope="module")
def python_clients():
    return play([environments.python_with("clients-python", *PYTHON), HERE / "clients_py.py"], PYTHON_CLIENTS)


@pytest.fixture(scope="module")
def node_clients():
    folder = environments.node_with("clients-node", *NODE)
    program = folder / "clients_js.mjs"  # node looks for packages beside the program
    program.write_text((HERE / "clients_js.mjs").read_text())
    return play(["node", program], dict.fromkeys(NODE_CLIENTS, STEPS))


def check(one, replies, trajectories):
    assert not one.wrong, one.wrong[-3000:]
    world.check(one.policy, one.trajectories)
    assert len(one.policy.turns) == len(replies) and len(one.trajectories) <= trajectories


@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_a_python_client_does_a_task_with_two_tools(python_clients, name):
    one = python_clients[name]
    check(one, PYTHON_CLIENTS[name], ANEW.get(name, 1))
    assert "50" in one.answer or one.answer == "four one three two"


@pytest.mark.parametrize("name", NODE_CLIENTS)
def test_a_javascript_client_does_a_task_with_two_tools(node_clients, name):
    check(node_clients[name], STEPS, 1)
    assert "50" in node_clients[name].answer
