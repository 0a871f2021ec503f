"""Composites: sums, caps, names and the warning, by hand."""

import logging
import math
import re
from functools import partial
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.rewards import length, text
from jaxagent.rewards.composite import Composite, Part
from jaxagent.rewards.view import View
from jaxagent.types import Task

EM = Part("em", text.em, weight=1.0, low=0.0, high=1.0)


def constant(name, value, weight=1.0, low=0.0, high=1.0, shaping=True) -> Part:
    return Part(name, lambda view: value, weight, low, high, shaping)


def view(answer="Accra", tokens=1000) -> View:
    return View(Task("t", "", ("Accra",)), (("a", ""),), answer, action_tokens=(tokens,))


def test_the_example_of_the_docstring():
    overlong = partial(length.soft_overlong, max_tokens=4096, buffer_tokens=1024)
    reward = Composite((EM, Part("overlong", overlong, 0.5, -1.0, 0.0, shaping=True)), shaping_cap=0.3)
    # 3072 tokens are free; 256 more are a quarter of the buffer
    assert reward(view(tokens=3328)) == {"reward": 0.875, "em": 1.0, "overlong": -0.25, "shaping": -0.125}
    # all of the buffer would cost 0.5: the cap holds it at 0.3
    assert reward(view(tokens=4096)) == {"reward": 0.7, "em": 1.0, "overlong": -1.0, "shaping": -0.3}
    assert reward(view(None, tokens=0)) == {"reward": 0.0, "em": 0.0, "overlong": 0.0, "shaping": 0.0}


def test_the_cap_is_on_the_sum_of_shaping_in_both_directions():
    parts = (EM, constant("a", 1.0, 0.25), constant("b", -1.0, 0.5, -1.0, 1.0))
    assert Composite(parts, 0.2)(view()) == {"reward": 0.8, "em": 1.0, "a": 1.0, "b": -1.0, "shaping": -0.2}
    assert Composite(parts, 1.0)(view())["shaping"] == -0.25
    assert Composite((EM, constant("a", 1.0)), 0.125)(view())["reward"] == 1.125
    assert Composite((EM, constant("a", 1.0)), 0.0)(view())["reward"] == 1.0


def test_parts_of_parts_are_reported_under_their_part_and_composites_nest():
    toolrl = Part("toolrl", lambda view: {"reward": 1.5, "format": 1, "correctness": 0.5}, 0.5, -3.0, 4.0)
    inner = Composite((toolrl,), shaping_cap=0.0)
    assert inner(view()) == {
        "reward": 0.75, "toolrl": 1.5, "toolrl/format": 1.0, "toolrl/correctness": 0.5, "shaping": 0.0}  # fmt: skip
    outer = Composite((Part("tools", inner, 2.0, -1.5, 2.0), EM), shaping_cap=0.0)
    report = outer(view())
    assert report["reward"] == 2.5 and report["tools/toolrl/format"] == 1.0 and report["em"] == 1.0


@pytest.mark.parametrize(
    ("value", "message"), [(1.1, "'a'"), (-0.1, "'a'"), (math.nan, "lambda> returned a reward of nan")]
)
def test_a_value_outside_of_its_range_is_an_error_that_names_the_part(value, message):
    with pytest.raises(ValueError, match=message):
        Composite((EM, constant("a", value)), 1.0)(view())


@pytest.mark.parametrize(
    "parts, cap, message",
    [
        ((), 0.0, "not shaping"),
        ((constant("a", 1.0),), 1.0, "not shaping"),
        ((Part("a", text.em, 0.0, 0.0, 1.0),), 1.0, "not shaping"),
        ((EM, EM), 1.0, "'em'"),
        ((EM, constant("mean", 1.0)), 1.0, "'mean'"),
        ((EM, constant("reward", 1.0)), 1.0, "'reward'"),
        ((EM, constant("a/b", 1.0)), 1.0, "'a/b'"),
        ((EM, constant("a", 1.0, math.nan)), 1.0, "'a'"),
        ((EM, constant("a", 1.0, 1.0, 1.0, 1.0)), 1.0, "'a'"),
        ((EM,), -1.0, "shaping_cap"),
        ((EM,), math.inf, "shaping_cap"),
    ],
)
def test_senseless_composites_are_the_users_error(parts, cap, message):
    with pytest.raises(ConfigError, match=message):
        Composite(parts, cap)


@pytest.mark.parametrize(
    "shaping, cap, frac",
    [
        ([], 9.0, 1.0),
        ([constant("a", 0.0, 1.0)], 9.0, 0.5),  # 1 of 1 + 1: half is still silent
        ([constant("a", 0.0, 1.0), constant("b", 0.0, -0.5)], 9.0, 1 / 2.5),
        ([constant("a", 0.0, 3.0)], 0.5, 1 / 1.5),  # from 0 to the cap
        ([constant("a", 0.0, 3.0, -1.0, 1.0)], 1.0, 1 / 3),  # from -1 to 1
    ],
)
def test_a_warning_when_outcome_is_under_half_of_what_can_be_earned(shaping, cap, frac, caplog):
    with caplog.at_level(logging.WARNING):
        assert Composite((EM, *shaping), cap).outcome_frac == pytest.approx(frac)
    assert bool(caplog.records) == (frac < 0.5)
    if caplog.records:
        assert f"{100 * frac:.0f}%" in caplog.text and f"a {shaping[0].span[0]:g}.." in caplog.text


def test_the_code_of_the_documentation_runs():
    page = (Path(__file__).resolve().parents[2] / "docs/rewards.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    transcript = names["Transcript"]("Where?", (("search", "found"), ("It is Accra", "")), (3000, 328))
    verdict = names["verdict"](Task("t", "", ("Accra",)), transcript, "Accra")
    assert verdict.reward == 0.875 and verdict.components["overlong"] == -0.25
