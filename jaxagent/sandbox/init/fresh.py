"""A program in a fresh process, which no shell of the agent's starts; the kernel says its status."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import struct
import time
import warnings  # noqa: F401  (os.execvpe wants it, when it is too late)

from jaxagent.sandbox.init.command import FLOODED, REQUEST, TIMED_OUT
from jaxagent.sandbox.init.output import Output
from jaxagent.sandbox.init.processes import reset_child
from jaxagent.sandbox.init.session import Session


def run_fresh(session: Session, number: int, data: bytes) -> None:
    """Answers X. Raises OSError where no process can be started, and HostGone."""
    deadline_s, keep, flood = REQUEST.unpack_from(data)
    (count,) = struct.unpack_from("<I", data, REQUEST.size)
    strings = [os.fsdecode(word) for word in data[REQUEST.size + 4 :].split(b"\0")[:-1]]
    directory, argv, variables = strings[0], strings[1 : count + 1], strings[count + 1 :]
    environment = dict(v.split("=", 1) for v in variables)
    output, flags, processes = Output(keep), 0, session.processes
    reading, writing = os.pipe2(os.O_CLOEXEC)
    end = time.monotonic() + deadline_s
    pid = processes.fork()
    if pid == 0:
        _become_program(writing, directory, argv, environment)
    os.close(writing)
    os.set_blocking(reading, False)
    open_end = True
    while processes.runs(pid):
        session.terminals.drain()
        fds = {processes.wake: select.POLLIN}
        if open_end:
            fds[reading] = select.POLLIN
        happened = session.wait(fds, end)
        if happened.get(reading):
            open_end = output.read(reading)
        if happened.get(processes.wake):
            processes.reap()
        if not flags and processes.runs(pid) and (time.monotonic() >= end or output.total > flood):
            flags = TIMED_OUT if time.monotonic() >= end else FLOODED
            end = float("inf")
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
    output.read(reading)
    os.close(reading)
    session.host.write("D", number, output.result(processes.take_status(pid), flags))


def _become_program(writing: int, directory: str, argv: list[str], environment: dict[str, str]) -> None:
    """In the child, never returns: a session of its own, output and errors to the pipe, then the program."""
    code = 126
    try:
        reset_child()
        os.setsid()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        try:
            os.chdir(directory)
        except OSError as failure:
            os.write(2, f"{directory}: {failure.strerror}\n".encode())
            os._exit(126)
        os.execvpe(argv[0], argv, environment)
    except OSError as failure:
        os.write(2, f"{argv[0]}: {failure.strerror}\n".encode())
        code = 127 if failure.errno == errno.ENOENT else 126
    finally:
        os._exit(code)
