"""What all sandboxes of a run may use together, whatever each of them may.

Files in memory belong to no process, so on a full host the kernel would kill the trainer. Instead the control group of
the whole run has three quarters of the host's memory and process ids; beyond that, processes of sandboxes end.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from jaxagent.sandbox.base import Limits

logger = logging.getLogger(__name__)
SHARE = 0.75  # the rest is the trainer's and the host's own
FILES = {  # version: controller: files; the second is missing where swap is not accounted for
    1: {"memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "pids": ("pids.max",)},
    2: {"memory": ("memory.max",), "pids": ("pids.max",)},
}
UNITS = {"memory": (2**30, "GiB of memory and disk"), "pids": (1, "processes")}


class Together:
    """The limits of one run, and what its running sandboxes may take by their own."""

    def __init__(self):
        self.most: dict[str, int] = {}  # controller: bytes or processes
        self._sums = dict.fromkeys(UNITS, 0)
        self._has_warned = False

    def bound(self, own: Path, group: Path, controllers: set[str], version: int) -> tuple[str, ...]:
        """Limits the run's group; returns what cannot be limited, in words.

        Args:
          own: the group that this process is in; `group` is below it.
        """
        for controller, (name, *more) in FILES[version].items():
            if controller not in controllers:
                continue
            most = int(host_has(controller, own, name) * SHARE)
            try:
                (group / name).write_text(str(most), encoding="utf-8")
                for path in (group / other for other in more):
                    if path.exists():
                        path.write_text(str(most), encoding="utf-8")
            except OSError as failure:
                return (f"the sandboxes together are not limited ({controller}: {failure.strerror})",)
            self.most[controller] = most
        return ()

    def count(self, limits: Limits, sign: int) -> None:
        """A sandbox starts (1) or has ended (-1). Says once when they may take more than there is."""
        self._sums["memory"] += sign * (limits.memory_bytes + limits.disk_bytes)
        self._sums["pids"] += sign * limits.processes
        over = [name for name, most in self.most.items() if self._sums[name] > most]
        if not over or self._has_warned:
            return
        self._has_warned = True
        words = []
        for name in over:
            unit, noun = UNITS[name]
            words.append(f"{self._sums[name] / unit:.4g} {noun}, and all of them have {self.most[name] / unit:.4g}")
        logger.warning(
            "the limits of the sandboxes that run now add up to %s: where that is used up, the kernel ends processes "
            "of any of them. Lower each one's limits, or start fewer at once.",
            "; ".join(words),
        )


def host_has(controller: str, own: Path, name: str) -> int:
    """Bytes of memory, or processes, that this process's own group and those above it leave of the host's."""
    if controller == "memory":
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        most = min(int(Path("/proc/sys/kernel", limit).read_bytes()) for limit in ("pid_max", "threads-max"))
    for directory in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            most = min(most, int((directory / name).read_text(encoding="utf-8")))
    return most
