"""An episode beside its record: the first number that differs, and where. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxagent.types import Episode, Trajectory

COLUMNS = ("tokens", "kinds", "turns", "policy_versions", "logprobs")  # of one position, in the order of telling


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that is not as it is recorded."""

    place: str  # "step 3, episode train/706#41, trajectory 0, position 17"
    field: str  # "tokens", "reward", "weights", ...
    logged: str
    again: str

    def __str__(self) -> str:
        return f"{self.place}: {self.field} is {self.logged} in the record, and {self.again} now"


@dataclasses.dataclass(frozen=True)
class EpisodeDiff:
    """An episode that was made again."""

    first: Difference | None  # None: nothing differs
    tokens: int  # recorded ones that were made again and compared, up to the first difference
    logprobs: int  # of them sampled
    gap: float  # the largest difference of a log-prob before the first token that differs


def compare(logged: Episode, again: Episode, place: str, recorded: bool = False) -> EpisodeDiff:
    """Compares two plays of an episode, which messages call `place`: log-probs bit for bit.

    `recorded`: the environment's side was taken from the record, and what it says of the episode is not compared.
    """
    tokens = logprobs = 0
    gap, first = 0.0, None
    if again.stop_reason.is_failure and not recorded:
        reason = f"{again.stop_reason} ({again.error})" if again.error else str(again.stop_reason)
        return EpisodeDiff(Difference(place, "stop_reason", str(logged.stop_reason), reason), 0, 0, 0.0)
    for number, (old, new) in enumerate(zip(logged.trajectories, again.trajectories, strict=False)):
        where = f"{place}, trajectory {number}"
        gap = max(gap, largest_gap(old, new))
        difference = differing(old, new, where)
        upto = len(old) if difference is None else difference[0]
        sampled = int(old.action_mask[:upto].sum())
        # What stands between turns is copied then, and equal by that.
        tokens, logprobs = tokens + (sampled if recorded else upto), logprobs + sampled
        if difference is not None:
            first = difference[1]
            break
    if first is None:
        first = next(_beside_tokens(logged, again, place, recorded), None)
    return EpisodeDiff(first, tokens, logprobs, gap)


def differing(logged: Trajectory, again: Trajectory, place: str) -> tuple[int, Difference] | None:
    """The first position at which two trajectories differ, and how."""
    both = min(len(logged), len(again))
    positions: list[tuple[int, str]] = []
    for name in COLUMNS:
        old, new = getattr(logged, name)[:both], getattr(again, name)[:both]
        if name == "logprobs":  # 0.0 and -0.0 are two numbers, and a NaN is one
            old, new = old.view(np.uint32), new.view(np.uint32)
        (places,) = np.nonzero(old != new)
        positions += [(int(at), name) for at in places[:1]]
    if positions:
        at, name = min(positions, key=lambda each: (each[0], COLUMNS.index(each[1])))
        old, new = (_text(getattr(trajectory, name)[at]) for trajectory in (logged, again))
        return at, Difference(f"{place}, position {at}", name, old, new)
    if len(logged) != len(again):
        old, new = (_text(t.tokens[both]) if len(t) > both else "at its end" for t in (logged, again))
        return both, Difference(f"{place}, position {both}", "tokens", old, new)
    return None


def largest_gap(logged: Trajectory, again: Trajectory) -> float:
    """The largest difference of a log-prob before the first token that differs."""
    both = min(len(logged), len(again))
    (differ,) = np.nonzero(logged.tokens[:both] != again.tokens[:both])
    upto = int(differ[0]) if len(differ) else both
    gaps = np.abs(logged.logprobs[:upto].astype(np.float64) - again.logprobs[:upto])
    return float(gaps.max(initial=0.0))


def _beside_tokens(logged: Episode, again: Episode, place: str, recorded: bool) -> Iterator[Difference]:
    """All else that an episode's result is."""
    both = logged, again
    values = [("trajectories", [len(e.trajectories) for e in both])]
    if not recorded:
        fields = ("stop_reason", "turns", "reward", "fork_of", "forked_at")
        values += [(name, [getattr(e, name) for e in both]) for name in fields]
        names = sorted({*logged.rewards, *again.rewards})
        values += [(f"rewards.{name}", [e.rewards.get(name) for e in both]) for name in names]
        values += [("turn_rewards", [list(e.turn_rewards) for e in both]), ("heard", [len(e.heard) for e in both])]
    for name, (old, new) in values:
        if old != new:
            yield Difference(place, name, str(old), str(new))
    if recorded:
        return
    for number, (old, new) in enumerate(zip(logged.heard, again.heard, strict=False)):
        where = f"{place}, heard {number} ({old.role})"
        if old.trajectory is not None and new.trajectory is not None:
            if difference := differing(old.trajectory, new.trajectory, where):
                yield difference[1]
        elif [tuple(turn) for turn in old.turns] != [tuple(turn) for turn in new.turns]:
            yield Difference(where, "turns", "one text", "another")


def _text(value: Any) -> str:
    if isinstance(value, np.floating):
        return f"{value!s} (0x{np.float32(value).view(np.uint32):08x})"
    return str(value)
