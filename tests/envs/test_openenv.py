"""OpenEnv's protocol without its package: servers that misbehave, actions by schema, the manifest, the processes."""

import asyncio
import json
import math
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

from jaxagent.config import ConfigError
from jaxagent.envs.base import Transcript
from jaxagent.envs.openenv import actions, manifest
from jaxagent.envs.openenv.environment import OpenEnv, OpenEnvAttempt, Protocol, reset_of
from jaxagent.envs.openenv.servers import Servers
from jaxagent.envs.server_process import REPLY_BYTES, ServerProcess, ServerProgram
from jaxagent.types import StopReason, Task, TokenKind
from tests.envs.served import opened, web_server

WAY = {"type": "object", "properties": {"way": {"type": "string"}}, "required": ["way"], "additionalProperties": False}
TASK = Task("t", "Go.", (), "", {"seed": 7, "episode_id": "one", "reset": {"level": 2}})


def result(reward=0.0, done=False, **fields):
    return {"type": "observation", "data": {"observation": fields or {"text": "here"}, "reward": reward, "done": done}}


def error(code, message="no", **more):
    return {"type": "error", "data": {"code": code, "message": message, **more}}


class Peer:
    """A server whose answers a function of the message makes: a dict, dicts, text, bytes, None (it closes), a wait."""

    def __init__(self, answer, most=math.inf, heartbeat=None, twice=False):
        self.answer, self.most, self.heartbeat, self.twice = answer, most, heartbeat, twice
        self.messages, self.now, self.peak = [], 0, 0
        self.app = web.Application()
        self.app.router.add_get("/ws", self._session)

    async def _session(self, request):
        socket = web.WebSocketResponse(heartbeat=self.heartbeat)
        await socket.prepare(request)
        if self.now >= self.most:
            await socket.send_json(error("CAPACITY_REACHED", "full", active_sessions=self.now, max_sessions=self.most))
            await socket.close()
            return socket
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT or (said := json.loads(message.data))["type"] == "close":
                    break
                self.messages.append(said)
                answer = self.answer(said)
                answer = await answer if asyncio.iscoroutine(answer) else answer
                if answer is None:
                    break
                if isinstance(answer, bytes):
                    await socket.send_bytes(answer)
                else:
                    for one in answer if isinstance(answer, list) else [answer] * (1 + self.twice):
                        await socket.send_str(one if isinstance(one, str) else json.dumps(one))
        finally:
            self.now -= 1
        return socket


def attempt_on(url, form=WAY, reply_s=5.0, task=TASK, **settings):
    config = OpenEnv(server=url, step_timeout_s=reply_s, **settings)
    servers = Servers(url, ServerProgram(""), 1, 5.0, reply_s)
    return OpenEnvAttempt(task, config, servers, Protocol(actions.form_of(form, "here")))


async def failure_of(answer, task=TASK, **settings):
    """What an attempt raises whose server answers a step by `answer`, and that it closes all the same."""
    peer = Peer(lambda said: result() if said["type"] == "reset" else answer(said))
    async with web_server(peer.app) as url:
        attempt = attempt_on(url, task=task, **settings)
        await attempt.start()
        try:
            await attempt.step("<action>left</action>")
            await attempt.verify(Transcript("", ()))
        except Exception as failure:
            return f"{type(failure).__name__}: {failure}"
        finally:
            await attempt.close()
            async with asyncio.timeout(5):
                while peer.now:
                    await asyncio.sleep(0.01)
    return ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda said: asyncio.sleep(0.6), "TimeoutError: .* did not answer 'step' in 0.3 s"),
        (lambda said: None, "ConnectionError: .* closed the session in place of an answer to 'step'"),
        (lambda said: b"\0\1", "ConnectionError: .* sent bytes in place of an answer"),
        (lambda said: "{", "ValueError: .* answered 'step' with no JSON"),
        (lambda said: "[" * 100_000, "ValueError: .* with no JSON"),
        (lambda said: "[1]", "ValueError: .* answered 'step' with no data"),
        (lambda said: {"type": "observation", "data": 3}, "ValueError: .* with no data"),
        (lambda said: {"type": "state", "data": {}}, "ValueError: .* answered 'step' with 'state', not 'observation'"),
        (lambda said: {"type": "observation", "data": {"reward": 1}}, "ValueError: .* without an observation"),
        (lambda said: result(done="yes"), "ValueError: .* without an observation"),
        (lambda said: result(reward="1"), "ValueError: .* no finite number: '1'"),
        (lambda said: result(reward=math.nan), "ValueError: .* no finite number: nan"),
        (lambda said: result(reward=10**400), "ValueError: .* no finite number: 1000"),
        (lambda said: error("EXECUTION_ERROR", "the lamp is broken"), "ServerError: .* EXECUTION_ERROR: the lamp is b"),
        (
            lambda said: error("VALIDATION_ERROR", errors=[{"loc": ["text"], "msg": "own"}]),
            "ServerError: .* VALIDATION",
        ),
        (lambda said: result(text="x" * (REPLY_BYTES + 1)), "ConnectionError: .* broke the session: .*exceeds limit"),
    ],
    ids=lambda value: value.partition(":")[2][:24] if isinstance(value, str) else "",
)
def test_a_server_that_misbehaves_is_a_failed_attempt_with_its_reason(answer, said):
    failure = asyncio.run(failure_of(answer, reply_s=0.3 if "did not answer" in said else 20.0))
    assert re.match(said, failure, re.DOTALL), failure[:300]


