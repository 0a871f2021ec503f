"""Scores over kinds of tasks, worked out by hand."""

import pytest

from jaxagent.config import ConfigError
from jaxagent.rollout.statistics import by_kind
from jaxagent.runs.evaluation.held_out import summarised
from jaxagent.types import Episode, StopReason, Task


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
    assert [name for name in names if summarised(name)] == ["eval/solved", "eval/solved_level1", "eval/commands"]
