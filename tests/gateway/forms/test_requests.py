"""What a request of each dialect means, and what is refused: bodies as the vendors document them and programs send."""

import json

import pytest

from jaxagent.config import SamplingConfig
from jaxagent.gateway.chat import BadRequest, Call, ChatMessage, Tool
from jaxagent.gateway.forms import chat, fields, messages, responses


def texts(kind, *words):
    return [{"type": kind, "text": word} for word in words]


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = Tool("bash", "Runs a command.", SCHEMA)
FUNCTION = {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA}
CALLS = Call("bash", {"command": "ls"}, "id1"), Call("bash", {"command": "pwd"}, "id2")
ASKED = (
    ChatMessage("system", "You are an agent."),
    ChatMessage("user", "Create hello.txt"),
    ChatMessage("assistant", "I shall.", CALLS, reasoning="hm"),
    ChatMessage("tool", "a b", call_id="id1", name="bash"),
    ChatMessage("tool", "/x\n/y", call_id="id2", name="bash"),
    ChatMessage("system", "Be quick."),
    ChatMessage("user", "one\ntwo"),
)
FIRST = {"role": "user", "content": "Create hello.txt"}
CACHED = {"cache_control": {"type": "ephemeral"}}
CHAT_CALLS = [
    {"id": "id1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
    {"id": "id2", "index": 1, "function": {"name": "bash", "arguments": '{"command":"pwd"}'}},
]
ANSWER = {"role": "assistant", "content": "I shall.", "reasoning_content": "hm", "refusal": None}
CHAT = {
    "model": "toy",
    "messages": [
        {"role": "developer", "content": "You are an agent."},
        FIRST,
        ANSWER | {"tool_calls": CHAT_CALLS},
        {"role": "tool", "tool_call_id": "id1", "content": "a b"},
        {"role": "tool", "tool_call_id": "id2", "content": texts("text", "/x", "/y")},
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": [{"type": "text", "text": "one"} | CACHED, *texts("text", "two")]},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
RESPONSES = {
    "model": "toy",
    "instructions": "You are an agent.",
    "store": False,
    "input": [
        FIRST,
        THOUGHT | {"content": texts("reasoning_text", "hm")},
        SAID | {"content": [{"type": "output_text", "text": "I shall.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "id1", "name": "bash", "arguments": '{"command":"ls"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "id2", "name": "bash", "arguments": '{"command":"pwd"}'},
        {"type": "function_call_output", "call_id": "id1", "output": "a b"},
        {"type": "function_call_output", "call_id": "id2", "output": texts("input_text", "/x", "/y")},
        {"type": "message", "role": "developer", "content": texts("input_text", "Be quick.")},
        {"type": "message", "role": "user", "content": texts("input_text", "one", "two")},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": []},
        {"type": "local_shell"},
    ],
}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=00a1;"
BLOCKS = [{"type": "tool_use", "id": call.id, "name": "bash", "input": call.arguments} for call in CALLS]
FAILED = {"type": "tool_result", "tool_use_id": "id2", "content": texts("text", "/x", "/y"), "is_error": True}
MESSAGES = {
    "model": "toy",
    "max_tokens": 99,
    "system": [*texts("text", BILLING), {"type": "text", "text": "You are an agent."} | CACHED],
    "messages": [
        FIRST,
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, *texts("text", "I shall."), BLOCKS[0]],
        },
        {"role": "assistant", "content": [BLOCKS[1]]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "id1", "content": "a b"}, FAILED]},
        {"role": "system", "content": texts("text", "Be quick.")},
        {"role": "user", "content": [*texts("text", "one"), {"type": "text", "text": "two"} | CACHED]},
    ],
    "tools": [
        {"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA, "cache_control": {"type": "x"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
}
FORMS = {"chat": (chat, CHAT), "responses": (responses, RESPONSES), "messages": (messages, MESSAGES)}


def parsed(form, data, **more):
    return form.parse(json.dumps({**data, **more}).encode())


@pytest.mark.parametrize("name", FORMS)
def test_one_history_is_one_conversation_in_every_dialect(name):
    ask = parsed(*FORMS[name])
    assert ask.messages == ASKED
    assert ask.tools == (BASH,)
    assert (ask.model, ask.stream, ask.sampling) == ("toy", False, SamplingConfig(1.0, 1.0, 0, 0.0))


def test_what_was_sent_for_nothing_is_listed():
    assert parsed(*FORMS["chat"]).ignored == ()
    assert parsed(*FORMS["responses"]).ignored == ("tools: web_search", "tools: namespace", "tools: local_shell")
    assert parsed(*FORMS["messages"]).ignored == (
        "system: x-anthropic-billing-header",
        "tool_result: is_error",
        "tools: web_search_20250305",
    )
    more = dict(response_format={"type": "json_object"}, parallel_tool_calls=False, presence_penalty=1, x=[])
    assert parsed(chat, CHAT, **more).ignored == ("parallel_tool_calls", "response_format", "presence_penalty", "x")
    more = dict(include=["reasoning.encrypted_content"], prompt_cache_key="k", text={"verbosity": "low"})
    assert parsed(responses, RESPONSES, **more).ignored[3:] == (
        "include: reasoning.encrypted_content", "prompt_cache_key", "text",
    )  # fmt: skip
    more = dict(thinking={"type": "disabled"}, context_management={}, metadata={"user_id": "u", "a": 1})
    ask = parsed(messages, MESSAGES, **more)
    assert ask.user == "u" and ask.ignored[3:] == ("metadata.a", "thinking", "context_management")
    many = {f"field{i}" * 20: 1 for i in range(1000)}
    names = parsed(chat, CHAT, **many).ignored
    assert len(names) == fields.MAX_IGNORED and max(map(len, names)) <= fields.MAX_IGNORED_CHARS


@pytest.mark.parametrize("name", FORMS)
def test_null_is_absent_and_parameters_are_read(name):
    form, data = FORMS[name]
    nulls = ("tools", "tool_choice", "temperature", "top_p", "stream", "metadata", "stream_options", "n", "include")
    ask = parsed(form, data, **dict.fromkeys((*nulls, "stop", "stop_sequences", "max_completion_tokens", "system")))
    assert ask.tools == () and not ask.stream and ask.sampling.temperature == 1
    limit, stop = {
        "chat": ("max_completion_tokens", "stop"),
        "responses": ("max_output_tokens", "stop"),
        "messages": ("max_tokens", "stop_sequences"),
    }[name]
    told = dict(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=3, stream=True, return_token_ids=True)
    ask = parsed(form, data, **told, **{limit: 7, stop: ["END", "E", "END"]})
    assert ask.sampling == SamplingConfig(0.0, 0.5, 0, 0.1)
    assert (ask.seed, ask.max_tokens, ask.stops, ask.stream, ask.return_token_ids) == (3, 7, ("END", "E"), True, True)
    none = {"type": "none"} if name == "messages" else "none"
    assert parsed(form, data, tool_choice=none).tools == ()


def test_arguments_and_freeform_texts_come_back_as_they_were_sampled():
    for arguments in ({}, {"input": "*** Begin Patch\nä"}, {"input": '{"a": 1}'}, {"a": [1.5, None]}, {"input": 3}):
        assert responses.freeform_arguments(responses.freeform_text(Call("apply_patch", arguments))) == arguments
    assert fields.arguments("") == {} and fields.arguments(' {"a":1}') == {"a": 1}
    for text in ("[1]", "{", '{"a":1,"a":2}', '{"a": NaN}', '{"a":"\\ud800"}', "rm -rf"):
        assert fields.arguments(text) == text
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    }
    history = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    ask = responses.parse(json.dumps({"input": history, "tools": [patch]}).encode())
    assert ask.messages[1:] == (
        ChatMessage("assistant", "", (Call("apply_patch", {"input": "*** Begin"}, "c1"),)),
        ChatMessage("tool", "done", call_id="c1", name="apply_patch"),
    )
    assert (
        ask.tools[0].parameters is responses.FREEFORM_SCHEMA and "lark grammar:\nstart: x" in ask.tools[0].description
    )


def user(part):
    return [{"role": "user", "content": [part]}]


REFUSED = [
    (chat, {"messages": user({"type": "image_url", "image_url": {"url": "x"}})}, "messages[0].content[0]", "text only"),
    (chat, {"messages": user({"type": "input_audio"})}, "messages[0].content[0]", "input_audio"),
    (chat, {"messages": user({"type": "text"})}, "messages[0].content[0].text", "missing"),
    (chat, {"messages": []}, "messages", "not be empty"),
    (chat, {"messages": None}, "messages", "missing"),
    (chat, {"messages": "hi"}, "messages", "must be list"),
    (chat, {"messages": ["hi"]}, "messages[0]", "must be an object"),
    (chat, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "one of system"),
    (chat, {"n": 0}, "n", "from 1 to 128"),
    (chat, {"tool_choice": "sometimes"}, "tool_choice", "one of auto"),
    (chat, {"tool_choice": {"type": "function", "function": {"name": "dig"}}}, "tool_choice", "not among"),
    (chat, {"continue_final_message": True}, "continue_final_message", "continue"),
    (chat, {"max_tokens": 1.5}, "max_tokens", "must be int"),
    (chat, {"functions": [{"name": "x"}]}, "functions", "'tools'"),
    (chat, {"modalities": ["text", "audio"]}, "modalities", "text only"),
    (chat, {"temperature": True}, "temperature", "int or float"),
    (chat, {"temperature": -1}, "temperature", "from 0"),
    (chat, {"max_tokens": 0}, "max_tokens", "positive"),
    (chat, {"stop": [""]}, "stop", "1 to 256"),
    (chat, {"seed": 2**64}, "seed", "64 bits"),
    (chat, {"stream": "yes"}, "stream", "bool"),
    (chat, {"tools": CHAT["tools"] * 2}, "tools", "two tools"),
    (chat, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "match"),
    (responses, {"previous_response_id": "resp_1"}, "previous_response_id", "none of the last 16"),
    (responses, {"conversation": "c"}, "conversation", "stores nothing"),
    (responses, {"background": True}, "background", "stores nothing"),
    (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "did not answer"),
    (responses, {"input": [{"type": "computer_call"}]}, "input[0]", "computer_call"),
    (responses, {"input": user({"type": "input_image", "image_url": "x"})}, "input[0].content[0]", "input_image"),
    (responses, {"input": user({"type": "input_file"})}, "input[0].content[0]", "input_file"),
    (responses, {"input": []}, "input", "not be empty"),
    (responses, {"tool_choice": {"name": "x"}}, "tool_choice", "one of auto"),
    (messages, {"messages": user({"type": "image", "source": {}})}, "messages[0].content[0]", "and tool_result"),
    (messages, {"messages": user({"type": "document", "source": {"type": "base64", "data": "x"}})},
     "messages[0].content[0].source", "text and content"),
    (messages, {"messages": user({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]})},
     "messages[0].content[0].content[0]", "image"),
    (messages, {"messages": [*MESSAGES["messages"], {"role": "assistant", "content": "I"}]}, "messages", "continue"),
    (messages, {"tool_choice": {"type": "tool", "name": "dig"}}, "tool_choice", "not among"),
    (messages, {"system": [{"type": "image"}]}, "system[0]", "image"),
]  # fmt: skip


DOCUMENT = {"type": "document", "title": "notes", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}}
FOUND = {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "hit"}]}
NAMED = {"type": "function", "function": {"name": "bash"}}
ODD = {"top_p": 0, "max_tokens": 100.0, "stop": [str(i) for i in range(64)]}
LAST = [*CHAT["messages"], {"role": "assistant", "content": "I"}]
EMPTY = [{"role": "assistant", "content": "x", "reasoning": {}}, {"role": "user", "content": "y"}]
TAKEN = [  # what real clients send, and what of it counts as a wish without effect
    (chat, {"tool_choice": "required"}, ("tool_choice",)),
    (chat, {"tool_choice": NAMED}, ("tool_choice",)),
    (chat, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, ("tool_choice",)),
    (responses, {"tool_choice": "required"}, ("tool_choice",)),
    (responses, {"tool_choice": {"type": "function", "name": "bash"}}, ("tool_choice",)),
    (responses, {"tool_choice": {"type": "web_search"}}, ("tool_choice",)),
    (messages, {"tool_choice": {"type": "any"}}, ("tool_choice",)),
    (messages, {"tool_choice": {"type": "tool", "name": "bash"}}, ("tool_choice",)),
    (messages, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ("tool_choice",)),
    (chat, ODD, ()),
    (responses, {"max_output_tokens": 100.0, **ODD}, ("max_tokens",)),
    (messages, {"stop_sequences": ODD["stop"], **ODD}, ("stop",)),
    (chat, {"messages": EMPTY}, ()),
    (chat, {"messages": LAST}, ("messages: the last one is the assistant's, and another one follows it",)),
    (responses, {"reasoning": {}}, ("reasoning",)),
]


