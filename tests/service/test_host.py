"""A node: places and phases, deadlines, plays that raise, hang or will not stop, results that are refused, draining."""

import asyncio
import dataclasses
import math
import time

import pytest

from jaxagent.config import ConfigError
from jaxagent.config.errors import WaitedInVainError
from jaxagent.fleet.wire import RefusedCallError
from jaxagent.io.http import HttpStatus
from jaxagent.service import host, node
from jaxagent.service.client import ServiceClient
from jaxagent.service.play import Places, of_rollout
from jaxagent.service.remote_rollout import ServiceConfig
from jaxagent.service.states import State
from jaxagent.service.store import open_database
from tests.service.cluster import ended, episode, playing, same, serving, until
from tests.service.test_rollout_service import group


async def played(work, phases):
    """A play without an agent."""
    await phases.enter(State.RUNNING)
    await phases.enter(State.EVALUATING)
    return episode(work.task, work.number)


async def test_every_session_is_played_and_each_phase_within_its_places(tmp_path):
    inside, most = dict.fromkeys(State, 0), dict.fromkeys(State, 0)

    async def play(work, phases):
        for state in (State.INITIALIZING, State.RUNNING, State.POST_RUN, State.EVALUATING):
            await phases.enter(state)
            inside[state] += 1
            most[state] = max(most[state], inside[state])
            await asyncio.sleep(0.01 * (1 + work.sample % 3))
            inside[state] -= 1
        return episode(work.task, work.number)

    async with serving(tmp_path / "s") as service, playing(service.url, play, places=(3, 2, 1)) as (node, _):
        await service.client.submit(group("a", 8, first_sample=100))
        await service.client.submit(group("b", 4))
        for name, n, first in [("a", 8, 100), ("b", 4, 0)]:
            found = await ended(service.client, name)
            assert [r["state"] for r in found["results"]] == ["COMPLETED"] * n
            got = await service.client.episode(name, 1, found["results"][1]["digest"])
            assert same(got, episode(dataclasses.replace(got.task), first + 1))
        assert node.ended == 12

        async def all_free():
            (told,) = await service.client.nodes()
            return (told["places"], told["free"]) == ({"init": 3, "run": 2, "postrun": 1},) * 2

        await until(all_free)
    assert (most[State.INITIALIZING], most[State.RUNNING], most[State.EVALUATING]) == (3, 2, 1)


async def test_how_a_play_fails_is_how_its_session_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CLEAN_UP_S", 0.2)
    cleaned = []

    async def play(work, phases):
        how = work.task_id
        await phases.enter(State.RUNNING)
        if how == "raises":
            raise ValueError("no image")
        if how == "hangs":
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(how)
        if how == "stubborn":
            end = time.monotonic() + 2
            while time.monotonic() < end:
                try:
                    await asyncio.sleep(0.5)
                except asyncio.CancelledError:
                    cleaned.append(how)
        if how == "unsendable":
            return dataclasses.replace(episode(work.task, work.number), metrics={"x": math.nan})
        if how == "unmeasured":
            return dataclasses.replace(episode(work.task, work.number), metrics={"x": None})
        if how == "other":
            return episode(work.task, work.number + 1)
        if how == "malformed":
            return dataclasses.replace(episode(work.task, work.number), turns="three")
        return episode(work.task, work.number)

    async with serving(tmp_path / "s") as service, playing(service.url, play, places=(9, 9, 9)):
        ways = {
            "good": ("COMPLETED", ""),
            "raises": ("ERROR", "env_error: ValueError: no image"),
            "hangs": ("TIMEOUT", "timeout: the session's 0.3 s were over in RUNNING"),
            "stubborn": ("TIMEOUT", "and it did not clean up in 0.2 s"),
            "unsendable": ("ERROR", "the episode cannot be sent"),
            "malformed": ("ERROR", "the server refused the episode"),
            "unmeasured": ("ERROR", "column 'metrics.x' must be a finite number, got None"),
        }
        for how in ways:
            await service.client.submit(group(how, timeout_seconds=0.3 if how in ("hangs", "stubborn") else 60))
        for how, (state, reason) in ways.items():
            (found,) = (await ended(service.client, how))["results"]
            assert (found["state"], reason in found["reason"]) == (state, True), found
    assert "hangs" in cleaned and "stubborn" in cleaned


async def test_the_agents_time_counts_running_alone_and_keeps_the_session(tmp_path):
    async def slow(task, sample):
        if task.metadata.get("raises"):
            raise TimeoutError  # its own, which is no limit of the task's
        await asyncio.sleep(20 if sample == 0 else 0)
        return episode(task, sample)

    async with serving(tmp_path / "s") as service, playing(service.url, of_rollout(slow), places=(2, 1, 1)):
        # One place to run: the second waits for longer than the agent's time, and still has all of it.
        await service.client.submit(group(n=2, metadata={"agent_timeout": 0.5}))
        await service.client.submit(group("own", metadata={"raises": True}))
        first, second = (await ended(service.client, "t"))["results"]
        assert (first["state"], first["stop_reason"], first["reward"]) == ("COMPLETED", "time_limit", 0.0)
        assert (second["state"], second["stop_reason"]) == ("COMPLETED", "answer")
        assert (first["usable"], second["usable"]) == (False, True)  # this rollout left no tokens
        assert (await ended(service.client, "own"))["results"][0]["state"] == "TIMEOUT"


