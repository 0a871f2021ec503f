"""The vendors' own clients read every answer of the forms strictly: whole and streamed, with calls and reasoning."""

import json

import pytest

from jaxagent.gateway.chat import Call, Reasoning, Text
from tests.gateway.forms.played import Played, answer, run

openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")

CALL = Call("bash", {"command": "echo 'ä€😀' > hello.txt", "n": 1.5}, "k1")
OTHER = Call("bash", {}, "k2")
PLAYS = {
    "text": ([Text("Hel"), Text("lo ä€😀\n")], {}),
    "empty": ([], {}),
    "blank": ([Text("\n"), Text(" ")], {}),
    "call": ([CALL], {}),
    "text and calls": ([Text("I look"), Text(".\n"), CALL, Text("\n"), OTHER, Text("\n")], {}),
    "text between calls": ([CALL, Text("\n"), Text("then"), OTHER, Text(" end")], {}),
    "reasoning": ([Reasoning("I th"), Reasoning("ink"), Text("\n\n"), Text("Done")], {}),
    "reasoning and call": ([Reasoning("hm"), CALL], {}),
    "length": ([Text("cut o")], {"finish": "length"}),
    "stop": ([Text("until ")], {"finish": "stop_sequence", "stop_string": "END"}),
    "not counted": ([Text("x")], {"cached": None}),
}
STREAMS = ["whole", "streamed", "stored"]  # stored: a stream of an answer that was there before
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}


STRICT = {"max_retries": 0, "timeout": 20, "_strict_response_validation": True}
ASKED = {"model": "toy", "extra_body": {"return_token_ids": True}}
HI = [{"role": "user", "content": "hi"}]


def openai_client(url, key):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **STRICT)


def anthropic_client(url, key):
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, **STRICT)


