"""A sandbox on this host, reached by frames over a socket to the program inside it (`init_program.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxagent.sandbox import snapshot, wire
from jaxagent.sandbox.base import (
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    CommandResult,
    Entry,
    FileError,
    Sandbox,
    SandboxClosed,
    SandboxError,
    Spec,
)
from jaxagent.sandbox.relay import MOST_PORTS, Relay, check_port, close_all, listener

LATE_S = 10.0  # what the inside may take beyond a deadline before the sandbox is given up
FILE_TIMEOUT_S = 60.0
SNAPSHOT_TIMEOUT_S = 600.0
END_TIMEOUT_S = 2.0  # for the inside to end by itself
KILL_TIMEOUT_S = 20.0
MAX_STDERR_BYTES = MAX_GAPS_CHARS = 4096
OOM_SCORE = 500  # of a sandbox's process 1; its programs' is higher still
MOST_DESCRIPTORS = 4  # taken from one message; the kernel drops the others
READ_BYTES = 2**18
DIED, CLOSED = "the sandbox died", "the sandbox is closed"


class _Frames:
    """The host's end of the socket: sends a request, and gets the frame that answers it."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.is_lost = False
        self._socket = sock
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[str, int, bytes] | None] | None = None
        self._descriptors: list[int] | None = None
        asyncio.get_running_loop().add_reader(sock, self._read)

    async def ask(self, data: bytes, descriptors: list[int] | None = None) -> tuple[str, int, bytes]:
        """Sends bytes and waits for a frame: its kind, number and data.

        Args:
          descriptors: those that come with the answer are added to it, and the caller closes them; others are dropped.

        Raises:
          SandboxClosed: the other end is gone.
        """
        loop = asyncio.get_running_loop()
        self._answer, self._descriptors = loop.create_future(), descriptors
        try:
            if not self.is_lost:
                await loop.sock_sendall(self._socket, data)
                if (answer := await self._answer) is not None:
                    return answer
        except OSError as failure:
            raise SandboxClosed(DIED) from failure
        finally:
            self._descriptors = None
        raise SandboxClosed(DIED)

    def lose(self) -> None:
        """Ends the connection: who waits for an answer gets an error."""
        self.is_lost = True
        asyncio.get_running_loop().remove_reader(self._socket)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever sends meanwhile sees it
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def close(self) -> None:
        """Frees the socket, after `lose`."""
        self._socket.close()

    def _read(self) -> None:
        # Without room for descriptors, the kernel drops them.
        space = 0 if self._descriptors is None else socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
        try:
            data, control, _, _ = self._socket.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, control = b"", []
        if self._descriptors is not None:
            self._descriptors += wire.descriptors(control)
        self._buffer += data
        if not data or not self._take_frames():
            self.lose()

    def _take_frames(self) -> bool:
        """Gives complete frames to whoever waits. False where one is too large."""
        while len(self._buffer) >= wire.HEADER.size:
            size, kind, number = wire.HEADER.unpack_from(self._buffer)
            if size > wire.MAX_FRAME_BYTES:
                return False
            end = wire.HEADER.size + size
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[wire.HEADER.size : end])
            del self._buffer[:end]
            if self._answer is not None and not self._answer.done():
                self._answer.set_result((chr(kind), number, body))
        return True