async def test_a_session_that_is_not_wanted_is_cancelled_at_its_node(tmp_path):
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def play(work, phases):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(tmp_path / "s") as service, playing(service.url, play) as (node, _):
        await service.client.submit(group())
        await begun.wait()
        await service.client.cancel("t")
        async with asyncio.timeout(30):
            await cancelled.wait()
        await until(lambda: asyncio.sleep(0, not node._playing))


async def test_a_drained_node_ends_what_it_has_and_gives_back_what_it_cannot(tmp_path):
    gate = asyncio.Event()

    async def play(work, phases):
        await (gate.wait() if work.task_id == "short" else asyncio.Event().wait())
        return await played(work, phases)

    async with serving(tmp_path / "s") as service:
        client = service.client
        async with playing(service.url, play, "first", drain_s=0.5) as (node, running):
            await client.submit(group("short"))
            await client.submit(group("long"))
            await until(lambda: asyncio.sleep(0, len(node._playing) == 2))
            await client.drain("first")
            await client.submit(group("later"))
            await until(lambda: asyncio.sleep(0, node._draining.is_set()))
            gate.set()
            await running
            assert node.ended == 1
        assert await client.nodes() == []
        (left,) = (await client.task("long"))["results"]
        assert (left["state"], left["losses"]) == ("REGISTERED", 0)  # handed back, not lost
        async with playing(service.url, played, "second"):
            for name in ("short", "long", "later"):
                assert (await ended(client, name))["usable_sessions"] == 1


async def test_a_node_that_another_process_replaces_ends(tmp_path):
    async with (
        serving(tmp_path / "s", heartbeat_s=0.1) as service,
        playing(service.url, played, "same") as (_, old),
    ):
        await until(lambda: service.client.nodes())
        async with playing(service.url, played, "same"):
            with pytest.raises(RefusedCallError, match="another process"):
                await asyncio.wait_for(old, 20)
            await service.client.submit(group())
            assert (await ended(service.client, "t"))["usable_sessions"] == 1


async def test_a_node_that_the_server_forgot_registers_again(tmp_path):
    async with serving(tmp_path / "s", heartbeat_s=0.1) as service, playing(service.url, played):
        await until(lambda: service.client.nodes())
        await service.store.do(lambda db, now: db.execute("DELETE FROM nodes").rowcount)
        await service.client.submit(group())
        assert (await ended(service.client, "t"))["usable_sessions"] == 1


async def test_a_node_whose_token_worked_asks_again_and_delivers_what_it_played(tmp_path, caplog):
    gate = asyncio.Event()

    async def play(work, phases):
        await phases.enter(State.RUNNING)
        await gate.wait()
        return await played(work, phases)

    async with (
        serving(tmp_path / "s", heartbeat_s=0.1) as service,
        playing(service.url, play) as (node, running),
    ):
        await service.client.submit(group())
        await until(lambda: asyncio.sleep(0, node._playing))
        token, service.api._token = service.api._token, b"another run's server, which has the port for a while"
        gate.set()  # the episode is offered, and refused
        await until(lambda: asyncio.sleep(0, caplog.text.count("sessions/t/0/1 answered 401")))
        service.api._token = token
        assert (await ended(service.client, "t"))["usable_sessions"] == 1
        assert not running.done()
        node.patience_s = 0.5
        service.api._token = b"a server that never takes the node's token again"
        with pytest.raises(WaitedInVainError, match=r"failed for .* 401"):
            await asyncio.wait_for(running, 20)


async def test_a_node_that_no_server_ever_accepted_ends_after_its_patience(tmp_path):
    async with serving(tmp_path / "s") as service:
        service.api._token = b"another token"
        began = time.monotonic()
        async with playing(service.url, played, patience_s=0.5) as (_, running):
            with pytest.raises(HttpStatus, match="401"):
                await asyncio.wait_for(running, 20)
        assert time.monotonic() - began > 0.5
    async with playing("http://127.0.0.1:9", played, patience_s=0.1) as (_, running):
        with pytest.raises(WaitedInVainError, match="is not reached"):
            await asyncio.wait_for(running, 20)


async def test_a_node_whose_server_is_not_there_ends_at_once_when_it_is_drained():
    client = ServiceClient("http://127.0.0.1:9", "0123456789abcdef", retries=0)
    node = host.Node(client, played, "n", Places(1, 1, 1), drain_s=600.0)
    running = asyncio.create_task(node.run())
    await asyncio.sleep(0.2)
    assert not running.done()  # it waits for the server
    node.drain()
    async with asyncio.timeout(20):
        await running
    await client.close()


def test_an_address_without_a_scheme_is_refused(tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    told = "--server='127.0.0.1:8080' is no URL: write http://127.0.0.1:8080"
    with pytest.raises(ConfigError, match=told):
        node.run(*node.arguments(["--server=127.0.0.1:8080", f"--token_file={token}", "--player=x:y"]))
    with pytest.raises(ConfigError, match=r"service\.url='' is no URL"):
        ServiceConfig("", str(token))


def test_a_folder_is_no_store(tmp_path):
    with pytest.raises(ConfigError, match="cannot be used as a store"):
        open_database(tmp_path)
