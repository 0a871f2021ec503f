"""What is started again when it ends, after which pause, and what is final: one rule for all launchers.

- 2 (a mistake of the user's) is final, but of a process that has worked before it is a failure for now.
- 1 (a failure that it has told) and 130, 143, 129 (asked to end) are final of the trainer, and a crash of others.
- 75 (a failure for now: a taken port, ...): again for `VAIN_S`, and at least as often as after a crash.
- A signal or a hang: again. Any other code is a crash: `CRASHES_AT_ONE_PLACE` in a row are final.

Who ends soon after its start waits before the next one: 0.25 s, 0.5 s, ... `LONGEST_DELAY_S`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from typing import Any

from jaxagent.config.errors import EXIT_CODES, WAITED

FILE = "restarts.jsonl"
CRASHED = 70  # exit code where an exception ended a process that nobody expected
MISTAKE = 2
HANGS = -1000  # in place of an exit code
CRASHES_AT_ONE_PLACE = 3  # by its own doing; then starting it again is of no use
VAIN_S = 300.0  # for so long failures at one place may be failures for now, their pauses included
LONGEST_DELAY_S = 30.0  # before a start
GOOD_S = 60.0  # who lived for so long did not fail at its start


@dataclasses.dataclass
class Lives:
    """Of one gang: how often it was started, and how it ended.

    Attributes:
      restarts: at most.
      leads: it is the trainer.
    """

    restarts: int
    leads: bool = False
    starts: int = 0
    _short: int = 0  # ends in a row soon after a start
    _row: int = 0  # ends in a row by its own doing, at one place
    _vain_s: float = 0.0  # for so long they were failures for now; 0: they are crashes
    _progress: int = -1  # how far it has come
    _worked: bool = False

    def final(self, code: int) -> bool:
        """Whether a process that ends so has said all there is to say. What has worked before is no mistake."""
        return not self._worked if code == MISTAKE else self.leads and (code == 1 or code in EXIT_CODES.values())

    def next_start(self, code: int, lived_s: float, progress: int | None) -> tuple[float, str]:
        """(seconds until the next start, ""), or (0, why there is none).

        Args:
          code: negative for a signal, or `HANGS`.
          lived_s: of its longest-lived process.
          progress: how far it has come, of whatever it counts; None: nobody here knows.
        """
        # An engine counts from its own start on; a trainer's number is the run's, and says nothing of this process.
        worked = lived_s > GOOD_S if progress is None else progress > 0 and not self.leads
        progress = progress or 0
        further, self._progress = progress > self._progress, max(progress, self._progress)
        good = further or (worked and lived_s > GOOD_S)  # after hours of episodes it stands at no one place
        self._worked = self._worked or progress > 0 or lived_s > GOOD_S
        self._short = 0 if further or worked or lived_s > GOOD_S else self._short + 1
        pause_s = 0.0 if self._short < 2 else min(LONGEST_DELAY_S, 0.25 * 2.0 ** (self._short - 2))
        vain = code in (WAITED, MISTAKE)
        failed = vain or (code > 0 and code not in EXIT_CODES.values())
        if not failed or good or vain != (self._vain_s > 0):
            self._row, self._vain_s = 0, 0.0
        self._row += failed
        self._vain_s += (lived_s + pause_s) * vain
        if self._row >= CRASHES_AT_ONE_PLACE and not 0 < self._vain_s < VAIN_S:
            return 0.0, f"{self._row} times in a row at one place"
        return (pause_s, "") if self.starts <= self.restarts else (0.0, f"after {self.restarts} restarts")


def note(folder: pathlib.Path, name: str, reason: str) -> None:
    """Adds a restart to the list; a disk that fails is no reason to end."""
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "process": name, "reason": reason}
    with contextlib.suppress(OSError), open(folder / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def summary(folder: pathlib.Path) -> dict[str, Any]:
    """What the summary of a run says: how often what was started again, and why first."""
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill or a full disk cut off
                row = json.loads(line)
                process, reason = row["process"], row["reason"]
                counts[process] = counts.get(process, 0) + 1
                first.setdefault(process, reason)
    return {"restarts": counts, "first_reasons": first}