def test_a_reset_carries_what_the_task_says_and_the_state_is_reported():
    def answer(said):
        if said["type"] == "state":
            return {"type": "state", "data": {"step_count": 2, "depth": 1.5}}
        return result(None if said["type"] == "reset" else 0.25, done=said == {"type": "step", "data": {"way": "up"}})

    async def play():
        peer = Peer(answer)
        async with web_server(peer.app) as url:
            attempt = attempt_on(url, report=("step_count", "depth"), instructions="Play.")
            (prompt,) = await attempt.start()
            assert prompt.content == "Play.\n\nWrite your action as <action>...</action>: text\n\nGo.\n\nhere\n"
            step = await attempt.step("I go <action> left </action>")
            assert step.observation.parts == (("\nhere\n", TokenKind.OBSERVATION),)
            warned = (await attempt.step("left")).observation
            assert warned.parts == (("\nWrite <action>...</action>.\n", TokenKind.WARNING),)
            assert (await attempt.step("<action>up</action>")).stop_reason == StopReason.ANSWER
            verdict = await attempt.verify(Transcript("", ()))
            assert verdict.reward == 0.5
            assert verdict.components == {"solved": 0.0, "return": 0.5, "step_count": 2.0, "depth": 1.5}
            await attempt.close()
        reset = {"seed": 7, "episode_id": "one", "level": 2}
        assert peer.messages[:2] == [{"type": "reset", "data": reset}, {"type": "step", "data": {"way": "left"}}]

    asyncio.run(play())


def test_an_action_that_the_server_refuses_is_the_policys_mistake_and_the_last_turn_is_played():
    wrong = error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["way"], "msg": "no such way"}])
    moves = iter([wrong, result(1.0)])

    async def play():
        peer = Peer(lambda said: result() if said["type"] == "reset" else next(moves))
        async with web_server(peer.app) as url:
            attempt = attempt_on(url, max_turns=2, action="message", pay="last")
            await attempt.start()
            step = await attempt.step("anything")
            assert step.observation.parts == (("\nNo action: way: no such way.\n", TokenKind.WARNING),)
            assert (await attempt.step("again")).stop_reason == StopReason.TURN_LIMIT
            assert (await attempt.verify(Transcript("", ()))).reward == 1.0
            assert attempt.counters == {"actions": 1.0, "invalid_actions": 1.0, "failed_calls": 0.0, "unpaid": 0.0}
            await attempt.close()

    asyncio.run(play())


def test_a_server_that_pings_is_answered_while_the_policy_writes():
    """aiohttp's server closes a connection that has not answered its ping after half of the heartbeat."""

    async def play():
        peer = Peer(lambda said: result(), heartbeat=0.2)
        async with web_server(peer.app) as url:
            attempt = attempt_on(url)
            await attempt.start()
            await asyncio.sleep(1.0)
            assert (await attempt.step("<action>left</action>")).observation
            await attempt.close()

    asyncio.run(play())


def test_a_message_that_nobody_asked_for_is_no_answer():
    async def play():
        peer = Peer(lambda said: result(), twice=True)
        async with web_server(peer.app) as url:
            attempt = attempt_on(url)
            await attempt.start()
            await asyncio.sleep(0.1)
            with pytest.raises(ValueError, match="sent a message before 'step' was asked"):
                await attempt.step("<action>left</action>")
            await attempt.close()

    asyncio.run(play())


