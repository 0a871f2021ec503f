"""The durable half of the coordinator's state: a function of the plan and of the events, and of nothing else.

`apply` is the one way to change it, for a running coordinator and for one that reads its log again. It trusts its
events; `admission.Coordinator` decides which of them happen.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from jaxagent.fleet.events import (
    BatchFormed,
    EpisodeDamaged,
    EpisodeStored,
    Event,
    GroupClosed,
    StateKept,
    VersionPublished,
)
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan


class BoundError(RuntimeError):
    """A batch would hold a token that is older than the run allows. The rules exclude it: this is a defect."""


class StoredResult(NamedTuple):
    """What is known of a stored episode."""

    digest: str
    version: int  # of its oldest token
    lease: str


@dataclasses.dataclass
class GroupRecord:
    """A group that was admitted."""

    results: dict[int, StoredResult] = dataclasses.field(default_factory=dict)  # by sample
    usable: bool | None = None  # None: not closed yet
    damaged: set[int] = dataclasses.field(default_factory=set)  # samples whose result can no longer be read


class Record:
    """What is stored, closed, trained and published.

    Args:
      initial: digest of version 0; "": it is published like the others, and until then nothing is admitted.
      steps: that a log of before has episodes of. More than the plan's where the run had more: these groups stay known,
        and are not wanted.
    """

    def __init__(self, plan: Plan, initial: str = "", steps: int = 0):
        self.plan = plan
        self._ever = dataclasses.replace(plan, steps=max(plan.steps, steps))
        self.versions = [initial] if initial else []  # digests, by version
        self.groups: dict[GroupId, GroupRecord] = {}  # admitted, and not forgotten by `Kept`
        self.batches: dict[int, BatchFormed] = {}  # by step, not forgotten
        self.formed = 0  # steps whose batch is decided
        self.kept = 0  # steps before this are trained, saved and forgotten
        self.found_damaged = 0  # episodes, in the whole run
        self._untrained: set[GroupId] = set()  # admitted, in no batch
        self._rounds: dict[int, list[list[GroupId]]] = {}  # by step without a batch
        self._new_groups: list[GroupId] = []
        self._admitted = 0
        self._admit()

    @property
    def published(self) -> int:
        """The newest version; -1: there is none yet."""
        return len(self.versions) - 1

    def take_new_groups(self) -> list[GroupId]:
        """Groups that were admitted since this was asked last, in order."""
        new_groups, self._new_groups = self._new_groups, []
        return new_groups

    def unjudged(self) -> list[GroupId]:
        """Groups whose attempts are all stored and that nobody closed, in order."""
        return sorted(
            group for group in self._untrained if self.groups[group].usable is None and self.is_complete(group)
        )

    def is_complete(self, group: GroupId) -> bool:
        """Whether all attempts of a group are stored, and can be read."""
        record = self.groups[group]
        return len(record.results) == self.plan.attempts and not record.damaged

    def damaged(self) -> list[EpisodeId]:
        """Stored episodes that can no longer be read, in order."""
        return sorted(EpisodeId(group, sample) for group, record in self.groups.items() for sample in record.damaged)

    def is_needed(self, group: GroupId) -> bool:
        """Whether anybody needs a group's results: the run may have fewer steps than when it was admitted."""
        return group.step < self.plan.steps or self.in_batch(group)

    def in_batch(self, group: GroupId) -> bool:
        """Whether a step's batch has the group, or left it out: a trainer may have read it."""
        return group in self.groups and group not in self._untrained

    def trained(self, group: GroupId) -> bool:
        """Whether a version is published that was trained on the group, or left it out."""
        if group in self._untrained:
            return False
        steps = [step for step, batch in self.batches.items() if group in (*batch.groups, *batch.left_out)]
        return not steps or self.published > steps[0]

    def apply(self, event: Event) -> None:
        """Changes the state."""
        match event:
            case EpisodeStored():
                self.groups[event.group].results[event.sample] = StoredResult(event.digest, event.version, event.lease)
                self.groups[event.group].damaged.discard(event.sample)
            case EpisodeDamaged():
                self.groups[event.group].damaged.add(event.sample)
                self.found_damaged += 1
            case GroupClosed():
                self.groups[event.group].usable = event.usable
                self._open_next_round(event.group.step)
            case BatchFormed():
                self.batches[event.step] = event
                self.formed = event.step + 1
                self._untrained.difference_update(event.groups, event.left_out)
                self._rounds.pop(event.step, None)
            case VersionPublished():
                self.versions.append(event.digest)
                self._admit()
            case StateKept():
                for step in range(self.kept, event.step):
                    batch = self.batches.pop(step)
                    for group in (*batch.groups, *batch.left_out):
                        del self.groups[group]
                self.kept = event.step

    def forgotten(self, group: GroupId) -> bool:
        """Whether a group was trained so long ago that its results are no longer known here."""
        most = max(self.plan.first_round, self.plan.groups_per_step)
        could_be = group.step >= 0 and 0 <= group.round < self.plan.rounds and 0 <= group.number < most
        if group in self.groups or not could_be:
            return False
        return group.step < (self.kept if self.plan.window == 1 else self._admitted)

    def form(self, step: int) -> BatchFormed | None:
        """The batch of the next step, when enough groups are closed. It is not applied."""
        plan = self.plan
        if plan.window == 1:
            return self._form_in_order(step)
        untrained = [group for group in self._untrained if group.step < plan.steps]
        closed_groups = sorted(group for group in untrained if self.groups[group].usable is not None)
        unfinished = [plan.ordinal(group) for group in untrained if self.groups[group].usable is None]
        # The anchor is the oldest group that is missing; what is not yet admitted is younger than all that is.
        end = min(unfinished, default=plan.steps * plan.groups_per_step) + plan.window
        ready = [group for group in closed_groups if plan.ordinal(group) < end]
        return BatchFormed(step, tuple(ready[: plan.groups_per_step])) if len(ready) >= plan.groups_per_step else None

    def ages(self, batch: BatchFormed) -> dict[int, int]:
        """Episodes by staleness: the version that trains on them less that of their oldest token.

        Raises:
          BoundError: one is older than the plan allows.
        """
        ages = collections.Counter(
            batch.step - result.version for group in batch.groups for result in self.groups[group].results.values()
        )
        if ages and max(ages) > self.plan.bound:
            raise BoundError(
                f"Step {batch.step} would train on tokens of {max(ages)} versions ago; the bound is {self.plan.bound}."
            )
        return dict(sorted(ages.items()))

    # ---------------------------------------------------------------- how groups come to be

    def _admit(self) -> None:
        """Opens the first rounds of the steps that the newest version allows."""
        end = self._ever.admitted(self.published) if self.versions else 0
        for step in range(self._admitted, end):
            ids = [GroupId(step, 0, number) for number in range(self.plan.first_round)]
            self._rounds[step] = []
            self._open(ids)
        self._admitted = max(self._admitted, end)

    def _open(self, ids: list[GroupId]) -> None:
        self._rounds[ids[0].step].append(ids)
        self.groups |= {group: GroupRecord() for group in ids}
        self._untrained.update(ids)
        self._new_groups += ids

    def _open_next_round(self, step: int) -> None:
        """Dynamic sampling: when all of a step's groups are closed and too few are usable, others replace those."""
        if self.plan.rounds == 1:
            return
        rounds = self._rounds[step]
        last = [self.groups[group] for group in rounds[-1]]
        missing = self.plan.groups_per_step - len(self._usable(step))
        if len(rounds) >= self.plan.rounds or missing <= 0 or any(group.usable is None for group in last):
            return
        count = self.plan.groups_per_round or missing
        self._open([GroupId(step, len(rounds), number) for number in range(count)])

    def _usable(self, step: int) -> list[GroupId]:
        return [group for ids in self._rounds[step] for group in ids if self.groups[group].usable]

    def _form_in_order(self, step: int) -> BatchFormed | None:
        """All groups of the step's rounds, when the last one of the last round is closed."""
        if step not in self._rounds:
            return None
        groups = [group for ids in self._rounds[step] for group in ids]
        if any(self.groups[group].usable is None for group in groups):
            return None
        chosen = groups if self.plan.rounds == 1 else self._usable(step)[: self.plan.groups_per_step]
        return BatchFormed(step, tuple(chosen), tuple(group for group in groups if group not in set(chosen)))


def replayed(plan: Plan, initial: str, events: Iterable[Event]) -> Record:
    """The state after events that a log holds. They may be of a run that had more steps than the plan has."""
    past = list(events)
    steps = (event.group.step + 1 for event in past if isinstance(event, EpisodeStored | EpisodeDamaged | GroupClosed))
    record = Record(plan, initial, max(steps, default=0))
    for event in past:
        record.apply(event)
    return record


WHAT_TO_DO = (
    "Put the file back from a copy and start the same command again, which looks for it; without a copy the run cannot "
    "go on from here: begin anew in another workdir (its newest bundle can be exported and evaluated)."
)


class LostEpisodeError(RuntimeError):
    """A step needs a stored episode that can neither be read nor be had again; says why, and what to do."""


class Repairs:
    """What becomes of stored episodes that can no longer be read. What it knows itself may be lost: it comes back.

    An episode of rule `pinned` is a function of (seed, task, attempt, version), so another play has the digest that the
    ledger knows, to the bit with exact numerics. Everywhere else another play is another sample. A step that nobody has
    trained may have that one instead, since it is as good as the first; a step that is trained may not, because a
    trainer that repeats it would come to other weights than those that are published.

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
