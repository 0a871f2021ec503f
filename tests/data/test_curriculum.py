"""Curricula: hand-computed chances and statistics, and draws that depend on the seed, the step and the past alone."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.data.curriculum import CURRICULA, Curriculum, Learnability, Target, draw, weights
from jaxagent.types import Episode, Group, StopReason
from tests.data.memory import source_of

BASE = Target(explore=0.0, decay=0.5)


def group(task, rewards, failed=0):
    episodes = [Episode(task, i, (), r, {}, StopReason.ANSWER, 1) for i, r in enumerate(rewards)]
    episodes += [Episode(task, 9, (), 0.0, {}, StopReason.TIMEOUT, 1)] * failed
    return Group(task, tuple(episodes))


@pytest.mark.parametrize(
    "name, raw",
    [
        ("target", [0.0, 0.5, 1.0, 0.5]),  # 1 - |p - .5| / .5
        ("failed", [1.0, 0.75, 0.5, 0.25]),  # 1 - p
        ("learnability", [0.0, 0.1875, 0.25, 0.1875]),  # p (1 - p)
    ],
)
def test_chances_by_hand(name, raw):
    success = np.array([0.0, 0.25, 0.5, 0.75])
    cfg = CURRICULA[name](explore=0.0)
    np.testing.assert_allclose(weights(success, cfg), np.array(raw) / sum(raw), rtol=1e-12)
    mixed = weights(success, dataclasses.replace(cfg, explore=0.2))
    np.testing.assert_allclose(mixed, 0.8 * np.array(raw) / sum(raw) + 0.05, rtol=1e-12)


def test_nothing_to_prefer_is_an_even_draw():
    cfg = Learnability(explore=0.0)
    np.testing.assert_array_equal(weights(np.array([0.0, 1.0, 1.0]), cfg), np.full(3, 1 / 3))


def test_first_draws_follow_the_chances_and_none_comes_twice():
    chances = np.array([0.5, 0.3, 0.2, 0.0])
    draws = [draw(chances, 4, [7, i]) for i in range(4000)]
    assert all(sorted(d) == [0, 1, 2, 3] and d[-1] == 3 for d in draws)
    first = Counter(d[0] for d in draws)
    np.testing.assert_allclose([first[i] / 4000 for i in range(4)], chances, atol=0.03)
    second = np.mean([d[1] == 1 for d in draws if d[0] == 0])  # .3 / (.3 + .2)
    assert abs(second - 0.6) < 0.05


def test_success_by_hand():
    curriculum = Curriculum(source_of(3), BASE, 0)
    np.testing.assert_array_equal(curriculum.success, [0.5, 0.5, 0.5])  # (0 + .5 * 2) / (0 + 2)
    assert sorted(curriculum.take(3, 0, 0)) == [0, 1, 2]
    tasks, where = {f"t{i}": source_of(3)[i] for i in range(3)}, {f"t{i}": i for i in range(3)}
    curriculum.record([group(tasks["t1"], [1.0, 1.0, 1.0, 0.0], failed=2)], where)  # the failed ones say nothing
    assert curriculum.success[1] == (3 + 1) / (4 + 2)
    curriculum.record([group(tasks["t1"], [0.0, 0.0])], where)  # decay .5: s = 1.5, n = 4
    assert curriculum.success[1] == (1.5 + 1) / (4 + 2)
    curriculum.record([group(tasks["t2"], [], failed=4)], where)
    assert curriculum.success.tolist() == [0.5, 2.5 / 6, 0.5]
    assert curriculum.metrics() == {"curriculum/tasks_seen": 1.0, "curriculum/success": 2.5 / 6}


def test_rounds_of_a_step_do_not_repeat_tasks_while_there_are_others():
    curriculum = Curriculum(source_of(5), BASE, 0)
    used = curriculum.take(2, 3, 0)
    used += curriculum.take(2, 3, 1, used)
    assert len(set(used)) == 4
    last, again = curriculum.take(2, 3, 2, used)  # one is left, and one comes again
    assert last not in used and again in used
    with pytest.raises(ConfigError, match="6 different tasks, memory has 5"):
        curriculum.take(6, 4, 0)


def test_what_it_draws_depends_on_seed_step_and_past_alone():
    def run(curriculum, steps):
        out = []
        for step in steps:
            tasks = {f"t{i}": i for i in curriculum.take(3, step, 0)}
            rewards = {name: [1.0, 0.0] if name < "t4" else [0.0, 0.0] for name in tasks}
            curriculum.record([group(source_of(9)[i], rewards[name]) for name, i in tasks.items()], tasks)
            out.append([*tasks])
        return out

    whole = run(Curriculum(source_of(9), BASE, 1), range(8))
    first, second = Curriculum(source_of(9), BASE, 1), Curriculum(source_of(9), BASE, 1)
    begun = run(first, range(4))
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert begun + run(second, range(4, 8)) == whole
    assert whole != run(Curriculum(source_of(9), BASE, 2), range(8))
    with pytest.raises(ConfigError, match="other data"):
        Curriculum(source_of(9, "u"), BASE, 1).set_state(first.get_state())
