"""The server over HTTP: who may ask, what is refused, groups and their ends, callbacks, events, bursts."""

import asyncio
import contextlib
import hashlib
import json

import aiohttp
import pytest
from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.io.http import HttpError, HttpStatus
from jaxagent.service import callbacks, reading
from jaxagent.service.api import Api
from jaxagent.service.episodes import DIGEST, to_bytes
from jaxagent.service.states import ServiceRules
from jaxagent.types import StopReason, Task
from tests.service.cluster import RULES, TOKEN, ended, episode, same, serving, until

FREE = {"init": 100, "run": 100, "postrun": 100}
PLACES = {f"max_{phase}_workers": 100 for phase in FREE}


def group(task_id="t", n=1, **more):
    return {"task_id": task_id, "instruction": "do it", "num_samples": n, **more}


async def taken(client, wait_s=5, node="n", places=100):
    """What a node is given, in a process of its own."""
    await client.register(node, f"{node}-process", "", PLACES)
    return await client.take(node, f"{node}-process", [], FREE | {"init": places}, wait_s)


def task_of(work):
    return Task(work["task"]["id"], work["task"]["prompt"], ())


async def send(client, work, **how):
    body, digest = to_bytes(episode(task_of(work), work["number"], **how))
    return await client.finish((work["task_id"], work["sample"], work["attempt"]), body, digest)


@contextlib.asynccontextmanager
async def refused(status):
    with pytest.raises(HttpStatus) as failure:
        yield failure
    assert failure.value.status == status
    assert json.loads(failure.value.body)["error"]


async def test_a_group_from_submission_to_episodes(tmp_path):
    async with serving(tmp_path / "s") as service:
        client = service.client
        assert await client.submit(group(n=3, first_sample=40)) == {"task_id": "t", "status": "running"}
        work = await taken(client)
        assert [w["number"] for w in work] == [40, 41, 42] and {w["group_size"] for w in work} == {3}
        assert await client.task("t") | {"results": 0} == {
            "task_id": "t", "status": "running", "reason": "", "total_sessions": 3, "completed_sessions": 0,
            "usable_sessions": 0, "needed_sessions": 0, "results": 0,
        }  # fmt: skip
        assert await send(client, work[0], reward=0.5)
        assert await send(client, work[1], stop_reason=StopReason.TIME_LIMIT, reward=0.0)
        waiting = asyncio.create_task(client.task("t", wait_s=20))
        assert await send(client, work[2], stop_reason=StopReason.ENV_ERROR)
        found = await waiting  # as soon as it has ended
        assert (found["status"], found["completed_sessions"], found["usable_sessions"]) == ("completed", 3, 2)
        first, second, third = found["results"]
        assert (first["state"], first["reward"], first["trainable_tokens"]) == ("COMPLETED", 0.5, 5)
        assert (second["state"], second["reward"], second["usable"]) == ("COMPLETED", 0.0, True)
        assert (third["state"], third["reward"], third["usable"]) == ("ERROR", None, False)
        assert third["reason"] == "env_error: it failed on purpose"
        got = await client.episode("t", 0, first["digest"])
        assert same(got, episode(task_of(work[0]), 40, 0.5))
        with pytest.raises(HttpError, match="changed on the way"):
            await client.episode("t", 0, third["digest"])
        status = await client.status()
        assert status["sessions"] == {"COMPLETED": 2, "ERROR": 1} and status["since_start"]["stored"] == 3


async def test_a_burst_of_30_submissions_and_30_results_is_one_of_each(tmp_path):
    async with serving(tmp_path / "s") as service:
        client = service.client
        answers = await asyncio.gather(*[client.submit(group(n=2)) for _ in range(30)])
        assert answers == [{"task_id": "t", "status": "running"}] * 30
        work = await taken(client)
        assert len(work) == 2
        stored = await asyncio.gather(*[send(client, work[0]) for _ in range(30)])
        assert sum(stored) == 1
        assert (await client.status())["since_start"]["duplicates"] == 29
        async with refused(409):
            await client.submit(group(n=3))  # the same id, another body
        async with refused(409) as failure:
            await send(client, work[0], reward=0.25)  # the same attempt, another episode
        assert "another episode" in str(failure.value)


