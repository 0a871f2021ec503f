"""The rules of an asynchronous run, as pure functions of its settings: what may start when, under which version.

Version v is the policy after v published steps; version 0 is what the run began with. Step t trains version t into
version t + 1. Groups are numbered by the step that they are sampled for, so nothing here depends on time or workers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

from jaxagent.config.errors import ConfigError

Rule = Literal["pinned", "in_flight"]


class GroupId(NamedTuple):
    """A group of attempts at one task. Ids sort in the order in which groups are due."""

    step: int  # the step that it is sampled for
    round: int  # 0; more for dynamic sampling's further rounds
    number: int  # within its round


class EpisodeId(NamedTuple):
    """One attempt."""

    group: GroupId
    sample: int  # within its group


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of a run's settings, each of which the config has checked, decides who may play what.

    Raises:
      ConfigError: values that exclude each other.
    """

    steps: int  # the last one is steps - 1
    groups_per_step: int  # that a step trains on
    attempts: int  # of a group
    staleness: int = 0  # S: versions by which a token may be older than the version that trains on it
    rule: Rule = "pinned"  # which weights an episode has: one version, or the newest at every dispatch
    window: int = 1  # groups; a finished group may overtake what is unfinished by fewer than this. 1: strict order
    rounds: int = 1  # of dynamic sampling, at most; 1: every group is used
    groups_per_round: int = 0  # with dynamic sampling; 0: as many as are missing
    lease_s: float = 10.0  # a worker that is silent for so long has lost its episodes

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "attempts", "window", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be 1 or more.")
        if self.window > 1 and self.rule == "pinned":
            raise ConfigError("window > 1 lets groups overtake by time: it needs the rule 'in_flight'.")
        if self.window > 1 and self.rounds > 1:
            raise ConfigError("window > 1 excludes dynamic sampling, whose rounds belong to one step.")
        if self.window > (self.staleness + 1) * self.groups_per_step:
            raise ConfigError(
                f"window ({self.window}) must be at most (staleness + 1) * groups_per_step "
                f"({(self.staleness + 1) * self.groups_per_step}): no more groups are admitted at once."
            )
        if self.groups_per_round and self.rounds == 1:
            raise ConfigError("groups_per_round is of dynamic sampling: rounds must be 2 or more.")

    @property
    def first_round(self) -> int:
        """Groups of a step that are admitted together."""
        return self.groups_per_round or self.groups_per_step

    @property
    def bound(self) -> int:
        """Versions by which the oldest token of a batch may lag behind the version that trains on it."""
        return self.staleness + math.ceil((self.window - 1) / self.groups_per_step)

    def admitted(self, published: int) -> int:
        """Steps below this may be sampled for when `published` is the newest version.

        A group's first token then has version step - S or a newer one, whenever it starts.
        """
        return min(self.steps, published + self.staleness + 1)

    def version(self, step: int) -> int:
        """The version for a step's groups: exactly this with `pinned`, this or a newer one with `in_flight`."""
        return max(0, step - self.staleness)

    def numbers(self, episode: EpisodeId, number: int) -> bool:
        """Whether a result with this attempt's number can be the episode's.

        Attempts are numbered over the run, steps of an earlier stage included (runs/attempts.py); one that failed
        before it began is numbered within its group.
        """
        place = episode.group.round * self.attempts + episode.sample
        return number == episode.sample or number % (self.rounds * self.attempts) == place

    def ordinal(self, group: GroupId) -> int:
        """A group's number in the stream of first rounds, by which windows are measured."""
        return group.step * self.first_round + group.number
