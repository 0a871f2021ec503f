"""NeMo-Gym's protocol without its package: rows, what the response is made of, and servers that misbehave."""

import asyncio
import contextlib
import json
import re

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.data import rows as data_rows
from jaxagent.data.fields import RowError
from jaxagent.envs.base import Transcript
from jaxagent.envs.nemo_gym import environment as nemo_gym
from jaxagent.envs.nemo_gym import rows
from jaxagent.envs.nemo_gym.environment import NemoGym, NemoGymAttempt, ResourceServer
from jaxagent.envs.server_process import REPLY_BYTES
from jaxagent.io.http import HttpError
from jaxagent.types import StopReason
from tests.envs.served import opened, web_server

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
ROW = {
    "id": 3,
    "responses_create_params": {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Add."},
            {"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]},
        ],
        "tools": [ADD],
        "temperature": 1.0,
        "max_tool_calls": None,
    },
    "expected": 5,
}  # fmt: skip


def row(**params):
    return {**ROW, "responses_create_params": {**ROW["responses_create_params"], **params}}


def call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Peer:
    """A resources server whose answers are replaced by those of `wrong`: path -> a handler."""

    def __init__(self, **wrong):
        self.bodies, self.cookies, self.now = {}, [], 0
        self.app = web.Application(client_max_size=1 << 26)
        for path in ("seed_session", "add", "verify"):
            self.app.router.add_post(f"/{path}", self._handler(path, wrong.get(path)))

    def _handler(self, path, wrong):
        async def handle(request):
            self.bodies[path] = await request.json()
            self.cookies.append(request.cookies.get("session"))
            if wrong is not None:
                answer = wrong(request)
                return await answer if asyncio.iscoroutine(answer) else answer
            if path == "verify":
                return web.json_response({**self.bodies[path], "reward": 0.5, "exact": True, "note": "x"})
            answer = web.json_response({"sum": 5} if path == "add" else {})
            answer.set_cookie("session", "s1")
            return answer

        return handle


async def played(peer, *actions, cut="", of=ROW, ended=StopReason.ANSWER, **settings):
    """(steps, verdict or what was raised, the attempt) of an attempt at a row."""
    async with web_server(peer.app) as url:
        config = NemoGym(server=url, **settings)
        attempt = NemoGymAttempt(data_rows.to_task(of, False), config, ResourceServer(config, print))
        steps = []
        try:
            prompt = await attempt.start()
            steps = [await attempt.step(action) for action in actions]
            turns = tuple((action, "") for action in (*actions, *([cut] if cut else [])))
            return steps, await attempt.verify(Transcript("", turns, (), ended)), prompt, attempt
        except Exception as failure:
            return steps, f"{type(failure).__name__}: {failure}", (), attempt
        finally:
            await attempt.close()


def test_an_episode_is_told_as_a_response_with_the_row_around_it():
    peer = Peer()
    texts = ("<think>5?</think>I add." + call("add", '{"a": 2}') + call("verify", "{}"), "It is 5.")
    steps, verdict, prompt, attempt = asyncio.run(played(peer, *texts))
    assert [message.role for message in prompt] == ["system", "system", "user"] and prompt[2].content == "2 + 3?"
    assert prompt[0].content.startswith("Be brief.\n\nYou can call these functions") and "Adds." in prompt[0].content
    assert steps[0].observation.role == "tool"
    assert steps[0].observation.text == '\n{"sum": 5}\n\n{"detail":"Not Found"}\n'  # its own routes are no tools
    assert steps[1].stop_reason is StopReason.ANSWER
    assert verdict.reward == 0.5 and verdict.components == {"exact": 1.0, "solved": 0.0}
    assert peer.bodies["seed_session"] == ROW and peer.bodies["add"] == {"a": 2}
    assert peer.cookies == [None, "s1", "s1"]
    body = peer.bodies["verify"]
    assert {name: body[name] for name in ROW} == ROW
    items = body["response"]["output"]
    calls = ["function_call"] * 2 + ["function_call_output"] * 2
    assert [item["type"] for item in items] == ["reasoning", "message", *calls, "message"]
    assert items[1]["content"][0]["text"] == "I add." and json.loads(items[2]["arguments"]) == {"a": 2}
    assert items[4]["call_id"] == items[2]["call_id"] and items[4]["output"] == '{"sum": 5}'
    assert body["response"]["incomplete_details"] is None and body["response"]["tools"] == [ADD]
    assert attempt.counters == {"calls": 2.0, "failed_calls": 1.0, "invalid_actions": 0.0}


