"""Failed episodes of a run: told on the console, counted for the summary, and its end where there are no others."""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn

from jaxagent.rollout.failures import Failures


class FailedEpisodes:
    """One run's.

    Args:
      max_steps: `env.max_failed_steps`.
      results: of the run, for the summary: "failed_episodes" gets counts by place, "first_failure" place and reason.
      note: prints a line.

    Attributes:
      stuck: why the run is to save and end; "" while it is not.
    """

    def __init__(self, max_steps: int, results: MutableMapping[str, Any], note: Callable[[str], None]):
        self.stuck = ""
        self._max_steps = max_steps
        self._results = results
        self._note = note
        self._told: set[tuple[str, str]] = set()
        self._in_a_row = 0  # steps of this process: who has mended the cause begins anew

    def tell(self, where: str, step: int, failures: Failures) -> None:
        """Counts failed episodes, and prints a line for every kind of failure that has none yet.

        Args:
          where: "rl", "rl.eval", "warm_start.gate", ...
          step: when it was.
          failures: of one batch of episodes.
        """
        if not failures.failed:
            return
        counts = self._results.get("failed_episodes", {})
        self._results["failed_episodes"] = {**counts, where: counts.get(where, 0) + failures.failed}
        self._results.setdefault("first_failure", f"{where}, step {step}: {failures.reason}")
        # Numbers in a reason (a port, a length, seconds) make it no other one; that everything fails does.
        kind = (where, f"{failures.all} {re.sub('[0-9]+', '#', failures.reason)}")
        if kind not in self._told:
            self._told.add(kind)
            self._note(f"{where}, step {step}: {failures}")

    def tell_step(self, where: str, step: int, failures: Failures) -> None:
        """`tell`, of the episodes of a step. Step after step without one that counts, the run is `stuck`."""
        self.tell(where, step, failures)
        if failures.played:
            self._in_a_row = self._in_a_row + 1 if failures.all else 0
        if 0 < self._max_steps <= self._in_a_row:
            steps = "1 step" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row"
            self.stuck = f"stopped and saved after {steps} without an episode that counts ({where}, step {step}): "
            self.stuck += str(failures)


def end(reason: str) -> NoReturn:
    """Ends the process with exit code 1 and one line on stderr."""
    raise SystemExit(f"error: {reason.rstrip('.')}. Mend this and run the same command to continue.")
