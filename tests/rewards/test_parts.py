"""Test reports, tool efficiency, lengths and process rewards: every number by hand."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.rewards import length, process, text, unit_tests
from jaxagent.rewards.tool_efficiency import calls_over, duplicate_calls, tool_efficiency, unknown_calls
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
    assert (duplicate_calls(MADE), unknown_calls(MADE, {"search"}), calls_over(MADE, 4)) == (2, 1, 2)
    assert duplicate_calls(MADE, repeatable={"search"}) == 0
    assert (duplicate_calls(()), calls_over((), 0), calls_over(MADE, 9)) == (0, 0, 0)
    view = View(Task("t", "", ()), tool_calls=MADE)
    assert tool_efficiency(view, tools={"search"}, budget=4, penalty=0.125) == {
        "reward": -0.625, "duplicates": 2.0, "unknown": 1.0, "over": 2.0}  # fmt: skip
    assert tool_efficiency(view, tools={"search"}, budget=4, penalty=0.5)["reward"] == -1.0
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


def test_linear_and_cosine_by_hand():
    assert [length.linear(n, 100, 1.0, 0.5) for n in (0, 50, 100, 300)] == [1.0, 0.75, 0.5, 0.5]
    # cos 0 = 1, cos 60 degrees = 1/2, cos 90 = 0, cos 180 = -1
    got = [length.cosine(n, 300, 2.0, 1.0) for n in (0, 100, 150, 300, 999)]
    assert got == pytest.approx([2.0, 1.75, 1.5, 1.0, 1.0], abs=1e-12)
    assert length.linear_length(of_length(20, 30), max_tokens=100, at_zero=0.0, at_max=-1.0) == -0.5


def test_the_cosine_reward_turns_over_with_the_outcome():
    reward = partial(
        length.cosine_length, outcome=text.em, max_tokens=300, right=(2.0, 1.0), wrong=(-10.0, 0.0), exceeded=-10.0
    )
    assert reward(of_length(0)) == 2.0 and reward(of_length(100)) == pytest.approx(1.75)
    assert reward(of_length(0, answer="Lomé")) == -10.0
    assert reward(of_length(100, answer="Lomé")) == pytest.approx(-7.5)  # 0 + (-10)(1 + 1/2)/2
    assert reward(of_length(300)) == reward(of_length(300, answer=None)) == -10.0


def test_lengths_that_are_unknown_or_senseless_are_errors():
    with pytest.raises(ValueError, match="1 turns with 0"):
        length.sampled_tokens(View(Task("t", "", ()), (("a", ""),)))
    for buffer_tokens in (0, 101):
        with pytest.raises(ValueError, match="buffer_tokens"):
            length.overlong(1, 100, buffer_tokens)


# Process rewards


def test_direct_turn_rewards_keep_their_proportions_under_the_cap():
    assert process.direct([1.0, -0.5, 0.0], 0.5, cap=1.0) == (0.5, -0.25, 0.0)
    assert process.direct([1.0, -0.5, 0.5], 1.0, cap=1.0) == (0.5, -0.25, 0.25)  # absolute values sum to 2
    assert process.direct([], 1.0, cap=0.0) == () and process.direct([2.0], 1.0, cap=0.0) == (0.0,)
    with pytest.raises(ValueError, match="negative"):
        process.direct([1.0], 1.0, cap=-1.0)


def test_progress_by_hand():
    assert process.progress([0.25, 0.25, 1.0], start=0.0) == (0.25, 0.0, 0.75)
    assert process.progress([0.5, 1.0], start=0.25, gamma=0.5) == (0.0, 0.0)
    assert process.progress([], start=1.0) == ()
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            process.progress([bad], start=0.0)


@settings(deadline=None)
@given(st.lists(st.integers(-8, 8), min_size=1), st.integers(-8, 8))
def test_progress_pays_for_where_one_arrives_and_not_for_the_way(values, start):
    assert sum(process.progress(values, start)) == values[-1] - start
