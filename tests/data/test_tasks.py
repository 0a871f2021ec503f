"""The stream of tasks: whole epochs, one order per seed, exact resume, and refusal of a position in other data."""

import functools
import json
import operator
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.types import Task
from tests.data.memory import source_of


def ids(iterator, count):
    return [task.id for task in iterator.take(count)]


def test_every_epoch_is_its_own_permutation():
    iterator = sources.TaskIterator(source_of(9), seed=0, shuffle=True)
    epochs = [ids(iterator, 9) for _ in range(4)]
    assert all(sorted(epoch) == [f"t{i}" for i in range(9)] for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_no_two_tasks_of_a_step_are_alike():
    """Across the end of an epoch too; unless a step asks for more tasks than there are."""
    iterator = sources.TaskIterator(source_of(5), seed=0, shuffle=True)
    drawn = [ids(iterator, 4) for _ in range(50)]
    assert all(len(set(step)) == 4 for step in drawn)
    assert set(Counter(functools.reduce(operator.iadd, drawn, [])).values()) <= set(range(30, 51)), (
        "and none is starved"
    )
    plain = sources.TaskIterator(source_of(5), seed=0, shuffle=True)
    assert any(len({next(plain).id for _ in range(4)}) < 4 for _ in range(50)), "which the stream itself does not give"
    for start in range(4):  # more than there are: each so many of a step are all the tasks, wherever it begins
        stream = sources.TaskIterator(source_of(3), 0, True)
        ids(stream, start)
        step = ids(stream, 8)
        assert all(len(set(step[i : i + 3])) == len(step[i : i + 3]) for i in (0, 3, 6)), step


def test_the_order_is_the_seeds_alone():
    source = source_of(50)
    first = ids(sources.TaskIterator(source, 1, True), 60)
    assert first == ids(sources.TaskIterator(source, 1, True), 60)
    assert first != ids(sources.TaskIterator(source, 2, True), 60)
    assert ids(sources.TaskIterator(source, 1, False), 60) == [f"t{i % 50}" for i in range(60)]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(0, 40), st.booleans(), st.integers(0, 2**31))
def test_resume_continues_exactly(size, taken, shuffle, seed):
    source = source_of(size)
    straight = sources.TaskIterator(source, seed, shuffle)
    straight.take(taken)
    state = json.loads(json.dumps(straight.get_state()))  # as a checkpoint stores it
    assert state["next_index"] == taken
    resumed = sources.TaskIterator(source, seed, shuffle)
    resumed.take(3)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert ids(resumed, 20) == ids(straight, 20)


def test_a_position_in_other_data_or_another_order_is_refused():
    state = sources.TaskIterator(source_of(5), 0, True).get_state()
    for other in (
        sources.TaskIterator(source_of(5, "u"), 0, True),
        sources.TaskIterator(source_of(6), 0, True),
        sources.TaskIterator(source_of(5), 1, True),
        sources.TaskIterator(source_of(5), 0, False),
    ):
        with pytest.raises(ConfigError, match="task position"):
            other.set_state(state)


def make(kind, count):
    return [Task(f"{kind}-{i}", "p", ("a",), kind) for i in range(count)]


def test_balanced_sample_is_even_over_families_then_kinds():
    pool = make("one_hop/a", 100) + make("one_hop/b", 5) + make("two_hop/a", 30) + make("two_hop/b", 30)
    sample = sources.balanced_sample(pool, 64, seed=0)
    kinds = Counter(task.kind for task in sample)
    assert kinds == {"one_hop/a": 27, "one_hop/b": 5, "two_hop/a": 16, "two_hop/b": 16}
    assert len({task.id for task in sample}) == 64
    assert sample == sources.balanced_sample(pool, 64, seed=0)
    assert sample != sources.balanced_sample(pool, 64, seed=1)


def test_balanced_sample_of_one_kind_or_too_few():
    assert Counter(t.id for t in sources.balanced_sample(make("", 4), 9, seed=0)) == Counter(t.id for t in make("", 4))
    assert sources.balanced_sample([], 9, seed=0) == []