async def test_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_BODY_BYTES", 1000)

    async with serving(tmp_path / "s", ServiceRules(max_waiting=4)) as service, aiohttp.ClientSession() as session:
        client = service.client
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": "Bearer "}):
            for method, path in [("GET", "/health"), ("POST", "/rollout/task/submit"), ("GET", "/none")]:
                async with session.request(method, service.url + path, headers=headers) as answer:
                    assert answer.status == 401
        async with refused(404):
            await client.task("none")
        async with refused(404):
            await client.cancel("none")
        async with refused(404):
            await client.take("none", "p", [], FREE, 0)
        async with refused(400):  # half of a surrogate pair, which the store cannot hold
            await client.register("n", "p", "\ud800", FREE)
        async with refused(400) as failure:
            await client.submit(group(num_sample=2))
        assert "num_sample" in str(failure.value)
        async with refused(413):
            await client.submit(group(instruction="x" * 2000))
        async with refused(503) as failure:
            await client.submit(group(n=5))
        assert "wait" in str(failure.value)
        await client.submit(group())
        async with refused(409):  # an attempt that nobody was given
            await client.finish(("t", 0, 1), *to_bytes(episode(Task("t", "do it", ()), 0)))
        (work,) = await taken(client)
        async with refused(409):  # another task's episode
            await client.finish(("t", 0, 1), *to_bytes(episode(Task("u", "do it", ()), 0)))
        body, digest = to_bytes(episode(task_of(work), 0))
        for wrong in (body.replace(b"5", b"6", 1), body[:-1], b""):
            async with refused(422):  # the bytes are not those of the digest
                await client.finish(("t", 0, 1), wrong, digest)
        async with refused(422):
            await client.finish(("t", 0, 1), body, "")
        for wrong in (b"[]", b"{}", b'{"task": 1}'):
            async with refused(400):
                await client.finish(("t", 0, 1), wrong, hashlib.sha256(wrong).hexdigest())
        assert await client.finish(("t", 0, 1), body, digest.upper())
        assert not await client.finish(("t", 0, 1), body, digest)
    with pytest.raises(ConfigError):
        Api(None, RULES, "short", 1.0)


async def test_early_stop_cancels_the_rest_and_their_node_hears_of_it(tmp_path):
    async with serving(tmp_path / "s") as service:
        client = service.client
        await client.submit(group(n=8, min_complete_accept_fraction=0.25))  # needs 2, stops at 4
        work = await taken(client, places=6)
        for one in work[:4]:
            assert (await client.task("t"))["status"] == "running"
            await send(client, one)
        found = await client.task("t")
        assert (found["status"], found["usable_sessions"]) == ("completed", 4)
        assert [r["state"] for r in found["results"]] == ["COMPLETED"] * 4 + ["CANCELLED"] * 4
        key = ["t", 5, 1]
        answer = await client.beat("n", "n-process", [(("t", 4, 1), "RUNNING"), (("t", 5, 1), "RUNNING")], FREE)
        assert key in answer["cancel"] and len(answer["cancel"]) == 2
        assert not await send(client, work[5])  # too late: told, and not stored
        assert await taken(client, wait_s=0) == []


async def test_cancel_also_before_the_task_comes(tmp_path):
    async with serving(tmp_path / "s") as service:
        client = service.client
        await client.submit(group(n=2))
        work = await taken(client)
        await send(client, work[0])
        assert (await client.cancel("t"))["status"] == "failed"
        found = await client.task("t")
        assert [r["state"] for r in found["results"]] == ["COMPLETED", "CANCELLED"] and "cancelled" in found["reason"]
        assert (await client.cancel("t"))["status"] == "failed"
        await client.cancel("later", register_if_missing=True)
        assert (await client.submit(group("later", 5)))["status"] == "failed"
        assert await taken(client, wait_s=0) == []


async def test_who_goes_first_and_places_and_answers_that_were_lost(tmp_path):
    async with serving(tmp_path / "s") as service:
        client = service.client
        for name, priority in [("low", 0), ("high", 90), ("low2", 0)]:
            await client.submit(group(name, 2, dispatch_priority=priority))
        work = await taken(client, places=3)
        assert [w["task_id"] for w in work] == ["high", "high", "low"]
        # The answer was lost: the node says that it has only the first, and is told of the others again.
        again = await client.take("n", "n-process", [("high", 0, 1)], FREE | {"init": 1}, 0)
        assert [(w["task_id"], w["sample"], w["attempt"]) for w in again] == [("high", 1, 1), ("low", 0, 1)]
        have = [("high", 0, 1), ("high", 1, 1), ("low", 0, 1)]
        work = await client.take("n", "n-process", have, FREE, 20)
        assert [w["task_id"] for w in work] == ["low", "low2", "low2"]
        waiting = asyncio.create_task(taken(client, wait_s=20, node="other"))
        await asyncio.sleep(0.1)
        await client.submit(group("new"))
        assert [w["task_id"] for w in await waiting] == ["new"]  # a long poll ends when there is work
        await client.drain("other")
        await client.submit(group("newer"))
        assert await client.take("other", "other-process", [("new", 0, 1)], FREE, 0) == []
        assert (await client.beat("other", "other-process", [], FREE))["drain"]
        assert [n["status"] for n in await client.nodes()] == ["active", "draining"]
        await client.leave("other", "other-process")
        have += [("low", 1, 1), ("low2", 0, 1), ("low2", 1, 1)]
        work = await client.take("n", "n-process", have, FREE, 0)
        assert [(w["task_id"], w["attempt"]) for w in work] == [("new", 2), ("newer", 1)]