@pytest.mark.parametrize("late", [False, True])
def test_rewards_of_a_step_that_is_answered_twice_are_no_rewards(late):
    """The second answer comes with the next one, before it: the last step is paid what the one before it was."""
    steps = []

    def answer(said):
        if said["type"] == "state":
            return {"type": "state", "data": {}}
        steps.append(result(len(steps) / 2))
        return steps[-2:] if late and len(steps) == 3 else steps[-1]

    async def play():
        async with web_server(Peer(answer).app) as url:
            attempt = attempt_on(url)
            try:
                await attempt.start()
                for _ in range(2):
                    await attempt.step("<action>left</action>")
                return (await attempt.verify(Transcript("", ()))).reward
            finally:
                await attempt.close()

    if late:
        with pytest.raises(ValueError, match=r"before 'state' was asked|answered 'state' with 'observation'"):
            asyncio.run(play())
    else:
        assert asyncio.run(play()) == 1.5


@pytest.mark.parametrize(("tasks", "heldout", "said"), [(5, 2, ""), (5, 5, "leaves none"), (5, 7, "5 tasks in all")])
def test_a_list_without_held_out_tasks_is_split(tasks, heldout, said):
    answers = {"/list_environments": ["game"], "/game/splits": [{"name": "train"}]}
    answers |= {"/game/tasks": {"tasks": [{}] * tasks}, "/game/num_tasks": {"num_tasks": tasks}}

    async def look():
        app = web.Application()
        for path, answer in answers.items():
            app.router.add_route("*", path, _handler(answer))
        async with web_server(app) as url:
            return await asyncio.to_thread(OpenEnv(server=url).tasks, heldout)

    if said:
        with pytest.raises(ConfigError, match=said):
            asyncio.run(look())
    else:
        assert {name: len(rows) for name, rows in asyncio.run(look()).items()} == {"train": 3, "heldout": 2}


def _handler(answer):
    async def handle(request):
        return web.json_response(answer)

    return handle


def test_attempts_wait_for_a_place_on_a_server_that_takes_two_sessions():
    async def play():
        peer = Peer(lambda said: result(), most=2)
        async with web_server(peer.app) as url:
            servers = Servers(url, ServerProgram(""), 1, 5.0, 5.0)

            async def episode():
                session, place, _ = await servers.begin("reset", {})
                await asyncio.sleep(0.02)
                await servers.end(session, place)

            async with asyncio.timeout(20):
                await asyncio.gather(*(episode() for _ in range(12)))
            assert peer.peak == 2 and peer.now == 0 and servers._places[0].sessions == 0
            peer.most = 0  # somebody else has every place: said after a while, not waited for
            with pytest.raises(Exception, match="CAPACITY_REACHED: full"):
                await servers.begin("reset", {})

    asyncio.run(play())


@pytest.mark.parametrize(
    ("reset", "said"),
    [({"seed": -1}, "whole number"), ({"seed": True}, "whole number"), ({"episode_id": "x" * 256}, "255"),
     ({"reset": 3}, "must be an object")],
)  # fmt: skip
def test_a_task_that_no_reset_takes_is_refused(reset, said):
    with pytest.raises(ConfigError, match=said):
        reset_of(Task("t", "", (), "", reset))
    assert reset_of(Task("t", "", ())) == {}


def form(properties, required=(), **more):
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return actions.form_of({"additionalProperties": False, **schema}, "server 'x'")


METADATA = {"metadata": {"type": "object"}}
MOVE = form(
    {
        **METADATA,
        "kind": {"const": "move", "type": "string"},
        "where": {"$ref": "#/$defs/Place"},
        "how": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None, "description": "how fast"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "picture": {"type": "string", "format": "binary"},
    },
    ["kind", "where"],
    **{"$defs": {"Place": {"enum": ["here", "there"], "type": "string"}}},
)


