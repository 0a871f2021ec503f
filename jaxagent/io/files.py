"""Files that several processes use: the one lock, and the one way to write a file whole or not at all."""

from __future__ import annotations

import fcntl
import os
import pathlib

from jaxagent.config import ConfigError


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file as a whole: a full disk or a kill leaves the old one, and of two processes the later one wins.

    Raises:
      OSError: the disk is full, or failed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the name changes: after a power cut, an empty file would have it
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def try_lock(fd: int) -> bool:
    """Locks an open file or folder until it is closed or the process ends, however it ends. False: another holds it.

    Raises:
      OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, path: pathlib.Path) -> None:
    """Locks `path`, open as `fd`, like `try_lock`; where the file system has no locks it does nothing.

    Raises:
      ConfigError: another process holds it.
    """
    try:
        locked = try_lock(fd)
    except OSError:
        return
    if not locked:
        raise ConfigError(f"'{path}' is being written by another process: wait for it, end it, or use another folder.")
