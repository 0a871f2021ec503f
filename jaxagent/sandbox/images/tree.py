"""A tree that became a base root: files whose links point wherever they like, so nothing here follows one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxagent.sandbox.owner import sandbox_uid

# apt gives its rights up to a user of its own, which a sandbox with one user id does not have.
APT = ("etc/apt/apt.conf.d", "99jaxagent", b'APT::Sandbox::User "root";\n')
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def prepare(root: Path) -> None:
    """Makes a root fit for sandboxes: it belongs to their user, who can enter every folder; apt works."""
    top = os.open(root, _FOLDER)
    try:
        with contextlib.suppress(OSError), folder(top, APT[0].split("/")) as fd:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(APT[1], flags, 0o644, dir_fd=fd), "wb") as file:
                file.write(APT[2])
        _own(top, sandbox_uid() if os.geteuid() == 0 else -1)
    finally:
        os.close(top)
    root.chmod(0o755)


@contextlib.contextmanager
def folder(top: int, parts: Sequence[str], make: bool = False) -> Iterator[int]:
    """The descriptor of a folder below the descriptor `top`, made where it is not there or not.

    Raises:
      OSError: FileNotFoundError where it is not there and not made, NotADirectoryError at a link or a file.
    """
    fd = os.dup(top)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            try:
                below = os.open(part, _FOLDER, dir_fd=fd)
            except FileNotFoundError:
                raise
            except OSError:
                raise NotADirectoryError(errno.ENOTDIR, f"goes through {part!r}, which is a link or a file") from None
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def is_folder(fd: int, name: str) -> bool:
    """Whether a name in a folder is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def remove(fd: int, name: str) -> None:
    """Deletes a name in a folder, with everything below it; a name that is not there is no error."""
    if is_folder(fd, name):
        shutil.rmtree(name, dir_fd=fd)  # follows no link, whoever puts one there meanwhile
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)


def _own(top: int, uid: int) -> None:
    for _, folders, files, fd in os.fwalk(dir_fd=top):  # links to folders are among the folders
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & 0o1777 | 0o700)
        for name in (*folders, *files) if uid >= 0 else ():
            os.chown(name, uid, uid, dir_fd=fd, follow_symlinks=False)
    if uid >= 0:
        os.fchown(top, uid, uid)
