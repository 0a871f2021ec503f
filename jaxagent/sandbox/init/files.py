"""Files and directories, as paths resolve inside and with the rights of the programs there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct

from jaxagent.sandbox.init.session import Session

ENTRY = struct.Struct("<cIQH")  # kind, mode, size, length of the path that follows
KINDS = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l"}
MAX_PATH_BYTES, MAX_DEPTH = 4096, 64


def get_file(session: Session, number: int, data: bytes) -> None:
    """Answers G. Raises OSError."""
    (most,) = struct.unpack_from("<Q", data)
    fd = os.open(data[8:-1], os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(info.st_mode) or info.st_dev == os.stat("/proc").st_dev:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if info.st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        session.host.write("D", number, file.read(info.st_size))


def put_file(session: Session, number: int, data: bytes) -> None:
    """Answers P: the file is written beside its place and renamed. Raises OSError."""
    mode, length = struct.unpack_from("<II", data)
    path, contents = data[8 : 8 + length], data[9 + length :]
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    temporary = path + b".%s.part" % os.urandom(8).hex().encode()  # no program can know it and be in the way
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(contents)
            os.fchmod(fd, mode & 0o7777)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    session.host.write("D", number)


def list_directory(session: Session, number: int, data: bytes) -> None:
    """Answers L. Raises OSError, also beyond the allowed number of entries."""
    (most,) = struct.unpack_from("<I", data)
    entries: list[bytes] = []
    fd = os.open(data[4:-1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _walk(fd, b"", 0, entries, most)
    finally:
        os.close(fd)
    session.host.write("D", number, b"".join(entries))


def _walk(fd: int, prefix: bytes, depth: int, entries: list[bytes], most: int) -> None:
    for name in os.listdir(fd):
        path = prefix + os.fsencode(name)
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            continue
        if len(path) >= MAX_PATH_BYTES:
            continue
        if len(entries) >= most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        kind = KINDS.get(stat.S_IFMT(info.st_mode), b"o")
        entries.append(ENTRY.pack(kind, info.st_mode & 0o7777, info.st_size, len(path)) + path)
        if kind == b"d" and depth < MAX_DEPTH:
            try:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            except OSError:
                continue
            try:
                _walk(below, path + b"/", depth + 1, entries, most)
            finally:
                os.close(below)
