"""What all requests share: the connection, the processes, the terminals, and the one shell."""

from __future__ import annotations

import contextlib
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
WATCH_S, IDLE_S = 0.05, 1.0
SOCKETS = "/proc/net/sockstat"
MOST_SOCKETS = 1024  # the kernel charges to nobody what connections hold that nobody has accepted
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
        self.processes = Processes(config.mercy)
        self.terminals = Terminals()
        self.last_status = 0  # of the last command, which `$?` shows to the next one
        self._config = config
        self._watched_at = 0.0
        if os.getpid() == 1 and not config.host_network and not os.access(SOCKETS, os.R_OK):
            config.gaps.append("the number of sockets is not limited: /proc/net/sockstat cannot be read")
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
        pause_s = IDLE_S if end == float("inf") else WATCH_S
        end = min(end, self.terminals.next_drain(), time.monotonic() + pause_s)
        happened = dict(poll.poll(max(0.0, end - time.monotonic()) * 1000))
        if happened.get(self.host.incoming, 0) & (select.POLLHUP | select.POLLERR | select.POLLRDHUP):
            raise HostGone
        self._watch_sockets()
        return happened

    def _watch_sockets(self) -> None:
        """Ends all where there are too many; only where the network is surely the sandbox's own."""
        if os.getpid() != 1 or self._config.host_network or time.monotonic() - self._watched_at < WATCH_S:
            return
        self._watched_at = time.monotonic()
        with contextlib.suppress(OSError), open(SOCKETS, "rb") as file:
            if int(file.readline().split()[2]) > MOST_SOCKETS:
                self.kill_all()

    def kill_all(self) -> bool:
        """Ends every process of the sandbox; the next command starts a new shell. False: some do not end."""
        ended = self.processes.kill_all()
        self.terminals.close()
        return ended

    def kill_others(self, spared: set[tuple[int, int]]) -> bool:
        """Ends every process but those of `spared`, {(pid, start)}, which are stopped. False: some do not end."""
        ended = self.processes.kill_others(spared)
        self.terminals.close_shell()
        return ended

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
