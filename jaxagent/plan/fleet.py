"""What a fleet would gain over one process with as many devices, and how to divide them: the real rules, simulated.

Devices come in parts of `config.mesh`: an engine is one part, the trainer one or several. Synchronous is all parts
sampling, then all parts training, switched for nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random

from jaxagent.config import Config
from jaxagent.fleet.plan import EpisodeId, Plan
from jaxagent.fleet.plan_of import plan_of
from jaxagent.fleet.settings import of
from jaxagent.fleet.simulate import Costs, Layout, Turns, simulate
from jaxagent.plan.pace import Pace

ASSUMED_WAITS_S = (0.0, 2.0, 10.0)  # of a turn's environment, where nobody has measured it
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of the parts for the trainer, that are tried beside the run's own
# The model's step times were up to 9.4 % off those of real processes on a loaded machine (docs/benchmarks.md).
WORTH = 1.1  # times over synchronous, below which nothing is recommended
TURNS = 200_000  # that all simulations of a forecast have together, about: two seconds of one core
MOST_ENGINES = 12  # that are simulated; more are represented by these
FEWEST_SLOTS = 16


@dataclasses.dataclass(frozen=True)
class Split:
    """A fleet, and what is predicted of it."""

    trainer_devices: int
    engines: int
    step_s: float
    trainer_waits: float  # part of the time
    engines_idle: float  # part of the engines' time without a sequence to decode


@dataclasses.dataclass(frozen=True)
class Case:
    """All splits, for environments that take so long."""

    wait_s: float  # of a turn, on average
    synchronous_step_s: float
    asked: Split  # as the config says
    best: Split  # of those that were tried
    tried: tuple[Split, ...]
    verdict: str


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What the dry run says of a fleet."""

    devices: int
    engine_devices: int  # config.mesh
    staleness: int
    cases: tuple[Case, ...]  # one; more where waits are assumed
    notes: tuple[str, ...]  # where the numbers are from, and what is left out


def forecast(cfg: Config, pace: Pace) -> Forecast | None:
    """What a run with `config.fleet` would come to; None where the config does not say how many engines there are.

    Raises:
      ConfigError: the settings exclude each other.
    """
    plan, engines, mesh = plan_of(cfg), of(cfg).engines, cfg.mesh.devices
    if not engines:
        return None
    waits = (None,) if pace.waits_known else ASSUMED_WAITS_S
    cases = tuple(case(cfg, plan, pace, engines, wait_s, len(waits)) for wait_s in waits)
    room, admitted = engines * cfg.concurrent_episodes, (plan.staleness + 1) * plan.groups_per_step * plan.attempts
    left_out = [
        "every part has devices of its own; processes that share cores or GPUs share their speed",
        "not counted: the host's work between dispatches, the way of weights to engines, switching in one process, "
        "failures, evaluations",
    ]
    if engines > 1:
        left_out.append("a trainer of several times config.mesh is taken to be so many times as fast")
    if of(cfg).engine is not None:
        left_out.append("an engine is taken to have as many devices as config.mesh, and not those of fleet.engine")
    if room < admitted:
        left_out.append(
            f"the engines of this config have room for {room} of the {admitted} episodes that may be played at once: "
            "with slow environments raise env.concurrent_episodes"
        )
    if cfg.rl.refill is not None:
        left_out.append("rl.refill: only first rounds are simulated")
    if cfg.roles and pace.waits_known:
        left_out.append("roles: the time of their engines is part of the waits, the same however many episodes wait")
    return Forecast((engines + 1) * mesh, mesh, plan.staleness, cases, (*pace.sources, *left_out))


def case(cfg: Config, plan: Plan, pace: Pace, engines: int, wait_s: float | None, cases: int) -> Case:
    """All splits of the run's devices; `wait_s` is assumed of every turn, None: as the episodes waited."""
    parts, mesh = engines + 1, cfg.mesh.devices
    own = {1, *(min(parts - 1, max(1, round(parts * share))) for share in SHARES)}
    episodes = pace.episodes if wait_s is None else tuple(_with_wait(one, wait_s) for one in pace.episodes)
    turns = functools.lru_cache(maxsize=None)(functools.partial(_draw, episodes))
    mean_turns = sum(map(len, episodes)) / len(episodes)
    groups = few_groups(cfg, plan, parts, TURNS / cases / (len(own) + 1) / mean_turns)

    def run(staleness: int, engines: int, trainer: int) -> Split:
        rules, layout, costs = small(cfg, plan, pace, staleness, groups, Layout(engines, trainer), parts)
        found = simulate(rules, layout, costs, turns)
        return Split(trainer * mesh, engines, found.step_s, found.trainer_waits, max(0.0, found.engines_idle))

    synchronous = run(0, parts, parts)
    tried = [run(plan.staleness, parts - trainer, trainer) for trainer in sorted(own)]
    best = min(tried, key=lambda split: split.step_s)
    seconds = [wait for one in episodes for _, wait in one]
    told = verdict(synchronous.step_s, tried[0], best, parts * mesh, plan.staleness)
    return Case(
        wait_s=sum(seconds) / len(seconds),
        synchronous_step_s=synchronous.step_s,
        asked=tried[0],
        best=best,
        tried=tuple(tried),
        verdict=told if wait_s is None else f"If environments take {wait_s:g} s a turn: {told}",
    )


