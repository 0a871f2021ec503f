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


def whole(name):
    deltas, more = PLAYS[name]
    return answer(*deltas, **more)


STRICT = {"max_retries": 0, "timeout": 20, "_strict_response_validation": True}


def openai_client(url, key):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **STRICT)


def anthropic_client(url, key):
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, **STRICT)


def played(name, stream=None):
    return Played(lambda ask: PLAYS[name], stored=stream == "stored")


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", PLAYS)
def test_chat(name, stream):
    session, want = played(name, stream), whole(name)

    async def scene(*gateway):
        async with openai_client(*gateway) as client:
            asked = dict(
                model="toy",
                messages=[{"role": "user", "content": "hi"}],
                tools=[{"type": "function", "function": {"name": "bash", "parameters": TOOL}}],
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            if stream != "whole":
                asked["stream_options"] = {"include_usage": True}
                async with client.chat.completions.stream(**asked) as events:
                    chunks = [e.chunk async for e in events if e.type == "chunk"]
                    try:
                        got = await events.get_final_completion()
                    except openai.LengthFinishReasonError as cut:  # what its parser makes of "length"
                        got = cut.completion
                assert all(chunk.choices for chunk in chunks[:-1])  # clients read choices[0] of all but the usage
                extra = next(c for c in chunks if c.choices and c.choices[0].finish_reason)
                prompt_ids, ids = extra.prompt_token_ids, extra.choices[0].token_ids
            else:
                got = await client.chat.completions.create(**asked)
                prompt_ids, ids = got.prompt_token_ids, got.choices[0].token_ids
            choice = got.choices[0]
            assert (choice.message.content or "") == want.text
            assert (getattr(choice.message, "reasoning_content", None) or "") == want.reasoning
            calls = choice.message.tool_calls or []
            assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
                (f"call_{c.id}", c.name, c.arguments) for c in want.calls
            ]
            assert choice.finish_reason == {"stop_sequence": "stop"}.get(want.finish, want.finish)
            assert [t.logprob for t in choice.logprobs.content or []] == want.logprobs.tolist()
            assert [t.bytes for t in choice.logprobs.content or []] == [
                None if i == 1 else list(t.encode()) for i, t in enumerate(want.token_texts)
            ]
            assert (prompt_ids, ids) == ([1, 2, 3, 4, 5], want.tokens.tolist())
            assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (5, len(want.tokens))
            assert got.usage.prompt_tokens_details.cached_tokens == want.cached_tokens
        assert session.asks[0].logprobs and session.asks[0].return_token_ids and not session.asks[0].ignored

    run(session, scene)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", PLAYS)
def test_responses(name, stream):
    session, want = played(name, stream), whole(name)

    async def scene(*gateway):
        async with openai_client(*gateway) as client:
            asked = dict(
                model="toy",
                input="hi",
                tools=[{"type": "function", "name": "bash", "parameters": TOOL, "strict": False}],
                include=["message.output_text.logprobs"],
                extra_body={"return_token_ids": True},
            )
            if stream != "whole":
                async with client.responses.stream(**asked) as events:
                    seen = [e async for e in events]
                done = [e.item for e in seen if e.type == "response.output_item.done"]
                numbers = [e.sequence_number for e in seen]
                assert numbers == list(range(len(numbers)))
                assert seen[-1].type == f"response.{'incomplete' if want.finish == 'length' else 'completed'}"
                got = seen[-1].response
                plain = [e async for e in await client.responses.create(**asked, stream=True)]
                ended = [e.item for e in plain if e.type == "response.output_item.done"]
                assert ended == plain[-1].response.output and [i.type for i in done] == [i.type for i in ended]
                assert [i.id for i in done] == [i.id for i in got.output]
                added = [e.item.id for e in seen if e.type == "response.output_item.added"]
                assert added == [i.id for i in got.output] and len(set(added)) == len(added)
                text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
                assert text.strip() == want.text.strip()
                assert [e.arguments for e in seen if e.type == "response.function_call_arguments.done"] == [
                    json.dumps(c.arguments, ensure_ascii=False) for c in want.calls
                ]
            else:
                got = await client.responses.create(**asked)
            texts = [part for i in got.output if i.type == "message" for part in i.content]
            assert "".join(p.text for p in texts).strip() == want.text.strip() == got.output_text.strip()
            assert all(p.text.strip() for p in texts)
            reasonings = [part.text for i in got.output if i.type == "reasoning" for part in i.content]
            assert "".join(reasonings) == want.reasoning
            assert [(i.call_id, i.name, json.loads(i.arguments)) for i in got.output if i.type == "function_call"] == [
                (f"call_{c.id}", c.name, c.arguments) for c in want.calls
            ]
            assert got.status == ("incomplete" if want.finish == "length" else "completed")
            assert (got.incomplete_details is not None) == (want.finish == "length")
            if texts and (not want.calls or stream == "whole"):
                assert [t.logprob for t in texts[0].logprobs] == want.logprobs.tolist()
            assert (got.usage.input_tokens, got.usage.output_tokens) == (5, len(want.tokens))
            assert got.usage.input_tokens_details.cached_tokens == (want.cached_tokens or 0)
            assert (got.prompt_token_ids, got.token_ids) == ([1, 2, 3, 4, 5], want.tokens.tolist())

    run(session, scene)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", PLAYS)
