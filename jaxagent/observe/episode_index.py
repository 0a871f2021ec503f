"""The index of a log of episodes, made anew from its blocks where it was damaged or deleted.

A block says all that its line of the index says (episode_store.py), so nothing is lost but the lines of episodes whose
tokens were given up. Lines that are intact stay.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.observe import jsonl
from jaxagent.observe.episode_store import BLOCKS, INDEX, MOST_BYTES, files_of, index_line, line_of, unpack

_PIECE = 1 << 16  # bytes


def mended(folder: Path, name: str, position: int, learns: bool) -> bytes | None:
    """What the index of a log should be, so that a run can go on after `position` lines of it; None: as it is.

    b"" where nothing of the log is there: whoever deleted it wants it begun anew. Changes nothing.

    Args:
      learns: whether stages learn from the log, so that it must not begin anew.

    Raises:
      ConfigError: lines are lost, and no block says what stood in them; names the ways out.
    """
    path = folder / f"{name}{INDEX}"
    rows = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    lines = [_intact(row, path) for row in rows if row.endswith(b"\n")]
    if len(lines) >= position and None not in lines[:position]:
        return None
    files = files_of(folder, name)
    if not rows and not files and not learns:
        return b""
    indexed = {(line["file"], line["at"]): line for line in lines if line and line["body"]}
    blocks = [line for number, file in files.items() for line in _blocks(file, number, indexed, learns)]
    new = iter([line for line in blocks if (line["file"], line["at"]) not in indexed])
    whole = [line or next(new, None) for line in lines]
    whole += list(new)
    places = [(line["file"], line["at"]) for line in whole if line]
    if None in whole or len(whole) < position or places != sorted(places):
        intact = sum(map(bool, lines[:position]))
        way_out = "use another workdir: stages learn from these episodes."
        if not learns:
            way_out = f"go on without the episodes so far: delete all files {folder / name}.*"
        raise ConfigError(
            f"{path}: of the {position} lines that the checkpoint knows {intact} are intact, and no block in "
            f"{folder / name}.*{BLOCKS} says what stood in the others. Restore {folder} from a copy, or {way_out}"
        )
    return b"".join(map(jsonl.line, filter(None, whole)))


def _intact(row: bytes, path: Path) -> dict[str, Any] | None:
    try:
        return line_of(row, path, 0)
    except ConfigError:
        return None


def _blocks(file: Path, number: int, known: dict[tuple[int, int], Any], learns: bool) -> Iterator[dict[str, Any]]:
    """The lines of a file's blocks, up to one that is damaged or torn; those of `known` blocks as they are."""
    content, at, before = memoryview(file.read_bytes()), 0, 0
    while at < len(content):
        if line := known.get((number, at)):
            yield line
            at, before = at + line["texts"] + line["body"], line["step"]
            continue
        try:
            texts, body_at = _stream(content, at)
            raw, end = _stream(content, body_at)
            step, pairs = unpack(raw, texts)
        except (ValueError, LookupError, TypeError, zlib.error):  # ConfigError is a ValueError
            return
        episodes, learnt = [episode for episode, _ in pairs], [each for _, each in pairs]
        if step is None:  # of the first version: the newest weights that sampled in it
            step = max([int(t.policy_versions.max(initial=-1)) for e in episodes for t in e.trajectories], default=-1)
            step = step if step >= 0 else before
        before = step
        where = {"step": step, "file": number, "at": at, "texts": body_at - at, "body": end - body_at}
        yield index_line(where, episodes, learnt, learns)
        at = end


def _stream(content: memoryview, at: int) -> tuple[bytes, int]:
    """What was compressed from `at` on, and where that ends. Raises zlib.error: it does not end, or is too long."""
    decompress, parts, size = zlib.decompressobj(), list[bytes](), 0
    while not decompress.eof:
        piece = content[at : at + _PIECE]
        parts.append(decompress.decompress(piece, MOST_BYTES + 1 - size))
        size, at = size + len(parts[-1]), at + len(piece) - len(decompress.unused_data)
        if not len(piece) or size > MOST_BYTES:
            raise zlib.error("a block is cut off, or too long")
    return b"".join(parts), at
