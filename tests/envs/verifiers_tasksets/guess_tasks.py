"""A taskset of verifiers 0.4: higher or lower. Its harness asks until the package or it ends; what its reward sees is
written to the file that SEEN names."""

import asyncio
import json
import os

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Guesses", "Loop"]


class Number(vf.TaskData):
    number: int


class Limits(vf.State):
    ready: bool = False


class GuessIt(vf.Task[Number, Limits]):
    async def setup(self, trace: vf.Trace, runtime) -> None:
        trace.state.ready = True

    async def finalize(self, trace: vf.Trace, runtime) -> None:
        trace.info["ready"] = trace.state.ready

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return "never" in trace.last_reply

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if path := os.environ.get("SEEN"):
            with open(f"{path}.{self.data.number}", "a") as file:
                file.write(json.dumps(seen(trace)) + "\n")
        if "divide" in trace.last_reply:
            return 1 / 0
        return float(str(self.data.number) in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class Guesses(vf.Taskset[GuessIt, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield GuessIt(Number(prompt=f"Guess {number}.", number=number, system_prompt="Be short."), self.config.task)
            number += 1


class Loop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(6):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code == 400 and "handled" in messages[-2]["content"]:
                    return ProgramResult(0, "", "")
                if answer.is_error:
                    return ProgramResult(1, "", answer.text)
                said = answer.json()["choices"][0]["message"]["content"]
                if "crash" in said:
                    raise RuntimeError("the harness is broken")
                if "sleep" in said:
                    await asyncio.sleep(60)
                if "done" in said:
                    return ProgramResult(0, "", "")
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "Again." + said.count("fill") * " more" * 900},
                ]
        return ProgramResult(0, "", "")


def seen(trace):
    """What a reward can see, without clocks and random names."""
    return {
        "messages": [message.model_dump(mode="json", exclude_none=True) for message in trace.messages],
        "stop": trace.stop_condition,
        "truncated": trace.is_truncated,
        "timeout": trace.is_timeout,
        "turns": trace.num_turns,
        "reply": trace.last_reply,
        "finish": [call.finish_reason for call in trace.calls],
        "failed": [call.error.status_code for call in trace.calls if call.error],
        "info": trace.info,
        "task": trace.task.data.model_dump(mode="json", exclude={"timeout"}),
        "tools": [tool.model_dump(mode="json") for tool in trace.tools],
    }
