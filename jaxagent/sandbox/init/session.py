"""What all requests share: the connection, the processes, the terminals, and the one shell."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import termios
import time

from jaxagent.sandbox.init.config import Config
from jaxagent.sandbox.init.host import Host, HostGone
from jaxagent.sandbox.init.processes import Processes, reset_child
from jaxagent.sandbox.init.terminals import OLD_CHANNELS, Terminals, count_terminals

TERMINAL_TIMEOUT_S, TERMINAL_POLL_S = 5.0, 0.05
NO_TERMINAL = "cannot start a shell, since the host is out of terminals (raise kernel.pty.max there)"
SHELLS = (
    ("/bin/bash", ["bash", "--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i"]),
    ("/usr/bin/bash", ["bash", "--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i"]),
    ("/bin/sh", ["sh", "-i"]),
)


class Session:
    """The state of a sandbox between two requests."""

    def __init__(self, host: Host, config: Config) -> None:
        self.host = host
        self.processes = Processes()
        self.terminals = Terminals()
        self.last_status = 0  # of the last command, which `$?` shows to the next one
        self._config = config
        self.shell = 0  # process id of the shell; 0 before there was one

    def wait(self, fds: dict[int, int], end: float) -> dict[int, int]:
        """Polls {fd: events} and the connection until `end`; returns {fd: events} that happened.

        Raises:
          HostGone: the host closed the connection.
        """
        poll = select.poll()
        poll.register(self.host.incoming, select.POLLRDHUP)
        for fd, events in fds.items():
            if fd >= 0:
                poll.register(fd, events)
        end = min(end, self.terminals.next_drain())
        timeout = None if end == float("inf") else max(0.0, end - time.monotonic()) * 1000
        happened = dict(poll.poll(timeout))
        if happened.get(self.host.incoming, 0) & (select.POLLHUP | select.POLLERR | select.POLLRDHUP):
            raise HostGone
        return happened

    def kill_all(self) -> None:
        """Ends every process of the sandbox; the next command starts a new shell."""
        self.processes.kill_all()
        self.terminals.close()

    def kill_others(self, spared: set[tuple[int, int]]) -> None:
        """Ends every process but those of `spared`, {(pid, start)}, which are stopped."""
        self.processes.kill_others(spared)
        self.terminals.close_shell()

    def ensure_shell(self) -> None:
        """A shell that runs and a channel for the output, whatever the agent's processes hold.

        Where the host itself has no terminal left, it waits for other sandboxes to give theirs back.

        Raises:
          OSError: neither helps.
          HostGone: the host closed the connection.
        """
        end = time.monotonic() + TERMINAL_TIMEOUT_S
        while True:
            try:
                return self._try_shell()
            except OSError as failure:
                if failure.errno != errno.ENOSPC or count_terminals() > OLD_CHANNELS + 2:
                    break
                if time.monotonic() > end:
                    raise OSError(errno.ENOSPC, NO_TERMINAL) from failure
            self.wait({}, time.monotonic() + TERMINAL_POLL_S)
        self.kill_all()
        return self._try_shell()

    def _try_shell(self) -> None:
        if not self.processes.runs(self.shell):
            path = self.terminals.open_shell()
            self.shell = self.processes.fork()
            if self.shell == 0:
                self._become_shell(path)
        self.terminals.open_channel()

    def _become_shell(self, path: str) -> None:
        """In the child: never returns."""
        try:
            reset_child()
            os.setsid()
            fd = os.open(path, os.O_RDWR)
            fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
            for target in range(3):
                os.dup2(fd, target)
            if fd > 2:
                os.close(fd)
            try:
                os.chdir(self._config.directory)
            except OSError:
                os.chdir("/")
            for program, arguments in SHELLS:
                if os.path.exists(program):
                    os.execve(program, arguments, self._config.environment)
        finally:
            os._exit(127)
