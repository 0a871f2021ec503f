"""An engine process looks at its own engine, and decides how many episodes it plays at once (fleet/in_flight.py)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from jaxagent.config import Config
from jaxagent.fleet import in_flight
from jaxagent.fleet.in_flight import Counted, Decision

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # an engine process logs no more than warnings, and these lines
LOOK_S = 0.2  # between two looks


class InFlight:
    """The limit of one engine.

    Args:
      cfg: of the run.
      stats: the driver's counters.
    """

    def __init__(self, cfg: Config, stats: Callable[[], Mapping[str, float]]):
        self._stats = stats
        self._state = in_flight.begin(cfg.engine.slots, cfg.concurrent_episodes)
        self._stayed = False

    def limit(self) -> int:
        """Episodes that may be played at once. Any thread."""
        return self._state.limit

    @contextlib.contextmanager
    def looking(self, held: Callable[[], int]) -> Iterator[None]:
        """While this is open, a thread looks and decides.

        Args:
          held: episodes that are played now.
        """
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                self.look(counted(time.monotonic(), held(), self._stats()))

        thread = threading.Thread(target=look, name="in-flight", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look(self, now: Counted) -> None:
        """Decides where there is something to be decided, and logs it; that a limit stays is logged once."""
        self._state, decision = in_flight.decide(self._state, now)
        if decision is not None:
            self._tell(decision)

    def _tell(self, decision: Decision) -> None:
        stays = decision.limit == decision.before
        if not (stays and self._stayed):
            logger.info("%s", decision)
        self._stayed = stays


def counted(now: float, held: int, stats: Mapping[str, float]) -> Counted:
    """From the counters of a driver, or of its scheduler."""
    get = stats.get
    return Counted(
        at_s=now,
        held=held,
        turns=get("requests", 0.0),
        free_s=get("free_slot_s", 0.0),
        queued_s=get("queued_turn_s", 0.0),
        again_s=get("prefill_again_s", 0.0),
        prefill_s=get("prefill_s", 0.0),
        prefill_tokens=get("prefill_padded_tokens", 0.0),
        cached_tokens=get("cached_tokens", 0.0),
    )
