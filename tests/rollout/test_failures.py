"""What is said of failed episodes."""

from jaxagent.rollout.statistics import Failures, by_kind, episode_metrics
from jaxagent.rollout.workers import ENOUGH
from jaxagent.types import Episode, Group, StopReason, Task


def episode(reason=StopReason.ANSWER, error="", kind="one_hop/x"):
    failed = reason.is_failure
    return Episode(Task("t", "p", (), kind), 0, (), 0.0, {} if failed else {"em": 0.0}, reason, 1, {}, "", error)


def test_the_most_frequent_reason_is_told_with_the_counts():
    dead = [episode(StopReason.ENV_ERROR, "no server")] * 2
    late = [episode(StopReason.TIMEOUT, "late")]
    failures = Failures.of([*late, *dead, episode()])
    assert str(failures) == "3 of 4 episodes failed: env_error: no server" and not failures.all
    assert Failures.of(late).all
    assert Failures.of([]) == Failures(0, 0) and not Failures.of([]).all
    assert Failures.of([episode()]) == Failures(0, 1)


def test_an_attempt_that_an_early_stop_cancelled_has_not_failed():
    enough = episode(StopReason.CANCELLED, ENOUGH)
    assert Failures.of([enough, episode()]) == Failures(0, 1)
    assert Failures.of([enough, episode(StopReason.CANCELLED, "late")]).all


def test_the_mean_of_nothing_is_none():
    metrics = episode_metrics([Group(Task("t", "p", ()), (episode(StopReason.ENV_ERROR),) * 2)])
    assert metrics["stop/env_error"] == 1.0 and metrics["episode/count"] == 2.0
    assert {metrics[name] for name in ("reward/mean", "episode/turns", "episode/tokens")} == {None}
    # A kind of which every episode failed is named, so that nobody takes the other kinds for all of them.
    scores = by_kind([episode(), episode(StopReason.ENV_ERROR, kind="two_hop/y")], "em")
    assert scores == {
        "em": 0.0, "failed": 1.0, "em_one_hop": 0.0, "em/one_hop/x": 0.0, "em_two_hop": None, "em/two_hop/y": None
    }  # fmt: skip
