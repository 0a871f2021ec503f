"""The small parent of an agent script: when that has ended, or nobody wants it any more, none of its children lives.

    python -I keeper.py COMMAND...        its standard input is a pipe that stays open as long as the script is wanted
    python -I keeper.py --while=FOLDER COMMAND...     the pipe is FOLDER/wanted, and the command has the standard input;
                                                      the folder goes with the last process

Detached children (setsid, a double fork) have no parent but this process, their subreaper. Its exit status is the
command's, 128 + the number of the signal that killed it, or 127 where it does not start. It imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
PATIENCE_S = 10.0  # for what cannot be killed: another user's process


def main(argv: list[str]) -> int:
    """Runs the command to its end."""
    folder, wanted = "", 0
    if argv[0].startswith("--while="):
        folder = argv.pop(0).partition("=")[2]
        wanted = os.open(f"{folder}/wanted", os.O_RDONLY | os.O_NONBLOCK)  # also where nobody has it open any more
        os.set_blocking(wanted, True)
        os.setsid()  # an interrupt of the terminal is for who wants the command
    with contextlib.suppress(AttributeError, OSError):  # elsewhere than on Linux only its process group is found
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(argv, stdin=None if folder else subprocess.DEVNULL, start_new_session=True)
    except OSError as failure:
        print(failure, file=sys.stderr)
        return 127
    threading.Thread(target=lambda: (os.read(wanted, 1), kill_tree(child.pid)), daemon=True).start()
    pid, status = 0, 0
    while pid != child.pid:  # the others are orphans of its
        pid, status = os.wait()
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            kill_tree(child.pid)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.005)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill_tree(child: int) -> None:
    """Kills the group of the command, and all whose line of parents leads here."""
    parents, below = {}, {os.getpid()}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    for kill, pid in [(os.killpg, child), *((os.kill, pid) for pid in below - {os.getpid()})]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
