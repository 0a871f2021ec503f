"""Random schedules drive the real coordinator: the bound holds, nothing is lost, dropped or doubled, and it goes on."""

import collections
import random

import pytest

from jaxagent.fleet.plan import Plan
from tests.fleet.world import Faults, World


def random_plan(rng: random.Random) -> Plan:
    """S from 0 to 8, both rules, windows, dynamic sampling."""
    rule = rng.choice(("pinned", "pinned", "in_flight"))
    staleness = rng.choice((0, 0, 1, 1, 2, 2, 3, 4, 8))
    groups = rng.randint(1, 4)
    rounds = rng.choice((1, 1, 2, 3))
    window = 1
    if rule == "in_flight" and rng.random() < 0.6:
        rounds, window = 1, rng.randint(1, (staleness + 1) * groups)
    return Plan(
        steps=rng.randint(1, 5) + rng.randint(0, staleness),
        groups_per_step=groups,
        attempts=rng.randint(1, 3),
        staleness=staleness,
        rule=rule,
        window=window,
        rounds=rounds,
        groups_per_round=rng.choice((0, 0, 1, 3)) if rounds > 1 else 0,
        lease_s=rng.choice((2.0, 10.0)),
    )


def random_faults(rng: random.Random) -> Faults:
    """Each kind in two thirds of the schedules, so that all combinations come, and none."""
    most = {
        "crash": 0.03, "lost_answer": 0.1, "kill": 0.1, "pause": 0.1, "twice": 0.3, "trainer_kill": 0.2, "forged": 0.1,
        "churn": 0.5, "damage": 0.2,
    }  # fmt: skip
    return Faults(told=rng.random(), **{name: rng.choice((0.0, p / 3, p)) for name, p in most.items()})


def random_world(seed: int) -> World:
    rng = random.Random(f"schedule/{seed}")
    scale, sigma, slow = rng.choice((0.5, 2.0, 5.0)), rng.choice((0.0, 0.5, 1.0)), rng.choice((2, 3, 1000))

    def duration(world, work):
        return scale * world.random.lognormvariate(0, sigma) * (10 if work.episode.group.number % slow == 1 else 1)

    return World(random_plan(rng), rng.randint(1, 5), seed, random_faults(rng), duration)


def run(seeds) -> collections.Counter:
    seen: collections.Counter = collections.Counter()
    for seed in seeds:
        world = random_world(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}; {world.plan}; {world.faults}") from error
        for name in ("restarts", "kills", "forged", "damaged"):
            seen[name] += getattr(world, name)
        seen["replays"] += world.trainings
        seen["episodes"] += len(world.acknowledged)
        seen["requeued"] += len(world.begun) - len(world.acknowledged) - world.damaged
        seen["at the bound"] += max(world.ages, default=0) == world.plan.bound > 0
        seen["beyond S"] += max(world.ages, default=0) > world.plan.staleness
        seen[world.plan.rule] += 1
    return seen


def test_some_random_schedules():
    seen = run(range(300))
    assert min(seen.values()) > 0, seen  # each kind of misfortune did happen


@pytest.mark.slow
@pytest.mark.parametrize("number", [1500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_thousands_of_random_schedules(number):
    seen = run(range(1000, 1000 + number))
    assert min(seen["restarts"], seen["kills"], seen["replays"]) > number / 10, seen
