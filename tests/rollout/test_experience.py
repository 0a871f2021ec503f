"""Which tasks a step gets: a function of the seed, the step, the round, and of what is known S steps before."""

import dataclasses
import itertools
import json

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import ConfigError, overrides
from jaxagent.data.sources import TaskIterator
from jaxagent.rollout.experience import Experience, check_tasks
from jaxagent.rollout.groups import episode_metrics
from jaxagent.types import Episode, Group, StopReason
from tests.data.memory import source_of

SOURCE = source_of(23)


def made(**changes):
    changes = {"tasks_per_step": 4, "steps": 20} | changes
    flags = [(f"rl.{name.replace('__', '.')}", str(value)) for name, value in changes.items()]
    return Experience(SOURCE, config.parse(overrides.apply(get_config().to_dict(), flags)))


FAILED_ONLY = {"curriculum": "failed", "curriculum__explore": 0.0, "curriculum__prior_attempts": 0.01}


def played(experience, step, solved=lambda task: int(task.id[1:]) % 3 == 0):
    """The groups of a step's first round."""
    return [
        Group(task, tuple(Episode(task, s, (), float(solved(task)), {}, StopReason.ANSWER, 1) for s in range(2)))
        for task in experience.take(4, step, 0)
    ]


def test_first_rounds_are_the_stream_whatever_else_is_asked():
    stream = TaskIterator(SOURCE, 0, shuffle=True)
    expected = [[task.id for task in stream.take(4)] for _ in range(9)]
    ahead, with_rounds = made(staleness=2), made(refill__max_rounds=3)
    ahead.assign(5)
    for step in range(9):
        with_rounds.assign(step)
        for experience in (ahead, with_rounds):
            assert [task.id for task in experience.take(4, step, 0)] == expected[step]
            experience.record([], step)


def test_further_rounds_are_other_tasks_of_the_step():
    experience = made(refill__max_rounds=7)
    rounds = experience.assign(3)
    assert [len(drawn) for drawn in rounds] == [4] * 7
    assert sorted(itertools.chain(*rounds[:5])) == sorted(set(itertools.chain(*rounds[:5]))), "20 of 23"
    assert len(set(itertools.chain(*rounds[:6]))) == 23 and all(len(set(drawn)) == 4 for drawn in rounds)
    again = made(refill__max_rounds=7)
    assert [t.id for t in again.take(2, 3, 4)] == [f"t{i}" for i in rounds[4][:2]], "in whichever order they are asked"
    assert made(refill__max_rounds=7).assign(4)[1] != rounds[1]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_curriculum_knows_steps_before_t_minus_s_only(staleness):
    def assigned(failed):
        experience, out = made(staleness=staleness, **FAILED_ONLY), []
        for step in range(12):
            out.append(experience.assign(step))
            experience.record(played(experience, step, lambda _, step=step: step != failed), step)
        return out

    usual, other = assigned(None), assigned(5)
    first = next(step for step in range(12) if usual[step] != other[step])
    assert first == 5 + staleness + 1


@pytest.mark.parametrize("changes", [{}, {"curriculum": "failed"}, {"curriculum": "failed", "refill__max_rounds": 3}])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_goes_on_assigns_the_same(changes, staleness):
    whole, stopped = (made(staleness=staleness, **changes) for _ in range(2))
    expected = []
    for step in range(10):
        expected.append(whole.assign(step))
        whole.record(played(whole, step), step)
    for step in range(5):
        stopped.assign(step + staleness)
        stopped.record(played(stopped, step), step)
    state = json.loads(json.dumps(stopped.get_state()))
    assert ("assigned" in state) == bool(changes and staleness)
    resumed = made(staleness=staleness, **changes)
    resumed.set_state(state, 5)
    for step in range(5, 10):
        assert resumed.assign(step) == expected[step]
        resumed.record(played(resumed, step), step)
    assert resumed.get_state() == whole.get_state()


def test_other_settings_draw_anew_what_was_assigned():
    experience = made(staleness=2, curriculum="failed")
    state = json.loads(json.dumps(experience.get_state()))
    fewer = made(staleness=2, curriculum="failed", tasks_per_step=3)
    fewer.set_state(state, 0)
    assert [len(drawn) for drawn in fewer.assign(1)] == [3]


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({"tasks_per_step": 24}, 24),
        ({"oversample": "on", "oversample__extra_tasks": 20}, 24),
        ({"refill": "on", "refill__tasks_per_round": 30}, 30),
    ],
)
def test_a_curriculum_needs_as_many_tasks_as_a_round_has(changes, drawn):
    flags = {"curriculum": "failed", "tasks_per_step": 4, "steps": 20} | changes
    rl = config.parse(
        overrides.apply(get_config().to_dict(), [(f"rl.{n.replace('__', '.')}", str(v)) for n, v in flags.items()])
    ).rl
    with pytest.raises(ConfigError, match=f"rl.curriculum draws {drawn} different tasks, memory has 23"):
        check_tasks(SOURCE, rl)
    check_tasks(SOURCE, dataclasses.replace(rl, curriculum=None))


def test_forks_are_no_attempts_of_a_curriculum_nor_successes_to_replay():
    """They begin where others have come to: ten that succeed from there say nothing of the task from its start."""
    alone, forked = (made(curriculum="failed", replay__per_step=2, replay__use="nll") for _ in range(2))
    groups = played(alone, 0)
    fork = Episode(groups[0].task, 7, (), 1.0, {}, StopReason.ANSWER, 3, fork_of=0, forked_at=2)
    with_forks = [Group(g.task, (*g.episodes, *[dataclasses.replace(fork, task=g.task)] * 10)) for g in groups]
    assert forked.take(4, 0, 0) == alone.take(4, 0, 0)
    assert alone.record(groups, 0) == forked.record(with_forks, 0)
    assert alone.get_state() == forked.get_state()
    assert episode_metrics(groups) == episode_metrics(with_forks)
