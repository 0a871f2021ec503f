"""A taskset of verifiers 0.4: one answer. It has a split for held-out tasks, and a harness that asks once."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Letters", "OneAnswer"]


class Letter(vf.TaskData):
    answer: str


class SayIt(vf.Task[Letter]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def chars(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class LettersConfig(vf.TasksetConfig):
    split: str = "train"


class Letters(vf.Taskset[SayIt, LettersConfig]):
    def load(self):
        for letter in {"train": "abcdefgh", "test": "ijkl", "both": "abij"}[self.config.split]:
            yield SayIt(Letter(name=f"letter {letter}", prompt=f"Say {letter}.", answer=letter), self.config.task)


class OneAnswer(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
            answer.raise_for_status()
        return ProgramResult(0, "", "")


async def generous(trace: vf.Trace) -> float:
    """A reward that a config adds."""
    return 0.5
