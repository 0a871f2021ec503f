"""The search environment on a slow day: its episodes are the same, and take long enough to be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jaxagent.envs.base import Message, Opening
from jaxagent.envs.search.environment import Search, SearchAttempt
from jaxagent.types import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowSearch(Search):
    """Every attempt begins `wait_s` seconds late."""

    wait_s: float = 0.3

    @contextlib.contextmanager
    def open(self, here: Opening) -> Iterator[Callable[[Task], SearchAttempt]]:
        """As ever, with attempts that wait."""
        with super().open(here) as begin:
            yield lambda task: self._slow(begin(task))

    def _slow(self, attempt: SearchAttempt) -> SearchAttempt:
        quick = attempt.start

        async def start() -> Sequence[Message]:
            await asyncio.sleep(self.wait_s)
            return await quick()

        attempt.start = start
        return attempt
