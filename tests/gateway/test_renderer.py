"""Token-exact conversations: what a session gathers turn by turn is the conversation rendered at once, spliced."""

import datetime
import functools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message, Observation
from jaxagent.gateway.chat import BadRequest, Call, ChatMessage, Reasoning, Text, Tool
from jaxagent.gateway.renderer import Renderer, SampledTokens
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.templates import Chat, Plain
from jaxagent.types import Generation, TokenKind
from tests.gateway.chat_templates import CALLS_JSON, TEMPLATES
from tests.rollout.test_demonstrations import TEXTS

DATE = datetime.datetime(2025, 1, 2)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
CHATS = [name for name in TEMPLATES if name != "plain"]
NATIVE = ["qwen2.5", "qwen3", "qwen3-coder", "llama3.1", "hermes", "thinker"]
SHELL = Tool("shell", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
ADD = Tool(
    "add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": ["string", "null"]}}}
)


@functools.cache
def make(name):
    source, eos = TEMPLATES[name]
    trained = Tokenizer.train(TEXTS * 20, 420, SPECIAL)
    files = {"tokenizer_config.json": json.dumps({"eos_token": eos, "bos_token": "<|endoftext|>"})}
    tokenizer = Tokenizer(trained._backend, files)
    return tokenizer, Renderer(tokenizer, source, DATE)


def read(renderer, tokenizer, ids, tools):
    """The message that a program sends back for sampled tokens."""
    parser = renderer.parser(tools)
    deltas = parser.feed(tokenizer.decode(ids)) + parser.end()
    text = "".join(d.text for d in deltas if isinstance(d, Text))
    return ChatMessage("assistant", text, tuple(d for d in deltas if isinstance(d, Call)))


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["user", "<|im_start|>", "\n", " a \n", "1", "assistant", "PLACEHOLDER-0-END", "PLACEHOLDER", "<tool_response>"]
)
said = words.filter(lambda text: text.strip())
calls = st.lists(
    st.builds(lambda command: Call("shell", {"command": command}), said)
    | st.builds(lambda a, note: Call("add", {"a": a, "note": note}), st.integers(-99, 99), said),
    max_size=2,
)


@st.composite
def turns(draw, tools):
    """(random token ids, calls, whether EOS was sampled, the messages that follow)."""
    made = draw(calls) if tools else []
    after = [ChatMessage("tool", draw(words), call_id=str(i)) for i in range(len(made))]
    after += [ChatMessage("system", draw(said))] * draw(st.integers(0, 4).map(lambda n: n == 0))
    if draw(st.booleans()) or not after:
        after.append(ChatMessage("user", draw(said)))
    return draw(st.lists(st.integers(6, 400), max_size=8)), made, draw(st.booleans()), after


@st.composite
def histories(draw):
    name = draw(st.sampled_from(list(TEMPLATES)))
    tools = (SHELL, ADD) if name != "plain" and draw(st.booleans()) else ()
    messages = [ChatMessage("system", draw(said))] * draw(st.integers(0, 2))
    return name, tools, [*messages, ChatMessage("user", draw(said))], draw(st.lists(turns(tools), max_size=4))


