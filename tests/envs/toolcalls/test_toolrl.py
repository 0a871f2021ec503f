"""ToolRL's scores: the published function's own outputs, hand-computed cases, real rows, an independent reference."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.envs.toolcalls.rewards import (
    ToolRL,
    correctness_score,
    format_score,
    length_score,
    truth_calls,
)
from jaxagent.envs.toolcalls.rows import parse_calls
from jaxagent.rewards.view import View
from jaxagent.types import Task

SHARED = Path(__file__).resolve().parents[3].parent / "shared/data"
PARIS = {"name": "get_weather", "parameters": {"city": "Paris", "unit": "C"}}
NEWS = {"name": "search", "parameters": {"q": "news"}}


def text(*calls, think="t") -> str:
    lines = "\n".join(call if isinstance(call, str) else json.dumps(call) for call in calls)
    return f"<think> {think} </think>\n<tool_call>\n{lines}\n</tool_call>"


def test_every_output_of_the_published_function():
    path = SHARED / "reference-vectors/toolrl_rewards.jsonl"
    if not path.is_file():
        pytest.skip("toolrl_rewards.jsonl is not beside this checkout")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        # The published code's first step: the text between the assistant's mark and the end of the turn.
        response = row["solution_str"].split("<|im_start|>assistant")[-1].split("<|im_end|>")[0].strip()
        total, form, correctness, length = row["score_format_correctness_length"]
        scores = dict(ToolRL()(View(Task("t", "", (row["ground_truth"],)), ((f" {response}\n", ""),))))
        most = 4.0 if "<tool_call>" in row["ground_truth"] else 1.0
        assert scores.pop("solved") == float(total == most), row["name"]
        assert scores == {"reward": total, "format": form, "correctness": correctness}, row["name"]
        assert length == 0  # the length part is off, as published


@pytest.mark.parametrize(
    "calls, truth, wanted",
    [
        # most = 1 + (1 + 2) = 4. Names 1, parameter names 1, both values: 4 of 4 only for another list: twice the call.
        ([PARIS, PARIS], [PARIS], 6 * (1 / 2 + 1 + 2) / 4 - 3),  # names J = 1 of 2
        ([{"name": "get_weather", "parameters": {}}], [PARIS], 6 * 1 / 4 - 3),  # only the name
        ([{"name": "get_weather", "parameters": {"city": "Paris", "day": 1}}], [PARIS], 6 * (1 + 1 / 3 + 1) / 4 - 3),
        # Form is only looked at where it is needed: a call of another name may lack parameters ...
        ([PARIS, {"name": "x"}], [PARIS], 6 * (1 / 2 + 1 + 2) / 4 - 3),
        ([PARIS, {"name": "get_weather"}], [PARIS], -3.0),  # ... one of the same name may not,
        ([PARIS, {"parameters": {}}], [PARIS], -3.0),  # a name is always needed,
        ([PARIS, 7], [PARIS], -3.0),  # and an object
        ([PARIS, {"name": ["x"]}], [PARIS], -3.0),
        ([{"name": "get_weather", "parameters": "city"}], [PARIS], -3.0),
        ([{"name": "get_weather", "parameters": {"city": "Paris", "unit": "C"}, "id": 1}], [PARIS], 3.0),  # 4 of 4
    ],
)
def test_correctness_by_hand(calls, truth, wanted):
    assert correctness_score(text(*calls), truth) == pytest.approx(wanted, abs=1e-12)
    assert correctness_score(text(*calls), truth, bound=1.0) == pytest.approx(wanted / 3, abs=1e-12)


@pytest.mark.parametrize("block", ["{oops", "", json.dumps(PARIS) + "\n\n" + json.dumps(PARIS), "[" * 100_000])
def test_calls_that_cannot_be_parsed_score_the_least(block):
    assert correctness_score(text(block), [PARIS]) == -3.0
    assert correctness_score("no call", [PARIS]) == -3.0
    assert correctness_score("<tool_call>" + json.dumps(PARIS), [PARIS]) == -3.0


CALLS, RESPONSE = text(PARIS), "<think> t </think>\n<response> hi </response>"
BOTH = CALLS + "\n<response> hi </response>"


@pytest.mark.parametrize(
    "response, truth, good",
    [
        (CALLS, CALLS, 1), (RESPONSE, RESPONSE, 1), (BOTH, BOTH, 1), ("<think>a</think>", "<think> t </think>", 1),
        (RESPONSE, CALLS, 0), (CALLS, RESPONSE, 0), (CALLS, BOTH, 0), (BOTH, CALLS, 0),
        (CALLS + "x", CALLS, 0), ("x" + CALLS, CALLS, 0), (CALLS.replace("</think>\n", "</think>"), CALLS, 0),
        (CALLS + "\n" + text(PARIS).split("\n", 1)[1], CALLS, 0),  # two blocks
        (RESPONSE.replace(" hi ", "<response>"), RESPONSE, 0), (RESPONSE.replace(" hi ", "</response>"), RESPONSE, 0),
        (CALLS.replace(" t ", "</think><think>"), CALLS, 1),  # as published, a second thought passes
        (RESPONSE.replace(" hi ", "<tool_call>"), RESPONSE, 1),  # and so does a tag that is not counted
    ],
)  # fmt: skip
def test_format_by_hand(response, truth, good):
    assert format_score(response, truth) == good


def test_without_true_calls_correctness_is_nothing():
    assert ToolRL().score(CALLS, RESPONSE) == {"reward": 0.0, "format": 0.0, "correctness": 0.0, "solved": 0.0}


ROME = {"name": "get_weather", "parameters": {"city": "Rome", "unit": "C"}}


@pytest.mark.parametrize(
    "detail, calls, truth, wanted",
    [  # each number is an output of the published function with its switch on, worked out by hand again
        ("refined", [ROME], [PARIS], 6 * (1 + (1 + 1)) / 4 - 3),  # names as wanted, one value
        ("refined", [NEWS, PARIS], [PARIS, NEWS], 6 * (0 + 3 + 2) / 6 - 3),  # another order of tools: J is 0
        ("refined", [{"name": "get_weather", "parameters": {"city": "Paris"}}], [PARIS], 6 * (1 + 0 + 1) / 4 - 3),
        ("calls", [ROME], [PARIS], 6 * 1 / 2 - 3),  # most = 1 + 1; the name alone
        ("calls", [PARIS], [PARIS, NEWS], 6 * (1 / 2 + 1) / 3 - 3),
        ("calls", [NEWS, PARIS], [PARIS, NEWS], 3.0),
        ("coarse", [NEWS, PARIS], [PARIS, NEWS], -3.0),
        ("coarse", [PARIS, NEWS], [PARIS, NEWS], 3.0),
    ],
)
def test_the_published_variants_by_hand(detail, calls, truth, wanted):
    assert correctness_score(text(*calls), truth, detail=detail) == pytest.approx(wanted, abs=1e-12)


def test_the_length_of_a_thought_by_hand():
    assert length_score(text(PARIS, think="one two three"), 4) == 0.75
    assert length_score(text(PARIS, think="one two three"), 512) == 0.01  # 3 / 512, rounded to hundredths
    assert length_score(text(PARIS, think="word " * 600), 512) == 1.0
    assert length_score(text(PARIS).replace("</think>", ""), 512) == 0.0
    assert ToolRL(length_words=4).score(CALLS, CALLS)["reward"] == 4.25  # a thought of one word


@pytest.mark.parametrize("call", ["{oops", "7", '{"name": "x"}', '{"name": 1, "parameters": {}}', ""])
def test_a_broken_ground_truth_is_the_users_error_and_names_the_task(call):
    with pytest.raises(ConfigError, match="task 'row7'"):
        ToolRL()(View(Task("row7", "", (text(call),)), ((CALLS, ""),)))
    with pytest.raises(ConfigError, match="row8"):
        ToolRL()(View(Task("row8", "", ())))


def test_real_rows_earn_the_most_with_their_own_truth_and_less_without_a_parameter():
    path = SHARED / "toolrl-rlla/test.parquet"
    if not path.is_file():
        pytest.skip("toolrl-rlla is not beside this checkout")
    from pyarrow import parquet

    truths = [row["ground_truth"] for row in parquet.read_table(path).column("reward_model").to_pylist()]
    assert len(truths) == 80
    changed = 0
    for truth in truths:
        calls = truth_calls("t", truth)
        assert ToolRL().score(truth, truth)["solved"] == 1.0
        assert ToolRL().score(truth, truth)["reward"] == (4.0 if calls else 1.0)
        if len({call["name"] for call in calls}) < len(calls):
            continue  # calls of one tool may be matched to each other's truth
        for i, call in enumerate(calls):
            for name in call["parameters"]:
                lacking = {**call, "parameters": {k: v for k, v in call["parameters"].items() if k != name}}
                others = [*calls[:i], lacking, *calls[i + 1 :]]
                got = correctness_score(text(*others), calls)
                # One parameter of this call less: n - 1 of n names, n - 1 of n values; the rest stays.
                n, most = len(call["parameters"]), 1 + sum(1 + len(c["parameters"]) for c in calls)
                assert got == pytest.approx(6 * (most - (1 + 1 / n)) / most - 3, abs=1e-9)
                changed += 1
    assert changed > 100


CALL = st.fixed_dictionaries(
    {"name": st.sampled_from("fg"), "parameters": st.dictionaries(st.sampled_from("xyz"), st.integers(0, 1))}
)


def reference(calls, truth) -> float:
    """The description, step by step, with sorted multisets: greedy in the order of the true calls."""
    if calls == truth:
        return 3.0

    def j(a, b):
        union = sum(max(a.count(v), b.count(v)) for v in {*a, *b})
        return sum(min(a.count(v), b.count(v)) for v in {*a, *b}) / union if union else 1.0

    total, left = j([c["name"] for c in truth], [c["name"] for c in calls]), list(enumerate(calls))
    for want in truth:
        candidates = [
            (
                j([*want["parameters"]], [*c["parameters"]])
                + len(want["parameters"].items() & c["parameters"].items()),
                -i,
            )
            for i, c in left
            if c["name"] == want["name"]
        ]
        if candidates and max(candidates)[0] > 0:
            value, index = max(candidates)
            total += value
            left = [(i, c) for i, c in left if i != -index]
    most = 1 + sum(1 + len(c["parameters"]) for c in truth)
    return 6 * total / most - 3


@settings(deadline=None, max_examples=60)
@given(st.lists(CALL, min_size=1, max_size=4), st.lists(CALL, min_size=1, max_size=4))
def test_random_calls_against_the_description(calls, truth):
    assert parse_calls(text(*calls)) == calls
    assert correctness_score(text(*calls), truth) == pytest.approx(reference(calls, truth), abs=1e-9)
    assert -3.0 <= correctness_score(text(*calls), truth) <= 3.0


def test_all_layouts_of_parts_are_told_apart():
    parts = {"tool_call": CALLS.split("\n", 1)[1], "response": "<response> hi </response>"}
    layouts = [c for n in range(3) for c in itertools.combinations(parts, n)]
    for mine, theirs in itertools.product(layouts, repeat=2):
        response, truth = ("\n".join(["<think> t </think>", *(parts[p] for p in names)]) for names in (mine, theirs))
        # Only a truth without any part has a pattern that ends with the thought, and nothing else does.
        assert format_score(response, truth) == float(mine == theirs), (mine, theirs)
