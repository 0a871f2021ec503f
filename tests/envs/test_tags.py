"""Text between marks: what regular expressions find there, without their cost on hostile text."""

import re
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.envs import tags
from jaxagent.envs.python import formats
from jaxagent.envs.search import environment as search
from jaxagent.envs.search import rewards as search_rewards
from jaxagent.envs.terminal import dialogue, replies
from jaxagent.rewards import maths
from jaxagent.rewards.text import follows

# What is looked for in replies -> the same as one regular expression.
MARKS = {
    "cmd": (replies._PLAIN, r"<cmd>(.*?)</cmd>"),
    "command": (replies._COMMAND, r"(?i)<command>(.*?)</command>"),
    "think": (replies._THINK, r"<think>(.*?)</think>"),
    "tool_call": (replies._CALL, r"<tool_call>(.*?)</tool_call>"),
    "function": (replies._FUNCTION, r"<function=[\w-]+>(.*?)</function>"),
    "parameter": (replies._PARAMETER, r"<parameter=command>(.*?)</parameter>"),
    "py": (formats.PROGRAM["plain"], r"<py>(.*?)</py>"),
    "fence": (formats.PROGRAM["fenced"], r"```(?:python|py)[ \t]*\n(.*?)```"),
    "python": (
        formats.PROGRAM["qwen3_xml"],
        r"<tool_call>\s*<function=python>\s*<parameter=code>(.*?)</parameter>\s*</function>\s*</tool_call>",
    ),
    "answer": (search_rewards.ANSWER, r"<answer>(.*?)</answer>"),
    "information": (search_rewards.INFORMATION, r"<information>(.*?)</information>"),
}
PIECES = [
    *("<cmd>", "</cmd>", "<command>", "</Command>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<function="),
    *("bash", "python", ">", "<function=python>", "</function>", "<parameter=command>", "<parameter=code>"),
    *("</parameter>", "<py>", "</py>", "```", "```py", "<answer>", "</answer>", "<search>", "</search>"),
    *("<information>", "</information>", "\n", " ", "a", "İ", "\0"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_the_same_as_regular_expressions(text):
    for marks, pattern in MARKS.values():
        assert tags.inside(*marks, text) == re.findall(pattern, text, re.DOTALL)
        assert tags.outside(*marks, text) == re.sub(pattern, "", text, flags=re.DOTALL)
    found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    assert search.parse_action(text) == ((found[1], found[2].strip()) if found else None)


def readers():
    """Everything that reads what a policy wrote."""
    for style in ("plain", "endless", "qwen3_xml"):
        yield f"terminal {style}", lambda text, style=style: replies.parse(style, text)
    for style in ("plain", "fenced", "qwen3_xml"):
        yield f"program {style}", lambda text, style=style: formats.find_program(style, text)
        yield f"answer {style}", lambda text, style=style: formats.find_answer(style, text)
    yield "search", search.parse_action
    yield "search answer", lambda text: search_rewards.extract_answer(text, 1)
    yield "search documents", lambda text: search_rewards.retrieval_hit(text, ["fig"])
    yield "format", lambda text: follows(search_rewards.MOVES, text)
    yield "box", maths.last_boxed
    yield "equal", lambda text: maths.equal(text, "5")


READERS = dict(readers())
UNITS = [
    *("<cmd>", "<command>", "<action>", "<action> ", "<think>", "</think>", "<tool_call>", "<function=bash>"),
    *("<tool_call><function=bash>", "<tool_call><function=python><parameter=code>", "</parameter>", "</parameter> "),
    *(
        "<py>",
        "```",
        "```py\n",
        "<answer>",
        "<search>",
        "<search></answer>",
        "<information>",
        "\\boxed{",
        "\\boxed ",
        "{",
    ),
    *("\\sqrt", "\\frac", "\\frac{", "\\text{ ", "\\\\", " ", "(1,", "<", "1", "a", "^{"),
]


@pytest.fixture
def seconds_of_processor():
    """Ends the test when it has used five, many times what it needs: quadratic work on such texts takes minutes."""

    def stop(*_):
        raise AssertionError("not linear in the text")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 5.0)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("reader", READERS)
def test_hostile_replies_cost_little(reader, seconds_of_processor):
    for unit in UNITS:
        READERS[reader](unit * (100_000 // len(unit)))
    for unit in ("<tool_call>", "<think>", "<command>", "<cmd>", "<py>", "<answer>", "\\boxed{", "\\boxed{1}"):
        READERS[reader](unit * (1_000_000 // len(unit)))


@pytest.mark.parametrize("style", ["plain", "endless", "qwen3_xml"])
def test_what_is_behind_a_million_characters_is_not_read(style):
    long = " " * tags.MAX_CHARS
    assert replies.parse(style, dialogue.finish(style) + long).done
    assert not replies.parse(style, long + dialogue.finish(style)).done
    assert search.parse_action(long + "<answer>a</answer>") is None
    assert formats.find_answer("fenced", long + r"\boxed{1}") is None
