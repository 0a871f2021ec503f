"""How old trained tokens are, and that one beyond the bound is an error."""

import numpy as np
import pytest

from jaxagent.runs.lag import ages
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory


def group(*versions):
    """One group; of each attempt the versions of its tokens, -1 for one of the environment."""
    task, episodes = Task("t", "p", ("a",)), []
    for sample, of_tokens in enumerate(versions):
        column = np.array(of_tokens, np.int32)
        kinds = np.where(column < 0, TokenKind.OBSERVATION, TokenKind.ACTION).astype(np.uint8)
        zeros = np.zeros(len(column), np.int32)
        trajectory = Trajectory(zeros, kinds, zeros.astype(np.float32), column, zeros)
        episodes.append(Episode(task, sample, (trajectory,), 0.0, {}, StopReason.ANSWER, 1))
    return Group(task, tuple(episodes))


def test_ages_by_hand():
    found = ages([group([-1, 3, 3, -1, 4], [-1, -1]), group([5, 5, 5, 5])], 5, 3)
    assert found.pop("staleness/mean") == pytest.approx((2 + 2 + 1) / 7)
    assert found.pop("staleness/max") == 2.0
    expected = {"0": 4 / 7, "1": 1 / 7, "2": 2 / 7, "3": 0.0}
    assert found == pytest.approx({f"staleness/frac_{age}": part for age, part in expected.items()})


def test_nothing_sampled_is_nothing_measured():
    assert set(ages([group([-1])], 5, 1).values()) == {None}


@pytest.mark.parametrize(("version", "bound"), [(2, 2), (6, 2), (4, 0)])
def test_a_token_beyond_the_bound_ends_the_run(version, bound):
    with pytest.raises(
        RuntimeError, match=rf"step 5 would train on a token of task 't' that version {version} sampled"
    ):
        ages([group([5, version, 5])], 5, bound)


def test_on_policy_there_is_nothing_to_tell():
    assert ages([group([5, -1, 5])], 5, 0) == {}
