"""What an engine process's loop drives: whatever plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jaxagent.data.codec import Packed
from jaxagent.fleet.wire import Job

Done = Callable[[Packed | None, int], None]


class Player(Protocol):
    """What plays. `hold` is called by one thread at a time, all else by any."""

    def hold(self, version: int) -> None:
        """Fetches a version and serves it from the next dispatch on. With `pinned`, nothing runs meanwhile.

        Raises:
          WeightsError, OSError: it cannot be had; what was served before still is.
        """

    def expect(self, version: int) -> None:
        """`hold` will probably be called with this version: it may be fetched meanwhile. Returns at once."""

    def play(self, job: Job, report: Done) -> None:
        """Begins an episode and returns.

        `report(result, version of its oldest token)` is called once, from any thread, also for an episode that failed;
        with None where it was cancelled.
        """

    def cancel(self, lease: str) -> None:
        """Gives up the episode that was begun under a lease, if it still runs; its `report` comes when it has ended."""

    def places(self) -> int:
        """Episodes that may be played at once."""
        ...

    def numbers(self) -> dict[str, Any]:
        """What is told with every beat. "progress" grows while anything goes on at all."""
        ...