class Spy:
    """The tokenizer, with every text that was encoded."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.texts = []

    def encode(self, text):
        self.texts.append(text)
        return self._tokenizer.encode(text)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@settings(max_examples=300, deadline=None)
@given(histories())
def test_turn_by_turn_is_all_at_once(history):
    name, tools, messages, talk = history
    tokenizer, renderer = make(name)
    renderer._tokenizer = spy = Spy(tokenizer)
    eos = TEMPLATES[name][1]
    first = renderer.prompt(messages, tools, {})
    ids, kinds, stored, places = list(first.ids), list(first.kinds), {}, {}
    for number, (sampled, made, ended, after) in enumerate(talk):
        written = renderer._family.write("", made) if made else ""
        sampled = [*tokenizer.encode(f"MARK{number}!"), *sampled, *tokenizer.encode(written)]
        message = read(renderer, tokenizer, sampled, tools)
        sampled += [tokenizer.id_of(eos)] * ended
        places[len(messages)] = len(ids)
        stored[len(messages)] = SampledTokens(sampled, eos * ended)
        ids += sampled
        kinds += [TokenKind.PROMPT] * len(sampled)
        messages = [*messages, message, *after]
        more = renderer.continuation(messages, tools, len(messages) - len(after) - 1, eos * ended)
        ids += more.ids
        kinds += more.kinds
    whole = renderer.prompt(messages, tools, stored)
    assert tokenizer.decode(whole.ids) == tokenizer.decode(ids)
    assert whole.ids == ids and whole.kinds == kinds
    for at, start in places.items():
        assert ids[start : start + len(stored[at].ids)] == stored[at].ids
    text = tokenizer.decode(ids)
    assert all(text.count(f"MARK{number}!") == 1 for number in range(len(talk)))
    assert not any("MARK" in encoded for encoded in spy.texts)


@settings(max_examples=200, deadline=None)
@given(histories(), st.sets(st.integers(0, 3)))
def test_a_history_that_is_sampled_in_part(history, foreign):
    name, tools, messages, talk = history
    tokenizer, renderer = make(name)
    stored, bodies = {}, [m for m in messages if m.role != "system"]
    for number, (_, made, _, after) in enumerate(talk):
        if number in foreign:
            messages = [*messages, ChatMessage("assistant", f"MARK{number}!", tuple(made)), *after]
        else:
            stored[len(messages)] = SampledTokens(tokenizer.encode(f"MARK{number}!"), "")
            messages = [*messages, ChatMessage("assistant", "", tuple(made)), *after]
        bodies += after
    rendered = renderer.prompt(messages, tools, stored)
    text = tokenizer.decode(rendered.ids)
    assert [text.count(f"MARK{number}!") for number in range(len(talk))] == [1] * len(talk)
    marks = [text.index(f"MARK{number}!") for number in range(len(talk))]
    assert marks == sorted(marks)
    for number in foreign & set(range(len(talk))):
        end = marks[number + 1] if number + 1 < len(talk) else len(text)
        assert all(f'"{call.name}"' in text[:end] or f"={call.name}>" in text[:end] for call in talk[number][1])
    assert len(rendered.kinds) == len(rendered.ids) and set(rendered.kinds) <= {TokenKind.PROMPT, TokenKind.OBSERVATION}


@pytest.mark.parametrize("name", CHATS)
def test_kinds(name):
    tokenizer, renderer = make(name)
    messages = [
        ChatMessage("user", "first"),
        ChatMessage("assistant", "x", (Call("shell", {"command": "c"}, "1"), Call("shell", {"command": "d"}, "2"))),
        ChatMessage("tool", "user", call_id="1"),
        ChatMessage("tool", " assistant ", call_id="2"),
        ChatMessage("user", "tool"),
        ChatMessage("system", "policy"),
        ChatMessage("user", "u"),
    ]
    stored = {1: SampledTokens(tokenizer.encode("user tool"), "")}
    for rendered in (renderer.prompt(messages, [SHELL], stored), renderer.continuation(messages, [SHELL], 1, "")):
        observed, last = [], None
        for token, kind in zip(rendered.ids, rendered.kinds, strict=True):
            if kind == TokenKind.OBSERVATION:
                observed = [*observed, ""] if last != kind else observed
                observed[-1] += tokenizer.decode([token])
            last = kind
        assert [text.strip() for text in observed] == ["user", "assistant", "tool", "u"]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("with_tools", [False, True])
def test_texts_are_those_of_transformers(name, with_tools):
    transformers = pytest.importorskip("transformers")
    if with_tools and name not in NATIVE:
        pytest.skip("the template shows no tools")
    tokenizer, renderer = make(name)
    witness = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, eos_token=TEMPLATES[name][1], bos_token="<|endoftext|>"
    )
    messages = [ChatMessage("user", " do it\n"), ChatMessage("assistant", "I do"), ChatMessage("user", "more")]
    plain = [{"role": m.role, "content": m.text} for m in messages]
    tools = None
    if with_tools:
        messages += [ChatMessage("assistant", "", (Call("add", {"a": 1, "note": "<é>\n"}, "7"),))]
        messages += [ChatMessage("tool", "r1", call_id="7"), ChatMessage("user", "so?")]
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "note": "<é>\n"}}}
        plain += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        plain += [{"role": "tool", "content": "r1", "name": "add"}, {"role": "user", "content": "so?"}]
        parts = ({"name": t.name, "description": t.description, "parameters": t.parameters} for t in (SHELL, ADD))
        tools = [{"type": "function", "function": part} for part in parts]
    expected = witness.apply_chat_template(
        plain, tools=tools, chat_template=TEMPLATES[name][0], tokenize=False, add_generation_prompt=True
    )
    rendered = renderer.prompt(messages, (SHELL, ADD) if with_tools else (), {})
    assert tokenizer.decode(rendered.ids) == expected
    assert rendered.ids == tokenizer.encode(expected)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
TYPED = {"text": "string", "count": "integer", "ratio": "number", "flag": "boolean", "many": "array", "map": "object"}
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": words | st.sampled_from(["</tool_call>", "\n</parameter>\n", '{"a": 1}', "True", '"', "\\"]),
        "count": st.integers(-(10**9), 10**9),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "many": st.lists(values, max_size=3),
        "map": st.dictionaries(words, values, max_size=3),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(CHATS), st.lists(ARGUMENTS, min_size=1, max_size=2), st.sampled_from(["", "I look.", " a\n"]),
    st.sampled_from(["", "hm"]),
)  # fmt: skip
def test_calls_come_back_from_what_the_template_writes(name, arguments, text, reasoning):
    assume(not (name == "qwen3-quiet" and reasoning))  # its policy writes none
    tokenizer, renderer = make(name)
    tool = Tool("f", "", {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPED.items()}})
    made = tuple(Call("f", one) for one in arguments)
    messages = [ChatMessage("user", "q"), ChatMessage("assistant", text, made, reasoning=reasoning)]
    before = tokenizer.decode(renderer.prompt(messages[:1], [tool], {}).ids)
    whole = tokenizer.decode(renderer.prompt(messages, [tool], {}).ids)
    opening = before[before.index("q") + 1 :]  # the end of the question, and what the policy continues
    written = whole.removesuffix(renderer._headers["user"][1])
    written = written.rstrip("\n").removesuffix(TEMPLATES[name][1])
    if written.startswith(before):
        answer = written.removeprefix(before)
    else:  # the policy continues "<think>", which the history does not have
        answer = written.removeprefix(before.removesuffix("<think>\n")).removeprefix("<think>\n")
        answer = answer if "</think>" in answer else "</think>" + answer
    assert opening and len(answer) < len(written)
    parser = renderer.parser([tool])
    deltas = parser.feed(answer) + parser.end()
    assert [(d.name, d.arguments) for d in deltas if isinstance(d, Call)] == [(c.name, c.arguments) for c in made]
    assert "".join(d.text for d in deltas if isinstance(d, Text)).strip() in ("", text.strip())
    assert parser.malformed == 0 and all(d.text == "hm" for d in deltas if isinstance(d, Reasoning))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(TEMPLATES)), st.lists(said, min_size=1, max_size=2),
    st.lists(st.tuples(st.lists(st.integers(6, 400), min_size=1, max_size=6), st.booleans(), said, st.booleans()),
             max_size=3),
)  # fmt: skip
def test_conversations_without_tools_are_those_of_the_environments(name, prompt, talk):
    """Demonstrations are made with `Conversation`: a program that shows the same texts trains on the same tokens."""
    tokenizer, renderer = make(name)
    source, eos = TEMPLATES[name]
    template = Chat(source, tokenizer.special_strings, DATE) if source else Plain()
    built_in = Conversation(tokenizer, template, 10**6)
    roles = ["system", "user"] if len(prompt) == 2 and name != "strict" else ["user"]
    messages = [ChatMessage(role, text) for role, text in zip(roles, prompt, strict=False)]
    built_in.add_prompt([Message(m.role, m.text) for m in messages])
    rendered = renderer.prompt(messages, (), {})
    ids, kinds = list(rendered.ids), list(rendered.kinds)
    for sampled, ended, text, by_tool in talk:
        sampled = [i for i in sampled if i not in tokenizer.eos_ids] or [50]
        sampled += [tokenizer.id_of(eos)] * ended
        action = np.array(sampled)
        finish = "eos" if ended else "stop"
        built_in.add_action(Generation(action, np.zeros(len(action)), np.zeros(len(action)), finish))
        role = "tool" if by_tool and name not in ("hermes", "strict") else "user"
        built_in.add_observation(Observation(((text, TokenKind.OBSERVATION),), role))
        messages += [ChatMessage("assistant", "whatever"), ChatMessage(role, text)]
        more = renderer.continuation(messages, (), len(messages) - 2, eos * ended)
        ids += [*sampled, *more.ids]
        kinds += [*[TokenKind.ACTION] * len(sampled), *more.kinds]
    assert ids == built_in._columns.tokens and kinds == built_in._columns.kinds


def text_of(name, messages, tools=()):
    tokenizer, renderer = make(name)
    return tokenizer.decode(renderer.prompt([ChatMessage(*m) for m in messages], tools, {}).ids)


def test_system_messages_that_the_template_refuses():
    talk = [("system", "A"), ("system", "B"), ("user", "q"), ("assistant", "x"), ("system", "C"), ("user", "r")]
    assert text_of("strict", talk) == (
        "<|im_start|>user\nA\n\nB\n\nq<|im_end|>\n<|im_start|>model\nx<|im_end|>\n"
        "<|im_start|>user\n<system-reminder>\nC\n</system-reminder>\n\nr<|im_end|>\n<|im_start|>model\n"
    )
    assert text_of("thinker", talk) == (
        "<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>user\n<system-reminder>\nC\n</system-reminder>\n\nr<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    reminder = "<|im_start|>user\n<system-reminder>\nC\n</system-reminder><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert text_of("thinker", talk[:5]).endswith("x<|im_end|>\n" + reminder)
    assert "<|im_start|>system\nC<|im_end|>" in text_of("qwen2.5", talk)


def test_a_tool_whose_description_has_the_word_for_a_stored_turn():
    tokenizer, renderer = make("qwen2.5")
    tool = Tool("shell", "PLACEHOLDER-0-END PLACEHOLDER-1-END PLACEHOLDER-2-END", {})
    talk = [ChatMessage("user", "a"), ChatMessage("assistant", "sampled"), ChatMessage("user", "r")]
    stored = SampledTokens((7, 7, 7), "")
    text = tokenizer.decode(renderer.prompt(talk, (tool,), {1: stored}).ids)
    assert text.endswith(
        f"a<|im_end|>\n<|im_start|>assistant\n{tokenizer.decode([7, 7, 7])}<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )


def test_results_for_a_template_without_tools():
    made = (Call("shell", {"command": "ls"}),)
    talk = [("user", "q"), ("assistant", "I look.", made), ("tool", "a"), ("tool", "b"), ("user", "r")]
    text = text_of("strict", talk, (SHELL,))
    assert text.endswith(
        '<|im_start|>model\nI look.\n<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\na\n\nb\n\nr<|im_end|>\n<|im_start|>model\n"
    )
    assert '"name": "shell", "description": "Runs a command."' in text and text.count("<|im_start|>") == 4


def test_the_policys_thoughts_begin_where_it_began_them():
    tokenizer, renderer = make("thinker")
    messages = [ChatMessage("user", "q"), ChatMessage("assistant", "answer"), ChatMessage("user", "r")]
    ids = tokenizer.encode("hm</think>answer<|im_end|>")
    text = tokenizer.decode(renderer.prompt(messages, (), {1: SampledTokens(ids, "<|im_end|>")}).ids)
    assert text == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nhm</think>answer<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_what_a_template_does_not_show_is_refused():
    tokenizer, _ = make("chatml")
    source = (
        "{% for m in messages %}{% if m.content != 'hide' and 'secret' not in m.content %}[{{ m.role }}]{{ m.content }}"
        "{% elif 'secret' in m.content %}[{{ m.role }}]{% endif %}{% endfor %}"
    )
    renderer = Renderer(tokenizer, source, DATE)
    for text in ("hide", "a secret"):
        with pytest.raises(BadRequest, match=f"does not show message 1, which reads '{text}'"):
            renderer.prompt([ChatMessage("user", "q"), ChatMessage("user", text)], (), {})


@pytest.mark.parametrize(
    ("name", "messages", "tools", "match"),
    [
        ("plain", [("user", "q")], (SHELL,), "no chat template"),
        ("plain", [("user", "q"), ("assistant", "", (Call("shell", {}),))], (), "no chat template"),
        ("chatml", [], (), "there is none"),
        ("strict", [("assistant", "x"), ("user", "q")], (), "roles"),
        ("chatml", [("user", "\ud800")], (), "surrogate"),
        ("plain", [("user", "\ud800")], (), "surrogate"),
    ],
)
def test_bad_requests(name, messages, tools, match):
    with pytest.raises(BadRequest, match=match):
        text_of(name, messages, tools)


def test_an_unusable_template():
    with pytest.raises(ConfigError, match="cannot be used"):
        Renderer(make("plain")[0], "nothing", DATE)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *[(name, "Hermes") for name in ("qwen2.5", "qwen3", "hermes", "chatml", "smollm2", "strict")],
        *[("llama3.1", "Llama3"), ("qwen3-coder", "Qwen3Coder"), ("thinker", "Qwen3Coder"), ("plain", "ToolParser")],
    ],
)
def test_the_family_of_a_template(name, family):
    _, renderer = make(name)
    assert type(renderer.parser([SHELL])).__name__ == family
    if name != "plain":
        assert renderer._native == (name in NATIVE)


def test_tools_that_stand_behind_the_policys_messages():
    source = (
        "{% for m in messages %}{% if loop.last and tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}" + CALLS_JSON.replace("m.", "messages[-1].")
    )
    tokenizer, _ = make("chatml")
    renderer = Renderer(tokenizer, source, DATE)
    messages = [ChatMessage("user", "q"), ChatMessage("assistant", "x"), ChatMessage("user", "r")]
    text = tokenizer.decode(renderer.continuation(messages, [SHELL], 1, "").ids)
    assert text.startswith('<|im_end|>\n<tools>[{"type": "function"') and text.endswith("assistant\n")


@pytest.mark.parametrize("name", ["llama3.1", "qwen3-coder"])
def test_tools_may_have_a_template_of_their_own(name):
    """Hermes's models bring two; a conversation with tools is the second one's, from its prompt to its calls."""
    tokenizer, plain = make("chatml")
    _, whole = make(name)
    both = Renderer(tokenizer, TEMPLATES["chatml"][0], DATE, TEMPLATES[name][0])
    asked = [
        ChatMessage("user", "q"),
        ChatMessage("assistant", "x", (Call("add", {"a": 1}),)),
        ChatMessage("user", "r"),
    ]
    for tools, one in (((), plain), ((SHELL, ADD), whole)):
        assert both.prompt(asked, tools, {}).ids == one.prompt(asked, tools, {}).ids
        assert both.continuation(asked, tools, 1, "").ids == one.continuation(asked, tools, 1, "").ids
        assert type(both.parser(tools)) is type(one.parser(tools))