async def test_a_lease_ends_and_a_late_result_counts_once(tmp_path):
    async with serving(tmp_path / "s", ServiceRules(lease_s=300, max_losses=2)) as service:
        client = service.client
        await client.submit(group(n=2))
        lost = await taken(client, node="lost")
        await service.pass_time(200)
        other = await taken(client, node="other", wait_s=0)
        assert other == []
        waiting = asyncio.create_task(client.take("other", "other-process", [], FREE, 20))
        await service.pass_time(200)
        other = await waiting
        assert [w["attempt"] for w in other] == [2, 2]
        assert [(n["node_id"], n["status"]) for n in await client.nodes()] == [
            ("lost", "lost"),
            ("other", "active"),
        ]
        answer = await client.beat("lost", "lost-process", [(("t", 0, 1), "RUNNING")], FREE)
        assert answer["cancel"] == [["t", 0, 1]]
        assert [n["status"] for n in await client.nodes()] == ["active", "active"]
        assert await send(client, lost[0])  # the first episode of a session is its episode, whosever it is
        assert not await send(client, other[0])
        await service.pass_time(400)
        found = await ended(client, "t")
        assert [r["state"] for r in found["results"]] == ["COMPLETED", "ERROR"]
        assert found["results"][1]["reason"].startswith("its node was lost 2 times")


async def test_a_beat_keeps_its_sessions_and_no_others(tmp_path):
    async with serving(tmp_path / "s", ServiceRules(lease_s=300)) as service:
        client = service.client
        await client.submit(group(n=2))
        await taken(client)
        for _ in range(3):
            await service.pass_time(200)
            await client.beat("n", "n-process", [(("t", 0, 1), "RUNNING")], FREE)
        states = [(r["state"], r["losses"]) for r in (await client.task("t"))["results"]]
        assert states == [("RUNNING", 0), ("REGISTERED", 1)]  # the node does not know of the second


async def test_the_server_ends_what_its_node_does_not(tmp_path):
    async with serving(tmp_path / "s", ServiceRules(lease_s=10_000)) as service:
        client = service.client
        await client.submit(group("whole", timeout_seconds=1000))
        await client.submit(group("agent", timeout_seconds=9000, metadata={"agent_timeout": 1000}))
        work = await taken(client)
        await service.pass_time(500)
        await client.beat("n", "n-process", [((w["task_id"], 0, 1), "RUNNING") for w in work], FREE)
        for seconds, sessions in [(510, {"RUNNING": 2}), (40, {"RUNNING": 1, "TIMEOUT": 1}), (500, {"TIMEOUT": 2})]:
            await service.pass_time(seconds)  # the node has half a minute to end it itself
            assert (await client.status())["sessions"] == sessions
        assert "its time was over" in (await client.task("whole"))["results"][0]["reason"]
        assert "the agent's time was over" in (await client.task("agent"))["results"][0]["reason"]


async def test_a_server_that_was_away_for_long_gives_its_nodes_time_to_be_heard(tmp_path):
    rules = ServiceRules(lease_s=300, max_losses=1)
    async with serving(tmp_path / "s", rules) as service:
        await service.client.submit(group(n=2, timeout_seconds=600, metadata={"agent_timeout": 60}))
        work = await taken(service.client)
        keys = [(("t", w["sample"], 1), "RUNNING") for w in work]
        await service.client.beat("n", "n-process", keys, FREE)
    async with serving(tmp_path / "s", rules, late_s=24 * 3600.0) as service:
        await service.pass_time(200)
        assert await send(service.client, work[0])  # ended while nobody listened
        await service.pass_time(200)
        found = (await service.client.task("t"))["results"]
        assert [(r["state"], r["losses"]) for r in found] == [("COMPLETED", 0), ("ERROR", 1)]


