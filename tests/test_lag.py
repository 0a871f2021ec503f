"""How old trained tokens are; and stale ones are compared with the version that sampled them, never with another."""

import math
import types

import numpy as np
import pytest

from jaxagent.runs import lag
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

STEP = 7


def trajectory(*sampled_by: int | None) -> Trajectory:
    """A prompt token, then tokens by the version that sampled them; None: the environment's."""
    versions = np.array([-1, *(-1 if v is None else v for v in sampled_by)], np.int32)
    kinds = [TokenKind.PROMPT, *(TokenKind.OBSERVATION if v is None else TokenKind.ACTION for v in sampled_by)]
    logprobs = np.where(versions < 0, 0.0, said(versions)).astype(np.float32)
    zeros = np.zeros(len(kinds), np.int32)
    return Trajectory(zeros, np.array(kinds, np.uint8), logprobs, versions, zeros)


def said(version):
    """What a version says of any token."""
    return -0.1 * (version + 1)


def group(*trajectories: Trajectory) -> Group:
    task = Task("t", "?", ())
    return Group(task, [Episode(task, 0, trajectories, 1.0, {}, StopReason.ANSWER, 1)])


class Programs:
    """Score with whatever weights they are given, which are a version's number, off by `error`."""

    def __init__(self, every=1, error=0.0):
        self.rl = types.SimpleNamespace(
            rescore_every=every, rescores=every > 0, temperature=None,
            sampling=types.SimpleNamespace(temperature=1.0), steps=20,
        )  # fmt: skip
        self.update = types.SimpleNamespace(merged=lambda state: state)
        self.error, self.calls = error, []

    def policy_logprobs(self, state, trajectories, temperature):
        self.calls.append((state.params, len(trajectories)))
        row = np.float32(said(state.params) + self.error)
        return [np.where(t.action_mask, row, np.float32(0.0)) for t in trajectories]


class State(types.SimpleNamespace):
    def replace(self, params):
        return State(params=params)


def gaps(programs, *groups, held=lambda version: version, step=STEP):
    found = lag.gaps(programs, State(params=step), held, groups, step)
    assert tuple(found) == lag.METRICS
    return [found[name] for name in lag.METRICS[:3]]


MIXED = group(trajectory(5, 5, None, 6), trajectory(7, None)), group(trajectory(None), trajectory(6, 7))


def test_every_token_is_scored_by_its_own_version():
    programs = Programs()
    assert gaps(programs, *MIXED) == [0.0, 0.0, 1.0]
    assert programs.calls == [(5, 1), (6, 2), (7, 2)], "only the trajectories in which a version has tokens"
    assert gaps(Programs(), *MIXED, held=lambda version: version + 1)[0] == pytest.approx(0.1, rel=1e-5)
    assert gaps(Programs(error=0.5), *MIXED)[:2] == pytest.approx([0.5, 0.5], rel=1e-5)
    assert math.isnan(gaps(Programs(error=math.nan), *MIXED)[0])


def test_the_mean_and_the_part_are_of_tokens():
    programs = Programs(error=0.5)
    assert gaps(programs, *MIXED, held={5: 5.0}.get) == pytest.approx([0.5, 0.5, 4 / 6], rel=1e-5)
    assert programs.calls == [(5.0, 1), (7, 2)], "version 6 is not held, and 7 is the step's own"
    found = [np.array([0.0, 0.3]), np.array([0.6])]
    assert list(lag.summary(found, [trajectory(5, 5, None, 6), trajectory(6)]).values()) == [0.6, 0.3, 0.75]


def test_what_is_not_scored_is_null_and_not_0():
    nobody = lambda version: None  # noqa: E731
    assert gaps(Programs(), group(trajectory(5, 6)), held=nobody) == [None, None, 0.0]
    assert gaps(Programs(), group(trajectory(None))) == [None, None, None]
    for every, step, scored in ((0, 6, False), (3, 6, True), (3, 7, False)):
        programs = Programs(every=every)
        found = gaps(programs, group(trajectory(step)), step=step)
        assert bool(programs.calls) == scored and found == ([0.0, 0.0, 1.0] if scored else [None] * 3)


def test_ages_by_hand():
    ages = lag.ages([group(trajectory(3, 3, None, 4), trajectory(None)), group(trajectory(5, 5, 5, 5))], 5, 3)
    assert ages.pop("staleness/mean") == pytest.approx((2 + 2 + 1) / 7) and ages.pop("staleness/max") == 2.0
    parts = {"0": 4 / 7, "1": 1 / 7, "2": 2 / 7, "3": 0.0}
    assert ages == pytest.approx({f"staleness/frac_{age}": part for age, part in parts.items()})
    assert set(lag.ages([group(trajectory(None))], 5, 1).values()) == {None}  # nothing sampled, nothing measured
    assert lag.ages([group(trajectory(5, None, 5))], 5, 0) == {}  # on-policy there is nothing to tell


@pytest.mark.parametrize(("version", "bound"), [(2, 2), (6, 2), (4, 0)])
def test_a_token_beyond_the_bound_ends_the_run(version, bound):
    with pytest.raises(RuntimeError, match=rf"step 5 would train on a token of task 't' that version {version} samp"):
        lag.ages([group(trajectory(5, version, 5))], 5, bound)
