"""Remote workers: the same interface over HTTP, the token, leases, many sandboxes on several workers."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from jaxagent.config import ConfigError, SandboxConfig, WorkersConfig
from jaxagent.config.command import bound_socket
from jaxagent.config.errors import WaitedInVainError
from jaxagent.io import connections
from jaxagent.sandbox import remote as remote_module
from jaxagent.sandbox import worker as worker_module
from jaxagent.sandbox.base import Backend, FileError, Limits, SandboxClosed, SandboxError, SandboxLost, Spec
from jaxagent.sandbox.of_config import Sandboxes
from jaxagent.sandbox.remote import Remote
from jaxagent.sandbox.worker import CLIENT, Worker

TOKEN = "0123456789abcdef-token"


@contextlib.asynccontextmanager
async def workers(backend, count=1, most=64, **options):
    options = {"max_sandboxes": 8, "lease_s": 60.0, **options}
    async with contextlib.AsyncExitStack() as opened:
        addresses = [bound_socket("127.0.0.1", 0) for _ in range(count)]
        for address in addresses:
            await opened.enter_async_context(Worker(backend, TOKEN, **options).serving(address, most))
        yield [f"http://127.0.0.1:{address.getsockname()[1]}" for address in addresses]


@contextlib.asynccontextmanager
async def connected(backend, **options):
    """URLs, and a client of theirs."""
    async with workers(backend, **options) as urls:
        remote = Remote(urls, TOKEN)
        yield urls, remote
        await remote.close()


async def test_the_same_interface(local, tmp_path):
    async with connected(local, own_folder=str(tmp_path)) as (_, remote):
        await remote.connect()
        assert "namespaces" in remote.describe() and "not encrypted" in remote.describe()
        spec = Spec(uid=7, env={"A": "b"}, limits=Limits(processes=99))
        async with await remote.start(spec) as sandbox:
            result = await sandbox.run("X=1; id -u; echo $A; ulimit -u; printf '\\377'; (exit 3)", 10, 1000)
            assert (result.output, result.exit_code) == (b"7\nb\n99\n\xff", 3)
            assert (await sandbox.run("echo $X; sleep 100", 0.3, 1000)).timed_out
            fresh = await sandbox.execute(["sh", "-c", "echo $B; pwd"], 10, 100, {"B": "c"}, "/tmp")
            assert fresh.output == b"c\n/tmp\n"
            data = bytes(range(256)) * 5000
            await sandbox.write("/tmp/a b/&?#c", data, 0o700)
            assert await sandbox.read("/tmp/a b/&?#c") == data
            listed = await sandbox.list("/tmp")
            assert [(e.path, e.kind, e.mode) for e in listed] == [
                ("a b", "directory", 0o755),
                ("a b/&?#c", "file", 0o700),
            ]
            for path in ("/none", "relative"):
                with pytest.raises(FileError):
                    await sandbox.read(path)
            with pytest.raises(SandboxError):
                await sandbox.execute([], 1, 1)
            await sandbox.stop_processes()
            layer = await sandbox.snapshot(str(tmp_path / "layer"))
            assert (Path(layer) / "tmp" / "a b" / "&?#c").read_bytes() == data
        for operation in (sandbox.run("true", 1, 1), sandbox.read("/x")):
            with pytest.raises(SandboxClosed):
                await operation
        counts = "memory" in local.owner.cgroups.controllers
        small = Spec(limits=Limits(memory_bytes=64 * 2**20, disk_bytes=16 * 2**20))
        async with await remote.start(small) as sandbox:
            assert await sandbox.oom_kills() == (0 if counts else None)
            await sandbox.run("head -c 200M /dev/zero | tail -n 1", 30, 100)
            assert bool(await sandbox.oom_kills()) == counts
        assert bool(await sandbox.oom_kills()) == counts  # the worker told it with the end
        with pytest.raises(ConfigError):
            await remote.start(Spec(layers=("/nonexistent",)))


async def test_many_on_several_workers(local, monkeypatch):
    async with workers(local, 3, max_sandboxes=4) as urls:
        remote = Remote([*urls, "http://127.0.0.1:1"], TOKEN)  # nobody listens there
        sandboxes = await asyncio.gather(*[remote.start(Spec()) for _ in range(12)])
        said = await asyncio.gather(*[s.run(f"sleep 0.1; echo {i}", 20, 100) for i, s in enumerate(sandboxes)])
        assert [r.output for r in said] == [b"%d\n" % i for i in range(12)]
        monkeypatch.setattr(remote_module, "AWAY_S", 0.0)
        with pytest.raises(SandboxLost, match="in use"):
            await remote.start(Spec())
        monkeypatch.undo()
        waiting = asyncio.create_task(remote.start(Spec()))
        await asyncio.sleep(0.2)
        assert not waiting.done()  # a dead client's sandboxes have their places until its lease is over
        await sandboxes[0].close()
        again = await waiting
        await asyncio.gather(*[s.close() for s in [*sandboxes, again]])
        await remote.close()


async def test_tokens_and_clients(local):
    with pytest.raises(ConfigError):
        Worker(local, "short", 1, 1.0)
    async with connected(local) as (urls, remote), aiohttp.ClientSession() as session:
        wrong = Remote(urls, "not the token")
        with pytest.raises(SandboxError, match="token"):
            await wrong.start(Spec())
        await wrong.close()
        sandbox = await remote.start(Spec())
        name = sandbox._url.rsplit("/", 1)[1]
        headers = {"Authorization": f"Bearer {TOKEN}", CLIENT: "somebody else"}
        async with session.post(f"{urls[0]}/sandboxes/{name}/stop", headers=headers) as answer:
            assert answer.status == 410  # a sandbox belongs to its client
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": TOKEN + "x", CLIENT: "x"}):
            async with session.get(f"{urls[0]}/health", headers=headers) as answer:
                assert answer.status == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", int(urls[0].rpartition(":")[2]))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await ends(reader)).startswith(b"HTTP/1.1 401 ")  # and the connection ends
        writer.close()
        await sandbox.close()


SPEC = {"id": "0123456789abcdef", "limits": {}, "layers": []}
BAD_BODIES = [
    *(("POST", "", body) for body in ("{", "[]", "{}", '{"limits": {}, "layers": []}')),
    *(("POST", "", {**SPEC, "id": name}) for name in ("", "../x", "G" * 16, "a" * 9, "f" * 65)),
    ("POST", "", {**SPEC, "limits": {"memory": 1}}),
    ("POST", "", {**SPEC, "hostname": ["a"]}),
    ("POST", "", {**SPEC, "uid": 1.5}),
    ("POST", "", {**SPEC, "uid": True}),
    ("POST", "", {**SPEC, "limits": {"processes": 1.5}}),
    ("POST", "", {**SPEC, "limits": [1]}),
    ("POST", "", {**SPEC, "env": {"A": 1}}),
    ("POST", "", "[" * 100_000 + "]" * 100_000),
    ("POST", "", "7"),
    ("POST", "/NAME/run", {"command": "true", "deadline_s": 1, "output_bytes": -1}),
    ("POST", "/NAME/run", {"command": "true", "deadline_s": "nan", "output_bytes": 1}),
    ("POST", "/NAME/execute", {"argv": ["a"], "env": {}, "directory": "", "deadline_s": 1, "output_bytes": 2**70}),
    ("POST", "/NAME/stop", {"spared": [[-1, 1]]}),
    ("POST", "/NAME/stop", {"spared": [[1, 2**65]]}),
    ("PUT", "/NAME/file?path=/tmp/x&mode=8589934592", ""),
    ("GET", "/NAME/file?path=/tmp/x&max_bytes=-1", ""),
    ("GET", "/NAME/list?path=/tmp&max_entries=-1", ""),
]


async def test_malformed_requests_are_the_clients_mistake(local):
    """400 and what is wrong, without a traceback in the worker's log; the sandbox goes on."""
    async with workers(local) as urls, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {TOKEN}", CLIENT: "x"}
        async with session.post(f"{urls[0]}/sandboxes", headers=headers, json={**SPEC, "id": "f" * 16}) as answer:
            assert answer.status == 200
        for method, where, body in BAD_BODIES:
            data = body if isinstance(body, str) else json.dumps(body)
            url = f"{urls[0]}/sandboxes{where.replace('NAME', 'f' * 16)}"
            async with session.request(method, url, headers=headers, data=data) as answer:
                assert answer.status == 400, (where, str(body)[:50])
                assert re.match("malformed request: |(Unknown config field ')?spec", (await answer.json())["error"])
        good = {"command": "echo on", "deadline_s": 10, "output_bytes": 10}
        async with session.post(f"{urls[0]}/sandboxes/{'f' * 16}/run", headers=headers, json=good) as answer:
            assert (await answer.json())["exit_code"] == 0