async def chat(gateway, streamed):
    tools = [{"type": "function", "function": {"name": "bash", "parameters": TOOL}}]
    asked = ASKED | dict(messages=HI, tools=tools, logprobs=True)
    async with openai_client(*gateway) as client:
        if streamed:
            asked["stream_options"] = {"include_usage": True}
            async with client.chat.completions.stream(**asked) as events:
                chunks = [e.chunk async for e in events if e.type == "chunk"]
                try:
                    got = await events.get_final_completion()
                except openai.LengthFinishReasonError as cut:  # what its parser makes of "length"
                    got = cut.completion
            assert all(chunk.choices for chunk in chunks[:-1])  # clients read choices[0] of all but the usage
            extra = next(c for c in chunks if c.choices and c.choices[0].finish_reason)
        else:
            got = extra = await client.chat.completions.create(**asked)
    (choice,), used = got.choices, got.usage
    logprobs = choice.logprobs.content or []
    texts = (bytes(t.bytes).decode() if t.bytes is not None else "t\ufffd" for t in logprobs)
    assert all(text == ("t\ufffd" if i == 1 else f"t{i}") for i, text in enumerate(texts))
    return {
        "text": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [(c.id, c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or []],
        "finish": choice.finish_reason,
        "used": (used.prompt_tokens, used.completion_tokens, used.prompt_tokens_details.cached_tokens),
        "ids": (extra.prompt_token_ids, extra.choices[0].token_ids),
        "logprobs": [t.logprob for t in logprobs],
    }


async def responses(gateway, streamed):
    tools = [{"type": "function", "name": "bash", "parameters": TOOL, "strict": False}]
    asked = ASKED | dict(input="hi", tools=tools, include=["message.output_text.logprobs"])
    async with openai_client(*gateway) as client:
        if streamed:
            async with client.responses.stream(**asked) as events:
                seen = [e async for e in events]
            got = seen[-1].response
            assert [e.sequence_number for e in seen] == list(range(len(seen)))
            assert seen[-1].type == f"response.{got.status}"
            for kind in ("added", "done"):
                ids = [e.item.id for e in seen if e.type == f"response.output_item.{kind}"]
                assert ids == [i.id for i in got.output] and len(set(ids)) == len(ids)
            text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
            assert text.strip() == got.output_text.strip()
            arguments = [e.arguments for e in seen if e.type == "response.function_call_arguments.done"]
            assert arguments == [i.arguments for i in got.output if i.type == "function_call"]
            plain = [e async for e in await client.responses.create(**asked, stream=True)]
            ended = [e.item for e in plain if e.type == "response.output_item.done"]
            assert ended == plain[-1].response.output
        else:
            got = await client.responses.create(**asked)
    texts = [part for i in got.output if i.type == "message" for part in i.content]
    assert all(p.text.strip() for p in texts) and "".join(p.text for p in texts) == got.output_text
    assert (got.incomplete_details is not None) == (got.status == "incomplete")
    calls = [i for i in got.output if i.type == "function_call"]
    told = {
        "text": got.output_text,
        "reasoning": "".join(part.text for i in got.output if i.type == "reasoning" for part in i.content),
        "calls": [(i.call_id, i.name, json.loads(i.arguments)) for i in calls],
        "finish": got.status,
        "used": (got.usage.input_tokens, got.usage.output_tokens, got.usage.input_tokens_details.cached_tokens),
        "ids": (got.prompt_token_ids, got.token_ids),
    }
    return told | ({"logprobs": [t.logprob for t in texts[0].logprobs]} if texts and not (calls and streamed) else {})


async def messages(gateway, streamed):
    asked = ASKED | dict(max_tokens=99, messages=HI, tools=[{"name": "bash", "input_schema": TOOL}])
    async with anthropic_client(*gateway) as client:
        if streamed:
            async with client.messages.stream(**asked) as events:
                seen = [e async for e in events]
                got = await events.get_final_message()
            opened = [(e.type, e.index) for e in seen if e.type in ("content_block_start", "content_block_stop")]
            assert opened == [(f"content_block_{w}", i) for i in range(len(got.content)) for w in ("start", "stop")]
            kinds = [e.type.removeprefix("message_") for e in seen if e.type.startswith("message")]
            assert kinds == ["start", "delta", "stop"]
        else:
            got = await client.messages.create(**asked)
        assert (await client.messages.count_tokens(model="toy", messages=HI)).input_tokens == 1
    texts = [b.text for b in got.content if b.type == "text"]
    assert all(t.strip() for t in texts) and all(b.signature == "" for b in got.content if b.type == "thinking")
    used = got.usage
    told = {
        "text": "".join(texts),
        "reasoning": "".join(b.thinking for b in got.content if b.type == "thinking"),
        "calls": [(b.id, b.name, b.input) for b in got.content if b.type == "tool_use"],
        "finish": (got.stop_reason, got.stop_sequence),
        "used": (used.input_tokens + used.cache_read_input_tokens, used.output_tokens, used.cache_read_input_tokens),
    }
    return told if streamed else told | {"ids": (got.prompt_token_ids, got.token_ids)}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", PLAYS)
@pytest.mark.parametrize("dialect", [chat, responses, messages])
def test_an_answer_is_what_the_vendors_own_client_reads(dialect, name, stream):
    deltas, more = PLAYS[name]
    session, want = Played(lambda ask: PLAYS[name], stored=stream == "stored"), answer(*deltas, **more)
    told = run(session, lambda *gateway: dialect(gateway, stream != "whole"))
    anthropics = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    finish, cached = {
        chat: ({"stop_sequence": "stop"}.get(want.finish, want.finish), want.cached_tokens),
        responses: ("incomplete" if want.finish == "length" else "completed", want.cached_tokens or 0),
        messages: ((anthropics.get(want.finish, want.finish), want.stop_string), want.cached_tokens or 0),
    }[dialect]
    prefix = "toolu_" if dialect is messages else "call_"
    text = told.pop("text")  # in blocks, no outer blanks
    assert text == want.text if dialect is chat else text.strip() == want.text.strip()
    expected = {
        "reasoning": want.reasoning,
        "calls": [(prefix + c.id, c.name, c.arguments) for c in want.calls],
        "finish": finish,
        "used": (5, len(want.tokens), cached),
        "ids": ([1, 2, 3, 4, 5], want.tokens.tolist()),
        "logprobs": want.logprobs.tolist(),
    }
    assert told == {key: expected[key] for key in told}
    ask = session.asks[0]
    assert ask.return_token_ids and ask.logprobs == (dialect is not messages)
    assert set(ask.ignored) <= ({"tools[].strict"} if dialect is responses else set())


def test_errors_and_models_as_the_clients_read_them():
    async def scene(*gateway):
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        async with openai_client(*gateway) as client, anthropic_client(*gateway) as other:
            with pytest.raises(openai.BadRequestError, match="image_url") as caught:
                await client.chat.completions.create(model="toy", messages=[{"role": "user", "content": [image]}])
            assert caught.value.param == "messages[0].content[0]"
            with pytest.raises(openai.BadRequestError, match="send the whole history"):
                await client.responses.create(model="toy", input="x", previous_response_id="resp_1")
            with pytest.raises(anthropic.BadRequestError, match="image") as told:
                block = {"type": "image", "source": {"type": "url", "url": "http://x"}}
                await other.messages.create(model="toy", max_tokens=9, messages=[{"role": "user", "content": [block]}])
            assert told.value.body["error"]["type"] == "invalid_request_error"
            assert [m.id async for m in client.models.list()] == ["toy"] == [m.id async for m in other.models.list()]
            created = (await client.models.retrieve("toy")).created
            assert (await other.models.retrieve("toy")).created_at.timestamp() == created

    run(Played(lambda ask: PLAYS["text"]), scene)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_call_of_a_freeform_tool_is_its_text(stream):
    patch = "*** Begin Patch\n+ä"

    play = [Text("so"), Call("apply_patch", {"input": patch}, "k1")], {}

    async def scene(*gateway):
        async with openai_client(*gateway) as client:
            asked = dict(model="toy", input="hi", tools=[{"type": "custom", "name": "apply_patch"}])
            if stream == "whole":
                got = await client.responses.create(**asked)
            else:
                seen = [e async for e in await client.responses.create(**asked, stream=True)]
                assert [e.input for e in seen if e.type == "response.custom_tool_call_input.done"] == [patch]
                got = seen[-1].response
            call = got.output[1]
            assert (call.type, call.call_id, call.name, call.input) == (
                "custom_tool_call",
                "call_k1",
                "apply_patch",
                patch,
            )

    run(Played(lambda ask: play, stored=stream == "stored"), scene)


def test_a_stream_that_breaks_off_says_why():
    async def scene(*gateway):
        async with openai_client(*gateway) as client, anthropic_client(*gateway) as other:
            with pytest.raises(openai.APIError, match="it broke"):
                async for _ in await client.chat.completions.create(model="toy", messages=HI, stream=True):
                    pass
            seen = [e async for e in await client.responses.create(model="toy", input="hi", stream=True)]
            assert seen[-1].type == "response.failed" and seen[-1].response.error.message == "it broke"
            assert seen[-1].response.error.code == "server_error"
            with pytest.raises(anthropic.APIStatusError, match="it broke"):
                async for _ in await other.messages.create(model="toy", max_tokens=9, messages=HI, stream=True):
                    pass

    run(Played(lambda ask: ([Text("Hel")], {}), failing=True), scene)
