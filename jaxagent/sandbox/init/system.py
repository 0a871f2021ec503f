"""System calls that Python's standard library does not have."""

from __future__ import annotations

import ctypes
import os
import signal

PDEATHSIG, DUMPABLE, SECCOMP, CAPBSET_DROP, SUBREAPER, NO_NEW_PRIVS, AMBIENT = 1, 4, 22, 24, 36, 38, 47  # of prctl
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE = 1 << 18

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """The result of a call. Raises OSError with the name of what failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(*arguments: int) -> int:
    """prctl(2). Raises OSError."""
    return checked(libc.prctl(*(ctypes.c_ulong(a) for a in [*arguments, 0, 0, 0, 0][:5])), f"prctl {arguments[0]}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2). Raises OSError."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    checked(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), target)


def write_file(path: str, text: str) -> None:
    """Writes a file of /proc or of a control group. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; ends now if `parent` already has.

    Args:
      parent: its process id; 0 where that cannot be checked.
    """
    prctl(PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)
