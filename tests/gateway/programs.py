"""An agent program that does at random what programs do: goes on, edits, compacts, forks, retries, leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Post = Callable[[dict[str, Any], float | None, bool], Awaitable[Message | None]]  # body, patience, retry -> message


class Program:
    """One program.

    Args:
      seed: what it does follows from it.
      secret: a word that is in everything it says.
      post: sends a body; None where the program did not wait for the answer.
    """

    def __init__(self, seed: int, secret: str, tools: list[Any], post: Post) -> None:
        self._random, self._secret, self._tools, self._post = random.Random(seed), secret, tools, post
        self.histories: list[list[Message]] = [[self._user()]]
        self.steps = 0

    async def run(self, steps: int) -> None:
        """Takes so many steps."""
        for _ in range(steps):
            self.steps += 1
            action = self._random.choices(
                (self._go_on, self._title, self._edit, self._compact, self._fork, self._leave, self._both, self._twice),
                (8, 1, 1, 1, 1, 2, 1, 1),
            )[0]
            await action()

    def _user(self) -> Message:
        return {"role": "user", "content": f"{self._secret} {self._random.choice('abcdef')}{self._random.random():.3f}"}

    def _body(self, history: list[Message], tools: bool = True) -> dict[str, Any]:
        more = {"tools": self._tools} if tools else {}
        return {"messages": list(history), "stream": self._random.random() < 0.5, "model": "m"} | more

    def _next(self, said: Message) -> list[Message]:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{self._secret} saw {self._random.random():.3f}"}
            for call in said.get("tool_calls") or []
        ]
        return [said, *(results or [self._user()])]

    async def _go_on(self) -> None:
        history = self._random.choice(self.histories)
        said = await self._post(self._body(history), None, False)
        if said is not None:
            history += self._next(said)

    async def _title(self) -> None:
        await self._post(self._body([self._user()], tools=False), None, False)

    async def _edit(self) -> None:
        history = [dict(m) for m in self._random.choice(self.histories)]
        texts = [m for m in history if m["role"] in ("user", "tool")]
        self._random.choice(texts)["content"] += " edited"
        self.histories.append(history)
        await self._go_on()

    async def _compact(self) -> None:
        history = self._random.choice(self.histories)
        said = [m for m in history if m["role"] == "assistant"][-1:]
        self.histories.append([self._user(), *said, self._user()])
        await self._go_on()

    async def _fork(self) -> None:
        history = self._random.choice(self.histories)
        ends = [i for i, m in enumerate(history) if m["role"] == "assistant"]
        if ends:
            self.histories.append([*history[: self._random.choice(ends)], self._user()])
            if self.histories[-1][-2]["role"] == "assistant" and self.histories[-1][-2].get("tool_calls"):
                self.histories.pop()
        await self._go_on()

    async def _leave(self) -> None:
        history = self._random.choice(self.histories)
        body = self._body(history)
        await self._post(body, self._random.choice((0.0, 0.002, 0.01)), False)
        if self._random.random() < 0.7:
            said = await self._post(body, None, self._random.random() < 0.5)
            if said is not None:
                history += self._next(said)

    async def _both(self) -> None:
        left = self._random.choice(self.histories)
        right = [*left, self._user()] if left[-1]["role"] == "user" else list(left)
        both = await asyncio.gather(*(self._post(self._body(h), None, False) for h in (left, right)))
        for history, said in zip((left, right), both, strict=True):
            if said is not None:
                history += self._next(said)
        self.histories.append(right)

    async def _twice(self) -> None:
        body = self._body(self._random.choice(self.histories))
        await asyncio.gather(*(self._post(body, None, i > 0) for i in range(3)))
