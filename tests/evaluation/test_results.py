"""The numbers of an evaluation, worked out by hand."""

import pytest

from jaxagent.runs.evaluation.attempts import ScoredAttempt
from jaxagent.runs.evaluation.results import curves, summarise, table
from jaxagent.types import Task


def tasks(*kinds):
    return [Task(f"t{i}", "p", (), kind) for i, kind in enumerate(kinds)]


def attempts(*rows):
    """One text per task: + passed, - not, ! failed."""
    score = {"+": 1.0, "-": 0.5, "!": None}
    reason = {"+": "answer", "-": "turn_limit", "!": "timeout"}
    return {
        (f"t{i}", s): ScoredAttempt(score[x], reason[x], 2, 10) for i, row in enumerate(rows) for s, x in enumerate(row)
    }


def test_failed_attempts_are_no_zeros():
    rows = attempts("+-!!", "+---", "!!!!", "++++")
    found = summarise(tasks("a/x", "a/y", "b/x", "b"), 4, (1, 2), 1.0, rows)
    at = found["pass_at_k"]
    assert list(at) == ["all", "a", "a/x", "a/y", "b", "b/x"]
    assert at["all"]["1"]["mean"] == pytest.approx((1 / 2 + 1 / 4 + 1) / 3)
    assert at["all"]["2"]["mean"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert at["all"]["1"]["tasks"] == 3 and at["all"]["1"]["too_few"] == 1
    assert at["a"]["1"]["mean"] == pytest.approx(3 / 8)
    assert at["b"]["2"] == {**at["b"]["1"], "mean": 1.0, "tasks": 1, "too_few": 1}
    assert at["b/x"] == {"1": None, "2": None}
    assert (found["attempts"], found["failed"]) == (16, 6)
    assert found["stop_reasons"] == {"answer": 6, "timeout": 6, "turn_limit": 4}
    assert (found["action_tokens"], found["turns_mean"]) == (160, 2.0)
    assert found["per_task"][0] == {"task": "t0", "kind": "a/x", "n": 2, "passed": 1, "failed": 2}


def test_the_score_from_which_an_attempt_passes():
    found = summarise(tasks(""), 2, (1,), 0.5, attempts("--"))
    assert found["pass_at_k"]["all"]["1"]["mean"] == 1.0
    assert list(found["pass_at_k"]) == ["all"]


def test_the_mean_cost_is_of_attempts_that_did_not_fail():
    rows = {("t0", s): ScoredAttempt(1.0, "answer", 1, 1, cost=cost) for s, cost in enumerate((0.25, 0.5))}
    rows["t0", 2] = ScoredAttempt(None, "timeout", 1, 1)
    found = summarise(tasks(""), 3, (1,), 0.5, rows)
    assert found["cost_mean"] == 0.375 and "an attempt costs 0.375 on average" in table(found)
    assert "cost_mean" not in summarise(tasks(""), 2, (1,), 0.5, attempts("++"))  # where nothing has a price


def test_only_what_is_asked_for_is_looked_at():
    found = summarise(tasks("a"), 2, (2,), 1.0, attempts("--++", "++++"))
    assert found["pass_at_k"]["all"]["2"]["mean"] == 0.0 and found["attempts"] == 2


def test_a_kind_named_all_is_not_counted_twice():
    found = summarise(tasks("all", "all/x"), 1, (1,), 1.0, attempts("+", "-"))
    assert found["pass_at_k"]["all"]["1"]["tasks"] == 2


def test_the_table_says_what_has_to_be_said():
    found = summarise(tasks("a/x", "a/y", "b"), 4, (1, 4), 1.0, attempts("+-!!", "+---", "----"))
    text = table(found)
    lines = text.splitlines()
    assert lines[0].split() == ["tasks", "pass@1", "pass@4"]
    assert lines[1].split()[:3] == ["all", "3", "0.250"]
    assert lines[3].split()[:3] == ["x", "1", "0.500"] and lines[3].endswith("-")
    assert "pass@4: 1 tasks have fewer than 4 attempts that count" in text
    assert "12 attempts, of which 2 failed and do not count: answer 2, timeout 2, turn_limit 8" in text
    assert curves(found)["a"] == [(1.0, 0.375), (4.0, 1.0)]
    assert [name for name in curves(found)] == ["all", "all, low", "all, high", "a", "b"]
