"""A role behind HTTP against a real server on loopback that plays good, wrong and hostile endpoints."""

import asyncio
import contextlib
import dataclasses
import json

import pytest
from aiohttp import web

from configs import tau_bench, tool_orchestra
from jaxagent.config import ConfigError, parse
from jaxagent.envs.base import Message
from jaxagent.envs.cast import NoRoom
from jaxagent.rewards import chat_client
from jaxagent.rewards.chat_client import CallError, ChatClient, Endpoint
from jaxagent.roles.http import GREETING, Http
from jaxagent.rollout.workers import Workers
from jaxagent.types import Task

TASK = Task("task-1", "", ())
ASKED = (Message("system", "You are a customer."), Message("user", "What is your order number?"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("jaxagent.io.http.FIRST_PAUSE_S", 0.01)


@pytest.fixture
def workers():
    with Workers(4) as workers:
        yield workers


def completion(text, finish="stop", **more) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}], **more}


class Server:
    """An endpoint that answers request number n (0 is the run's question at start) with `play(n, body)`."""

    def __init__(self, play):
        self.play, self.bodies, self.headers = play, [], []
        self.now = self.most = 0

    async def answer(self, request):
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            got = self.play(len(self.bodies) - 1, self.bodies[-1])
            got = await got if asyncio.iscoroutine(got) else got
        finally:
            self.now -= 1
        return got if isinstance(got, web.StreamResponse) else web.json_response(got)

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self.answer)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        finally:
            await runner.cleanup()


@contextlib.contextmanager
def served(workers, play):
    """The server and its address."""
    server = Server(play)
    stack = contextlib.AsyncExitStack()
    url = workers.run(stack.enter_async_context(server.serving()), 10)
    try:
        yield server, url
    finally:
        workers.run(stack.aclose(), 10)


def role(url, **changes) -> Http:
    return dataclasses.replace(Http(url=url, model="m", timeout_s=10.0, reply_tokens=64), **changes)


@contextlib.contextmanager
def talking(workers, play, **changes):
    """(server, the function that begins a conversation) with a role whose question at start was answered."""
    first = lambda n, body: completion("Yes.") if n == 0 else play(n, body)  # noqa: E731
    with (
        served(workers, first) as (server, url),
        role(url, **changes).open("user", workers.run, lambda line: None) as speaker_at,
    ):
        yield server, speaker_at


def say(workers, speaker, messages=ASKED, max_tokens=9):
    return workers.run(speaker.reply(messages, (), max_tokens), 20)


def test_a_conversation(workers, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    counts = {"usage": {"prompt_tokens": 21, "completion_tokens": 4, "total_tokens": 25}}
    lines = []
    with (
        served(workers, lambda n, body: completion(f"reply {n}", **counts)) as (server, url),
        role(url, token_file=str(tmp_path / "token")).open("user", workers.run, lines.append) as speaker_at,
    ):
        speaker = speaker_at(TASK, 0, 1)
        reply = say(workers, speaker)
        assert (reply.text, reply.finish, reply.prompt_tokens, reply.reply_tokens) == ("reply 1", "eos", 21, 4)
        say(workers, speaker, (*ASKED, Message("assistant", "reply 1"), Message("user", "And?")))
    start, first, second = server.bodies
    assert lines == [f"role user: m at {url}"]
    assert start["messages"] == [{"role": "user", "content": GREETING[0].content}] and start["max_tokens"] == 64
    assert first["messages"] == [{"role": m.role, "content": m.content} for m in ASKED]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.7, 9)
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)


def test_seeds_know_seed_task_sample_conversation_and_turn_and_nothing_else(workers):
    later = (*ASKED, Message("assistant", "a"), Message("user", "b"))
    with talking(workers, lambda n, body: completion("x")) as (server, at):
        for task, sample, number, messages in (
            (TASK, 0, 1, ASKED),
            (TASK, 0, 1, (ASKED[0], Message("user", "other text"))),
            (Task("task-2", "", ()), 0, 1, ASKED),
            (TASK, 1, 1, ASKED),
            (TASK, 0, 2, ASKED),
            (TASK, 0, 1, later),
        ):
            say(workers, at(task, sample, number), messages)
        seeds = [body["seed"] for body in server.bodies[1:]]
    with talking(workers, lambda n, body: completion("x"), seed=1) as (server, at):
        say(workers, at(TASK, 0, 1))
        seeds.append(server.bodies[1]["seed"])
    assert seeds[0] == seeds[1] and len({*seeds}) == 6
    assert all(0 <= seed < 1 << 31 for seed in seeds)


