"""Scores over kinds of tasks, and what is said of failed episodes: worked out by hand."""

import math

import pytest

from jaxagent.config import ConfigError
from jaxagent.observe.headline import is_summarised
from jaxagent.rollout.groups import Failures, by_kind, episode_metrics
from jaxagent.rollout.groups import largest as largest_of
from jaxagent.rollout.workers import ENOUGH
from jaxagent.types import Episode, Group, StopReason, Task


def episode(kind, value, reason=StopReason.ANSWER):
    rewards = {} if reason.is_failure else {"solved": value, "em": -1.0}
    return Episode(Task("t", "p", (), kind), 0, (), value, rewards, reason, 1)


def test_by_kind():
    episodes = [
        episode("level1/mkdir", 1.0),
        episode("level1/mkdir", 0.0, StopReason.TIME_LIMIT),  # the policy's own slowness counts
        episode("level1/cp", 1.0),
        episode("level2/cp", 0.0),
        episode("other", 1.0),
        episode("", 1.0),
        episode("level1/cp", 0.0, StopReason.ENV_ERROR),  # left out
    ]
    scores = by_kind(episodes, "solved")
    assert scores.pop("solved") == pytest.approx(4 / 6)
    assert scores.pop("solved_level1") == pytest.approx(2 / 3)
    assert scores == {
        "failed": 1.0,
        "solved_level2": 0.0,
        "solved_other": 1.0,
        "solved/level1/mkdir": 0.5,
        "solved/level1/cp": 1.0,
        "solved/level2/cp": 0.0,
    }
    assert by_kind([], "em") == {"em": None, "failed": 0.0}


def test_a_verdict_without_the_environments_score_is_named():
    with pytest.raises(ConfigError, match=r"config.env has the score 'guessed', and its verdicts have solved, em:"):
        by_kind([episode("a", 1.0)], "guessed")


def test_what_a_summary_holds():
    names = ("eval/solved", "eval/solved_level1", "eval/solved/level1/cp", "eval/commands", "eval/n", "eval/failed")
    assert [name for name in names if is_summarised(name)] == ["eval/solved", "eval/solved_level1", "eval/commands"]


def failing(reason=StopReason.ANSWER, error="", kind="one_hop/x"):
    """One that ended for a reason, with a score where it is no failure."""
    rewards = {} if reason.is_failure else {"em": 0.0}
    return Episode(Task("t", "p", (), kind), 0, (), 0.0, rewards, reason, 1, error=error)


def test_the_most_frequent_reason_is_told_with_the_counts():
    dead = [failing(StopReason.ENV_ERROR, "no server")] * 2
    late = [failing(StopReason.TIMEOUT, "late")]
    failures = Failures.of([*late, *dead, failing()])
    assert str(failures) == "3 of 4 episodes failed: env_error: no server" and not failures.all
    assert Failures.of(late).all
    assert Failures.of([]) == Failures(0, 0) and not Failures.of([]).all
    assert Failures.of([failing()]) == Failures(0, 1)


def test_an_attempt_that_an_early_stop_cancelled_has_not_failed():
    enough = failing(StopReason.CANCELLED, ENOUGH)
    assert Failures.of([enough, failing()]) == Failures(0, 1)
    assert Failures.of([enough, failing(StopReason.CANCELLED, "late")]).all


def test_the_mean_of_nothing_is_none():
    metrics = episode_metrics([Group(Task("t", "p", ()), (failing(StopReason.ENV_ERROR),) * 2)])
    assert metrics["stop/env_error"] == 1.0 and metrics["episode/count"] == 2.0
    assert {metrics[name] for name in ("reward/mean", "episode/turns", "episode/tokens")} == {None}
    # A kind of which every episode failed is named, so that nobody takes the other kinds for all of them.
    scores = by_kind([failing(), failing(StopReason.ENV_ERROR, kind="two_hop/y")], "em")
    assert scores == {
        "em": 0.0, "failed": 1.0, "em_one_hop": 0.0, "em/one_hop/x": 0.0, "em_two_hop": None, "em/two_hop/y": None
    }  # fmt: skip


NAN = math.nan


@pytest.mark.parametrize(
    ("before", "now", "largest"),
    [(0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, None, 0.5), (None, None, None), (0.0, NAN, NAN), (NAN, 0.5, NAN),
     (math.inf, NAN, NAN), (NAN, None, NAN)],
)  # fmt: skip
def test_nan_wins_in_a_running_maximum(before, now, largest):
    found = largest_of(before, now)
    assert found == largest or (math.isnan(largest) and math.isnan(found))