class LocalSandbox(Sandbox):
    """A sandbox on this host, behind the socket of the program inside.

    Args:
      process, sock, side: as `spawn` gives them.
      on_closed: called once when all of it has ended.
      remove: called in a thread before the process is waited for.
      oom_kills: what `Sandbox.oom_kills` returns while it lives.
      own_network: False where it has the host's, in which ports may be taken: `open_port` then takes any free one.
    """

    def __init__(
        self,
        spec: Spec,
        process: subprocess.Popen,
        sock: socket.socket,
        side: socket.socket,
        on_closed: Callable[[], None],
        remove: Callable[[], None] | None,
        oom_kills: Callable[[], int | None],
        own_network: bool,
    ):
        self._spec, self._process, self._own_network = spec, process, own_network
        self._relay, self._frames = Relay(), _Frames(sock)
        self._on_closed, self._remove, self._count_oom_kills = on_closed, remove, oom_kills
        self._oom_kills: int | None = None  # at the end
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task | None = None
        self._number = 0
        self._side: socket.socket | None = side
        self._upper = -1

    async def begin(self, directives: bytes, timeout_s: float, keeps_layers: bool) -> tuple[str, ...]:
        """Tells the program inside what to make, and waits until it is ready; closed where it raises SandboxError.

        Returns:
          protections that it could not make, in words.
        """
        mortal = _make_mortal(self._process.pid)  # before it reads, so before any other process is there
        try:
            async with asyncio.timeout(timeout_s):
                answer, _, body = await self._frames.ask(directives)
        except BaseException as failure:
            text = _stderr(self._side) if self._side is not None and not keeps_layers else ""
            await self.close()
            if isinstance(failure, TimeoutError | SandboxClosed):
                why = f"no answer in {timeout_s:g} s" if isinstance(failure, TimeoutError) else "it ended"
                raise SandboxError(f"the sandbox did not start: {text or why}") from failure
            raise
        if answer != "H":
            await self.close()
            raise SandboxError(f"the sandbox did not start: {_error_text(body)}")
        if not keeps_layers and self._side is not None:
            self._side.close()
            self._side = None
        return (*mortal, *filter(None, body.decode("utf-8", "replace")[:MAX_GAPS_CHARS].split("; ")))

    async def run(self, command: str, deadline_s: float, output_bytes: int) -> CommandResult:
        """Asks the program inside to run it in the shell (R)."""
        keep, flood = min(output_bytes, MAX_OUTPUT_BYTES), self._spec.limits.flood_bytes
        request = wire.run_request(command, deadline_s, keep, flood, secrets.token_hex(8))
        begin = time.monotonic()
        answer = await self._ask("R", request, deadline_s + LATE_S)
        return wire.parse_result(answer, time.monotonic() - begin)

    async def execute(
        self,
        argv: Sequence[str],
        deadline_s: float,
        output_bytes: int,
        env: Mapping[str, str] | None = None,
        directory: str = "",
    ) -> CommandResult:
        """Asks the program inside for a fresh process (X), with the spec's environment below `env`."""
        keep, flood = min(output_bytes, MAX_OUTPUT_BYTES), self._spec.limits.flood_bytes
        env = {**self._spec.environment(), **(env or {})}
        request = wire.execute_request(argv, env, directory or self._spec.directory, deadline_s, keep, flood)
        begin = time.monotonic()
        answer = await self._ask("X", request, deadline_s + LATE_S)
        return wire.parse_result(answer, time.monotonic() - begin)

    async def read(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Asks the program inside for the file (G)."""
        data = struct.pack("<Q", min(max_bytes, MAX_FILE_BYTES)) + wire.text(_path(path))
        return await self._ask("G", data, FILE_TIMEOUT_S, repr(path))

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Has the program inside write the file (P)."""
        if len(data) > MAX_FILE_BYTES:
            raise FileError(f"{path}: {len(data)} bytes are more than the {MAX_FILE_BYTES} that one write takes")
        name = wire.text(_path(path))
        await self._ask("P", struct.pack("<II", mode, len(name) - 1) + name + data, FILE_TIMEOUT_S, repr(path))

    async def list(self, path: str, max_entries: int = 10_000) -> list[Entry]:
        """Asks the program inside what is there (L)."""
        data = struct.pack("<I", max_entries) + wire.text(_path(path))
        return wire.parse_entries(await self._ask("L", data, FILE_TIMEOUT_S, repr(path)))

    async def stop_processes(self, spared: Sequence[tuple[int, int]] = ()) -> None:
        """Has the program inside kill them (K)."""
        await self._ask("K", b"".join(struct.pack("<IQ", *process) for process in spared), FILE_TIMEOUT_S)

    async def snapshot(self, directory: str) -> str:
        """Copies the upper directory, which the launcher has handed out, in a thread."""
        if self._side is None:
            raise SandboxError("this back end has no copy-on-write layer to keep")
        await self.stop_processes()
        if self._upper < 0:
            self._upper = snapshot.receive_directory(self._side)
        stop, upper, most = threading.Event(), os.dup(self._upper), self._spec.limits.disk_bytes
        saving = asyncio.create_task(asyncio.to_thread(snapshot.save, upper, directory, most, stop))
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                return await asyncio.shield(saving)
        except (TimeoutError, asyncio.CancelledError) as failure:
            stop.set()
            with contextlib.suppress(SandboxError):
                await saving  # threads cannot be cancelled; this one ends soon and removes what it made
            if isinstance(failure, TimeoutError):
                raise SandboxError(f"the sandbox could not be kept in {SNAPSHOT_TIMEOUT_S:g} s") from failure
            raise

    async def open_port(self, port: int, target: tuple[str, int]) -> int:
        """Takes the listening socket from inside (O), and relays what comes to it."""
        request, about = struct.pack("<H", check_port(port) if self._own_network else 0), f"port {port}"
        if self._relay.ports == MOST_PORTS:
            raise SandboxError(f"{about}: a sandbox may have {MOST_PORTS} open ports, and all of them are in use")
        fds: list[int] = []
        try:
            answer = await self._ask("O", request, FILE_TIMEOUT_S, about, SandboxError, fds)
            port_inside = int.from_bytes(answer[:2], "little")
            listening = listener(fds, port_inside)
        finally:
            close_all(fds)
        if self._closing is not None:
            listening.close()
            raise SandboxClosed(CLOSED)
        self._relay.serve(listening, target)
        return port_inside

    async def oom_kills(self) -> int | None:
        """What its control group counts; after the sandbox has ended, what the group had counted by then."""
        if self._closing is None:
            return self._count_oom_kills()
        await asyncio.shield(self._closing)
        return self._oom_kills

    @property
    def pid(self) -> int:
        """Process id of the outermost process, on the host."""
        return self._process.pid

    @property
    def is_closed(self) -> bool:
        """True once closing has begun."""
        return self._closing is not None

    async def lives(self) -> bool:
        """Whether the sandbox is open and its connection still stands."""
        return self._closing is None and not self._frames.is_lost

    async def close(self) -> None:
        """Ends the processes; whoever is cancelled while he waits does not stop that."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)  # closing goes on, whoever stops waiting for it

    async def _ask(
        self,
        kind: str,
        data: bytes,
        timeout_s: float,
        about: str = "",
        refused: type[SandboxError] = FileError,
        descriptors: list[int] | None = None,
    ) -> bytes:
        """Sends one request and returns the data of its answer.

        Args:
          about: what is asked for; with it the inside may refuse, else the sandbox is closed.
          refused: raised then.
          descriptors: those that come with the answer are added to it, also where this raises.
        """
        async with self._lock:
            if self._closing is not None or self._frames.is_lost:
                raise SandboxClosed(CLOSED if self._closing is not None else DIED)
            self._number += 1
            try:
                async with asyncio.timeout(timeout_s):
                    request = wire.frame(kind, data, self._number)
                    answer, number, body = await self._frames.ask(request, descriptors)
            except BaseException as failure:  # a cancelled operation leaves an unknown state inside
                await self.close()
                if isinstance(failure, TimeoutError):
                    raise SandboxClosed(f"the sandbox did not answer in {timeout_s:g} s and was closed") from failure
                raise
        if answer == "D" and number == self._number:
            return body
        message = _error_text(body)
        if answer == "E" and about and number == self._number:
            raise refused(f"{about}: {message}")
        await self.close()
        raise SandboxClosed(message)

    async def _close(self) -> None:
        self._frames.lose()
        await self._relay.close()
        if self._remove is not None:  # what lives elsewhere, in an engine, ends first
            await asyncio.to_thread(self._remove)
        await end_process(self._process)
        self._frames.close()
        if self._side is not None:
            self._side.close()
        if self._upper >= 0:
            os.close(self._upper)
            self._upper = -1
        self._oom_kills = self._count_oom_kills()  # while the control group is still this sandbox's
        self._on_closed()


def _path(path: str) -> str:
    if not path.startswith("/") or "\0" in path or len(os.fsencode(path)) > 4096:
        raise FileError(f"{path!r} must be an absolute path of at most 4096 bytes")
    return path


def _error_text(body: bytes) -> str:
    return body[4:].decode("utf-8", "replace")[:500] or "the sandbox sent a malformed answer"


def spawn(
    argv: Sequence[str], executable: str | None, user: int | None, env: Mapping[str, str], keeps_layers: bool
) -> tuple[subprocess.Popen, socket.socket, socket.socket]:
    """Starts the outermost process: it, the socket of its standard input and output, and that of its standard error.

    Args:
      user: user and group id to start it as.
      keeps_layers: standard error is for the descriptor of its upper directory; else it is for an error text.

    Raises:
      SandboxError: it does not start.
    """
    mine, theirs = socket.socketpair()
    side, other_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM if keeps_layers else socket.SOCK_STREAM)
    try:
        process = subprocess.Popen(
            list(argv),
            executable=executable,
            stdin=theirs,
            stdout=theirs,
            stderr=other_side,
            cwd="/",
            env=dict(env),  # /proc/1/environ shows what is put here
            start_new_session=True,
            **({} if user is None else {"user": user, "group": user, "extra_groups": []}),
        )
    except OSError as failure:
        mine.close(), side.close()
        raise SandboxError(f"{executable or argv[0]} does not start: {failure}") from failure
    finally:
        theirs.close(), other_side.close()
    side.setblocking(False)
    return process, mine, side


def _make_mortal(pid: int) -> tuple[str, ...]:
    """Where the host's memory is full, a sandbox ends before the run does. Returns what cannot be done, in words."""
    path = Path(f"/proc/{pid}/oom_score_adj")
    try:
        path.write_text(str(max(OOM_SCORE, int(path.read_text(encoding="utf-8")))), encoding="utf-8")
    except OSError as failure:
        return (f"sandboxes do not die for memory before the run does (oom_score_adj: {failure.strerror})",)
    return ()


def _stderr(side: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return " ".join(side.recv(MAX_STDERR_BYTES).decode("utf-8", "replace").split())
    return ""


async def end_process(process: subprocess.Popen) -> None:
    """Waits for the outermost process, which ends after everything inside; kills it where that takes too long."""
    if process.poll() is not None:
        return
    try:
        watch = os.pidfd_open(process.pid)
    except OSError:  # ended in between
        process.wait(KILL_TIMEOUT_S)
        return
    loop, has_exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(watch, has_exited.set)
    try:
        for timeout_s, then in ((END_TIMEOUT_S, signal.SIGKILL), (KILL_TIMEOUT_S, None)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await has_exited.wait()
                    break
            if then is not None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, then)  # a session of its own, so a group of its own
                process.kill()
    finally:
        loop.remove_reader(watch)
        os.close(watch)
        process.poll()
