"""Reasoning, text and calls of each family, in pieces of any length; what cannot be read comes back as it was."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxagent.gateway.chat import Call, Reasoning, Text, Tool
from jaxagent.tools import FAMILIES, Hermes, Llama3, Qwen3Coder, ToolParser

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "n": {"type": ["string", "null"]},
        "u": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
TOOL = Tool("f", "", SCHEMA)
PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=s>",
    "</parameter>", "<|python_tag|>", '{"name": "f", "arguments": {"s": "x"}}', '{"name": "f", "parameters": {}}',
    "<tool", "</tool_", "<|pyth", "{", "}", '"', "\\", ";", "\n", " ", "word", "<", "é",
    "\n<tool_call>\n<function=f>\n", "\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
]  # fmt: skip


def read(family, pieces, **options):
    parser = family([TOOL], **options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.end()
    joined = []
    for delta in deltas:
        if joined and isinstance(delta, Text | Reasoning) and type(joined[-1]) is type(delta):
            joined[-1] = type(delta)(joined[-1].text + delta.text)
        else:
            joined.append(delta)
    return joined, parser.malformed


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([ToolParser, *FAMILIES]), st.lists(st.sampled_from(PIECES), max_size=12), st.booleans(),
    st.booleans(), st.data(),
)  # fmt: skip
def test_any_pieces_say_the_same(family, parts, reasoning, opened, data):
    text = "".join(parts)
    whole = read(family, [text], reasoning=reasoning, in_thought=opened)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(family, pieces, reasoning=reasoning, in_thought=opened) == whole
    assert read(family, text, reasoning=reasoning, in_thought=opened) == whole
    deltas, _ = whole
    if not reasoning and not opened and not any(isinstance(delta, Call) for delta in deltas):
        assert "".join(delta.text for delta in deltas) == text


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50, deadline=None)
@example("</tool_call>").via("a closing tag in a value")
@example("\n</parameter>\n").via("a closing tag in a value")
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_what_a_family_writes_it_reads(family, value):
    made = [Call("f", {"s": value, "i": 3, "b": True, "o": {"k": [value]}}), Call("f", {})]
    assert read(family, [family.write("", made)]) == (made, 0)
    assert read(family, [family.write("Look:", made)]) == ([Text("Look:"), *made], 0)


@pytest.mark.parametrize(
    "text", ['{"name": "' + "a" * 5000, '{"name": {' * 2000, '{"name": "f", "parameters": ["{' * 500]
)
def test_a_call_without_end_is_parsed_once(text, monkeypatch):
    """A policy that falls into a loop writes megabytes of it, token by token, and all requests share one event loop."""
    parsed = []
    decode = json.JSONDecoder.raw_decode
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", lambda *a, **k: parsed.append(1) or decode(*a, **k))
    said, malformed = read(Llama3, [text[at : at + 5] for at in range(0, len(text), 5)])
    assert said == [Text(text)] and malformed and len(parsed) <= 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "f", "arguments": {"s": "a"}}</tool_call>', [Call("f", {"s": "a"})]),
        ('hi\n\n<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>\n', [Text("hi"), Call("g", {})]),
        ('<tool_call>{"name": "f"}</tool_call>  \n bye', [Call("f", {}), Text("bye")]),
        ('<tool_call>{"name": "f", "parameters": {"i": 1}}</tool_call>', [Call("f", {"i": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>', [Call("f", {"s": "a\nb"})]),
        ("a < b <tool> <tool_calls>", [Text("a < b <tool> <tool_calls>")]),
    ],
)
def test_hermes(text, expected):
    assert read(Hermes, text) == (expected, 0)


@pytest.mark.parametrize(
    "body",
    [
        "ls", '{"name": "f", "args": {"i": 1}}', '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": {}', '{"name": "f", "arguments": [1]}', '{"name": "", "arguments": {}}', "[]",
        '{"arguments": {}}', '{"name": "f", "arguments": {"i": NaN}}', '{"name": "f", "arguments": {"s": "\\ud800"}}',
        '{"name": "f", "arguments": {"s": "open}}', '{"name": "f"} {"name": "f"}', "[" * 100_000, "9" * 9999,
    ],
)  # fmt: skip
def test_a_malformed_call_comes_back_and_the_next_is_read(body):
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    bad = f"so \n<tool_call>{body}</tool_call>"
    assert read(Hermes, [bad]) == ([Text(bad)], 1)
    assert read(Hermes, [bad, "\n", good]) == ([Text(bad), Call("f", {})], 1)


def test_a_call_that_is_cut_off_comes_back():
    assert read(Hermes, ['a <tool_call>{"name": "f", "argu']) == ([Text('a <tool_call>{"name": "f", "argu')], 1)
    assert read(Hermes, ["a <tool_ca"]) == ([Text("a <tool_ca")], 0)


def test_text_is_passed_on_as_soon_as_it_is_no_tag():
    parser = Hermes([TOOL])
    assert parser.feed("one ") == [Text("one")]
    assert parser.feed("two <to") == [Text(" two")]
    assert parser.feed("ol_c") == []
    assert parser.feed("at> \n") == [Text(" <tool_cat>")]
    assert parser.feed('<tool_call>{"name": "f"}') == []
    assert parser.feed("</tool_call>") == [Call("f", {})]
    assert parser.feed("\n") == parser.end() == []


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ("", {}),
        ("<parameter=s>\n 3 \n</parameter>\n", {"s": " 3 "}),
        ("<parameter=i>\n3\n</parameter>\n<parameter=b>\nTrue\n</parameter>", {"i": 3, "b": True}),
        ("<parameter=i>three</parameter><parameter=b>yes</parameter>", {"i": "three", "b": "yes"}),
        ('<parameter=o>\n{"a": [1, null]}\n</parameter>', {"o": {"a": [1, None]}}),
        ("<parameter=n>\nNone\n</parameter><parameter=u>null</parameter>", {"n": None, "u": None}),
        (
            "<parameter=n>7</parameter><parameter=u>7</parameter><parameter=x>7</parameter>",
            {"n": "7", "u": 7, "x": "7"},
        ),
        (
            "<parameter=s>\n\n<a>\n</parameter>\n</tool_call>\n\n</parameter>",
            {"s": "\n<a>\n</parameter>\n</tool_call>\n"},
        ),
    ],
)
def test_qwen3_coder(parameters, arguments):
    text = f"ok\n<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    assert read(Qwen3Coder, text) == ([Text("ok"), Call("f", arguments)], 0)


@pytest.mark.parametrize("body", ["<function=f>x</function>", "<function=>\n</function>", "f(1)", "<parameter=s>1"])
def test_qwen3_coder_malformed(body):
    text = f"<tool_call>{body}</tool_call>"
    good = "<tool_call><function=g></function></tool_call>"
    assert read(Qwen3Coder, text + good) == ([Text(text), Call("g", {})], 1)


@pytest.mark.parametrize(
    ("text", "expected", "malformed"),
    [
        ('{"name": "f", "parameters": {"i": 1}}', [Call("f", {"i": 1})], 0),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [Call("f", {})], 0),
        ('\n{"name": "f", "arguments": {}};{"name": "g", "parameters": {}} ; ', [Call("f", {}), Call("g", {})], 0),
        ('{"name": "f", "parameters": {}}; and', [Call("f", {}), Text("; and")], 0),
        ('I call {"name": "f", "parameters": {}}', [Text('I call {"name": "f", "parameters": {}}')], 0),
        ('Look <|python_tag|>{"name": "f", "parameters": {}}', [Text("Look"), Call("f", {})], 0),
        ('{"answer": 3} indeed', [Text('{"answer": 3} indeed')], 1),
        ('{"name": "f", "params": {}}', [Text('{"name": "f", "params": {}}')], 1),
        ('{"name": "f", "parameters": [}}', [Text('{"name": "f", "parameters": [}}')], 1),
        ("<|python_tag|>print(1)", [Text("<|python_tag|>print(1)")], 1),
        ('{"name": "f", "parameters": {', [Text('{"name": "f", "parameters": {')], 1),
    ],
)
def test_llama3(text, expected, malformed):
    assert read(Llama3, text) == (expected, malformed)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", {"reasoning": True}, [Reasoning("hm"), Text("yes")]),
        ("hm</think>yes", {"in_thought": True}, [Reasoning("hm"), Text("yes")]),
        ("hm <thi", {"in_thought": True}, [Reasoning("hm <thi")]),
        ("<think>\n\n</think>\n\nyes", {"reasoning": True}, [Text("yes")]),
        ("a <think>b</think>", {"reasoning": True}, [Text("a <think>b</think>")]),
        ("<think>hm</think>yes", {}, [Text("<think>hm</think>yes")]),
        (" yes\n", {"reasoning": True}, [Text(" yes\n")]),
        (
            '<think><tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}</tool_call>',
            {"reasoning": True},
            [Reasoning('<tool_call>{"name": "f"}</tool_call>'), Call("g", {})],
        ),
    ],
)
def test_reasoning(text, options, expected):
    assert read(Hermes, text, **options) == (expected, 0)


def test_without_tools_nothing_is_a_call():
    text = Hermes.write("a", [Call("f", {})])
    for family in (ToolParser, *FAMILIES):
        parser = family()
        assert "".join(d.text for d in parser.feed(text) + parser.end()) == text and parser.malformed == 0


def test_written_calls_are_plain_json():
    assert json.loads(Llama3.write("", [Call("f", {"s": "é"})])) == {"name": "f", "parameters": {"s": "é"}}


@pytest.mark.parametrize(
    "family, head", [(Hermes, '<tool_call>{"name": "'), (Qwen3Coder, "<tool_call><function=a><parameter=b>")]
)
def test_a_closing_tag_without_end_is_judged_once_each(family, head):
    """A policy that falls into a loop writes thousands of them, and everybody's requests share one event loop."""
    judged = []

    class Counting(family):
        def _parse(self, *args):
            judged.append("parse")
            return super()._parse(*args)

        def _within_value(self, *args):
            judged.append("within")
            return super()._within_value(*args)

    parser, pieces = Counting([TOOL]), ["</tool", "_call>", " a"] * 50
    said = [delta for piece in [head, *pieces] for delta in parser.feed(piece)] + parser.end()
    assert "".join(delta.text for delta in said) == head + "".join(pieces)
    assert 50 <= len(judged) <= 120
