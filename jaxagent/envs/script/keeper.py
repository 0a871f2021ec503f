"""The small parent of an agent script: when that has ended, or nobody wants it any more, none of its children lives.

    python -I keeper.py COMMAND...        its standard input is a pipe that stays open as long as the script is wanted

Detached children (setsid, a double fork) have no parent but this process, which is their subreaper, and are found by
their line of parents. It exits with the command's status, 128 + the number of the signal that killed it, or 127 where
it cannot be started. Nothing of the package is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
PATIENCE_S = 10.0  # for what cannot be killed: another user's process


def main(argv: list[str]) -> int:
    """Runs the command to its end."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux: children of the same group are found all the same
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as failure:
        print(failure, file=sys.stderr)
        return 127
    threading.Thread(target=watch, args=(child.pid,), daemon=True).start()
    pid, status = 0, 0
    while pid != child.pid:  # the others are orphans of its
        pid, status = os.wait()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        kill_tree(child.pid)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            break
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def watch(child: int) -> None:
    """Kills everything when the pipe has an end."""
    os.read(0, 1)
    kill_tree(child)


def kill_tree(child: int) -> None:
    """Kills the group of the command, and all whose line of parents leads here."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    numbers = [name for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    parents = dict(filter(None, map(parent, numbers)))
    below = {os.getpid()}
    while more := {pid for pid, of in parents.items() if of in below} - below:
        below |= more
    for pid in below - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def parent(pid: str) -> tuple[int, int] | None:
    """(a process, its parent); None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(pid), int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
