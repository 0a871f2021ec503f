"""Remote workers: the same interface over HTTP, the token, leases, many sandboxes on several workers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.sandbox.base import FileError, Limits, SandboxClosed, SandboxError, Spec
from jaxagent.sandbox.remote import Remote
from jaxagent.sandbox.worker import CLIENT, Worker

TOKEN = "0123456789abcdef-token"


@contextlib.asynccontextmanager
async def workers(backend, count=1, **options):
    options = {"max_sandboxes": 8, "lease_s": 60.0, **options}
    runners, urls = [], []
    for _ in range(count):
        runner = web.AppRunner(Worker(backend, TOKEN, **options).app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield urls
    finally:
        for runner in runners:
            await runner.cleanup()


def test_the_same_interface(places, tmp_path):
    async def main(local):
        async with workers(local) as urls:
            remote = Remote(urls, TOKEN)
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
            with pytest.raises(ConfigError):
                await remote.start(Spec(layers=("/nonexistent",)))
            await remote.close()

    places.run(main(places.backend("namespaces")))


def test_many_on_several_workers(places):
    async def main(local):
        async with workers(local, 3, max_sandboxes=4) as urls:
            remote = Remote([*urls, "http://127.0.0.1:1"], TOKEN)  # nobody listens there
            sandboxes = await asyncio.gather(*[remote.start(Spec()) for _ in range(12)])
            said = await asyncio.gather(*[s.run(f"sleep 0.1; echo {i}", 20, 100) for i, s in enumerate(sandboxes)])
            assert [r.output for r in said] == [b"%d\n" % i for i in range(12)]
            with pytest.raises(SandboxError, match="in use"):
                await remote.start(Spec())
            await sandboxes[0].close()
            again = await remote.start(Spec())
            await asyncio.gather(*[s.close() for s in [*sandboxes, again]])
            await remote.close()

    places.run(main(places.backend("namespaces")))


def test_tokens_and_clients(places):
    async def main(local):
        with pytest.raises(ConfigError):
            Worker(local, "short", 1, 1.0)
        async with workers(local) as urls, aiohttp.ClientSession() as session:
            wrong = Remote(urls, "not the token")
            with pytest.raises(SandboxError, match="token"):
                await wrong.start(Spec())
            await wrong.close()
            remote = Remote(urls, TOKEN)
            sandbox = await remote.start(Spec())
            name = sandbox._url.rsplit("/", 1)[1]
            headers = {"Authorization": f"Bearer {TOKEN}", CLIENT: "somebody else"}
            async with session.post(f"{urls[0]}/sandboxes/{name}/stop", headers=headers) as answer:
                assert answer.status == 410  # a sandbox belongs to its client
            for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": TOKEN + "x", CLIENT: "x"}):
                async with session.get(f"{urls[0]}/health", headers=headers) as answer:
                    assert answer.status == 401
            headers = {"Authorization": f"Bearer {TOKEN}", CLIENT: "x"}
            for body in ("{", "[]", "{}", '{"limits": {"memory": 1}, "layers": []}'):
                async with session.post(f"{urls[0]}/sandboxes", headers=headers, data=body) as answer:
                    assert answer.status in (400, 500) and "error" in await answer.json()
            await sandbox.close()
            await remote.close()

    places.run(main(places.backend("namespaces")))


def test_a_dead_clients_sandboxes_end(places):
    async def main(local):
        async with workers(local, lease_s=0.4) as urls:
            remote = Remote(urls, TOKEN)
            sandbox = await remote.start(Spec())
            slow = await sandbox.run("sleep 1; echo on", 10, 100)  # a long command keeps the lease
            assert slow.output == b"on\n"
            await asyncio.sleep(1.5)
            with pytest.raises(SandboxClosed):
                await sandbox.run("true", 1, 1)
            await remote.close()

    places.run(main(places.backend("namespaces")))


def test_the_program(places, tmp_path):
    """python -m jaxagent.sandbox.worker, killed hard under a running command."""
    places.backend("namespaces")
    (tmp_path / "token").write_text(TOKEN + "\n")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "jaxagent.sandbox.worker", f"--token_file={tmp_path / 'token'}", "--port=0"]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("sandbox back end: namespaces")
        url = process.stdout.readline().split()[-1]

        async def main():
            remote = Remote([url], TOKEN)
            sandbox = await remote.start(Spec())
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
            running = asyncio.create_task(sandbox.run("sleep 100", 100, 100))
            await asyncio.sleep(0.3)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(SandboxClosed):
                await running
            await remote.close()

        places.run(main())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    missing = subprocess.run([*command[:3], "--token_file=/nonexistent"], cwd=root, capture_output=True, text=True)
    assert missing.returncode == 2 and "nonexistent" in missing.stderr