async def test_a_callback_is_told_until_it_is_heard_and_a_dead_url_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "FIRST_PAUSE_S", 0.05)
    heard = []

    async def hear(request):
        heard.append(await request.json())
        return web.Response(status=503 if len(heard) < 3 else 204)

    app = web.Application()
    app.router.add_post("/done", hear)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    async with serving(tmp_path / "s", ServiceRules(callback_s=0.5)) as service:
        client = service.client
        await client.submit(group("live", callback_url=f"http://127.0.0.1:{port}/done"))
        await client.submit(group("dead", callback_url="http://127.0.0.1:1/done"))
        await client.submit(group("silent"))
        for work in await taken(client):
            await send(client, work)

        async def told():
            found = (await client.status())["callbacks"]
            return found if "waiting" not in found and sum(found.values()) == 2 else None

        assert await until(told) == {"told": 1, "given up": 1}
        rows = await service.store.do(lambda db, now: [dict(r) for r in db.execute("SELECT * FROM callbacks")])
        dead = next(r for r in rows if r["task_id"] == "dead")
        assert "not reached" in dead["error"] and dead["tries"] > 1
    await runner.cleanup()
    assert len(heard) == 3
    assert all((h["task_id"], h["status"], h["usable_sessions"]) == ("live", "completed", 1) for h in heard)


async def test_events_are_streamed_and_continued(tmp_path):
    async def lines(service, session, count, **params):
        found = []
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with asyncio.timeout(20), session.get(f"{service.url}/events", headers=headers, params=params) as answer:
            assert answer.content_type == "text/event-stream"
            async for line in answer.content:
                if line.startswith(b"id: "):
                    found.append([int(line[4:])])
                if line.startswith((b"event: ", b"data: ")):
                    found[-1].append(line.decode().partition(": ")[2].strip())
                if len(found) == count and len(found[-1]) == 3:
                    return [(n, kind, json.loads(data)) for n, kind, data in found]

    async with serving(tmp_path / "s") as service, aiohttp.ClientSession() as session:
        client = service.client
        listening = asyncio.create_task(lines(service, session, 6))
        await until(lambda: asyncio.sleep(0, service.api._streams))
        await client.submit(group())
        (work,) = await taken(client)
        await client.beat("n", "n-process", [(("t", 0, 1), "RUNNING")], FREE)
        await send(client, work)
        events = await listening
        assert [(kind, data.get("state", data.get("status"))) for _, kind, data in events] == [
            ("task", "running"), ("node", "registered"), ("session", "INITIALIZING"), ("session", "RUNNING"),
            ("session", "COMPLETED"), ("task", "completed"),
        ]  # fmt: skip
        assert await lines(service, session, 2, after=str(events[3][0])) == events[4:]


async def test_a_full_disk_is_told_and_the_same_result_taken_later(tmp_path):
    async with serving(tmp_path / "s") as service:
        client = service.client
        await client.submit(group())
        (work,) = await taken(client)
        db = service.store.connection
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
        big = episode(task_of(work), 0, actions=20_000)
        body, digest = to_bytes(big)
        client._http._retries = 0
        async with refused(503) as failure:
            await client.finish(("t", 0, 1), body, digest)
        assert "full" in str(failure.value)
        assert (await client.task("t"))["completed_sessions"] == 0
        db.execute("PRAGMA max_page_count = 1000000")
        assert await client.finish(("t", 0, 1), body, digest)
        assert same(await client.episode("t", 0, digest), big)


async def test_old_tasks_are_forgotten_and_stuck_ones_end(tmp_path):
    async with serving(tmp_path / "s", ServiceRules(lease_s=10, keep_s=1000)) as service:
        client = service.client
        await client.submit(group("done"))
        (work,) = await taken(client)
        await send(client, work)
        await service.pass_time(900)
        await client.submit(group("stuck"))
        await service.pass_time(200)
        async with refused(404):
            await client.task("done")
        assert await service.store.do(lambda db, now: db.execute("SELECT count(*) FROM episodes").fetchone()[0]) == 0
        await service.pass_time(900)
        found = await ended(client, "stuck")
        assert (found["status"], found["reason"]) == ("failed", "it did not end in 1000 s")
        assert found["results"][0]["state"] == "CANCELLED"
        await service.pass_time(1100)
        assert (await client.status())["tasks"] == {}


def test_the_header_is_the_one_that_the_page_names():
    assert DIGEST == "X-Content-SHA256"
