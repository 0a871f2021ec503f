"""What becomes of a stored episode that can no longer be read: when playing it again gives back what it was.

An episode of rule `pinned` is a function of (seed, task, attempt, version), so another play has the digest that the
ledger knows, to the bit with exact numerics. Everywhere else another play is another sample. A step that nobody has
trained may have that one instead, since it is as good as the first; a step that is trained may not, because a trainer
that repeats it would come to other weights than those that are published.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxagent.fleet.plan import EpisodeId, GroupId
from jaxagent.fleet.record import Record

WHAT_TO_DO = (
    "Put the file back from a copy and start the same command again, which looks for it; without a copy the run cannot "
    "go on from here: begin anew in another workdir (its newest bundle can be exported and evaluated)."
)


class LostEpisodeError(RuntimeError):
    """A step needs a stored episode that can neither be read nor be had again; says why, and what to do."""


class Repairs:
    """Of the damaged episodes of a record. What it knows itself may be lost: it comes to the same again.

    Args:
      exact: numerics are exact: with `pinned`, another play must be equal.
    """

    def __init__(self, record: Record, exact: bool):
        self._record, self._exact = record, exact
        self.lost: dict[EpisodeId, str] = {}  # played again, and come out otherwise: how

    def refusal(self, which: EpisodeId) -> str:
        """Why a damaged episode cannot be had again; "" where it can be tried."""
        if which in self.lost:
            return f"{self.lost[which]} {WHAT_TO_DO}"
        if self._record.plan.rule == "in_flight" and self._record.trained(which.group):
            return (
                "its step is trained and published already, and with fleet.rule=in_flight another play is another "
                f"sample, from which other weights would come. {WHAT_TO_DO}"
            )
        return ""

    def takes_another(self, which: EpisodeId) -> bool:
        """Whether a damaged episode may be replaced by another sample of it."""
        equal = self._record.plan.rule == "pinned" and self._exact
        return not equal and not self._record.trained(which.group)

    def at_once(self, which: EpisodeId) -> bool:
        """Whether an episode whose file is gone may be played again before the trainer asks for it.

        Of a step that is trained the trainer reads it only if it replays, and the version that it was played under may
        be deleted: engines would ask for that for ever. And where another play may differ, a trainer that has read the
        batch goes on with the first one.
        """
        if self._record.trained(which.group):
            return False
        return not (self._record.in_batch(which.group) and self.takes_another(which))

    def check(self, groups: Iterable[GroupId]) -> None:
        """Raises LostEpisodeError: one of their episodes cannot be had again."""
        for which, why in sorted(self.lost.items()):
            if which.group in set(groups):
                raise LostEpisodeError(f"{why} {WHAT_TO_DO}")
