"""Phases: what begets a task, which tasks are kept, and that a run that goes on makes the same ones."""

import dataclasses
import json
from collections import Counter

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import ConfigError, overrides
from jaxagent.config.run import PhasesConfig
from jaxagent.data import files, sources
from jaxagent.envs.base import Environment
from jaxagent.rollout import groups as groups_
from jaxagent.rollout.experience import Experience
from jaxagent.rollout.phases import Phases
from jaxagent.runs import checks
from jaxagent.types import Episode, Group, StopReason, Task

CFG = PhasesConfig(steps=3, tasks=4)
STEPS, SIZE = 3, 4


class Sums(files.Rows):
    """Tasks "a + 1" for a from `start`; the metadata hold a."""

    name = "sums"

    def __init__(self, start, count):
        self._numbers = range(start, start + count)

    def __len__(self):
        return len(self._numbers)

    def __getitem__(self, index):
        return row(self._numbers[index])


def row(a):
    return {"id": f"t{a}", "prompt": f"{a} + 1", "answers": [str(a + 1)], "metadata": {"a": a}}


TRAIN, HELD_OUT = (sources.TaskSource(Sums(*at), "sums", True) for at in ((0, 40), (100, 40)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adder(Environment):
    """Its new tasks add up to 60 more, so that some are training tasks and some are held out."""

    def attempt(self, task):
        raise NotImplementedError

    def new_task(self, failed, rng):
        a = failed.metadata["a"] + rng.randrange(-30, 61)
        return None if a % 10 == 0 else Task(f"new{a}", f"{a} + 1", (str(a + 1),), failed.kind, {"a": a})


ENV = {"max_turns": 1, "turn_tokens": 4, "observation_tokens": 4, "context_tokens": 32}
ADDER = Adder(**ENV, episode_timeout_s=1.0)


def phases(cfg=CFG, seed=0, environment=ADDER):
    return Phases(cfg, environment, TRAIN, HELD_OUT, seed)


def played(tasks, solved=lambda task, attempt: (task.metadata["a"] + attempt) % 2 == 0):
    def episode(task, s):
        return Episode(task, s, (), float(solved(task, s)), {}, StopReason.ANSWER, 1)

    return [Group(task, tuple(episode(task, s) for s in range(4))) for task in tasks]


def first_phase(of, tasks=TRAIN, values=None, **how):
    for step in range(STEPS):
        some = [tasks[step * SIZE + i] for i in range(SIZE)]
        metrics = of.record(played(some, **how), step, values)
    return metrics


def test_new_tasks_are_of_failed_ones_and_nobody_knows_them():
    one = phases(dataclasses.replace(CFG, tasks=500))
    metrics = first_phase(one, solved=lambda task, attempt: task.metadata["a"] < 6 or attempt == 0)
    made = [task.metadata["a"] for task in one.tasks]
    assert made and all(a >= 40 or a < 0 for a in made) and len(set(made)) == len(made), "no training task again"
    assert not any(100 <= a < 140 for a in made) and not any(a % 10 == 0 for a in made)
    assert metrics["phases/failed"] == 6 and metrics["phases/new"] == len(made) and metrics["phases/known"] > 0
    assert [task.id for task in one.tasks] == [f"phase1/{n}" for n in range(len(made))]


def test_a_held_out_question_is_never_made():
    far = [sources.TaskSource(Sums(90, 20), "sums", True)[i] for i in range(20)]
    one = phases(dataclasses.replace(CFG, tasks=500))
    metrics = first_phase(one, far)
    assert metrics["phases/held_out"] > 0
    assert not {task.prompt for task in one.tasks} & {task.prompt for task in HELD_OUT}
    again = Phases(dataclasses.replace(CFG, tasks=500), ADDER, TRAIN, TRAIN, 0)  # the witness: without it some are
    first_phase(again, far)
    assert {task.prompt for task in again.tasks} & {task.prompt for task in HELD_OUT}


def test_where_all_prompts_are_one_the_whole_task_counts():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Silent(Adder):
        def new_task(self, failed, rng):
            return Task("", "Begin.", (), "", {"a": rng.randrange(30)})

    class Begin(Sums):
        def __getitem__(self, index):
            return super().__getitem__(index) | {"prompt": "Begin.", "answers": []}

    train, held_out = (sources.TaskSource(Begin(*at), "sums", False) for at in ((0, 12), (12, 12)))
    one = Phases(dataclasses.replace(CFG, tasks=500), Silent(**ENV, episode_timeout_s=1.0), train, held_out, 0)
    metrics = first_phase(one, train)
    assert {task.metadata["a"] for task in one.tasks} <= set(range(24, 30)) and metrics["phases/held_out"] > 0


@pytest.mark.parametrize(
    ("rate", "kept"), [(0, True), (1, True), (3, True), (2, True)]
)  # of 4 attempts: (0 + 1) / 6 = .17, ..., (3 + 1) / 6 = .67
def test_without_a_critic_the_success_of_the_parent_is_the_value(rate, kept):
    one = phases()
    metrics = first_phase(one, solved=lambda task, attempt: attempt < rate)
    assert bool(one.tasks) == kept and metrics["phases/no_use"] == 0
    hard = phases(dataclasses.replace(CFG, low=0.3, high=0.6))
    metrics = first_phase(hard, solved=lambda task, attempt: attempt < rate)
    assert bool(hard.tasks) == (rate in (1, 2)) == (metrics["phases/no_use"] == 0)


def test_a_critic_says_which_new_tasks_are_of_use():
    asked = []

    def values(tasks):
        asked.extend(task.metadata["a"] for task in tasks)
        return [task.metadata["a"] / 100 for task in tasks]

    one = phases(dataclasses.replace(CFG, tasks=500, low=0.0))
    metrics = first_phase(one, values=values)
    kept = [task.metadata["a"] for task in one.tasks]
    assert kept and all(0 <= a <= 75 for a in kept)
    assert Counter(kept) == Counter(a for a in asked if 0 <= a <= 75)
    assert metrics["phases/no_use"] == len(asked) - len(kept)


def test_a_solved_phase_begets_nothing():
    one = phases()
    assert first_phase(one, solved=lambda task, attempt: True)["phases/new"] == 0 and not one.tasks
    assert one.places(3, SIZE) == []


def test_what_no_task_is_ends_the_run_with_its_name():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wrong(Adder):
        def new_task(self, failed, rng):
            return "2 + 1"

    with pytest.raises(ConfigError, match=r"Wrong\.new_task .* a Task or None"):
        first_phase(phases(environment=Wrong(**ENV, episode_timeout_s=1.0)))


def made(**changes):
    changes = {"tasks_per_step": SIZE, "steps": 20, "phases.steps": STEPS, "phases.tasks": 10} | changes
    cfg = config.parse(overrides.apply(get_config().to_dict(), [(f"rl.{n}", str(v)) for n, v in changes.items()]))
    return Experience(TRAIN, dataclasses.replace(cfg, env=ADDER), HELD_OUT)


def steps(experience, which):
    out = []
    for step in which:
        tasks = experience.take(SIZE, step, 0)
        out.append([task.id for task in tasks])
        assert experience.assign(step)[0] and experience.take(SIZE, step, 0) == tasks
        experience.record(played(tasks), step)
    return out


def test_new_tasks_come_first_in_the_next_phase_and_then_those_of_the_data():
    run = steps(made(), range(9))
    second = [task for step in run[3:6] for task in step]
    new = [task for task in second if task.startswith("phase1/")]
    assert 0 < len(new) <= 10 and second[: len(new)] == new and len(set(second)) == len(second)
    assert not any(task.startswith("phase1/") for step in run[:3] + run[6:] for task in step)
    assert any(task.startswith("phase2/") for step in run[6:] for task in step)
    plain = [task for step in run for task in step if task.startswith("t")]
    assert len(set(plain)) == len(plain), "no task of the data is skipped or comes twice"


@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_a_run_that_goes_on_makes_the_same_tasks(at):
    whole, stopped, resumed = made(), made(), made()
    expected = steps(whole, range(9))
    steps(stopped, range(at))
    resumed.set_state(json.loads(json.dumps(stopped.get_state())), at)
    assert steps(resumed, range(at, 9)) == expected[at:]
    assert resumed.get_state() == whole.get_state()


def test_further_rounds_are_of_the_data():
    experience = made(**{"refill.max_rounds": 3})
    for step in range(4):
        tasks = experience.take(SIZE, step, 0)
        more = experience.take(SIZE, step, 1)
        assert all(task.id.startswith("t") for task in more) and not {t.id for t in tasks} & {t.id for t in more}
        experience.record(played([*tasks, *more]), step)
    assert any(task.id.startswith("phase") for task in tasks)


def test_what_cannot_have_phases_is_refused():
    for wrong in ({"staleness": "1"}, {"curriculum": "failed"}):
        with pytest.raises(ConfigError, match=r"rl\.phases makes a phase's tasks of what the one before it has shown"):
            groups_.check(dataclasses.replace(config.parse(raw(**wrong)).rl))
    with pytest.raises(ConfigError, match=r"rl\.phases needs new tasks, which Search cannot make"):
        checks.check(config.parse(raw()))


def raw(**changes):
    return overrides.apply(
        get_config().to_dict(), [(f"rl.{n}", v) for n, v in ({"phases.steps": "3"} | changes).items()]
    )
