"""Real processes that are killed, stopped and started again: no acknowledged episode is lost, none is counted twice."""

import asyncio
import collections
import contextlib
import signal

import pytest

from jaxagent.data import codec
from jaxagent.service.client import ServiceClient
from jaxagent.service.episodes import to_bytes
from jaxagent.types import Task
from tests.service.cluster import TOKEN, ended, episode, free_port, same, start_node, start_server, until
from tests.service.test_rollout_service import FREE, PLACES


class Cluster:
    """A server and nodes, and the files by which tests hold their agents."""

    def __init__(self, folder, stack):
        self.folder, self.stack, self.port = folder, stack, free_port()
        self.client = ServiceClient(f"http://127.0.0.1:{self.port}", TOKEN, timeout_s=20, retries=8)

    async def server(self, *more):
        process = start_server(self.folder, self.port, *more)
        self.stack.callback(process.kill)
        await until(self.there)
        return process

    async def there(self):
        with contextlib.suppress(Exception):
            return await self.client.status()

    def node(self, name, *more):
        process = start_node(self.folder, self.port, name, *more)
        self.stack.callback(process.kill)
        return process

    def group(self, name, n, hold=True):
        begun, held = self.folder / f"{name}.begun", self.folder / f"{name}.hold"
        begun.touch()
        if hold:
            held.touch()
        task = Task(name, "do it", (), metadata={"begun": str(begun), "hold": str(held)})
        row = {"task_id": name, "task": codec.encode_task(task), "num_samples": n}
        return row, task, lambda: collections.Counter(begun.read_text().split()), held.unlink

    async def states(self, name):
        return [r["state"] for r in (await self.client.task(name))["results"]]


@contextlib.asynccontextmanager
async def cluster(folder):
    with contextlib.ExitStack() as stack:
        found = Cluster(folder, stack)
        try:
            yield found
        finally:
            await found.client.close()


async def test_a_killed_server_has_every_acknowledged_episode_and_its_nodes_play_on(tmp_path):
    async with cluster(tmp_path) as c:
        server = await c.server()
        node = c.node("node")
        done, _, _, _ = c.group("done", 3, hold=False)
        await c.client.submit(done)
        before = await ended(c.client, "done")
        row, task, begun, release = c.group("held", 2)
        await c.client.submit(row)

        async def both_run():
            return await c.states("held") == ["RUNNING"] * 2

        await until(both_run)
        server.kill()
        release()  # the node ends both while there is no server
        await asyncio.sleep(1.0)
        await c.server()
        after = await ended(c.client, "done")
        assert after == before
        found = await ended(c.client, "held")
        assert [(r["state"], r["attempt"]) for r in found["results"]] == [("COMPLETED", 1)] * 2
        assert begun() == {"0": 1, "1": 1}  # nothing was played twice
        for i, result in enumerate(found["results"]):
            assert same(await c.client.episode("held", i, result["digest"]), episode(task, i))
        assert await c.client.submit(row) == {"task_id": "held", "status": "completed"}  # still the same submission
        node.signal(signal.SIGTERM)
        assert node.wait() == 0 and "played 5 sessions" in node.log.read_text()


async def test_a_server_killed_at_any_moment_keeps_what_it_acknowledged(tmp_path):
    """Episodes are sent in a stream, and the server killed in the middle of it, three times."""

    async with cluster(tmp_path) as c:
        server = await c.server("--lease_s=60")
        row, task, _, _ = c.group("many", 60)
        await c.client.submit(row)
        await c.client.register("n", "p", "", PLACES)
        work = await c.client.take("n", "p", [], FREE, 5)
        acknowledged, waiting = {}, iter(work)

        async def send():
            for one in waiting:
                body, digest = to_bytes(episode(task, one["number"]))
                await c.client.finish(("many", one["sample"], 1), body, digest)  # tried again where it breaks off
                acknowledged[one["sample"]] = digest
                await asyncio.sleep(0.02)

        sending = asyncio.gather(*[send() for _ in range(4)])
        for after in (10, 25, 40):
            while len(acknowledged) < after:
                await asyncio.sleep(0.005)
                assert not sending.done() or not sending.exception()
            server.kill()
            had = dict(acknowledged)
            server = await c.server("--lease_s=60")
            found = {r["sample"]: r["digest"] for r in (await c.client.task("many"))["results"] if r["digest"]}
            assert had.items() <= found.items()
        await sending
        found = await ended(c.client, "many")
        assert {r["sample"]: r["digest"] for r in found["results"]} == acknowledged and len(acknowledged) == 60