def test_a_message_that_was_cut_is_the_last_of_an_incomplete_response():
    for cut, text in (("It is <think>", "It is <think>"), ("", "")):
        peer = Peer()
        asyncio.run(played(peer, call("add", "{}"), cut=cut, ended=StopReason.TOKEN_LIMIT))
        response = peer.bodies["verify"]["response"]
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["content"][0]["text"] == text


def test_a_call_that_is_none_ends_as_the_answer_and_the_last_turns_call_is_made():
    peer = Peer()
    steps, *_, attempt = asyncio.run(played(peer, '<tool_call>{"name": </tool_call>'))
    assert steps[0].stop_reason is StopReason.ANSWER and attempt.counters["invalid_actions"] == 1.0
    peer = Peer()
    steps, *_ = asyncio.run(played(peer, call("add", "{}"), max_turns=1))
    assert steps[0].stop_reason is StopReason.TURN_LIMIT and peer.bodies["add"] == {}
    assert peer.bodies["verify"]["response"]["output"][-1]["type"] == "function_call_output"


MASKED = {"reward": 0.0, "mask_sample": True, "failure_reason": "the judge is ill"}


async def _sleep(request):
    await asyncio.sleep(0.6)
    return web.json_response({})


def _gone(request):
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seed_session": lambda r: web.Response(status=500, text="no\n room")},
         "RuntimeError: .*/seed_session answered 500: no room"),
        ({"seed_session": _sleep}, "TimeoutError: .*/seed_session did not answer in 0.3 s"),
        ({"add": _sleep}, "TimeoutError: .*/add did not answer in 0.3 s"),
        ({"add": _gone}, "HttpUnreachable: .*/add is not reached: Server disconnected"),
        ({"add": lambda r: web.Response(body=b"x" * (REPLY_BYTES + 1))}, "HttpError: .*/add sent more than"),
        ({"verify": lambda r: web.Response(text="<html>")}, "ValueError: .*/verify sent no JSON: '<html>'"),
        ({"verify": lambda r: web.json_response([1])}, "ValueError: .* gave no finite reward"),
        ({"verify": lambda r: web.json_response({"reward": None})}, "ValueError: .* gave no finite reward"),
        ({"verify": lambda r: web.Response(text='{"reward": NaN}')}, "ValueError: .* gave no finite reward"),
        ({"verify": lambda r: web.Response(text='{"reward": 1' + "0" * 400 + "}")}, "ValueError: .* gave no finite"),
        ({"verify": lambda r: web.json_response({"reward": 1, "reward_components": [1]})},
         "ValueError: .* no mapping as reward_components"),
        ({"verify": lambda r: web.json_response(MASKED)},
         "RuntimeError: .* measures nothing: the judge is ill"),
        ({"verify": lambda r: web.Response(status=302, headers={"Location": "/x"})}, "RuntimeError: .*answered 302"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_server_that_misbehaves_is_a_failed_attempt_with_its_reason(wrong, said):
    settings = dict(call_timeout_s=0.3 if "did not answer" in said else 20.0)
    _, failure, *_ = asyncio.run(played(Peer(**wrong), call("add", "{}"), "5", **settings))
    assert isinstance(failure, str) and re.match(said, failure), failure


def test_a_tools_own_error_is_shown_to_the_policy():
    steps, verdict, _, attempt = asyncio.run(
        played(Peer(add=lambda r: web.Response(status=500, text="broken")), call("add", "{}"), "5")
    )
    assert steps[0].observation.text == "\nbroken\n" and attempt.counters["failed_calls"] == 1.0
    assert verdict.reward == 0.5


def test_rows_are_read_by_their_columns():
    task = data_rows.to_task(ROW, False)
    assert (task.id, task.prompt, task.metadata) == ("3", "2 + 3?", {"nemo_gym": ROW})
    assert data_rows.to_task(row(input="Hi."), False).prompt == "Hi."
    history = [
        {"role": "user", "content": "Hi."},
        {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    messages = rows.messages_of(row(input=history))
    assert [role for role, _ in messages] == ["system", "user", "assistant", "tool"] and '"a": 1' in messages[2][1]
    assert rows.tools_of(row(tool_choice="none")) == ([], True)
    assert rows.tools_of(row(parallel_tool_calls=False))[1] is False


@pytest.mark.parametrize(
    ("params", "column"),
    [
        ({"background": True}, "background"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "function", "parameters": {}}]}, r"tools\[0\].name"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"temperatur": 1}, "temperatur.*Did you mean 'temperature'"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, r"input\[0\].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\]"),
    ],
)
def test_a_row_that_is_not_played_here_is_refused_by_its_column(params, column):
    with pytest.raises(RowError, match=f"responses_create_params.{column}"):
        data_rows.to_task(row(**params), False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "role"]), inner),
    max_leaves=4,
)
KINDS = st.sampled_from(["message", "function_call", "function_call_output", "function", "input_text"])
PART = st.fixed_dictionaries(
    {}, optional={"type": KINDS | JSON, "role": st.just("user") | JSON, "name": JSON, "arguments": JSON | st.just("{"),
                  "output": JSON, "content": JSON | st.lists(JSON, max_size=2), "parameters": JSON},
)  # fmt: skip
PARAMETERS = st.dictionaries(
    st.sampled_from([*rows.USED, *rows.UNUSED, *rows.REFUSED]), JSON | st.lists(PART, max_size=2), max_size=4
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a machine that has other things to do
@given(PARAMETERS | JSON, st.none() | JSON)
def test_no_row_fails_in_any_other_way(params, name):
    with contextlib.suppress(RowError):
        task = rows.to_task({"responses_create_params": params, "id": name})
        assert rows.messages_of(task.metadata["nemo_gym"])


def test_settings_and_servers_that_cannot_work():
    for wrong, said in (
        ({"server": "nowhere"}, "neither 'package.module:Class' nor a URL"),
        ({"server": "a:B", "arguments": "[1]"}, "must be a JSON object"),
        ({"server": "a:B", "variables": ("=3",)}, "is no variable"),
    ):
        with pytest.raises(ConfigError, match=said):
            NemoGym(**wrong)
    with pytest.raises(ConfigError, match="is not reached"), opened(NemoGym(server="http://127.0.0.1:9")):
        pass


async def _opened_on(paths, tasks):
    """What `open` says of a server with these routes."""
    app = web.Application()

    async def described(request):
        return web.json_response({"paths": {path: {} for path in paths}})

    app.router.add_get("/openapi.json", described)
    async with web_server(app) as url:

        def enter():
            with opened(NemoGym(server=url), tasks):
                return ""

        try:
            return await asyncio.to_thread(enter)
        except ConfigError as error:
            return str(error)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["/seed_session", "/verify", "/add"], ""),
        (["/seed_session", "/verify", "/{tool}"], ""),
        (["/seed_session", "/verify"], "no route /add for the tool of task '3'"),
        (["/verify"], "is no resources server: it has no /seed_session"),
        (["/seed_session", "/verify", "/step", "/reset"], "plays by /reset and /step, not by tools"),
    ],
)
def test_a_servers_routes_are_looked_at_first(paths, said):
    told = asyncio.run(_opened_on(paths, [data_rows.to_task(ROW, False)]))
    assert said in told and bool(said) == bool(told)