@pytest.mark.parametrize(("form", "change", "ignored"), TAKEN)
def test_what_real_clients_send_is_taken_and_wishes_are_counted(form, change, ignored):
    data = next(data for one, data in FORMS.values() if one is form)
    ask = parsed(form, data, **change)
    assert ask.tools == parsed(form, data).tools and set(ask.ignored) == {*ignored, *parsed(form, data).ignored}
    if "top_p" in change:
        assert 0 < ask.sampling.top_p < 1e-5 and ask.max_tokens == 100 and len(ask.stops) == 64


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (DOCUMENT, "notes\nabc"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}}, "x"),
        (FOUND, "t\ns\nhit"),
        ({"type": "tool_reference", "tool_name": "bash"}, "bash"),
    ],
)
def test_blocks_that_show_text_are_read_in_messages_and_in_results(block, text):
    result = {"type": "tool_result", "tool_use_id": "id1", "content": [block]}
    for content, role in (([block], "user"), ([result], "tool")):
        ask = parsed(messages, MESSAGES, messages=[{"role": "user", "content": content}])
        assert [(m.role, m.text) for m in ask.messages if m.role != "system"] == [(role, text)]
        assert set(ask.ignored) <= set(parsed(messages, MESSAGES).ignored)


@pytest.mark.parametrize(("form", "change", "param", "told"), REFUSED)
def test_mistakes_are_refused_by_name(form, change, param, told):
    data = next(data for one, data in FORMS.values() if one is form)
    with pytest.raises(BadRequest) as caught:
        parsed(form, data, **change)
    assert caught.value.param == param and told in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "an object"),
        (b"3", "an object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' stands twice"),
        (b'{"x": ' + b"[" * 200 + b"]" * 200 + b"}", "levels"),
        (b'{"x": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", "not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
@pytest.mark.parametrize("name", FORMS)
def test_what_is_no_json_is_refused(name, raw, told):
    with pytest.raises(BadRequest, match=told):
        FORMS[name][0].parse(raw)


def test_half_of_an_emoji_is_read_as_unknown():
    """Node programs cut a tool's output by UTF-16 units, and send the half with every later request."""
    body = {"model": "m", "messages": [{"role": "user", "content": "cut \ud83d"}, {"role": "user", "content": "😀"}]}
    assert [m.text for m in chat.parse(json.dumps(body).encode()).messages] == ["cut \ufffd", "😀"]


def test_the_deepest_json_that_is_read():
    at_most = b"[" * fields.MAX_DEPTH + b"1" + b"]" * fields.MAX_DEPTH
    fields.parse_json(at_most)
    with pytest.raises(BadRequest, match="levels"):
        fields.parse_json(b"[" + at_most + b"]")
