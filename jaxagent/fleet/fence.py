"""One writer of a folder, also where a process that was thought dead comes back: the newest epoch counts.

`take` makes an epoch file that no other process can make, and removes those of the writers before. A writer owns the
folder for as long as its own file is there; it looks after each write and before it tells anyone that it has written.
No lock is needed, so this also holds on network file systems (whose open asks the server whether a file still exists).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
import time

from jaxagent.config import ConfigError
from jaxagent.io import files

FOLDER = "epochs"


class FencedError(RuntimeError):
    """Another process has taken the folder over: this one must end, and nothing that it did since then counts."""


@dataclasses.dataclass(frozen=True)
class Fence:
    """A writer's hold on a folder."""

    path: pathlib.Path
    epoch: int  # from 1; each writer of the folder has a higher one than those before

    def check(self) -> None:
        """Raises FencedError where another writer has taken over since."""
        try:
            os.close(os.open(self.path, os.O_RDONLY))
        except FileNotFoundError:
            newer = max(epochs(self.path.parent), default=self.epoch)
            raise FencedError(
                f"'{self.path.parent}': epoch {newer} has taken over from epoch {self.epoch}, which is this process's."
            ) from None


def take(folder: pathlib.Path, at_least: int = 1) -> Fence:
    """Becomes the writer of a folder. Whoever was it before is not any more when this returns.

    Args:
      folder: which has, or gets, a folder of epochs.
      at_least: no lower epoch is taken; higher than those of the folder's files.

    Raises:
      ConfigError: another process took it in this very moment.
      OSError: the disk is full, or failed.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    before = epochs(place)
    epoch = max(at_least, max(before, default=0) + 1)
    path = place / f"{epoch:08d}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise ConfigError(f"'{folder}' has just been opened by another process as epoch {epoch}: end one.") from None
    with open(fd, "w", encoding="utf-8") as file:  # for people; nothing reads it
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        os.fsync(file.fileno())
    for older in before:
        (place / f"{older:08d}").unlink(missing_ok=True)
    files.sync_folder(place)
    fence = Fence(path, epoch)
    fence.check()
    return fence


def epochs(place: pathlib.Path) -> list[int]:
    """The epochs whose files are there."""
    return sorted(int(path.name) for path in place.iterdir() if path.name.isdigit()) if place.is_dir() else []
