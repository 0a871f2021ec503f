"""Test reports, tool efficiency and lengths: every number by hand."""

from functools import partial

import pytest

from jaxagent.config import ConfigError
from jaxagent.rewards import length, unit_tests
from jaxagent.rewards.tool_efficiency import tool_efficiency
from jaxagent.rewards.view import ToolCall, View
from jaxagent.types import Task

# Test reports


def swe(report, **metadata) -> View:
    return View(Task("swe-1", "", (), metadata=metadata), tests=report)


def test_fraction_and_all_of_the_required_tests():
    metadata = {"fail_to_pass": ["a", "b"], "pass_to_pass": '["c", "b", "d"]'}  # b counts once; JSON text is read
    statuses = dict.fromkeys("abcd", "passed") | {"other": "failed"}
    view = swe(statuses, **metadata)
    assert (unit_tests.passed_frac(view), unit_tests.all_passed(view)) == (1.0, 1.0)
    for status in ("failed", "skipped", "error", "PASSED"):
        view = swe(statuses | {"c": status}, **metadata)
        assert (unit_tests.passed_frac(view), unit_tests.all_passed(view)) == (0.75, 0.0)
    view = swe({"a": "passed"}, **metadata)  # tests that are absent have not passed
    assert (unit_tests.passed_frac(view), unit_tests.all_passed(view)) == (0.25, 0.0)
    assert unit_tests.passed_frac(swe({}, FAIL_TO_PASS=["x"])) == 0.0


def test_a_missing_report_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match=r"swe-1.*no test report"):
        unit_tests.all_passed(swe(None, fail_to_pass=["a"]))


@pytest.mark.parametrize("metadata", [{}, {"fail_to_pass": []}, {"fail_to_pass": "[oops"}, {"pass_to_pass": [1]},
                                      {"fail_to_pass": '"a"'}, {"fail_to_pass": 3}])  # fmt: skip
def test_a_task_without_readable_test_names_is_the_users_error(metadata):
    with pytest.raises(ConfigError, match="swe-1"):
        unit_tests.passed_frac(swe({"a": "passed"}, **metadata))


# Tool efficiency


def calls(*pairs) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name, arguments) for name, arguments in pairs)


MADE = calls(
    ("search", {"q": "a", "n": 1}),
    ("search", {"n": 1, "q": "a"}),  # a duplicate: the order of keys is nothing
    ("search", {"q": "a", "n": 1.0}),  # 1.0 is not 1
    ("search", {"q": "a", "n": True}),
    ("sarch", {"q": "a", "n": 1}),  # unknown
    ("search", {"q": "a", "n": 1}),  # a second duplicate
)


def test_faults_are_counted_and_their_penalty_is_bounded():
    view = View(Task("t", "", ()), tool_calls=MADE)
    assert tool_efficiency(view, tools={"search"}, budget=4, penalty=0.125) == {
        "reward": -0.625, "duplicates": 2.0, "unknown": 1.0, "over": 2.0}  # fmt: skip
    assert tool_efficiency(view, tools={"search"}, budget=4, penalty=0.5)["reward"] == -1.0
    assert tool_efficiency(view, tools={"search"}, budget=9, penalty=0.125, repeatable={"search"}) == {
        "reward": -0.125, "duplicates": 0.0, "unknown": 1.0, "over": 0.0}  # fmt: skip
    assert tool_efficiency(View(Task("t", "", ())), tools=(), budget=0, penalty=1.0)["reward"] == 0.0
    with pytest.raises(ValueError, match="penalty"):
        tool_efficiency(view, tools=(), budget=0, penalty=1.5)


# Lengths


def of_length(*tokens, answer="Accra") -> View:
    return View(Task("t", "", ("Accra",)), (("a", "o"),) * len(tokens), answer, action_tokens=tokens)


@pytest.mark.parametrize(
    "tokens, wanted", [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (99999, -1)]
)
def test_dapo_soft_overlong_with_the_published_lengths(tokens, wanted):
    assert length.overlong(tokens, 20480, 4096) == pytest.approx(wanted, abs=1e-12)
    reward = partial(length.soft_overlong, max_tokens=20480, buffer_tokens=4096)
    assert reward(of_length(tokens // 2, tokens - tokens // 2)) == length.overlong(tokens, 20480, 4096)


def test_lengths_that_are_unknown_or_senseless_are_errors():
    with pytest.raises(ValueError, match="1 turns with 0"):
        length.sampled_tokens(View(Task("t", "", ()), (("a", ""),)))
    for buffer_tokens in (0, 101):
        with pytest.raises(ValueError, match="buffer_tokens"):
            length.overlong(1, 100, buffer_tokens)