async def ends(reader):
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            return await reader.read()


HELLO = f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{CLIENT}: x\r\n\r\n".encode()
STRANGERS = {
    "half a head": b"GET /health HTTP/1.1\r\nHost: x\r\n",
    "an empty line": b"\r\n\r\n",
    "a body that does not come": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    "a wrong token": b"PUT / HTTP/1.1\r\nAuthorization: Bearer \xff\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n",
    "what no handler sees": b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: x\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", STRANGERS)
async def test_strangers_do_not_fill_the_door(local, what, monkeypatch):
    """Connections without the token make room for others, however long they may stay; those with it stay."""
    monkeypatch.setattr(worker_module, "STRANGER_S", float("inf"))
    async with connected(local, most=8) as (urls, remote):
        address = "127.0.0.1", int(urls[0].rpartition(":")[2])
        reader, known = await asyncio.open_connection(*address)
        known.write(HELLO)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        strangers = [await asyncio.open_connection(*address) for _ in range(20)]
        for _, writer in strangers:
            writer.write(STRANGERS[what])
        await asyncio.gather(*[remote.connect() for _ in range(4)])
        await asyncio.gather(*[ends(reader) for reader, _ in strangers[:12]])
        known.write(HELLO)
        await reader.readuntil(b"HTTP/1.1 200 ")
        for _, writer in [(reader, known), *strangers]:
            writer.close()


async def test_a_stranger_has_ten_seconds(local, monkeypatch):
    """To show the token, whatever it sends meanwhile and also where there is room; who has shown it stays."""
    assert worker_module.STRANGER_S == 10.0
    monkeypatch.setattr(worker_module, "STRANGER_S", 0.5)
    async with workers(local) as urls:
        address = "127.0.0.1", int(urls[0].rpartition(":")[2])
        clients = [await asyncio.open_connection(*address) for _ in range(len(STRANGERS) + 3)]
        (reader, known), (_, dripping), *strangers = clients
        known.write(HELLO)
        for (_, writer), sent in zip(strangers, (b"", *STRANGERS.values()), strict=True):
            writer.write(sent)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                for byte in b"GET /health HTTP/1.1\r\nHost: " + b"x" * 1000:
                    dripping.write(bytes([byte]))
                    await dripping.drain()
                    await asyncio.sleep(0.02)
                pytest.fail("the worker has waited for twenty seconds")
            await asyncio.gather(*[ends(stranger) for stranger, _ in strangers])
        known.write(HELLO)
        for _ in range(2):
            await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200 "), 10)
        for _, writer in clients:
            writer.close()


def test_a_worker_uses_all_descriptors_it_may_have():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        most = connections.raise_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert 16 <= most <= connections.MOST_CONNECTIONS and (
            hard == resource.RLIM_INFINITY or most <= max(16, hard // 2)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_dead_clients_sandboxes_end(local):
    async with connected(local, lease_s=0.4) as (_, remote):
        sandbox = await remote.start(Spec())
        slow = await sandbox.run("sleep 1; echo on", 10, 100)  # a long command keeps the lease
        assert slow.output == b"on\n"
        await asyncio.sleep(1.5)
        with pytest.raises(SandboxLost, match="no such sandbox"):
            await sandbox.run("true", 1, 1)


async def test_a_worker_that_is_away_is_waited_for(local, monkeypatch, tmp_path):
    """And patience has an end, which is nobody's mistake."""
    (tmp_path / "token").write_text(TOKEN)
    probe = bound_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    probe.close()
    remote = Remote([url], TOKEN)
    waiting = [asyncio.create_task(remote.connect()), asyncio.create_task(remote.start(Spec()))]
    await asyncio.sleep(0.7)
    assert not any(task.done() for task in waiting)
    worker = Worker(local, TOKEN, max_sandboxes=1, lease_s=60.0)
    async with worker.serving(bound_socket("127.0.0.1", int(url.rpartition(":")[2]))):
        await waiting[0]
        sandbox = await waiting[1]
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
    monkeypatch.setattr(remote_module, "AWAY_S", 0.3)
    gone = Sandboxes(SandboxConfig(backend="remote", remote=WorkersConfig(url, str(tmp_path / "token"))), "env.sandbox")
    with pytest.raises(SandboxLost, match=r"for 0\.3 s, .* is not reached: .*\.$") as told:
        await gone.open()
    assert isinstance(told.value, WaitedInVainError)  # exit code 75: it is started again
    await gone.close()
    with pytest.raises(SandboxLost, match="no worker starts a sandbox"):
        await remote.start(Spec())
    with pytest.raises(SandboxLost):
        await sandbox.run("true", 1, 1)
    await remote.close()


class Stuck:
    """A sandbox that does not close."""

    async def close(self):
        raise OSError("stuck")


async def test_a_sandbox_that_does_not_close_keeps_no_other(local):
    worker = Worker(local, TOKEN, 8, 0.2)
    for name in "ab":  # two clients that died: the watch goes on after the first
        made = await local.start(Spec())
        worker._clients[name] = worker_module._Client(time.monotonic(), {"1": Stuck(), "2": made})
    sandboxes = [c.sandboxes["2"] for c in worker._clients.values()]
    runner = web.AppRunner(worker.app())
    await runner.setup()

    async def ended():
        return all(s.is_closed for s in sandboxes) and not worker._clients

    await until(ended)
    await runner.cleanup()


async def health(url):
    """Asked as somebody else, which keeps no lease of the client under test."""
    headers = {"Authorization": f"Bearer {TOKEN}", CLIENT: "watcher"}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health", headers=headers) as answer:
        return await answer.json()


async def until(condition):
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


class Gated(Backend):
    """Starts that wait for a gate before they are real."""

    name, missing = "gated", ()

    def __init__(self, local):
        self._local, self.begun, self.gate = local, asyncio.Event(), asyncio.Event()
        self.made = []

    async def start(self, spec):
        self.begun.set()
        await self.gate.wait()
        self.made.append(await self._local.start(spec))
        return self.made[-1]

    async def close(self):
        pass


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_start_that_nobody_waits_for_leaves_no_sandbox(local, how, monkeypatch):
    """Neither where the worker sees that its client has left, nor by the name that the client has then deleted."""
    backend = Gated(local)
    async with connected(backend) as (urls, remote):
        if how == "late":
            monkeypatch.setattr(remote_module, "START_TIMEOUT_S", 0.2)
            monkeypatch.setattr(remote_module, "AWAY_S", 0.0)
        starting = asyncio.create_task(remote.start(Spec()))
        await backend.begun.wait()
        if how == "cancelled":
            starting.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else SandboxLost):
            await starting
        await asyncio.sleep(0.1)  # the worker hears of it before the sandbox is there
        backend.gate.set()

        await asyncio.sleep(0.3)
        assert all(sandbox.is_closed for sandbox in backend.made) and (await health(urls[0]))["running"] == 0
        async with await remote.start(Spec()) as sandbox:  # the client lives on
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"


async def test_a_name_that_was_ended_never_starts(local):
    """A DELETE may overtake its POST."""
    async with workers(local) as urls, aiohttp.ClientSession() as session:
        headers, name = {"Authorization": f"Bearer {TOKEN}", CLIENT: "x"}, "0123456789abcdef"
        body = {"id": name, "limits": {}, "layers": []}
        for method, where, status in (("DELETE", f"/{name}", 200), ("POST", "", 410)):
            async with session.request(method, f"{urls[0]}/sandboxes{where}", headers=headers, json=body) as answer:
                assert answer.status == status
        assert (await health(urls[0]))["running"] == 0
        for status in (200, 400):  # a name is used once
            async with session.post(f"{urls[0]}/sandboxes", headers=headers, json={**body, "id": name[::-1]}) as answer:
                assert answer.status == status
        assert (await health(urls[0]))["running"] == 1


async def test_a_failed_end_is_repeated(local, monkeypatch):
    monkeypatch.setattr("jaxagent.sandbox.remote.HEARTBEAT_S", 0.1)
    close, failures = Worker._close, iter(range(2))

    async def deaf(self, request, client):
        if next(failures, None) is not None:
            raise web.HTTPBadGateway(text="from a proxy")
        return await close(self, request, client)

    monkeypatch.setattr(Worker, "_close", deaf)
    async with connected(local) as (urls, remote):
        sandbox = await remote.start(Spec())
        await sandbox.close()
        assert (await health(urls[0]))["running"] == 1

        async def ended():
            return (await health(urls[0]))["running"] == 0

        await until(ended)


async def test_workers_that_do_not_answer_delay_no_others_heartbeat(monkeypatch):
    monkeypatch.setattr("jaxagent.sandbox.remote.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("jaxagent.sandbox.remote.HEALTH_TIMEOUT_S", 1000.0)
    heard = []

    async def count(request):
        heard.append(request.path)
        return web.json_response({})

    mute = await asyncio.start_server(lambda reader, writer: asyncio.sleep(1000), "127.0.0.1", 0)
    app = web.Application()
    app.add_routes([web.get("/health", count)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    silent = f"http://127.0.0.1:{mute.sockets[0].getsockname()[1]}"
    live = f"http://127.0.0.1:{runner.addresses[0][1]}"
    remote = Remote([silent, f"{silent}/too", live], TOKEN)
    await remote.ask("GET", f"{live}/health", 10)

    async def often():
        return len(heard) >= 5

    await until(often)
    await remote.close()
    await runner.cleanup()
    mute.close()


async def test_clients_name_paths_in_the_workers_folder_only(local, reachable):
    folder, outside = reachable / "folder", reachable / "outside"
    for path in (folder / "layer" / "etc", folder / "half.part" / "d", outside):
        path.mkdir(parents=True)
    (folder / "layer" / "link").symlink_to(outside)  # as a program in a sandbox may have left it
    (folder / "layer" / "loop").symlink_to("loop")
    outer = [str(outside), "/", f"{folder}/../outside", f"{folder}/layer/link", f"{folder}/layer/loop"]
    with pytest.raises(ConfigError, match="--folder"):
        Worker(local, TOKEN, 1, 1.0, str(reachable / "none"))
    async with workers(local) as without, workers(local, own_folder=str(folder)) as urls:
        bare, remote = Remote(without, TOKEN), Remote(urls, TOKEN)
        async with await bare.start(Spec()) as sandbox:
            with pytest.raises(ConfigError, match="without --folder"):
                await sandbox.snapshot(str(folder / "new"))
        with pytest.raises(ConfigError, match="without --folder"):
            await bare.start(Spec(layers=(str(folder / "layer"),)))
        for path in [*outer, f"{folder}/half.part/d", f"{folder}/missing"]:
            for spec in (Spec(root=path), Spec(layers=(str(folder / "layer"), path))):
                with pytest.raises(ConfigError):
                    await remote.start(spec)
        async with await remote.start(Spec(layers=(str(folder / "layer"),))) as sandbox:
            for path in [*(f"{p}/new" for p in outer), f"{folder}/..", f"{folder}/layer/new", f"{folder}/a.part"]:
                with pytest.raises(ConfigError, match="must be named"):
                    await sandbox.snapshot(path)
            assert await sandbox.snapshot(f"{folder}/layer/../new") == str(folder / "new")
        await bare.close()
        await remote.close()
    assert sorted(os.listdir(folder)) == ["half.part", "layer", "new"] and os.listdir(outside) == []


@pytest.mark.usefixtures("local")
async def test_the_program(tmp_path):
    """python -m jaxagent.sandbox.worker, killed hard under a running command."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "jaxagent.sandbox.worker", f"--token_file={tmp_path / 'token'}", "--port=0"]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("sandbox back end: namespaces")
        url = process.stdout.readline().split()[-1]
        remote = Remote([url], TOKEN)
        sandbox = await remote.start(Spec())
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
        running = asyncio.create_task(sandbox.run("sleep 100", 100, 100))
        await asyncio.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await running
        await remote.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    missing = subprocess.run([*command[:3], "--token_file=/nonexistent"], cwd=root, capture_output=True, text=True)
    assert missing.returncode == 2 and "nonexistent" in missing.stderr
