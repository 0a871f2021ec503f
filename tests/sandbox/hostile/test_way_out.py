"""Programs that abuse the open port: nothing but the target is reached, and nobody but the sandbox itself suffers."""

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios

import pytest

from jaxagent.sandbox import relay
from jaxagent.sandbox.base import MIB, Limits, Spec
from tests.sandbox.hostile.host import Host
from tests.sandbox.test_port import PYTHON, Server, echo, inside

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the programs inside need /usr/bin/python3")
SPEC = Spec(limits=Limits(memory_bytes=256 * MIB, disk_bytes=32 * MIB, processes=64))


def addresses_of_host():
    """Those that a program might guess, and those that this host really has."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: which address would it come from?
        return [probe.getsockname()[0]]
    return []


REACH = """
reached = []
for host in HOSTS:
    for other in PORTS:
        s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        s.settimeout(3)
        try:
            s.connect((host, other)); reached.append((host, other))
        except OSError: pass
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as u:
            try: u.sendto(b"x", (host, other))
            except OSError: pass
for name in NAMES:
    with socket.socket(socket.AF_UNIX) as s:
        try: s.connect(chr(0) + name); reached.append(name)
        except OSError: pass
try: reached.append(socket.getaddrinfo("example.com", 80))
except OSError: pass
print(reached)
"""


async def test_nothing_else_is_reached(backend):
    """Not the target's own address, no other port or address, no other sandbox's port, no abstract socket."""
    with contextlib.closing(Host()) as bait:
        async with (
            Server(echo) as server,
            Server(echo) as other_server,
            await backend.start(SPEC) as sandbox,
            await backend.start(SPEC) as other,
        ):
            assert await sandbox.open_port(8765, server.target) == 8765
            assert await other.open_port(8766, other_server.target) == 8766
            ports = [server.target[1], other_server.target[1], 8766, bait.tcp.getsockname()[1], 22]
            ports += [bait.udp.getsockname()[1]]
            hosts = ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::ffff:127.0.0.1", "10.0.2.2", "169.254.169.254"]
            hosts += addresses_of_host()
            program = f"HOSTS, PORTS, NAMES = {hosts}, {ports}, [{bait.abstract_name!r}]\n{REACH}"
            assert await inside(sandbox, 8765, program) == "[]\n"
            through = "s = talk(); s.sendall(b'x'); s.shutdown(socket.SHUT_WR); print(all_of(s))"
            assert await inside(sandbox, 8765, through) == "b'xend'\n"
            assert other_server.most == 0 and server.most == 1
            # A request through the port cannot name another place: what goes in is only bytes to the target.
            proxy = "s = talk(); s.sendall(b'CONNECT 127.0.0.1:%d\\r\\n\\r\\n'); s.shutdown(1); print(all_of(s))"
            assert "CONNECT" in await inside(sandbox, 8765, proxy % bait.tcp.getsockname()[1])
        assert bait.visitors() == []


async def test_the_listening_socket_is_nobodys(backend):
    """No process inside has it, and none can listen in its place, whoever it is."""
    for uid in (1000, 0):
        async with Server(echo) as server, await backend.start(Spec(uid=uid)) as sandbox:
            await sandbox.run("sleep 1000 &", 10, 100)  # a process from before it was opened
            await sandbox.open_port(8765, server.target)
            sockets = "for fd in /proc/[0-9]*/fd/*; do readlink $fd; done 2>/dev/null | grep -c socket:"
            assert (await sandbox.run(sockets, 10, 100)).output == b"0\n"
            own = "import os; own = '/proc/self/fd/'; print(*[n for n in os.listdir(own) if os.path.exists(own + n)])"
            assert await inside(sandbox, 8765, own) == "0 1 2\n"
            first = "for fd in `seq 3 40`; do (exec 3<>/proc/1/fd/$fd) 2>/dev/null && echo $fd; done; echo none"
            assert (await sandbox.run(first, 10, 1000)).output == b"none\n"
            steal = """
for family, place in ((2, "127.0.0.1"), (2, "0.0.0.0"), (10, "::")):
    for option in (2, 15):  # SO_REUSEADDR, SO_REUSEPORT
        s = socket.socket(family)
        s.setsockopt(socket.SOL_SOCKET, option, 1)
        try: s.bind((place, 8765)); s.listen(); print("stolen", family, place, option)
        except OSError as e: print(e.errno)
