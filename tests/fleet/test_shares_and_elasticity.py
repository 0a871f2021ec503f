"""What is slow keeps its share, long episodes are trained as often as they are sampled, workers come and go."""

import random

import pytest

from jaxagent.fleet.admission import LeasedEpisode
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from tests.fleet.world import Faults, World

STEPS = 50


def length(episode: EpisodeId) -> float:
    return random.Random(f"length/{episode}").lognormvariate(0, 0.7)


@pytest.mark.parametrize(("rule", "window"), [("pinned", 1), ("in_flight", 1), ("in_flight", 4)])
@pytest.mark.parametrize("every", [2, 4])
def test_groups_that_are_ten_times_slower_keep_their_share(rule, window, every):
    """And what is trained is as long as what is sampled, though long episodes take long."""
    plan = Plan(STEPS + 4, 8, 2, staleness=1, rule=rule, window=window)

    def slow(group: GroupId) -> bool:
        return plan.ordinal(group) % every == 1

    def duration(world: World, work: LeasedEpisode) -> float:
        return length(work.episode) * (10 if slow(work.episode.group) else 1)

    world = World(plan, 6, 0, Faults(), duration)
    world.run()
    order = [group for step in range(STEPS) for group in world.trained[step].groups]
    seen = [slow(group) for group in order]
    size = (plan.staleness + 1) * plan.groups_per_step
    off = [abs(seen[at : at + size].count(True) - size / every) for at in range(len(seen) - size + 1)]
    assert max(off) == 0 if window == 1 else 0 < max(off) < window
    trained = [length(which) for step in range(STEPS) for which in world.trained[step].results]
    begun = sorted(which for which, _ in world.begun.values())[: len(trained)]
    sampled = [length(which) for which in begun]
    assert abs(sum(trained) / sum(sampled) - 1) < (1e-9 if window == 1 else 0.01)


class Changing(World):
    """Two workers, four from step 10 on, one from step 20 on; every episode takes five seconds."""

    def change_workers(self) -> None:
        self.times = [*getattr(self, "times", []), self.now]
        if self.step == 10:
            self.start_worker()
            self.start_worker()
        if self.step == 20:
            for process in [process for process in self.processes if process.alive][1:]:
                self.end_worker(process, told=True)

    def start_worker(self) -> None:
        super().start_worker()
        self.processes[-1].places = 4


@pytest.mark.parametrize("rule", ["pinned", "in_flight"])
def test_workers_join_and_leave_in_the_middle(rule):
    """No restart; the steps that were begun afterwards take as long as the workers that are there need."""
    world = Changing(Plan(30, 4, 4, staleness=1, rule=rule), 2, 0, Faults(), lambda *_: 5.0)
    world.train_s = lambda: 0.1
    world.run()  # with `pinned` it ends by comparing every version with the synchronous run
    took = [after - before for before, after in zip(world.times, world.times[1:], strict=False)]
    two, four, one = (sum(took[a:b]) / (b - a) for a, b in ((2, 9), (12, 19), (22, 29)))
    assert four < 0.7 * two and one > 1.5 * two
    assert world.restarts == 0 and len(world.begun) >= 30 * 16
