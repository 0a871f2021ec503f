"""The one way out: connections to a port inside reach one place outside, both ways, and end with the sandbox."""

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

import pytest

from jaxagent.sandbox import relay, worker
from jaxagent.sandbox.base import SandboxClosed, SandboxError, Spec
from jaxagent.sandbox.remote import Remote
from tests.sandbox.test_remote import TOKEN, workers

PYTHON = Path("/usr/bin/python3")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the clients inside need /usr/bin/python3")
CLIENT = """
import socket, sys, time
def talk(port=int(sys.argv[1]), host="127.0.0.1"):
    return socket.create_connection((host, port), timeout=60)
def all_of(s):
    parts = []
    while part := s.recv(65536):
        parts.append(part)
    return b"".join(parts)
"""


async def inside(sandbox, port, program, deadline_s=60):
    """Runs a client inside; returns what it prints."""
    done = await sandbox.execute([str(PYTHON), "-c", CLIENT + program, str(port)], deadline_s, 100_000)
    return done.output.decode()


class Server:
    """A server outside, on a free port of the loopback; `handle` gets every connection."""

    def __init__(self, handle):
        self._handle, self.open, self.most = handle, 0, 0
        self.ended = asyncio.Condition()

    async def _connected(self, reader, writer):
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            with contextlib.suppress(ConnectionError):
                await self._handle(reader, writer)
        finally:
            writer.close()
            self.open -= 1
            async with self.ended:
                self.ended.notify_all()

    async def none_open(self):
        async with asyncio.timeout(30), self.ended:
            await self.ended.wait_for(lambda: self.open == 0)

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.target = self._server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_):
        self._server.close()


async def echo(reader, writer):
    """Everything back, and its end only after the client's."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"end")
    writer.write_eof()


async def test_both_ways_and_the_end_of_each(anywhere_with_ports):
    """A client that has said all still hears the answer; a server that speaks first is heard."""

    async def greet(reader, writer):
        writer.write(b"hello ")
        await echo(reader, writer)

    async with await anywhere_with_ports.start() as sandbox, Server(greet) as server:
        port = await sandbox.open_port(8765, server.target)
        assert port == 8765 or anywhere_with_ports.name == "plain"
        said = await inside(
            sandbox,
            port,
            "with talk() as s:\n  print(s.recv(6)); s.sendall(b'one'); print(s.recv(3)); s.sendall(b'two')\n"
            "  s.shutdown(socket.SHUT_WR); print(all_of(s))",
        )
        assert said == "b'hello '\nb'one'\nb'twoend'\n"
        much = "import os\nwith talk() as s:\n  s.recv(6); n = 0; data = os.urandom(1 << 22); import threading\n"
        much += "  t = threading.Thread(target=lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR))); t.start()\n"
        much += "  print(all_of(s) == data + b'end')"
        assert await inside(sandbox, port, much) == "True\n"
        await server.none_open()


async def test_it_works_while_a_program_runs_and_ends_with_the_sandbox(anywhere_with_ports):
    """The answer comes bit by bit with silence between; at close the server outside sees the connection's end."""
    seen, gone = [], []

    async def slow(reader, writer):
        seen.append(await reader.readline())
        for word in (b"one\n", b"two\n"):
            await asyncio.sleep(0.3)
            writer.write(word)
        gone.append(await reader.read())

    async with await anywhere_with_ports.start() as sandbox:
        async with Server(slow) as server:
            port = await sandbox.open_port(0, server.target)
            program = "s = talk(); s.sendall(b'ask\\n'); f = s.makefile()\n"
            program += "print(f.readline(), f.readline(), flush=True); time.sleep(1000)"
            running = asyncio.create_task(inside(sandbox, port, program))
            async with asyncio.timeout(30):
                while not seen:
                    await asyncio.sleep(0.01)
            assert server.open == 1 and not running.done()
            await asyncio.sleep(0.8)
            assert server.open == 1 and not gone  # it lives on, however silent
            await sandbox.close()
            with pytest.raises(SandboxClosed):
                await running
            await server.none_open()
            assert seen == [b"ask\n"] and gone == [b""]
        with pytest.raises(SandboxClosed):
            await sandbox.open_port(0, server.target)