@pytest.mark.parametrize(
    ("of", "text", "action", "mistake"),
    [
        (form({**METADATA, "text": {"type": "string"}}, ["text"]), 'say "no"', {"text": 'say "no"'}, ""),
        (form({"n": {"type": "integer"}}, ["n"]), "3", {"n": 3}, ""),
        (form({"n": {"type": "integer"}}, ["n"]), "3.5", None, "n must be a whole number"),
        (form({"n": {"type": "integer"}}, ["n"]), "true", None, "n must be a whole number"),
        (form({"n": {"type": "number", "minimum": 0}}, ["n"]), "NaN", None, r"n must be a number \(at least 0\)"),
        (form({"on": {"type": "boolean"}}, ["on"]), "true", {"on": True}, ""),
        (form({"w": {"enum": ["up", "down"], "type": "string"}}), "left", None, "w must be one of up, down"),
        (MOVE, '{"where": "here"}', {"kind": "move", "where": "here"}, ""),
        (MOVE, '{"where": "here", "how": null, "tags": ["a"]}',
         {"kind": "move", "where": "here", "how": None, "tags": ["a"]}, ""),
        (MOVE, '{"where": "home"}', None, "where must be one of here, there"),
        (MOVE, '{"where": "here", "how": "x"}', None, "how must be a number or null"),
        (MOVE, '{"where": "here", "tags": [1]}', None, "tags must be a list of: text"),
        (MOVE, '{"where": "here", "picture": "x"}', None, "'picture' is no field of an action"),
        (MOVE, '{"how": 1}', None, "'where' is missing"),
        (MOVE, "[1]", None, "no object"),
        (form({"n": {"type": ["integer", "null"]}}, ["n"]), '{"n": "x"}', None, "n must be a whole number or null"),
        (form({"n": True, "l": {"type": "array", "items": True}}, ["n"]), '{"n": 1, "l": [2]}', {"n": 1, "l": [2]}, ""),
        (form({"n": {"allOf": [{"type": "integer"}]}}, ["n"]), "3", {"n": 3}, ""),
        (form({"k": {"$ref": "#/$defs/K"}, "n": {"type": "integer"}}, ["k"], **{"$defs": {"K": {"const": "go"}}}), "3",
         {"k": "go", "n": 3}, ""),
        (MOVE, "{" * 50_000, None, "no JSON"),
    ],
)  # fmt: skip
def test_an_action_by_its_schema(of, text, action, mistake):
    read, said = of.read(text)
    assert read == action and re.fullmatch(mistake, said), said


def test_what_no_text_can_be_is_refused_with_its_name():
    with pytest.raises(ConfigError, match="server 'x': the action's field 'audio' is a file or a picture"):
        form({"audio": {"type": "string", "contentEncoding": "base64"}}, ["audio"])
    with pytest.raises(ConfigError, match="no objects with fields"):
        actions.form_of({"type": "string"}, "server 'x'")
    assert '"how": a number or null, optional (how fast)' in MOVE.words() and "picture" not in MOVE.words()


def test_a_schema_that_lies_within_itself_is_described_and_read_to_some_depth():
    tree = {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]}
    of = form({"tree": {"$ref": "#/$defs/Tree"}}, ["tree"], **{"$defs": {"Tree": tree}})
    assert "JSON" in of.words() and of.read('{"tree": [[[[[3]]]]]}')[0] == {"tree": [[[[[3]]]]]}
    within = {"type": "object", "properties": {"more": {"$ref": "#/$defs/Act"}}, "additionalProperties": False}
    schema = {"$ref": "#/$defs/Act", "$defs": {"Act": within}}  # as pydantic has a class that lies within itself
    assert not actions.is_tool_call(schema) and actions.form_of(schema, "x").read('{"more": {}}')[0] == {"more": {}}


def test_observations_as_text():
    text = actions.observation_text
    assert text({"question": "2 + 2?", "score": None, "metadata": {"gold": 4}}) == "2 + 2?"
    assert text({"x": 1, "board": [[0, 1]], "metadata": {}}) == "x: 1\nboard: [[0, 1]]"
    assert text({"x": 1, "hint": "no"}, ("hint",)) == "no"
    assert text({"metadata": {"status": "ready"}}) == "ready"
    call = {
        "tool_name": "f",
        "result": {"content": [{"type": "text", "text": "a"}, {"type": "image"}], "is_error": True},
    }
    assert actions.result_text(call) == ("a\n[image]", True)
    assert actions.result_text({"tool_name": "f", "error": {"error_type": "timeout", "message": "late"}}) == (
        "error: late", True,
    )  # fmt: skip
    assert actions.result_text({"tool_name": "f", "result": {"n": 1}}) == ('{"n": 1}', False)


def manifest_of(folder, text):
    (folder / manifest.FILE).write_text(textwrap.dedent(text))
    return manifest.read(folder)


