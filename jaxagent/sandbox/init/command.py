"""A command in the sandbox's shell. The protocol's text is in `wire.py`, the reasons in `native/serve.c`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import time

from jaxagent.sandbox.init.output import Output
from jaxagent.sandbox.init.processes import KILLED
from jaxagent.sandbox.init.session import Session
from jaxagent.sandbox.init.terminals import set_modes

TIMED_OUT, SHELL_LOST, FLOODED = 1, 2, 4
REQUEST = struct.Struct("<dQQ")  # deadline_s, bytes to keep, flood bytes
NONCE_CHARACTERS = 16
GRACE_S = 0.3  # between ^C, killing the foreground and killing everything
SHORT_PAUSE_S, LONG_PAUSE_S = 0.002, 0.05  # of a channel that nobody has opened
RECENT_BYTES = 8192  # of what the shell says, in which its status is looked for


def run_in_shell(session: Session, number: int, data: bytes) -> None:
    """Answers R. Raises OSError where no shell starts, and HostGone."""
    session.ensure_shell()
    command = Command(session, data)
    session.host.write("D", number, command.run())


class Command:
    """One command line, from its first byte until its status is known.

    The line ends by printing the nonce and the status to the shell's terminal. A command that is late, or prints too
    much, is ended in three steps: ^C, as a person would type it; SIGKILL for what is in the foreground; SIGKILL for
    every process of the sandbox. After each of the first two the shell is asked for its status again.
    """

    def __init__(self, session: Session, data: bytes) -> None:
        deadline_s, keep, self._flood = REQUEST.unpack_from(data)
        nonce = data[REQUEST.size : REQUEST.size + NONCE_CHARACTERS]
        word = data[REQUEST.size + NONCE_CHARACTERS + 1 : -1]
        self._session, self._terminals = session, session.terminals
        self._output = Output(keep)
        self._flags = 0
        self._status: int | None = None
        self._marker, self._recent = b"\n" + nonce + b":", b""
        self._ask_status = b"printf '\\n%s:%s\\n' " + nonce + b' "$?"\n'
        self._unsent = self._line(word)
        self._steps_taken = 0
        self._next_step_at = time.monotonic() + deadline_s
        self._pause_s, self._listen_at = SHORT_PAUSE_S, 0.0

    def _line(self, word: bytes) -> bytes:
        last = self._session.last_status
        restore = b"(exit %d); " % last if last else b""  # $? of the last command, as at a terminal
        channel = self._terminals.channel_path.encode()
        return restore + b"eval " + word + b" </dev/null >" + channel + b" 2>&1;" + self._ask_status

    def run(self) -> bytes:
        """Runs it to its end; returns the answer. Raises HostGone."""
        set_modes(self._terminals.shell, with_signals=True)
        while self._status is None:
            happened = self._wait()
            events = happened.get(self._terminals.shell, 0)
            if events & select.POLLOUT:
                self._send()
            if happened.get(self._terminals.channel):
                self._take_output()
            if events & (select.POLLIN | select.POLLHUP):
                self._look_for_status()
            self._look_at_shell()
            if self._status is None and self._is_step_due():
                self._take_step()
        if self._terminals.channel >= 0 and self._output.read(self._terminals.channel):
            self._terminals.replace_channel()
        lost = self._flags & SHELL_LOST
        if lost:
            self._terminals.close_shell()
        self._session.last_status = 0 if lost else self._status
        return self._output.result(self._status, self._flags)

    def _wait(self) -> dict[int, int]:
        self._terminals.drain()
        now, end = time.monotonic(), self._next_step_at
        fds = {self._session.processes.wake: select.POLLIN}
        fds[self._terminals.shell] = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        if now >= self._listen_at:
            fds[self._terminals.channel] = select.POLLIN
        else:
            end = min(end, self._listen_at)
        return self._session.wait(fds, end)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[os.write(self._terminals.shell, self._unsent) :]

    def _take_output(self) -> None:
        if self._output.read(self._terminals.channel):
            self._pause_s = SHORT_PAUSE_S
        else:  # not opened yet, or redirected away for good
            self._listen_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONG_PAUSE_S)

    def _look_for_status(self) -> None:
        """Reads what the shell says: a status, or noise such as job notices."""
        with contextlib.suppress(OSError):
            self._recent = (self._recent + os.read(self._terminals.shell, 4096))[-RECENT_BYTES:]
        _, found, after = self._recent.rpartition(self._marker)
        line, ended, _ = after.partition(b"\n")
        if found and ended and line.isdigit():
            self._status = int(line) & 255

    def _look_at_shell(self) -> None:
        """Where the shell has ended (exit, exec of something that ended, or killed), its status is the command's."""
        processes = self._session.processes
        processes.reap()
        if self._status is None and not processes.runs(self._session.shell):
            self._status = processes.take_status(self._session.shell)
            self._flags |= SHELL_LOST

    def _is_step_due(self) -> bool:
        """Whether the command's time, or the time that it was given to end, is over."""
        if not self._flags and self._output.total > self._flood:
            self._flags, self._next_step_at = FLOODED, time.monotonic()
        return time.monotonic() >= self._next_step_at

    def _take_step(self) -> None:
        """The next of the three steps that end a command."""
        self._flags = self._flags or TIMED_OUT
        self._steps_taken += 1
        if self._steps_taken == 3:  # the shell itself does not answer
            self._session.kill_all()
            self._status = KILLED
            self._flags |= SHELL_LOST
            return
        if self._steps_taken == 2:
            self._kill_foreground()
        set_modes(self._terminals.shell, with_signals=True)
        with contextlib.suppress(OSError):
            os.write(self._terminals.shell, b"\3")
        time.sleep(0.002)
        self._unsent = b"\n" + self._ask_status
        self._next_step_at = time.monotonic() + GRACE_S

    def _kill_foreground(self) -> None:
        with contextlib.suppress(OSError):
            group = struct.unpack("i", fcntl.ioctl(self._terminals.shell, termios.TIOCGPGRP, b"\0" * 4))[0]
            if group > 1:
                os.killpg(group, signal.SIGKILL)
