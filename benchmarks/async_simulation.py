"""A run in virtual time: the real coordinator, with engines, environments and a trainer that only cost time.

What goes in is measured (seconds of a decode step, lengths, waits, seconds of an update); what comes out is what a
layout would cost: step time, staleness, who waits for whom.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

from jaxagent.fleet.admission import Batch, Coordinator, LeasedEpisode
from jaxagent.fleet.leases import attempts
from jaxagent.fleet.plan import EpisodeId, Plan

# Of one episode, turn by turn: tokens that it samples, and seconds that its environment then takes.
Turns = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds. An engine decodes all of its sequences together, so each step is shared by all."""

    decode_s: float = 8e-3  # a decode step, whatever it holds
    sequence_s: float = 1.5e-4  # of a decode step, for each sequence
    update_device_s: float = 2e-4  # per trained token, times devices
    prefill_device_s: float = 4e-5  # per token of context that is computed again under new weights; `in_flight` only
    swap_s: float = 0.0  # an engine's pause for new weights
    publish_s: float = 0.0  # from the end of an update until workers can have its weights


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who has how many devices. An engine has one."""

    engines: int
    trainer_devices: int  # with staleness 0 these can be the engines' own: the two never work at once
    places: int = 0  # episodes that an engine plays at once; 0: as many as there can be
    slots: int = 0  # of these, as many as it decodes at once, the others queue; 0: all of them


@dataclasses.dataclass(frozen=True)
class Report:
    """Of the counted steps."""

    step_s: float  # mean
    ages: dict[int, int]  # episodes by staleness
    trainer_waits: float  # share of the time
    engines_idle: float  # share of the engines' time without a sequence to decode
    tokens_trained: float  # mean of an episode; of the first ordinals it is `tokens_sampled` where nothing is dropped
    tokens_sampled: float


def simulate(
    plan: Plan, layout: Layout, costs: Costs, turns: Callable[[EpisodeId], Turns], uncounted: int | None = None
) -> Report:
    """Runs a plan to its end.

    Args:
      plan: the rules. Its last `staleness` steps are not simulated to their end, since engines run out of work there.
      layout: devices.
      costs: seconds.
      turns: an episode's tokens and waits: a function of its id alone, so that layouts are compared on equal work.
      uncounted: first steps that are left out of the report; None: staleness + 2, until the run is in its stride.

    Raises:
      ValueError: no step is left to be counted.
    """
    first = plan.staleness + 2 if uncounted is None else uncounted
    if first >= plan.steps - plan.staleness:
        raise ValueError(
            f"{plan.steps} steps leave none to count after the first {first} and the last {plan.staleness}."
        )
    return _Simulation(plan, layout, costs, turns).run(first)


class _Engine:
    """One device. Its clock counts decode steps, so a turn ends at a fixed reading, however many share the engine."""

    def __init__(self, name: str, costs: Costs):
        self.name, self._costs = name, costs
        self.playing: dict[str, _EpisodeInEngine] = {}  # by lease
        self.decoding: list[tuple[float, int, _EpisodeInEngine]] = []  # by the clock's reading at the end of the turn
        self.queued: collections.deque[_EpisodeInEngine] = collections.deque()  # that wait for a slot
        self.clock = self.busy_s = 0.0
        self.now = self.resumes = 0.0
        self.stamp = 0  # of its newest event; others are void

    def advance(self, now: float) -> None:
        """Decodes until now."""
        begin = max(self.now, min(self.resumes, now))
        if self.decoding:
            self.clock += (now - begin) / self._step_s()
            self.busy_s += now - self.now
        self.now = now

    def next_end(self) -> float:
        """When the next turn ends, if nothing is added."""
        return max(self.now, self.resumes) + max(0.0, self.decoding[0][0] - self.clock) * self._step_s()

    def _step_s(self) -> float:
        return self._costs.decode_s + self._costs.sequence_s * len(self.decoding)


class _EpisodeInEngine:
    """An episode in an engine."""

    def __init__(self, work: LeasedEpisode, turns: Turns, version: int):
        self.work, self.turns, self.version = work, turns, version
        self.at = 0  # turn
        self.context = 0.0  # tokens of the turns before


class _Simulation:
    def __init__(self, plan: Plan, layout: Layout, costs: Costs, turns: Callable[[EpisodeId], Turns]):
        self.plan, self.layout, self.costs, self.turns = plan, layout, costs, turns
        self.coordinator = Coordinator(dataclasses.replace(plan, lease_s=math.inf), "0")
        self.engines = [_Engine(self.coordinator.join(0.0)[0], costs) for _ in range(layout.engines)]
        # As many as there can be: one version per engine leaves a step one of S + 1 parts of the engines.
        admitted = (plan.staleness + 1) * plan.groups_per_step * plan.attempts
        self.places = layout.places or math.ceil(admitted / layout.engines)
        self.slots = layout.slots or admitted
        self.now, self.count = 0.0, 0
        self.queue: list[tuple[float, int, Callable[..., None], tuple]] = []
        self.training = False
        self.waiting_since = self.waited_s = 0.0
        self.ends: list[tuple[float, float, float]] = []  # of steps: time, engines' busy seconds, trainer's waits
        self.batches: list[Batch] = []

    def run(self, uncounted: int) -> Report:
        self.fill()
        last = self.plan.steps - self.plan.staleness
        while len(self.ends) < last:
            self.now, _, action, args = heapq.heappop(self.queue)
            action(*args)
        begin, end = self.ends[uncounted - 1] if uncounted else (0.0, 0.0, 0.0), self.ends[-1]
        spent = end[0] - begin[0]
        ages: collections.Counter[int] = collections.Counter()
        for batch in self.batches[uncounted:last]:
            ages.update(batch.ages)
        trained = [self.tokens(episode) for batch in self.batches[:last] for episode in batch.results]
        begun = attempts(self.plan, sorted(self.coordinator.record.groups))
        sampled = [self.tokens(episode) for episode in begun[: len(trained)]]
        return Report(
            step_s=spent / (last - uncounted),
            ages=dict(sorted(ages.items())),
            trainer_waits=(end[2] - begin[2]) / spent,
            engines_idle=1 - (end[1] - begin[1]) / (spent * len(self.engines)),
            tokens_trained=sum(trained) / len(trained),
            tokens_sampled=sum(sampled) / len(sampled),
        )

    def tokens(self, episode: EpisodeId) -> float:
        return sum(tokens for tokens, _ in self.turns(episode))

    def at(self, time: float, action: Callable[..., None], *args: object) -> None:
        self.count += 1
        heapq.heappush(self.queue, (time, self.count, action, args))

    # ---------------------------------------------------------------- engines

    def fill(self) -> None:
        """Much waits, and all engines ask, the least loaded first, until nobody gets anything."""
        progress = True
        while progress:
            progress = False
            asking = [(len(engine.playing), at) for at, engine in enumerate(self.engines)]
            heapq.heapify(asking)
            while asking:
                _, at = heapq.heappop(asking)
                if self.take(self.engines[at]):
                    heapq.heappush(asking, (len(self.engines[at].playing), at))
                    progress = True

    def take(self, engine: _Engine) -> int:
        """Asks for work; returns how many episodes came."""
        free = self.places - len(engine.playing)
        works = self.coordinator.take(self.now, engine.name, free, list(engine.playing))
        engine.advance(self.now)
        for work in works:
            version = work.version if self.plan.rule == "pinned" else self.coordinator.record.published
            playing = engine.playing[work.lease] = _EpisodeInEngine(work, self.turns(work.episode), version)
            self.decode(engine, playing)
        if works:
            self.plan_end(engine)
        return len(works)

    def decode(self, engine: _Engine, playing: _EpisodeInEngine) -> None:
        if len(engine.decoding) >= self.slots:
            return engine.queued.append(playing)
        self.count += 1
        heapq.heappush(engine.decoding, (engine.clock + playing.turns[playing.at][0], self.count, playing))

    def plan_end(self, engine: _Engine) -> None:
        engine.stamp += 1
        if engine.decoding:
            self.at(engine.next_end(), self.turn_ends, engine, engine.stamp)

    def turn_ends(self, engine: _Engine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        engine.advance(self.now)
        _, _, playing = heapq.heappop(engine.decoding)
        tokens, wait_s = playing.turns[playing.at]
        playing.at += 1
        playing.context += tokens
        if engine.queued:
            self.decode(engine, engine.queued.popleft())
        self.plan_end(engine)
        self.at(self.now + wait_s, self.next_turn, engine, playing)

    def next_turn(self, engine: _Engine, playing: _EpisodeInEngine) -> None:
        if playing.at < len(playing.turns):
            engine.advance(self.now)
            self.decode(engine, playing)
            return self.plan_end(engine)
        del engine.playing[playing.work.lease]
        episode = playing.work.episode
        answer = self.coordinator.put(episode, playing.work.lease, playing.version, str(playing.version))
        if answer.complete:
            self.coordinator.close(episode.group, usable=True)
            self.train()
        self.take(engine)

    # ---------------------------------------------------------------- the trainer

    def train(self) -> None:
        """Begins the next step, if the trainer is free and its batch is there."""
        if self.training or len(self.batches) == self.plan.steps:
            return
        batch = self.coordinator.batch(len(self.batches))
        if batch is None:
            return
        self.training = True
        self.waited_s += self.now - self.waiting_since
        self.batches.append(batch)
        tokens = sum(self.tokens(episode) for episode in batch.results)
        seconds = tokens * self.costs.update_device_s / self.layout.trainer_devices
        self.at(self.now + seconds, self.trained, batch.step + 1)

    def trained(self, version: int) -> None:
        self.training, self.waiting_since = False, self.now
        self.ends.append((self.now, sum(engine.busy_s for engine in self.engines), self.waited_s))
        self.at(self.now + self.costs.publish_s, self.publish, version)
        self.train()

    def publish(self, version: int) -> None:
        self.coordinator.publish(version, str(version))
        self.coordinator.take_events()
        for engine in self.engines:
            if self.plan.rule == "in_flight" and engine.playing:
                self.pause(engine)
        self.fill()

    def pause(self, engine: _Engine) -> None:
        """New weights for the episodes in hand: their contexts are computed again."""
        engine.advance(self.now)
        decoded = sum(playing.turns[playing.at][0] - (end - engine.clock) for end, _, playing in engine.decoding)
        context = decoded + sum(playing.context for playing in engine.playing.values())
        pause_s = self.costs.swap_s + context * self.costs.prefill_device_s
        engine.resumes = max(engine.resumes, self.now) + pause_s
        self.plan_end(engine)
