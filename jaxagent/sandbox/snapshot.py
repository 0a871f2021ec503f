"""Keeps what a sandbox changed as a layer: its overlay's upper directory, copied file by file.

The tree was written by an untrusted program, so every name is opened relative to its directory and never followed.
Removed files are character devices 0/0 and replaced directories carry an attribute, as overlayfs has them.
"""

from __future__ import annotations

import array
import contextlib
import os
import shutil
import socket
import stat
from pathlib import Path

from jaxagent.sandbox.base import SandboxError

OPAQUE = "user.overlay.opaque"
MAX_DEPTH = 128
CHUNK_BYTES = 2**20


def receive_directory(side: socket.socket) -> int:
    """The descriptor that the launcher sent when it started; kept for further snapshots."""
    try:
        _, control, _, _ = side.recvmsg(1, socket.CMSG_SPACE(4))
    except OSError as failure:
        raise SandboxError("the sandbox sent no directory to keep") from failure
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not fds:
        raise SandboxError("the sandbox sent no directory to keep")
    for extra in fds[1:]:
        os.close(extra)
    return fds[0]


def save(upper: int, directory: str) -> str:
    """Copies the tree below the descriptor `upper` (closed afterwards) to a new directory; returns its path.

    Raises:
      SandboxError: it cannot be copied, or `directory` exists; nothing is left behind.
    """
    target = Path(directory)
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        try:
            source = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=upper)
            into = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _copy_directory(source, into, 0)
            finally:
                os.close(source), os.close(into)
            if target.exists():
                raise FileExistsError(f"{target} exists")
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    except OSError as failure:
        raise SandboxError(f"the sandbox cannot be kept as {directory}: {failure}") from failure
    finally:
        os.close(upper)
    return str(target)


def _copy_directory(source: int, target: int, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise SandboxError(f"directories deeper than {MAX_DEPTH} cannot be kept")
    with contextlib.suppress(OSError):
        if os.getxattr(source, OPAQUE) == b"y":
            os.setxattr(target, OPAQUE, b"y")
    for name in os.listdir(source):
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o700, dir_fd=target)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(name, flags, dir_fd=source)
            into = os.open(name, flags, dir_fd=target)
            try:
                _copy_directory(below, into, depth + 1)
                _own(into, info)
            finally:
                os.close(below), os.close(into)
        elif kind == stat.S_IFREG:
            _copy_file(source, target, name, info)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            if os.geteuid() == 0:
                os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
        elif kind == stat.S_IFCHR and info.st_rdev == 0:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
        # Sockets and pipes have no meaning without the processes that made them.
    info = os.fstat(source)
    if depth == 0:
        _own(target, info)


def _copy_file(source: int, target: int, name: str, info: os.stat_result) -> None:
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
    try:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            while chunk := os.read(reading, CHUNK_BYTES):
                view = memoryview(chunk)
                while view:
                    view = view[os.write(writing, view) :]
            _own(writing, info)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _own(fd: int, info: os.stat_result) -> None:
    """Owner, mode without set-uid bits, and time of what was copied."""
    if os.geteuid() == 0:
        os.fchown(fd, info.st_uid, info.st_gid)
    os.fchmod(fd, stat.S_IMODE(info.st_mode) & 0o1777)
    os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
