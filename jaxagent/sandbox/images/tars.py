"""Untrusted tars through `tarfile`, with bounds on what it keeps in memory.

It reads headers that carry long names and attributes (pax "x" and "g", GNU "L" and "K") whole, whatever size they
claim, and keeps every entry it has seen: a gzip of ten megabytes could take ten gigabytes of memory.
"""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxagent.sandbox.images.unpack import TarError

MAX_HEADER_BYTES = 2**20  # before one entry; what Go's archive/tar allows, and with it docker
MAX_MEMBERS = 20_000  # of an image's tar: a few for each layer and image
MAX_NAME_BYTES = 4096  # there
_CARRIERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def open_image(path: Path) -> tarfile.TarFile:
    """The tar in a file, plain or compressed. Raises TarError."""
    if not path.is_file():
        raise TarError(f"there is no file {path}")
    with _as_tar_errors():
        return tarfile.open(path, "r:*", tarinfo=_headers())


def open_layer(stream: Any) -> tarfile.TarFile:
    """A plain tar that is read once from its begin. Raises TarError."""
    with _as_tar_errors():
        return tarfile.open(fileobj=stream, mode="r|", ignore_zeros=False, tarinfo=_headers())


def entries(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Every entry, once; the archive does not keep it. Raises TarError."""
    while (entry := _next(archive)) is not None:
        archive.members.clear()
        yield entry


def members(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """All entries of an image's tar, which the archive keeps, too. Raises TarError."""
    while (entry := _next(archive)) is not None:
        entry.pax_headers = {}
        if max(len(entry.name), len(entry.linkname)) > MAX_NAME_BYTES:
            raise TarError(f"entry {entry.name[:80]!r}... has a name of more than {MAX_NAME_BYTES} bytes")
        if len(archive.members) > MAX_MEMBERS:
            raise TarError(f"more than {MAX_MEMBERS} entries")
    return archive.getmembers()


def _next(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    with _as_tar_errors():
        entry = archive.next()
    if entry is not None and entry.size < 0:  # as a pax header may say; the next entry would be one before
        raise TarError(f"entry {entry.name[:80]!r} has the size {entry.size}")
    return entry


@contextlib.contextmanager
def _as_tar_errors() -> Iterator[None]:
    """What malformed headers make tarfile raise beside its own errors, as TarError."""
    try:
        yield
    except TarError:
        raise
    except RecursionError:
        raise TarError("too many headers before one entry") from None
    except ValueError as error:
        raise TarError(f"a header is malformed: {error}") from None


def _headers() -> type[tarfile.TarInfo]:
    """Headers of one archive: a class of its own, since it counts."""

    class Header(tarfile.TarInfo):
        in_a_row = 0  # bytes of carriers before the entry that is awaited
        of_all = 0  # of "g" headers, which hold for all that follows and add up

        def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
            """Of every header, before what belongs to it is read. (Python 3.13 reads headers past `frombuf`.)"""
            if self.type == tarfile.GNUTYPE_SPARSE:
                raise TarError(f"entry {self.name[:80]!r} is a sparse file, which is not supported")
            kind = type(self)
            kind.in_a_row = kind.in_a_row + self.size if self.type in _CARRIERS else 0
            kind.of_all += self.size if self.type == tarfile.XGLTYPE else 0
            if max(kind.in_a_row, kind.of_all) > MAX_HEADER_BYTES:
                raise TarError(f"headers of more than {MAX_HEADER_BYTES} bytes")
            return super()._proc_member(archive)

        def _proc_gnusparse_10(self, following: tarfile.TarInfo, *_: object) -> None:
            """The one form of sparse files whose list of parts is no header, and without bound."""
            raise TarError(f"entry {following.name[:80]!r} is a sparse file, which is not supported")

    return Header