def test_the_manifest_says_how_a_run_goes(tmp_path):
    told = manifest_of(
        tmp_path,
        """
        spec_version: 1
        app: server.app:app
        port: 8000
        variables: {LEVEL: 3}
        validation:
          reward: {range: [0.0, 2.0], oracle_tolerance: 0.5, floor_margin: 0.1}
          resources: {cpu: 1, memory_mb: 64, disk_mb: 1, episode_timeout_s: 30.0}
          capabilities: {verifier: {kind: reward_channel}, declared_tools: [a, b]}
        """,
    )
    assert (told.target, told.folder, told.variables) == ("server.app:app", tmp_path, {"LEVEL": "3"})
    assert (told.solved_reward, told.time_limit_s, told.tools) == (1.5, 30.0, {"a", "b"})
    assert "port" in told.unused and "validation.resources.cpu" in told.unused
    package = tmp_path / "my_env"
    package.mkdir()
    (package / "__init__.py").touch()
    told = manifest_of(package, "app: server.app:app")
    assert (told.target, told.folder) == ("my_env.server.app:app", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("app: a:b\nvalidation: {network: {mode: no-network}}", "validation.network.mode: 'no-network'"),
        ("app: a:b\nvalidation: {resources: {gpus: 1}}", "validation.resources.gpus"),
        ("app: a:b\nvalidation: {resources: {gpu: 1}}", "the key 'validation.resources.gpu' is unknown. Did you mean"),
        ("app: a:b\nvalidation: {reward: {range: 3}}", "must be finite numbers"),
        ("app: a:b\nruntime: flask", "runtime: 'flask' is not known"),
        ("app: a:b\nspec_version: 2", "spec_version: 2 is not known"),
        ("app: a", "app: must be 'package.module:app'"),
        ("app: a:b\nvalidation: [1]", "validation must be a mapping"),
        ("app: a:b\nvariables: x", "variables must be a mapping"),
        ("app: [", "cannot be read"),
        ("3", "it must be a mapping"),
    ],
)
def test_a_manifest_that_cannot_be_kept_is_refused_with_the_key(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        manifest_of(tmp_path, text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "server is empty"), ({"server": "nowhere"}, "is no folder with openenv.yaml, module:app or URL"),
     ({"server": "a:b", "variables": ("x",)}, "'x' is no variable")],
)  # fmt: skip
def test_settings_that_cannot_work(settings, said):
    with pytest.raises(ConfigError, match=said):
        OpenEnv(**settings)


def test_a_server_without_sessions_is_a_failed_attempt_with_its_reason():
    async def play(status):
        async def refused(request):
            return web.Response(status=status)

        app = web.Application()
        app.router.add_get("/ws", refused)
        async with web_server(app) as url:
            with pytest.raises(ConnectionError, match=f"/ws is not reached: {status}"):
                await attempt_on(url).start()

    for status in (404, 500):
        asyncio.run(play(status))


def test_a_server_that_is_not_there_is_said_at_start():
    with (
        pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/schema is not reached"),
        opened(OpenEnv(server="http://127.0.0.1:9")),
    ):
        pass


BARE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pids", os.getpid(), child.pid)
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{os.getpid()} {child.pid}".encode()})
"""


def test_a_process_serves_on_its_port_and_is_killed_with_its_children(tmp_path):
    pytest.importorskip("uvicorn")
    (tmp_path / "bare_app.py").write_text(BARE)
    (tmp_path / "broken_app.py").write_text("raise SystemExit('no such lamp')")
    (tmp_path / "hanging_app.py").write_text("import time; print('I hang', flush=True); time.sleep(600)")

    async def play():
        process = ServerProcess(ServerProgram("bare_app:app", sys.executable, str(tmp_path), {"A": "b"}))
        await process.start("/", 60)
        assert process.alive
        import aiohttp

        async with aiohttp.ClientSession() as client, client.get(process.url) as answer:
            pids = [int(pid) for pid in (await answer.text()).split()]
        await process.close()
        assert not process.alive
        for _ in range(100):
            if not any(Path(f"/proc/{pid}").exists() for pid in pids):
                break
            await asyncio.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        for target, seconds, failure, words in (
            ("broken_app:app", 60, ConnectionError, "'broken_app:app' has ended; it wrote: no such lamp"),
            ("hanging_app:app", 2.0, TimeoutError, "was not ready in 2 s; it wrote: I hang"),
        ):
            process = ServerProcess(ServerProgram(target, sys.executable, str(tmp_path)))
            with pytest.raises(failure, match=words):
                await process.start("/", seconds)
            await process.close()
            assert not process.alive

    assert os.path.isdir("/proc")
    asyncio.run(play())
