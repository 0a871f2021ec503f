"""A summary of failed episodes for people: how many failed, and the most frequent reason."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Self

from jaxagent.rollout.early_stop import ENOUGH
from jaxagent.types import Episode, StopReason


@dataclasses.dataclass(frozen=True)
class Failures:
    """Attempts that an early stop cancelled, because enough groups were complete, are not counted at all."""

    failed: int
    played: int
    reason: str = ""  # "env_error: ConnectionError: ...", the most frequent, of equally frequent ones the first

    @classmethod
    def of(cls, episodes: Iterable[Episode]) -> Self:
        """Counts the failures among episodes."""
        played = [e for e in episodes if not (e.stop_reason is StopReason.CANCELLED and e.error == ENOUGH)]
        reasons = collections.Counter(f"{e.stop_reason}: {e.error}" for e in played if e.stop_reason.is_failure)
        return cls(reasons.total(), len(played), next((reason for reason, _ in reasons.most_common(1)), ""))

    @property
    def all(self) -> bool:
        """Whether every episode failed, so that nothing was measured."""
        return 0 < self.played == self.failed

    def __str__(self) -> str:
        return f"{self.failed} of {self.played} episodes failed: {self.reason}"