async def test_sessions_of_a_killed_node_go_to_another(tmp_path):
    async with cluster(tmp_path) as c:
        await c.server()
        node = c.node("first")
        row, _, begun, release = c.group("t", 3)
        await c.client.submit(row)
        await until(lambda: asyncio.sleep(0, begun().total() == 3))
        node.kill()
        c.node("second")
        await until(lambda: asyncio.sleep(0, begun().total() >= 6))
        release()
        found = await ended(c.client, "t")
        assert [(r["state"], r["node"]) for r in found["results"]] == [("COMPLETED", "second")] * 3
        assert [r["losses"] for r in found["results"]] == [r["attempt"] - 1 for r in found["results"]]


async def test_a_node_that_begins_anew_is_known_at_once(tmp_path):
    """The lease is long: it is the new process's registration that tells of the old one's end."""

    async with cluster(tmp_path) as c:
        await c.server("--lease_s=3600")
        node = c.node("same")
        row, _, begun, release = c.group("t", 1)
        await c.client.submit(row)
        await until(lambda: asyncio.sleep(0, begun().total() == 1))
        node.kill()
        c.node("same")
        await until(lambda: asyncio.sleep(0, begun().total() == 2))
        release()
        assert (await ended(c.client, "t"))["results"][0]["attempt"] == 2


async def test_a_stopped_node_that_wakes_up_counts_once(tmp_path):
    async with cluster(tmp_path) as c:
        await c.server()
        first = c.node("first")
        row, _, begun, release = c.group("t", 2)
        await c.client.submit(row)
        await until(lambda: asyncio.sleep(0, begun().total() == 2))
        first.signal(signal.SIGSTOP)
        second = c.node("second")
        await until(lambda: asyncio.sleep(0, begun().total() >= 4))
        release()
        found = await ended(c.client, "t")
        assert [(r["state"], r["node"]) for r in found["results"]] == [("COMPLETED", "second")] * 2
        first.signal(signal.SIGCONT)

        async def active():
            return [n["status"] for n in await c.client.nodes()] == ["active"] * 2

        await until(active)
        again, _, _, _ = c.group("u", 2, hold=False)
        await c.client.submit(again)
        assert (await ended(c.client, "u"))["usable_sessions"] == 2
        assert await ended(c.client, "t") == found
        for node in (first, second):
            node.signal(signal.SIGTERM)
            assert node.wait() == 0


async def test_sigterm_drains_and_a_second_one_ends(tmp_path):
    async with cluster(tmp_path) as c:
        await c.server()
        node = c.node("node", "--drain_s=3600")
        row, _, begun, release = c.group("t", 1)
        await c.client.submit(row)
        await until(lambda: asyncio.sleep(0, begun().total() == 1))
        node.signal(signal.SIGTERM)
        later, _, later_begun, later_release = c.group("later", 1)
        await asyncio.sleep(0.5)
        await c.client.submit(later)
        release()
        assert node.wait() == 0
        assert (await c.client.task("t"))["usable_sessions"] == 1 and not later_begun()
        node = c.node("node", "--drain_s=3600")
        await until(lambda: asyncio.sleep(0, later_begun().total() == 1))
        node.signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        node.signal(signal.SIGTERM)
        assert node.wait() == 0
        assert await c.states("later") == ["REGISTERED"]  # for another node
        later_release()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_server_ends_at_once_with_polls_and_streams_open(tmp_path, number):
    async with cluster(tmp_path) as c:
        server = await c.server()
        await c.client.register("n", "p", "", PLACES)
        polling = asyncio.create_task(c.client.take("n", "p", [], FREE, 20))
        await asyncio.sleep(0.3)
        server.signal(number)
        assert server.wait(10) == 0
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