"""
            assert await inside(sandbox, 8765, steal) == "98\n" * 6
            await sandbox.stop_processes()  # the port stays, since it is no process's
            through = "s = talk(); s.sendall(b'x'); s.shutdown(1); print(all_of(s))"
            assert await inside(sandbox, 8765, through) == "b'xend'\n"


async def test_more_connections_than_there_may_be(backend):
    """They wait; once some have ended the next ones come through, and this process has its descriptors back."""

    full = asyncio.Event()

    async def hold(reader, writer):
        if server.open == relay.MOST_CONNECTIONS:
            full.set()
        await full.wait()
        await echo(reader, writer)

    server = Server(hold)
    async with server, await backend.start(SPEC) as sandbox:
        await sandbox.open_port(8765, server.target)
        before = len(os.listdir("/proc/self/fd"))
        many = "many = [talk() for _ in range(100)]\nfor s in many: s.sendall(b'x')\n"
        many += "print([s.recv(1) for s in many[:64]] == [b'x'] * 64)"
        assert await inside(sandbox, 8765, many) == "True\n"
        await server.none_open()
        assert server.most == relay.MOST_CONNECTIONS
        quick = """
import struct
for i in range(200):
    s = talk(); s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); s.close()  # reset at once
s = talk(); s.sendall(b"x"); s.shutdown(1); print(all_of(s))
"""
        assert await inside(sandbox, 8765, quick) == "b'xend'\n"
        await server.none_open()
        async with asyncio.timeout(30):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)
        assert len(sandbox._relay._tasks) == 1  # that accepts


@pytest.mark.parametrize("deaf", ["client", "server"])
async def test_whoever_does_not_read_stops_the_other(backend, deaf):
    """What is under way stays little on this side, and a second connection is not held up."""
    asked, sent, done = 256 * MIB, [0], asyncio.Event()

    async def pour(reader, writer):
        if await reader.readexactly(1) == b"e":
            return await echo(reader, writer)
        if deaf == "server":
            return await done.wait()
        while sent[0] < asked:
            writer.write(bytes(MIB))
            await writer.drain()
            sent[0] += MIB

    async with Server(pour) as server, await backend.start(SPEC) as sandbox:
        await sandbox.open_port(8765, server.target)
        program = "s = talk(); s.sendall(b'd'); s.settimeout(1.0); n = 0; data = bytes(1 << 20)\n"
        if deaf == "server":
            program += f"try:\n  while n < {asked}: n += s.send(data)\nexcept TimeoutError: pass\n"
        else:
            program += "time.sleep(1.0)\n"
        program += "with talk() as t: t.sendall(b'ebesides'); t.shutdown(1); print(n, all_of(t), flush=True)\n"
        n, _, besides = (await inside(sandbox, 8765, program + "time.sleep(1.0)")).partition(" ")
        done.set()
        assert besides == "b'besidesend'\n"
        assert 0 < max(int(n), sent[0]) < asked / 16  # what the kernel's own buffers hold
    await server.none_open()


async def test_what_a_server_said_before_it_reset_arrives(backend):
    """Though the client inside has not read it yet."""

    acknowledged = []

    async def reset(reader, writer):
        sock, unsent = writer.get_extra_info("socket"), array.array("i", [0])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.write(await reader.readexactly(1) * MIB)
        await asyncio.sleep(0.3)
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, unsent)
        acknowledged.append(MIB - unsent[0] - writer.transport.get_write_buffer_size())
        writer.transport.abort()

    async with Server(reset) as server, await backend.start(SPEC) as sandbox:
        await sandbox.open_port(8765, server.target)
        program = "s = talk(); s.sendall(b'x'); time.sleep(1.0); print(len(all_of(s)))"
        assert await inside(sandbox, 8765, program) == f"{acknowledged[0]}\n" and acknowledged[0] > 2**17


async def test_one_byte_at_a_time(backend):
    async with Server(echo) as server, await backend.start(SPEC) as sandbox:
        await sandbox.open_port(8765, server.target)
        program = "s = talk(); s.setsockopt(6, 1, 1)\n"  # TCP_NODELAY
        program += "for i in range(300): s.sendall(bytes([i % 256])); assert s.recv(1) == bytes([i % 256])\n"
        assert await inside(sandbox, 8765, program + "s.shutdown(1); print(all_of(s))") == "b'end'\n"


async def test_what_is_no_listening_socket_is_refused():
    """Should process 1 itself be the agent's: only the socket that was asked for is taken, and none stays open."""

    def pair(family=socket.AF_UNIX, listening=False, address=None):
        made = socket.socket(family)
        if address:
            made.bind(address)
        if listening:
            made.listen()
        return made.detach()

    before = len(os.listdir("/proc/self/fd"))
    wrong = [
        [],
        [os.open("/dev/null", os.O_RDONLY)],
        [pair()],
        [pair(socket.AF_INET)],
        [pair(socket.AF_INET, True, ("127.0.0.2", 0))],
        [pair(socket.AF_INET, True, ("127.0.0.1", 0))],  # another port
    ]
    for fds in wrong:
        with pytest.raises(relay.SandboxError, match="the sandbox sent"):
            relay.listener(fds, 8765)
        relay.close_all(fds)
    assert len(os.listdir("/proc/self/fd")) == before
