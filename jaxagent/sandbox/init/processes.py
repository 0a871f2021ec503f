"""The processes below this one: starting them, hearing of their end, killing them."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from jaxagent.sandbox.init.system import SUBREAPER, libc, prctl

KILL_TIMEOUT_S = 5.0
KILLED = 137  # 128 + SIGKILL
ROUND_S = 0.0005  # between two rounds of killing
MORE, MOST = 100, 1000  # oom_score_adj: programs die before process 1 does


class Processes:
    """Processes that were started by `fork`, and all others that are left to this one.

    `wake` can be read when one has ended; `reap` then collects their statuses.

    Args:
      mercy: this process's own oom_score_adj, as an open file; -1 where there is none.
    """

    def __init__(self, mercy: int = -1) -> None:
        self._mercy = mercy
        self.wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._statuses: dict[int, int | None] = {}  # of those from `fork`, None while they run
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # to process 1 a signal without a handler is not delivered
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        if os.getpid() != 1:
            prctl(SUBREAPER, 1)

    def fork(self) -> int:
        """fork(2), but where a fork bomb holds every process, all are killed first. The child calls `reset_child`.

        It dies for memory before this process does. It has the number from here, since its own file is root's, as this
        process is not dumpable; and a moment in which it were would be one in which others could enter it.
        """
        own, pid = b"" if self._mercy < 0 else os.pread(self._mercy, 16, 0), -1
        if own:
            os.pwrite(self._mercy, b"%d" % min(int(own) + MORE, MOST), 0)
        try:
            try:
                pid = os.fork()
            except BlockingIOError:
                self.kill_all()
                pid = os.fork()
        finally:
            if pid and own:
                os.pwrite(self._mercy, own, 0)
        if pid:
            self._statuses[pid] = None
        return pid

    def runs(self, pid: int) -> bool:
        """Whether a process from `fork` runs, as far as `reap` has heard; 0 is none."""
        return pid in self._statuses and self._statuses[pid] is None

    def take_status(self, pid: int) -> int:
        """The exit status of a process that has ended, once: 128 + n after signal n."""
        status = self._statuses.pop(pid, None)
        return KILLED if status is None else status

    def reap(self) -> bool:
        """Collects those that have ended. False when there are no others."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            code = os.waitstatus_to_exitcode(status)
            if pid in self._statuses:
                self._statuses[pid] = 128 - code if code < 0 else code

    def kill_all(self) -> bool:
        """Kills every process of the sandbox but this one. False: there are some that do not end."""
        end, ended = time.monotonic() + KILL_TIMEOUT_S, False
        while time.monotonic() < end and not ended:
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                ended = not self.reap()
            else:
                _kill_children()
                ended = not self.reap() and not _kill_children()
            time.sleep(0 if ended else ROUND_S)
        self._forget()
        return ended

    def kill_others(self, spared: set[tuple[int, int]]) -> bool:
        """Kills all but the processes of `spared`, {(pid, start)}, which are stopped: they show, and do nothing.

        False: there are some that do not end.
        """
        left: list[int] = []
        end = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < end:
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGSTOP)  # so that none makes another meanwhile
            left = [pid for pid, keep in _others(spared) if not keep]
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            if not left:
                break
            time.sleep(ROUND_S)
        for pid, keep in _others(spared):
            if keep:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGSTOP)
        self._forget()
        return not left

    def _forget(self) -> None:
        _remove_system_v()
        self._statuses.clear()


def reset_child() -> None:
    """Undoes in a child what it must not pass on to a program: signal handlers."""
    signal.set_wakeup_fd(-1)
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)


def _kill_children() -> bool:
    """One round over the tree below this process, where process 1 is another. False when there was nothing to kill.

    Grandchildren come to this process, the subreaper, when their parents end.
    """
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
            pids = [int(word) for word in file.read().split()]
    except OSError:
        return False
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def _others(spared: set[tuple[int, int]]) -> list[tuple[int, bool]]:
    """(pid, is spared) of every process below this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *fields = file.read().rpartition(b")")[2].split()
            mine = os.getpid() == 1 or int(parent) == os.getpid()
            if int(name) != os.getpid() and state != b"Z" and mine:
                found.append((int(name), (int(name), int(fields[17])) in spared))
    return found


def _remove_system_v() -> None:
    """System V objects outlive their processes. Only where this is process 1 are they surely the sandbox's own."""
    for name, remove in (
        ("shm", lambda number: libc.shmctl(number, 0, None)),
        ("msg", lambda number: libc.msgctl(number, 0, None)),
        ("sem", lambda number: libc.semctl(number, 0, 0)),
    ):
        with (
            contextlib.suppress(OSError, ValueError, IndexError),
            open(f"/proc/sysvipc/{name}", encoding="utf-8") as file,
        ):
            for line in file.readlines()[1:] if os.getpid() == 1 else ():
                remove(int(line.split()[1]))
