"""Dynamic sampling and the filter of groups, on rewards written out."""

import numpy as np
import pytest

from jaxagent.config import RefillConfig
from jaxagent.rollout import groups as selection
from jaxagent.types import Episode, Group, StopReason, Task


def group(name, rewards, failed=0):
    task = Task(name, "?", ("a",))
    episodes = [Episode(task, i, (), r, {}, StopReason.ANSWER, 1) for i, r in enumerate(rewards)]
    episodes += [Episode(task, 9, (), 0.0, {}, StopReason.CANCELLED, 1)] * failed
    return Group(task, tuple(episodes))


MIXED, ZEROS, ONES = [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]


class Stock:
    """Groups in the order of their tasks; remembers what was asked for."""

    def __init__(self, *rewards):
        self.groups, self.asked = [group(f"t{i}", r) for i, r in enumerate(rewards)], []

    def __call__(self, number, count):
        self.asked.append((number, count))
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken


def names(groups):
    return [g.task.id for g in groups]


def test_off_uses_every_group():
    chosen = selection.refill(play := Stock(MIXED, ZEROS), 2, None)
    assert names(chosen.groups) == names(chosen.sampled) == ["t0", "t1"] and play.asked == [(0, 2)]


def test_rounds_ask_for_what_is_missing():
    play = Stock(ZEROS, MIXED, ONES, ZEROS, MIXED, MIXED)
    chosen = selection.refill(play, 3, RefillConfig(10, 0))
    assert play.asked == [(0, 3), (1, 2), (2, 1)]  # 1 of 3 has signal, then 1 of 2, then 1 of 1
    assert names(chosen.groups) == ["t1", "t4", "t5"]
    assert selection.selection_metrics(chosen) == {
        "sampling/rounds": 3.0,
        "sampling/groups_played": 6.0,
        "sampling/groups_without_signal": 3.0,
        "sampling/groups_trained": 3.0,
    }


def test_rounds_of_a_fixed_size_keep_the_first_in_task_order():
    play = Stock(ZEROS, MIXED, MIXED, ZEROS, MIXED, MIXED)
    chosen = selection.refill(play, 2, RefillConfig(10, 3))
    assert play.asked == [(0, 3)] and names(chosen.groups) == ["t1", "t2"]
    play = Stock(ZEROS, ZEROS, MIXED, ZEROS, MIXED, MIXED)
    chosen = selection.refill(play, 2, RefillConfig(10, 3))
    assert play.asked == [(0, 3), (1, 3)] and names(chosen.groups) == ["t2", "t4"]  # t5 is one too many
    assert len(chosen.sampled) == 6


def test_the_number_of_rounds_is_bounded():
    chosen = selection.refill(Stock(*[ZEROS] * 9), 2, RefillConfig(3, 0))
    assert chosen.groups == [] and chosen.rounds == 3 and len(chosen.sampled) == 6


def test_a_group_with_one_attempt_that_counts_has_no_signal():
    assert selection.signal([group("a", [1.0], failed=1), group("b", MIXED, failed=1)]).tolist() == [False, True]


def test_most_varied_by_hand():
    groups = [
        group("a", [0.0, 0.0, 1.0, 1.0]),  # std .5774
        group("b", [0.0, 0.0, 0.0, 1.0]),  # .5
        group("c", [0.0, 0.0, 0.0, 0.0]),
        group("d", [0.0, 1.0], failed=2),  # .7071: real size 2
        group("e", [1.0, 1.0, 0.0, 0.0]),  # as a
    ]
    spread = [selection.reward_std(g) for g in groups]
    np.testing.assert_allclose(spread, [3**-0.5, 0.5, 0, 0.5**0.5, 3**-0.5], rtol=1e-12)
    assert names(selection.keep_most_varied(groups, 0.2)) == ["d"]
    assert names(selection.keep_most_varied(groups, 0.4)) == ["a", "d"]  # the earlier of a and e; in their order
    assert names(selection.keep_most_varied(groups, 0.6)) == ["a", "d", "e"]
    assert names(selection.keep_most_varied(groups, 0.01)) == ["d"]  # one at least
    assert names(selection.keep_most_varied(groups, 1.0)) == names(groups) and selection.keep_most_varied([], 0.5) == []


@pytest.mark.parametrize("count, frac, kept", [(8, 0.25, 2), (100, 0.29, 29), (10, 0.7, 7), (3, 0.5, 1)])
def test_a_fraction_is_rounded_down_as_written(count, frac, kept):
    groups = [group(f"g{i}", MIXED) for i in range(count)]
    assert len(selection.keep_most_varied(groups, frac)) == kept


def test_one_reward_has_no_std():
    assert selection.reward_std(group("a", [1.0], failed=3)) == 0.0 == selection.reward_std(group("a", [], failed=1))