def test_a_reply_that_is_cut_off_is_a_roles_reply_and_no_judges(workers):
    with talking(workers, lambda n, body: completion("half a sent", "length")) as (_, at):
        reply = say(workers, at(TASK, 0, 1))
        assert (reply.text, reply.finish, reply.prompt_tokens) == ("half a sent", "length", None)
    with talking(workers, lambda n, body: completion("", "length")) as (_, at):
        assert say(workers, at(TASK, 0, 1)).finish == "length"

    async def judge(url):
        async with ChatClient(Endpoint(url, "m", "", 5.0, 0)) as chat:
            await chat.complete([], temperature=0.0, max_tokens=1, seed=0)

    with (
        served(workers, lambda n, body: completion("half", "length")) as (_, url),
        pytest.raises(CallError, match="cut off by max_tokens"),
    ):
        workers.run(judge(url), 10)


@pytest.mark.parametrize("counts", [{}, {"usage": None}, {"usage": [1]}, {"usage": {"prompt_tokens": "7"}},
                                    {"usage": {"prompt_tokens": -1, "completion_tokens": True}}])  # fmt: skip
def test_counts_that_are_none_are_none(workers, counts):
    with talking(workers, lambda n, body: completion("x", **counts)) as (_, at):
        reply = say(workers, at(TASK, 0, 1))
    assert reply.prompt_tokens is None and reply.reply_tokens is None


def test_a_server_that_fails_now_and_then_is_asked_again(workers):
    def play(n, body):
        return web.Response(status=503) if n in (1, 2) else completion("after all")

    with talking(workers, play) as (server, at):
        assert say(workers, at(TASK, 0, 1)).text == "after all"
    assert len(server.bodies) == 4 and len({json.dumps(body) for body in server.bodies[1:]}) == 1


def test_a_limit_of_calls_is_waited_for_and_one_that_lasts_advises_to_ask_less(workers):
    def limited(n, body):
        return web.Response(status=429, headers={"Retry-After": "0.3"}) if n == 1 else completion("after all")

    with talking(workers, limited, retries=1) as (_, at):
        assert say(workers, at(TASK, 0, 1)).text == "after all"
    lasting = lambda n, body: web.Response(status=429, headers={"Retry-After": "86400"}, text="slow down")  # noqa: E731
    with talking(workers, lasting) as (server, at), pytest.raises(CallError, match=r"slow down\. .*roles\.user\.calls"):
        say(workers, at(TASK, 0, 1))
    assert len(server.bodies) == 2
    message = refused(workers, lasting)
    assert "answered 429: slow down. The endpoint limits how often it is asked: lower config.roles.user" in message
    assert message.count("config.roles.user.calls") == 1 and "config.roles.user.model" not in message


def test_no_more_calls_at_once_than_allowed_and_all_are_answered(workers):
    async def slow(n, body):
        await asyncio.sleep(0.02)
        return completion(str(n))

    async def all_at_once(at):
        return await asyncio.gather(*(at(TASK, i, 1).reply(ASKED, (), 9) for i in range(12)))

    with talking(workers, slow, calls=3) as (server, at):
        replies = workers.run(all_at_once(at), 20)
    assert len({reply.text for reply in replies}) == 12 and server.most == 3


async def never(n, body):
    await asyncio.sleep(60)


