"""A tree that became a base root: files whose links point wherever they like, so nothing here follows one."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from jaxagent.sandbox.owner import sandbox_uid

# apt gives its rights up to a user of its own, which a sandbox with one user id does not have.
APT = ("etc/apt/apt.conf.d", "99jaxagent", b'APT::Sandbox::User "root";\n')
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def prepare(root: Path) -> None:
    """Makes a root fit for sandboxes: it belongs to their user, who can enter every folder; apt works."""
    top = os.open(root, _FOLDER)
    try:
        with contextlib.suppress(OSError):
            fd = descend(top, APT[0].split("/"))
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(APT[1], flags, 0o644, dir_fd=fd), "wb") as file:
                    file.write(APT[2])
            finally:
                os.close(fd)
        _own(top, sandbox_uid() if os.geteuid() == 0 else -1)
    finally:
        os.close(top)
    root.chmod(0o755)


def descend(top: int, parts: list[str]) -> int:
    """A new descriptor of a folder below the descriptor `top`. Raises OSError; NotADirectoryError also at a link."""
    fd = os.dup(top)
    try:
        for part in parts:
            below = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove(fd: int, name: str) -> None:
    """Deletes a name in a folder, with everything below it; a name that is not there is no error."""
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=fd)
        return
    os.chmod(name, 0o700, dir_fd=fd)  # a folder, not a link: seen above
    below = os.open(name, _FOLDER, dir_fd=fd)
    try:
        for inner in os.listdir(below):
            remove(below, inner)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=fd)


def _own(fd: int, uid: int) -> None:
    for name in os.listdir(fd):
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            below = os.open(name, _FOLDER, dir_fd=fd)
            try:
                _own(below, uid)
                os.fchmod(below, stat.S_IMODE(info.st_mode) & 0o1777 | 0o700)
            finally:
                os.close(below)
        elif uid >= 0:
            os.chown(name, uid, uid, dir_fd=fd, follow_symlinks=False)
    if uid >= 0:
        os.fchown(fd, uid, uid)