MORTAL = """
import json, os
def application():
    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        paths = {"/openapi.json": {"paths": {"/seed_session": {}, "/verify": {}, "/add": {}}}, "/verify": {"reward": 1}}
        if scope["path"] == "/add":
            os._exit(3)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(paths.get(scope["path"], {})).encode()})
    return app
"""


def test_a_process_that_dies_costs_its_attempts_and_is_started_again(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    (tmp_path / "app.py").write_text(MORTAL)
    monkeypatch.setattr(nemo_gym, "APP", tmp_path / "app.py")
    notes = []
    with opened(NemoGym(server="mortal:Server"), notes=notes) as (attempt_at, run):
        first, second, third = (attempt_at(data_rows.to_task(ROW, False)) for _ in range(3))
        run(first.start())
        with pytest.raises(HttpError):
            run(first.step(call("add", "{}")))
        run(asyncio.sleep(0.3))
        run(asyncio.wait_for(_both(second.start(), third.start()), 60))
        assert run(second.verify(Transcript("", ()))).reward == run(third.verify(Transcript("", ()))).reward == 1
        for attempt in (first, second, third):
            run(attempt.close())
    assert [note for note in notes if "again" in note] == ["mortal:Server has ended, and is started again"]


async def _both(*starts):
    await asyncio.gather(*starts)
