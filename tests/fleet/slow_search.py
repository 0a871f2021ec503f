"""The search environment on a slow day: its episodes are the same, and take long enough to be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

from jaxagent.envs.base import Message, Opening, Step
from jaxagent.envs.search.environment import Search, SearchAttempt
from jaxagent.types import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowSearch(Search):
    """Every attempt begins `wait_s` seconds late, and every turn takes `turn_s` in the mean: no two runs the same."""

    wait_s: float = 0.3
    turn_s: float = 0.0

    @contextlib.contextmanager
    def open(self, here: Opening) -> Iterator[Callable[[Task], SearchAttempt]]:
        """As ever, with attempts that wait."""
        with super().open(here) as begin:
            yield lambda task: self._slow(begin(task))

    def _slow(self, attempt: SearchAttempt) -> SearchAttempt:
        begin, take = attempt.start, attempt.step
        chance = random.Random()  # the system's, of no seed: it decides when, and must not decide what

        async def start() -> Sequence[Message]:
            await asyncio.sleep(self.wait_s)
            return await begin()

        async def step(action: str) -> Step:
            if self.turn_s:
                await asyncio.sleep(chance.expovariate(1 / self.turn_s))
            return await take(action)

        attempt.start, attempt.step = start, step
        return attempt