HOSTILE = {
    "500s": (lambda n, body: web.Response(status=500, text="out of memory"), "answered 500: out of memory"),
    "400": (lambda n, body: web.Response(status=400, text="too long"), "answered 400: too long"),
    "no json": (lambda n, body: web.Response(text="<html>"), "not a chat completion"),
    "no choices": (lambda n, body: {"choices": []}, "not a chat completion"),
    "two choices": (lambda n, body: {"choices": completion("x")["choices"] * 2}, "not a chat completion"),
    "a list": (lambda n, body: [], "not a chat completion"),
    "no content": (lambda n, body: completion(None), "no text"),
    "empty": (lambda n, body: completion(""), "without text"),
    "spaces": (lambda n, body: completion(" \n"), "without text"),
    "endless": (lambda n, body: web.Response(text="x" * (chat_client.MAX_REPLY_BYTES + 1)), "more than"),
    "deep": (lambda n, body: web.Response(text="[" * 100_000), "not a chat completion"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_reply_is_an_error_and_no_text(workers, name):
    play, told = HOSTILE[name]
    with talking(workers, play, retries=1) as (_, at), pytest.raises(CallError, match=told):
        say(workers, at(TASK, 0, 1))


@pytest.mark.parametrize(
    ("status", "said", "room"),
    [
        (400, '{"error": {"code": "context_length_exceeded", "message": "..."}}', False),
        (400, "This model's maximum context length is 8192 tokens. However, you requested 9000.", False),
        (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048575).", False),
        (413, "Prompt is too long", False),
        (400, "no such model", True),
        (500, "maximum context length", True),
    ],
)
def test_a_conversation_that_a_server_finds_too_long_is_no_failed_call(workers, status, said, room):
    play = lambda n, body: web.Response(status=status, text=said)  # noqa: E731
    with talking(workers, play, retries=0) as (_, at), pytest.raises(CallError if room else NoRoom):
        say(workers, at(TASK, 0, 1))


def test_no_reply_in_time(workers):
    with (
        talking(workers, never, timeout_s=0.2, retries=0) as (_, at),
        pytest.raises(TimeoutError, match="did not answer"),
    ):
        say(workers, at(TASK, 0, 1))


# ---------------------------------------------------------------- at start


def refused(workers, play, **changes) -> str:
    with (
        served(workers, play) as (_, url),
        pytest.raises(ConfigError) as error,
        role(url, **changes).open("user", workers.run, lambda line: None),
    ):
        raise AssertionError("it opened")
    return str(error.value)


@pytest.mark.parametrize(
    ("play", "told"),
    [
        (lambda n, body: web.Response(status=401, text="no key"), ("answered 401", "config.roles.user.token_file")),
        (lambda n, body: web.Response(status=404, text="no model m"), ("no model m", "config.roles.user.model")),
        (lambda n, body: web.Response(status=500), ("answered 500", "config.roles.user.model")),
        (lambda n, body: web.Response(text="hello"), ("not a chat completion", "config.roles.user.url")),
        (lambda n, body: completion(None), ("no text", "config.roles.user")),
        (lambda n, body: completion(""), ("without text", "config.roles.user")),
        (lambda n, body: completion("", "length"), ("config.roles.user.reply_tokens=64", "Raise them")),
    ],
)
def test_an_endpoint_that_does_not_answer_is_refused_at_start(workers, play, told):
    message = refused(workers, play, retries=0)
    assert message.startswith("config.roles.user") and all(part in message for part in told) and "\n" not in message


GEMINI = 'Invalid JSON payload received. Unknown name "seed": Cannot find field.'
GPT_LIMIT = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
GPT_TEMPERATURE = "Unsupported value: 'temperature' does not support 0.7 with this model. Only 1 is."


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, {"seed", "temperature", "max_tokens"}),
        ({"send_seed": False}, {"temperature", "max_tokens"}),
        ({"limit_field": "max_completion_tokens", "send_temperature": False}, {"seed", "max_completion_tokens"}),
    ],
)
def test_only_the_fields_that_an_endpoint_takes_are_sent(workers, changes, sent):
    with talking(workers, lambda n, body: completion("x"), **changes) as (server, at):
        say(workers, at(TASK, 0, 1))
    assert [set(body) - {"model", "messages"} for body in server.bodies] == [sent] * 2
    assert server.bodies[1][("max_tokens", "max_completion_tokens")["max_tokens" not in sent]] == 9


@pytest.mark.parametrize(
    ("said", "changes", "told"),
    [
        (GEMINI, {}, "set config.roles.user.send_seed=False."),
        (GPT_LIMIT, {}, "set config.roles.user.limit_field=max_completion_tokens, or, if only its value is refused"),
        (GPT_TEMPERATURE, {}, "set config.roles.user.send_temperature=False, or"),
        ("max_completion_tokens: extra inputs are not permitted", {"limit_field": "max_completion_tokens"},
         "set config.roles.user.limit_field=max_tokens, or"),
        ("no model seed-oss", {}, "why it refuses config.roles.user.model"),
        (GEMINI, {"send_seed": False}, "why it refuses config.roles.user.model"),
    ],
)  # fmt: skip
def test_a_field_that_is_refused_is_named_with_the_flag_that_changes_it(workers, said, changes, told):
    message = refused(workers, lambda n, body: web.json_response({"error": {"message": said}}, status=400), **changes)
    assert "answered 400" in message and told in message and "\n" not in message


@pytest.mark.parametrize(("file", "preset"), [(tau_bench, "qwen3-4b"), (tool_orchestra, "qwen3-8b")])
def test_presets_send_their_endpoints_what_these_take(file, preset):
    roles = parse(file.get_config(preset)).roles
    for found in roles.values():
        gemini, reasons = "gemini" in found.model, found.model.startswith("gpt-5")
        assert found.send_seed != gemini and found.send_temperature != reasons
        assert found.limit_field == ("max_completion_tokens" if reasons else "max_tokens")
    assert any("gemini" in found.model or found.model.startswith("gpt-5") for found in roles.values())


def test_an_endpoint_that_never_answers_is_refused_at_start(workers):
    assert "config.roles.user.timeout_s" in refused(workers, never, timeout_s=0.2, retries=0)


def test_nobody_there(workers):
    with served(workers, never) as (_, url):
        pass
    with pytest.raises(ConfigError, match=r"config\.roles\.user: .* is not reached: .* Start a server there"):
        role(url, retries=1).open("user", workers.run, lambda line: None).__enter__()


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff\xfe"])
def test_a_token_file_that_holds_no_token(workers, tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.roles\.user\.token_file='.*token'"):
        role("http://127.0.0.1:9/v1", token_file=str(path)).open("user", workers.run, print).__enter__()


@pytest.mark.parametrize(
    ("changes", "told"), [({"url": "127.0.0.1:8000"}, "write http://127"), ({"model": ""}, "model is empty")]
)
def test_what_can_be_seen_in_the_config(changes, told):
    with pytest.raises(ValueError, match=told):
        role(**{"url": "http://127.0.0.1:9/v1"} | changes)