def test_messages(name, stream):
    session, want = played(name, stream), whole(name)

    async def scene(*gateway):
        async with anthropic_client(*gateway) as client:
            asked = dict(
                model="toy",
                max_tokens=99,
                messages=[{"role": "user", "content": "hi"}],
                tools=[{"name": "bash", "input_schema": TOOL}],
                extra_body={"return_token_ids": True},
            )
            if stream != "whole":
                async with client.messages.stream(**asked) as events:
                    seen = [e async for e in events]
                    got = await events.get_final_message()
                opened = [(e.type, e.index) for e in seen if e.type in ("content_block_start", "content_block_stop")]
                assert opened == [(f"content_block_{w}", i) for i in range(len(got.content)) for w in ("start", "stop")]
                kinds = [e.type.removeprefix("message_") for e in seen if e.type.startswith("message")]
                assert kinds == ["start", "delta", "stop"]
            else:
                got = await client.messages.create(**asked)
                assert (got.prompt_token_ids, got.token_ids) == ([1, 2, 3, 4, 5], want.tokens.tolist())
            texts = [b.text for b in got.content if b.type == "text"]
            assert "".join(texts).strip() == want.text.strip() and all(t.strip() for t in texts)
            assert "".join(b.thinking for b in got.content if b.type == "thinking") == want.reasoning
            assert all(b.signature == "" for b in got.content if b.type == "thinking")
            assert [(b.id, b.name, b.input) for b in got.content if b.type == "tool_use"] == [
                (f"toolu_{c.id}", c.name, c.arguments) for c in want.calls
            ]
            finish = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
            assert got.stop_reason == finish.get(want.finish, want.finish) and got.stop_sequence == want.stop_string
            cached = want.cached_tokens or 0
            assert (got.usage.input_tokens, got.usage.output_tokens) == (5 - cached, len(want.tokens))
            assert got.usage.cache_read_input_tokens == cached
            counted = await client.messages.count_tokens(model="toy", messages=[{"role": "user", "content": "hi"}])
            assert counted.input_tokens == 1

    run(session, scene)


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

    run(played("text"), scene)


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
        said = [{"role": "user", "content": "hi"}]
        async with openai_client(*gateway) as client, anthropic_client(*gateway) as other:
            with pytest.raises(openai.APIError, match="it broke"):
                async for _ in await client.chat.completions.create(model="toy", messages=said, stream=True):
                    pass
            seen = [e async for e in await client.responses.create(model="toy", input="hi", stream=True)]
            assert seen[-1].type == "response.failed" and seen[-1].response.error.message == "it broke"
            assert seen[-1].response.error.code == "server_error"
            with pytest.raises(anthropic.APIStatusError, match="it broke"):
                async for _ in await other.messages.create(model="toy", max_tokens=9, messages=said, stream=True):
                    pass

    run(Played(lambda ask: ([Text("Hel")], {}), failing=True), scene)