async def test_a_killed_client_is_seen_outside_at_once(anywhere_with_ports):
    ends = []

    async def wait(reader, writer):
        writer.write(await reader.read(1))
        ends.append(await reader.read())

    async with await anywhere_with_ports.start() as sandbox, Server(wait) as server:
        port = await sandbox.open_port(0, server.target)
        program = "import os\nready, tell = os.pipe(); pid = os.fork()\n"
        program += "if pid == 0: s = talk(); s.sendall(b'x'); os.write(tell, s.recv(1)); time.sleep(1000)\n"
        program += "print(os.read(ready, 1)); os.kill(pid, 9); os.waitpid(pid, 0)"
        assert await inside(sandbox, port, program) == "b'x'\n"
        await server.none_open()
        assert ends == [b""]


@pytest.mark.parametrize("isolated", ["podman"], indirect=True)
async def test_engines_say_what_to_use_instead(isolated):
    async with await isolated.start() as sandbox:
        with pytest.raises(SandboxError, match="carries no socket: use the namespaces"):
            await sandbox.open_port(8765, ("127.0.0.1", 9))
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"


async def test_ports_that_cannot_be_opened(isolated_with_ports):
    """The reason is one line, and the sandbox goes on; no descriptor stays on this side."""
    async with await isolated_with_ports.start() as sandbox:
        before = len(os.listdir("/proc/self/fd"))
        await sandbox.run("python3 -m http.server 8080 --bind 0.0.0.0 >/dev/null 2>&1 &", 10, 100)
        taken = "until (exec 3<>/dev/tcp/127.0.0.1/8080) 2>/dev/null; do sleep 0.05; done"
        assert (await sandbox.run(taken, 30, 100)).exit_code == 0
        with pytest.raises(SandboxError, match="port 8080: cannot listen inside: Address already in use"):
            await sandbox.open_port(8080, ("127.0.0.1", 9))
        for port in (-1, 80, 1023, 65536):
            with pytest.raises(SandboxError, match="from 1024 to 65535, or 0"):
                await sandbox.open_port(port, ("127.0.0.1", 9))
        assert len(os.listdir("/proc/self/fd")) == before
        for _ in range(relay.MOST_PORTS):
            assert await sandbox.open_port(0, ("127.0.0.1", 9)) >= relay.LEAST_PORT
        with pytest.raises(SandboxError, match="all of them are in use"):
            await sandbox.open_port(0, ("127.0.0.1", 9))
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
        await sandbox.close()
        assert len(os.listdir("/proc/self/fd")) < before


def test_a_server_that_is_not_there(isolated_with_ports, caplog):
    """The client's connection ends; the log says why, once."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        target = unused.getsockname()

    async def check(sandbox):
        port = await sandbox.open_port(8765, target)
        program = "for _ in range(3):\n  s = talk()\n  try: print(all_of(s))\n  except ConnectionError: print(b'')"
        assert await inside(sandbox, port, program) == "b''\n" * 3

    with caplog.at_level(logging.WARNING):
        isolated_with_ports(check)
    assert [r.getMessage() for r in caplog.records if "cannot be reached" in r.getMessage()] == [
        f"127.0.0.1:{target[1]}, where a sandbox's port leads, cannot be reached: "
        f"[Errno 111] Connect call failed ('127.0.0.1', {target[1]})"
    ]


async def test_on_a_worker(local):
    """A worker leads ports only where it was told to, whoever has the token."""
    async with Server(echo) as server, workers(local, relay_to=[server.target]) as urls:
        remote = Remote(urls, TOKEN)
        async with await remote.start(Spec()) as sandbox:
            assert await sandbox.open_port(8765, server.target) == 8765
            said = "s = talk(); s.sendall(b'there '); s.shutdown(socket.SHUT_WR); print(all_of(s))"
            assert await inside(sandbox, 8765, said) == "b'there end'\n"
            for host, port in (("127.0.0.1", 22), ("localhost", server.target[1]), ("169.254.169.254", 80)):
                with pytest.raises(SandboxError, match=f"start it with --relay_to={host}:{port}"):
                    await sandbox.open_port(0, (host, port))
            with pytest.raises(SandboxError, match="Address already in use"):
                await sandbox.open_port(8765, server.target)
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
        await server.none_open()
        await remote.close()


def test_places_that_a_worker_may_lead_to(capsys):
    for wrong in ("10.0.0.1", ":80", "10.0.0.1:0", "10.0.0.1:http", "10.0.0.1:65536"):
        assert worker.main(["--token_file=/nonexistent", f"--relay_to={wrong}"]) == 2
        assert f"must be HOST:PORT, got '{wrong}'" in capsys.readouterr().err
    assert worker._place("[::1]:8000") == ("::1", 8000) and worker._place("gateway:8000") == ("gateway", 8000)
