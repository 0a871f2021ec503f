"""One episode of an environment of the package verifiers (its module v1), as a program behind the gateway.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python verifiers_v1.py INDEX

Its model client asks OPENAI_BASE_URL with OPENAI_API_KEY. The last line printed is JSON: {"reward": ..., "error": ...}.
"""

import asyncio
import json
import os
import sys

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

__all__ = ["TinyHarness", "TinyTaskset"]


class TinyData(vf.TaskData):
    answer: str


class TinyTask(vf.Task[TinyData]):
    """Scores the last message."""

    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class TinyTaskset(vf.Taskset[TinyTask, vf.TasksetConfig]):
    """Two questions."""

    def load(self) -> list[TinyTask]:
        return [TinyTask(TinyData(prompt=f"the {word} is", answer=word), self.config.task) for word in ("fox", "dog")]


class TinyHarness(vf.Harness[vf.HarnessConfig]):
    """Asks twice, without a program of its own."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        return ProgramResult(0, "", "")


async def main(index: int) -> None:
    agent = {"harness": {"id": "verifiers_v1"}, "runtime": {"type": "subprocess"}}
    environment = load_environment(resolve_env_config({"taskset": {"id": "verifiers_v1"}, "agent": agent}))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        task = list(environment.taskset)[index]
        episode = await environment.run_episode(task, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    reward = sum(trace.reward for trace in episode.traces)
    print(json.dumps({"reward": reward, "error": str(errors[0])[:500] if errors else ""}))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
