"""Keeps what a sandbox changed as a layer: its overlay's upper directory, copied file by file.

The tree was written by an untrusted program, so every name is opened relative to its directory and never followed.
Removed files are character devices 0/0 and replaced directories carry an attribute, as overlayfs has them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxagent.sandbox.base import SandboxError
from jaxagent.sandbox.owner import layer_owner
from jaxagent.sandbox.wire import descriptors

OPAQUE = "user.overlay.opaque"
MAX_DEPTH = 128
CHUNK_BYTES = 2**20
UNFINISHED = (".part", ".links")  # ends of the names that a copy has on its way


def receive_directory(side: socket.socket) -> int:
    """The descriptor that the launcher sent when it started; kept for further snapshots."""
    try:
        _, control, _, _ = side.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    except OSError as failure:
        raise SandboxError("the sandbox sent no directory to keep") from failure
    fds = descriptors(control)
    if not fds:
        raise SandboxError("the sandbox sent no directory to keep")
    for extra in fds[1:]:
        os.close(extra)
    return fds[0]


def save(upper: int, directory: str, max_bytes: int, stop: threading.Event | None = None) -> str:
    """Copies the tree below the descriptor `upper` (closed afterwards) to a new directory; returns its path.

    Holes stay holes and hard links stay links, so the copy takes what the tree took.

    Args:
      max_bytes: of all files' data, holes not counted.
      stop: once it is set, by another thread, the copy ends with an error.

    Raises:
      SandboxError: it cannot be copied, or `directory` exists; nothing is left behind.
    """
    target = Path(directory)
    part, links = (target.with_name(target.name + end) for end in UNFINISHED)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        try:
            links.mkdir()
            with (
                _opened(part, os.O_DIRECTORY) as into,
                _opened(links, os.O_DIRECTORY) as names,
                _opened(".", os.O_DIRECTORY, upper) as source,  # `upper` is a mere place
            ):
                _Copy(names, max_bytes, stop or threading.Event()).directory(source, into, 0)
            if target.exists():
                raise FileExistsError(f"{target} exists")
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(links, ignore_errors=True)
    except OSError as failure:
        raise SandboxError(f"the sandbox cannot be kept as {directory}: {failure}") from failure
    finally:
        os.close(upper)
    return str(target)


@contextlib.contextmanager
def _opened(path: str | Path, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


class _Copy:
    """One copy of a tree. `links` is a folder that holds one more name of every copied file with several."""

    def __init__(self, links: int, max_bytes: int, stop: threading.Event):
        self._links, self._max_bytes, self._stop = links, max_bytes, stop
        self._bytes = 0

    def directory(self, source: int, target: int, depth: int) -> None:
        """Copies what is below one directory into another; all are descriptors."""
        if depth > MAX_DEPTH:
            raise SandboxError(f"directories deeper than {MAX_DEPTH} cannot be kept")
        with contextlib.suppress(OSError):
            if os.getxattr(source, OPAQUE) == b"y":
                os.setxattr(target, OPAQUE, b"y")
        for name in os.listdir(source):
            self._check()
            info = os.stat(name, dir_fd=source, follow_symlinks=False)
            kind = stat.S_IFMT(info.st_mode)
            if kind == stat.S_IFDIR:
                os.mkdir(name, 0o700, dir_fd=target)
                with _opened(name, os.O_DIRECTORY, source) as below, _opened(name, os.O_DIRECTORY, target) as into:
                    self.directory(below, into, depth + 1)
                    _own(into, info)
            elif kind == stat.S_IFREG:
                self._linked_file(source, target, name, info)
            elif kind == stat.S_IFLNK:
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                if os.geteuid() == 0:
                    os.chown(
                        name, layer_owner(info.st_uid), layer_owner(info.st_gid), dir_fd=target, follow_symlinks=False
                    )
            elif kind == stat.S_IFCHR and info.st_rdev == 0:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
            # Sockets and pipes have no meaning without the processes that made them.
        info = os.fstat(source)
        if depth == 0:
            _own(target, info)

    def _linked_file(self, source: int, target: int, name: str, info: os.stat_result) -> None:
        if info.st_nlink == 1:
            self._file(source, target, name, info)
            return
        first = f"{info.st_dev}-{info.st_ino}"
        try:
            os.link(first, name, src_dir_fd=self._links, dst_dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            self._file(source, target, name, info)
            os.link(name, first, src_dir_fd=target, dst_dir_fd=self._links, follow_symlinks=False)

    def _file(self, source: int, target: int, name: str, info: os.stat_result) -> None:
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with _opened(name, os.O_NONBLOCK, source) as reading, _opened(name, new, target) as writing:
            self._data(reading, writing, info.st_size)
            _own(writing, info)

    def _data(self, reading: int, writing: int, size: int) -> None:
        """The parts that are no holes."""
        os.ftruncate(writing, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(reading, at, os.SEEK_DATA)
            except OSError as failure:
                if failure.errno != errno.ENXIO:
                    raise
                return  # a hole up to the end
            end = min(os.lseek(reading, at, os.SEEK_HOLE), size)
            while at < end:
                chunk = os.pread(reading, min(CHUNK_BYTES, end - at), at)
                if not chunk:
                    return
                self._bytes += len(chunk)
                self._check()
                view = memoryview(chunk)
                while view:
                    count = os.pwrite(writing, view, at)
                    view, at = view[count:], at + count

    def _check(self) -> None:
        if self._bytes > self._max_bytes:
            raise SandboxError(f"the sandbox cannot be kept: its files hold more than {self._max_bytes} bytes")
        if self._stop.is_set():
            raise SandboxError("the sandbox cannot be kept: nobody waits for it any more")


def _own(fd: int, info: os.stat_result) -> None:
    """Owner, mode without set-uid bits, and time of what was copied."""
    if os.geteuid() == 0:
        os.fchown(fd, layer_owner(info.st_uid), layer_owner(info.st_gid))
    os.fchmod(fd, stat.S_IMODE(info.st_mode) & 0o1777)
    os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
