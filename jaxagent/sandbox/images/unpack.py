"""A layer's tar over a tree, as overlay file systems would show it. The tar is untrusted.

Names are walked folder by folder and never through a link, so nothing outside the tree is touched; devices, pipes,
extended attributes and set-uid bits are left out. Whiteouts (".wh.name", ".wh..wh..opq") remove what lower layers
brought, and nothing of their own layer, in whatever order they stand.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections import Counter
from collections.abc import Iterable
from typing import IO

from jaxagent.sandbox.images import tree

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
MAX_DEPTH = 200
MAX_ENTRIES = 5_000_000
CHUNK_BYTES = 2**20


class TarError(ValueError):
    """A tar that is malformed or hostile; names the entry."""


class Unpacker:
    """Puts layers on one tree, the lowest first.

    Args:
      top: descriptor of an empty folder.
      max_bytes: of all regular files of all layers.

    Attributes:
      skipped: how many entries of each kind were left out: "device", "pipe".
    """

    def __init__(self, top: int, max_bytes: int):
        self._top = top
        self._bytes_left = max_bytes
        self._entries_left = MAX_ENTRIES
        self.skipped: Counter[str] = Counter()

    def layer(self, archive: Iterable[tarfile.TarInfo], contents: tarfile.TarFile) -> None:
        """Unpacks one layer.

        Raises:
          TarError: a name that leads out of the tree or through a link, a bad whiteout or hard link, too much.
        """
        self._mine: set[tuple[str, ...]] = set()  # what this layer brought, and the folders above
        for entry in archive:
            self._entries_left -= 1
            if self._entries_left < 0:
                raise TarError(f"more than {MAX_ENTRIES} entries")
            parts = _parts(entry.name)
            if not parts:
                if not entry.isdir():
                    raise TarError(f"entry {entry.name!r} names the root, and is no folder")
                continue
            try:
                self._entry(entry, parts, contents)
            except OSError as error:
                raise TarError(f"entry {entry.name!r}: {error.strerror or error}") from None

    def _entry(self, entry: tarfile.TarInfo, parts: list[str], contents: tarfile.TarFile) -> None:
        name = parts[-1]
        if name.startswith(WHITEOUT):
            self._whiteout(entry.name, parts)
            return
        if entry.ischr() or entry.isblk():
            self.skipped["device"] += 1
            return
        if entry.isfifo():
            self.skipped["pipe"] += 1
            return
        with tree.folder(self._top, parts[:-1], make=True) as folder:
            if entry.isdir():
                if not tree.is_folder(folder, name):  # over a file or link of a lower layer
                    tree.remove(folder, name)
                    os.mkdir(name, 0o700, dir_fd=folder)
                with tree.folder(folder, [name]) as below:
                    os.fchmod(below, entry.mode & 0o1777 | 0o700)
            elif entry.issym():
                tree.remove(folder, name)
                os.symlink(entry.linkname, name, dir_fd=folder)
            elif entry.islnk():
                self._hard_link(folder, name, entry)
            elif entry.isreg():
                tree.remove(folder, name)
                self._file(folder, name, entry, contents)
            else:
                raise TarError(f"entry {entry.name!r} is of the unknown kind {entry.type!r}")
        for n in range(1, len(parts) + 1):
            self._mine.add(tuple(parts[:n]))

    def _file(self, folder: int, name: str, entry: tarfile.TarInfo, contents: tarfile.TarFile) -> None:
        self._bytes_left -= entry.size
        if self._bytes_left < 0:
            raise TarError(f"entry {entry.name!r} makes the image larger than allowed")
        source: IO[bytes] | None = contents.extractfile(entry)
        if source is None:
            raise TarError(f"entry {entry.name!r} has no content")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
            remaining = entry.size
            while remaining > 0:
                chunk = source.read(min(remaining, CHUNK_BYTES))
                if not chunk:
                    raise TarError(f"entry {entry.name!r} ends too early")
                file.write(chunk)
                remaining -= len(chunk)
            os.fchmod(file.fileno(), entry.mode & 0o777)
            os.utime(file.fileno(), (int(entry.mtime), int(entry.mtime)))

    def _hard_link(self, folder: int, name: str, entry: tarfile.TarInfo) -> None:
        """To a file of this image that is there already; never to what a link points to."""
        parts = _parts(entry.linkname)
        if not parts:
            raise TarError(f"entry {entry.name!r} is a hard link to the root")
        if parts == _parts(entry.name):
            raise TarError(f"entry {entry.name!r} is a hard link to itself")
        try:
            with tree.folder(self._top, parts[:-1]) as source:
                tree.remove(folder, name)
                os.link(parts[-1], name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            raise TarError(f"entry {entry.name!r} is a hard link to {entry.linkname!r}, which is not there") from None

    def _whiteout(self, name: str, parts: list[str]) -> None:
        hidden = parts[-1].removeprefix(WHITEOUT)
        opaque = parts[-1] == OPAQUE
        if not opaque and hidden.startswith(WHITEOUT):
            return  # other bookkeeping of aufs
        if hidden in ("", ".", ".."):
            raise TarError(f"entry {name!r} is no whiteout")
        with contextlib.suppress(FileNotFoundError), tree.folder(self._top, parts[:-1]) as folder:
            self._hide(folder, tuple(parts[:-1]), os.listdir(folder) if opaque else [hidden])

    def _hide(self, folder: int, above: tuple[str, ...], names: list[str]) -> None:
        """Removes names that lower layers brought; of a folder that this layer also brought, only what is below."""
        for name in names:
            place = (*above, name)
            if place not in self._mine:
                tree.remove(folder, name)
                continue
            if tree.is_folder(folder, name):
                with tree.folder(folder, [name]) as below:
                    self._hide(below, place, os.listdir(below))


def _parts(name: str) -> list[str]:
    """The folders and the name of an entry, from the root of the image."""
    if "\0" in name:
        raise TarError(f"entry {name!r} has a NUL byte")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise TarError(f"entry {name!r} leads out of the image")
    if len(parts) > MAX_DEPTH:
        raise TarError(f"entry {name[:80]!r}... is {len(parts)} folders deep")
    return parts
