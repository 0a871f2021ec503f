"""Files that several processes use: the one lock, and the one way to write a file whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxagent.config import ConfigError


def cache_directory() -> pathlib.Path:
    """Where this user's compiled programs are kept: below $XDG_CACHE_HOME, unless that is relative, or ~/.cache.

    Raises:
      RuntimeError: the user has neither a home nor a cache folder.
    """
    configured = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else pathlib.Path.home() / ".cache") / "jaxagent"


def replace(path: pathlib.Path, content: str | bytes | memoryview) -> None:
    """Writes a file as a whole: a full disk or a kill leaves the old one, and of two writers the later one wins.

    Its name may still be lost with the machine's power: `sync_folder` makes names durable, of many files at once.

    Raises:
      OSError: the disk is full, or failed.
    """
    # The host's name, too: containers on one shared folder have the same few numbers of processes.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_native_id()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the name changes: after a power cut, an empty file would have it
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def text_of(path: pathlib.Path, otherwise: str = "") -> str:
    """The text that a file has, whatever its bytes are; `otherwise` where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else otherwise


def json_of(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object that a file has; {} where there is none. Raises ValueError: it is no JSON."""
    return json.loads(text_of(path, "{}"))


def replace_json(path: pathlib.Path, value: Any) -> None:
    """`replace`, of a value that people may read, too.

    Raises:
      OSError: the disk is full, or failed.
    """
    replace(path, json.dumps(value, indent=2) + "\n")


def sync_folder(folder: pathlib.Path) -> None:
    """When this returns, the names in a folder are on disk: what was made, renamed or removed there.

    Raises:
      OSError: the disk failed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def try_lock(fd: int, shared: bool = False) -> bool:
    """Locks an open file or folder until it is closed or the process ends, however it ends. False: another holds it.

    Args:
      fd: of the file or folder.
      shared: others may hold it as well, if theirs is shared too.

    Raises:
      OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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


@contextlib.contextmanager
def one_at_a_time(path: pathlib.Path) -> Iterator[None]:
    """Waits until no other process of this machine is inside, and removes the file `path` that says so.

    Where the file system has no locks nobody waits.
    """
    is_there = False
    while not is_there:
        with path.open("a", encoding="utf-8") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # removed by who was inside: others now wait at a new one
                is_there = os.path.samefile(path, file.fileno())
            if is_there:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)


def make_folder_once(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> bool:
    """Has a folder made, whole or not at all, by one of all the processes that want it at once, on however many hosts.

    On one machine they wait for the first one. Where no lock is seen (another host, a file system without locks) each
    makes its own under a name of its own, and all take the quickest one's.

    Args:
      folder: not made where it is there already, unless empty.
      write: makes a folder of this name, which is not there yet.

    Returns:
      Whether what another process made meanwhile, which counts, differs in any byte from what this one made.

    Raises:
      OSError: the disk is full, or failed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir() and any(folder.iterdir()):
            return False
        for partial in folder.parent.glob(
            f".{folder.name}.partial-*"
        ):  # by a process that was killed, if it has no lock
            with contextlib.suppress(OSError), open(partial / "lock", "r+", encoding="utf-8") as file:
                if try_lock(file.fileno()):
                    shutil.rmtree(partial, ignore_errors=True)
        place = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        with open(place / "lock", "w", encoding="utf-8") as file:
            with contextlib.suppress(OSError):
                try_lock(file.fileno())
            try:
                write(own := place / folder.name)
                own.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
                return _bytes_of(folder) != _bytes_of(own)
            finally:
                shutil.rmtree(place, ignore_errors=True)
    return False


def _bytes_of(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    """Every file's digest. Raises OSError: one cannot be read."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).digest() for path in paths}


def digest_of_file(path: pathlib.Path) -> str:
    """A hex digest of a file's content, which is read once in a process as long as nobody writes into it.

    Raises:
      OSError: it cannot be read.
    """
    status = path.stat()
    return _of_content(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _of_content(path: pathlib.Path, size: int, changed_ns: int) -> str:
    """Size and time are there to tell contents apart."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
