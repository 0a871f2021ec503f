"""Host user ids, one for each running sandbox.

The kernel counts much per user, whatever namespace: inotify instances, memory of pipes, descriptors in flight, waiting
signals, message queues. With one user for all, one sandbox could take everything.
"""

from __future__ import annotations

from collections.abc import Iterable

SHARED = (
    1_963_000_000  # nobody's: neither a login's, a service's nor in a subordinate range. Layers on disk are its own
)
PER_RUN = 1024  # sandboxes at once; more of them share `SHARED`
RUNS = 64  # at once on a host; more of them use the same ids
LAST = SHARED + PER_RUN * RUNS


def layer_owner(uid: int) -> int:
    """The owner that a sandbox's file gets in a layer on disk, so that every later sandbox can use it."""
    return SHARED if SHARED <= uid <= LAST else uid


class HostUids:
    """The host user ids of one run.

    Args:
      taken: parts of the range that other living runs have.

    Attributes:
      part: this run's.
    """

    def __init__(self, parts_in_use: Iterable[int] = ()):
        self.part = min(set(range(RUNS)) - set(parts_in_use), default=0)
        first = SHARED + 1 + self.part * PER_RUN
        self._free = list(range(first + PER_RUN - 1, first - 1, -1))  # the last is the next; used ones are used again

    def take(self) -> int:
        """A user id that no running sandbox has, or `SHARED` where all are in use."""
        return self._free.pop() if self._free else SHARED

    def free(self, uid: int) -> None:
        """Takes a user id back, when everything of its sandbox has ended."""
        if uid != SHARED:
            self._free.append(uid)