def verdict(synchronous_s: float, asked: Split, best: Split, devices: int, staleness: int) -> str:
    """The recommendation, in a sentence."""
    gain, most = synchronous_s / asked.step_s, synchronous_s / best.step_s
    other = f"a trainer of {best.trainer_devices} devices and {best.engines} engines"
    if most < 1:
        why = " (rl.staleness is 0: nothing overlaps)" if not staleness else ""
        return f"Synchronous is faster with the same {devices} devices{why}: leave config.fleet off."
    if most < WORTH:
        return (
            f"At best {most:.2f} times as fast as synchronous with the same {devices} devices, which is no more than "
            "what the model may be wrong by: leave config.fleet off."
        )
    if best is asked or most < WORTH * gain:
        return f"The fleet is {gain:.2f} times as fast as synchronous with the same {devices} devices."
    if gain < 1:
        return (
            f"Synchronous is faster than this fleet with the same {devices} devices: take {other}, which is "
            f"{most:.2f} times as fast as synchronous, or leave config.fleet off."
        )
    return (
        f"The fleet is {gain:.2f} times as fast as synchronous with the same {devices} devices; {other} would be "
        f"{most:.2f} times as fast."
    )


def counted(staleness: int) -> int:
    """Steps that are counted: some rounds of all cohorts."""
    return 2 * (staleness + 1) + 2


def few_groups(cfg: Config, plan: Plan, parts: int, most_episodes: float) -> int:
    """Groups that stand for a step's, so that one simulation has about so many episodes."""
    steps, whole = counted(plan.staleness) + 2 * plan.staleness + 2, plan.groups_per_step * plan.attempts
    engines = min(1.0, MOST_ENGINES / parts)  # of the whole's
    # Engines that have few slots, or few episodes, would not be like the whole.
    fewest = FEWEST_SLOTS * min(parts, MOST_ENGINES), FEWEST_SLOTS / cfg.engine.slots * engines * whole
    return min(plan.groups_per_step, math.ceil(max(most_episodes / steps, min(fewest)) / plan.attempts))


def small(
    cfg: Config, plan: Plan, pace: Pace, staleness: int, groups: int, layout: Layout, parts: int
) -> tuple[Plan, Layout, Costs]:
    """A run of fewer groups and engines, whose steps take as long as those of the whole.

    A sequence that stands for several adds to a decode step and to an update what these would, and takes as much room.
    Only the slowest of fewer episodes is less slow, by which synchronous looks somewhat better than it is.
    """
    engines = max(1, round(layout.engines * min(1.0, MOST_ENGINES / parts)))
    of_trainer = plan.groups_per_step / groups  # episodes that one stands for
    of_engine = of_trainer * engines / layout.engines
    window = min(max(1, math.floor(plan.window / of_trainer)), (staleness + 1) * groups) if staleness else 1
    steps = counted(plan.staleness) + 2 * staleness + 2
    return (
        Plan(steps, groups, plan.attempts, staleness=staleness, rule=plan.rule, window=window),
        Layout(
            engines,
            layout.trainer_devices,
            places=max(1, round(cfg.concurrent_episodes / of_engine)),
            slots=max(1, round(cfg.engine.slots / of_engine)),
        ),
        Costs(
            decode_s=pace.decode_s,
            sequence_s=pace.sequence_s * of_engine,
            update_device_s=pace.update_s * of_trainer,
            prefill_device_s=pace.prefill_s * of_engine,
        ),
    )


def _with_wait(turns: Turns, wait_s: float) -> Turns:
    return tuple((tokens, wait_s) for tokens, _ in turns)


def _draw(episodes: tuple[Turns, ...], which: EpisodeId) -> Turns:
    """An episode's turns, from its id alone, so that layouts are compared on equal work."""
    return random.Random(repr((*which.group, which.sample))).choice(episodes)
