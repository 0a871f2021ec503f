"""Whatever a client sends is a checked request or its mistake, in one line; never another exception."""

import copy
import json
import random

import pytest

from jaxagent.gateway.chat import Ask, BadRequest, Call
from jaxagent.gateway.forms import chat, messages, responses
from tests.gateway.forms.played import IDENT, answer
from tests.gateway.forms.test_requests import CHAT, MESSAGES, RESPONSES

FORMS = {"chat": (chat, CHAT), "responses": (responses, RESPONSES), "messages": (messages, MESSAGES)}
VALUES = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, "", " ", "x", "none", "auto",
    "function", "custom", "tool", "\ud83d", "\x00", "ä😀", "a" * 300, [], [[]], [None], [1], ["x"], {},
    [{}], {"type": "text"}, {"type": "image_url"}, {"role": "user", "content": "x"}, {"": None}, {"type": ["x"]},
    {"type": {"x": 1}},
]  # fmt: skip
MORE = {  # fields with a meaning that the bodies do not have
    "temperature": 1, "top_p": 1, "top_k": 1, "min_p": 0, "seed": 1, "stop": "x", "stop_sequences": ["x"], "n": 1,
    "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "tool_choice": "auto", "user": "u",
    "max_output_tokens": 3, "max_completion_tokens": 3, "metadata": {"user_id": "x"}, "include": ["x"], "system": "x",
    "instructions": "x", "parallel_tool_calls": False, "previous_response_id": None, "return_token_ids": True,
}  # fmt: skip


def places(value, found):
    """All lists and objects in a value."""
    if isinstance(value, dict | list):
        found.append(value)
        for child in value.values() if isinstance(value, dict) else value:
            places(child, found)
    return found


def mutate(rng, body):
    body = copy.deepcopy(body)
    for name in rng.sample(sorted(MORE), rng.randrange(3)):
        body[name] = copy.deepcopy(MORE[name])
    for _ in range(rng.randint(1, 3)):
        spots = [spot for spot in places(body, []) if spot]
        spot = rng.choice(spots)
        key = rng.choice(list(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
        match rng.randrange(5):
            case 0:
                del spot[key]
            case 1:
                spot[key] = copy.deepcopy(rng.choice(spots))
            case 2 if isinstance(spot, list):
                spot.insert(key, copy.deepcopy(rng.choice(VALUES)))
            case 3 if isinstance(spot, dict):
                spot[rng.choice(["type", "role", "content", "name", "id", "x\ud800", "input"])] = copy.deepcopy(
                    rng.choice(VALUES)
                )
            case _:
                spot[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(body).encode()


def mangle(rng, raw):
    raw = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        match rng.randrange(3):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                del raw[at : at + rng.randrange(20)]
            case _:
                raw[at:at] = rng.choice([b'"', b"{", b"]", b",", b"\\ud800", b"null", b"1e999", b"NaN", b"\xc3"])
    return bytes(raw)


@pytest.mark.parametrize("name", FORMS)
def test_a_mutated_body_is_a_request_or_a_mistake(name):
    form, body = FORMS[name]
    rng, read, refused = random.Random(name), 0, set()
    whole = answer(Call("bash", {"x": 1}, "k"))
    for i in range(4000):
        raw = mutate(rng, body) if i % 4 else mangle(rng, json.dumps(body).encode())
        try:
            ask = form.parse(raw)
        except BadRequest as mistake:
            refused.add(str(mistake)[:20])
            assert "\n" not in str(mistake) and len(str(mistake)) < 400 and mistake.status == 400
            json.dumps(form.error(str(mistake), mistake.status, mistake.param, mistake.code))
            continue
        read += 1
        assert isinstance(ask, Ask) and ask.messages and len(ask.ignored) <= 64
        for message in ask.messages:
            assert message.role in ("system", "user", "assistant", "tool")
            for text in (message.text, message.reasoning, message.call_id, message.name):
                text.encode()
            assert all(type(c.name) is str and isinstance(c.arguments, dict | str) for c in message.calls)
        assert ask.max_tokens is None or ask.max_tokens > 0
        json.dumps(form.body(ask, whole, ident=IDENT), allow_nan=False)
        events = form.writer(ask, IDENT)
        assert all((events.begin(5, None), events.end(whole)))
    assert read > 300 and len(refused) > 30
