"""How many episodes an engine plays at once: a pure rule that weighs what one more of N would gain against its price.

With too few, slots of the decode step are free while environments work. With too many, episodes whose environment works
keep pages that others need, and contexts that were cached are prefilled again when their turn comes. The engine counts
both in seconds (`engine/scheduler.py`), of which the rule takes shares of its time:

    free     a slot was free that no turn asked for. One more episode in N is then decoded beside the others, which
             gains a part of 1/N of this time, nearly all of it where a decode step costs the same whatever it holds
    again    contexts were prefilled that had been cached before
    saved    what prefilling would have taken, had nothing been found cached

While nothing is prefilled again there are pages for all, and one more episode costs nothing. Else it has no pages but
those of others: one more context is prefilled at every turn, which takes 1/N of what it would take to prefill all of
them at all turns, `again + saved`. So where pages are short the rule goes up while `free > again + saved` and down
while it is less. No constant of the machine is in it: where prefilling is cheap it goes on until the slots are full,
where it is dear it stops where the pages are full. Counts of evictions or preemptions would not do, since they say
nothing of the price: the same count is a tenth of a decode step in one engine, and ten of them in another.

Where no slot is free and many turns wait, fewer are held: they keep only pages, and episodes for other engines.

A decision needs a time in which the engine held its limit all the while, and in which each of its episodes had some
turns. Times in which it got fewer episodes than it asked for, or has more than a limit that was lowered, are left out.
"""

from __future__ import annotations

import dataclasses

AGAIN = 0.08  # of the time goes into prefilling again before pages count as short
BAND = 0.05  # of the time: gain and price that differ by less are equal
QUEUE = 1.0  # turns that wait, per slot, on the mean: more are many
TURNS = 4  # of each episode in hand, on the mean, between two decisions
SLACK = 8  # the limit counts as held where what is in hand differs by one, or by an eighth of it, at most
STRAIGHT = 2  # changes in one direction, after which they grow; they are halved when the direction turns


@dataclasses.dataclass(frozen=True)
class Counted:
    """What an engine has counted since it began, and what it holds now."""

    at_s: float
    held: int  # episodes
    turns: float  # that were given a slot
    free_s: float  # with a slot that no turn asked for
    queued_s: float  # of waiting, added up over the turns that wait while others decode
    again_s: float  # of prefilling what had been cached before
    prefill_s: float
    prefill_tokens: float  # padding included
    cached_tokens: float  # that turns found cached


@dataclasses.dataclass(frozen=True)
class State:
    """Of one engine."""

    limit: int  # episodes that it holds at once
    most: int
    slots: int
    step: int  # of the next change
    streak: int = 0  # how many of the newest changes had one direction; negative: downwards
    since: Counted | None = None  # the beginning of the time under way; None: the limit is not held


@dataclasses.dataclass(frozen=True)
class Decision:
    """With its numbers, which are of the time since the limit was held, or since the decision before."""

    before: int
    limit: int
    free: float  # shares of the time
    again: float
    saved: float
    queued: float  # turns, on the mean
    seconds: float
    turns: int

    def __str__(self) -> str:
        change = f"{self.before} -> {self.limit}" if self.limit != self.before else f"{self.limit} stay"
        return (
            f"episodes in flight: {change}. In {self.seconds:.1f} s with {self.turns} turns: {self.free:.1%} of the "
            f"time with a free slot, {self.again:.1%} for prefilling again, {self.saved:.1%} saved by what was cached, "
            f"{self.queued:.1f} turns waited"
        )


def begin(slots: int, most: int) -> State:
    """An engine that has decided nothing holds as many episodes as it has slots, if it may."""
    limit = min(slots, most)
    return State(limit, most, slots, step=max(1, limit // 4))


def decide(state: State, now: Counted) -> tuple[State, Decision | None]:
    """Looks at an engine. The decision is None where there is nothing to be decided yet."""
    if abs(state.limit - now.held) > max(1, state.limit // SLACK):
        return dataclasses.replace(state, since=None), None
    then = state.since
    if then is None:
        return dataclasses.replace(state, since=now), None
    turns, seconds = now.turns - then.turns, now.at_s - then.at_s
    if turns < TURNS * state.limit or seconds <= 0:
        return state, None
    free, again = (now.free_s - then.free_s) / seconds, (now.again_s - then.again_s) / seconds
    token_s = (now.prefill_s - then.prefill_s) / max(1.0, now.prefill_tokens - then.prefill_tokens)
    saved = token_s * (now.cached_tokens - then.cached_tokens) / seconds
    queued = (now.queued_s - then.queued_s) / seconds
    price = again + saved if again > AGAIN else 0.0
    direction = (free > price + BAND) - (price > free + BAND)
    if not direction and queued > QUEUE * state.slots:
        direction = -1
    after = _moved(state, direction)
    decision = Decision(state.limit, after.limit, free, again, saved, queued, seconds, int(turns))
    return dataclasses.replace(after, since=now if after.limit == state.limit else None), decision


def _moved(state: State, direction: int) -> State:
    if not direction:
        return state
    step, streak = state.step, direction
    if state.streak * direction > 0:
        streak += state.streak
        step += max(1, step // 2) if abs(streak) > STRAIGHT else 0
    elif state.streak:
        step = max(1, step // 2)
    limit = min(state.most, max(1, state.limit + direction * min(step, max(1, state.limit // 2))))
    return state if limit == state.limit else dataclasses.replace(state, limit=limit, step=step, streak=streak)
