"""The ledger's files, read: lines with checksums, in segments that each say what came before them.

A line is a JSON object, {"crc":"...","n":17,"record":{...}}: the checksum covers what follows it, and n counts lines.
A writer never continues another's file. Its segment's first line, the header, lists the segments before it with the
number of bytes that count; what a writer that was replaced added behind that counts for nothing. A segment that
`compacts` lists none: it holds all that is still needed of what came before, under the old numbers.

    segments/00000003-0000.jsonl       of epoch 3, the first; later ones of an epoch are compactions
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxagent.config import ConfigError

FOLDER = "segments"
FORMAT = 1
_NAME = re.compile(r"(\d{8})-(\d{4})\.jsonl")
_START = b'{"crc":"'


class LedgerLine(NamedTuple):
    """One line of a segment."""

    number: int
    record: dict[str, Any]
    raw: bytes  # with its end


@dataclasses.dataclass(frozen=True)
class Content:
    """What the segments of a folder hold."""

    lines: list[LedgerLine]
    next: int  # number of the line to come
    takes: dict[str, int]  # segments that count, oldest first -> bytes of theirs that count
    dead: list[str]  # segments that count for nothing
    notes: list[str]  # what was left out, one line each

    @property
    def records(self) -> list[dict[str, Any]]:
        """What was appended, in order."""
        return [line.record for line in self.lines]


def name_of(epoch: int, index: int) -> str:
    """Of a segment's file. Names sort as segments were begun."""
    return f"{epoch:08d}-{index:04d}.jsonl"


def encode(number: int, record: Mapping[str, Any]) -> bytes:
    """A line.

    Raises:
      ValueError: a number of the record is not finite.
      TypeError: the record holds what JSON cannot.
    """
    text = json.dumps({"n": number, "record": record}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text[1:].encode()
    return b'%s%08x",%s\n' % (_START, zlib.crc32(body), body)


def header(epoch: int, takes: Mapping[str, int], compacts: bool) -> dict[str, Any]:
    """The record of a segment's first line."""
    return {"ledger": FORMAT, "epoch": epoch, "compacts": compacts, "takes": dict(takes)}


def read(folder: pathlib.Path) -> Content:
    """Every line that counts. Changes nothing.

    Raises:
      ConfigError: a line is damaged, or lines are missing; names file and line.
    """
    segment_names = names(folder)
    if not segment_names:
        return Content([], 0, {}, [], [])
    newest, notes = segment_names[-1], list[str]()
    ends: dict[str, int | None] = {**_bytes_before(folder / newest), newest: None}
    lines: list[LedgerLine] = []
    following, takes = 0, dict[str, int]()
    for name, end in ends.items():
        path = folder / name
        first, *own = _lines(path, end, notes)
        compacts = first.record["compacts"]
        if not compacts and first.number != following:
            raise ConfigError(f"{path}, line 1: line {following} of the ledger is missing: files were changed.")
        for row, line in enumerate(own, 2):
            old = compacts and line.number < first.number  # of those that a compaction kept, some are left out
            following = line.number if old and line.number >= following else max(following, first.number)
            if line.number != following:
                raise ConfigError(f"{path}, line {row}: line {following} of the ledger is missing: it was changed.")
            following += 1
        following = max(following, first.number)
        takes[name] = sum(len(line.raw) for line in (first, *own))
        if own or compacts:
            lines += own
        else:
            del takes[name]  # a writer that wrote nothing: the next one need not know of it
    return Content(lines, following, takes, [name for name in segment_names if name not in takes], notes)


def _bytes_before(path: pathlib.Path) -> dict[str, int]:
    """The segments before it, and their bytes that count. Raises ConfigError where the header is damaged."""
    with path.open("rb") as file:
        line = _decoded(file.readline(), path, 1)
    if line.record.get("ledger") != FORMAT:
        raise ConfigError(f"{path} is no segment of a ledger, or of another version's.")
    return line.record["takes"]


def _lines(path: pathlib.Path, end: int | None, notes: list[str]) -> list[LedgerLine]:
    """The lines of a segment, header first.

    Args:
      end: bytes that count; None: all but the rest of a write that was cut off.
      notes: gets one for bytes that do not count.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is gone, and later segments of the ledger go on from it.") from None
    if end is not None and len(content) < end:
        raise ConfigError(f"{path} has {len(content)} bytes, and later segments go on from byte {end}: it was changed.")
    if end is None:  # zeros: what some file systems leave, after a power cut, of a write that did not end
        end = content.rfind(b"\n", 0, len(content.rstrip(b"\0"))) + 1
    if end < len(content):
        notes.append(f"{path}: the last {len(content) - end} bytes are not read: a write that was cut off.")
    rows = content[:end].split(b"\n")[:-1]
    return [_decoded(row + b"\n", path, number) for number, row in enumerate(rows, 1)]


def _decoded(raw: bytes, path: pathlib.Path, row: int) -> LedgerLine:
    body = raw[len(_START) + 10 : -1]
    if raw[: len(_START) + 10] == b'%s%08x",' % (_START, zlib.crc32(body)) and raw.endswith(b"\n"):
        value = json.loads(b"{" + body)
        return LedgerLine(value["n"], value["record"], raw)
    raise ConfigError(
        f"{path}, line {row}: its checksum is another: the file was damaged after it was written. Restore it from a "
        f"copy, or begin the run anew in another folder."
    )


def names(folder: pathlib.Path) -> list[str]:
    """The names of a folder's segments, oldest first."""
    return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []
