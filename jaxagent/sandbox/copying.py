"""Directory trees in and out. What comes from either side is data: names are checked, links are never followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from jaxagent.sandbox.base import MAX_FILE_BYTES, FileError, Sandbox

MAX_TREE_BYTES = 2**30


async def copy_in(sandbox: Sandbox, source: str | Path, target: str) -> None:
    """Copies a directory of the host to `target`, an absolute path inside. Links and special files are refused.

    Raises:
      FileError: something cannot be copied, named; files before it are there.
    """
    for path in sorted(Path(source).rglob("*")):
        info = path.lstat()
        if stat.S_ISDIR(info.st_mode):
            continue
        if not stat.S_ISREG(info.st_mode):
            raise FileError(f"{path} is neither a regular file nor a directory")
        inside = PurePosixPath(target) / path.relative_to(source).as_posix()
        await sandbox.write(str(inside), path.read_bytes(), stat.S_IMODE(info.st_mode) & 0o777)


async def copy_out(sandbox: Sandbox, source: str, target: str | Path, max_entries: int = 10_000) -> list[str]:
    """Copies a directory from inside to a new directory of the host. Links and special files are left out.

    Returns:
      relative paths that were left out.

    Raises:
      FileError: a name that leads out of the tree, too many entries or bytes, a file that changed or cannot be read.
      FileExistsError: `target` exists.
    """
    entries = await sandbox.list(source, max_entries)
    left_out, total = [], 0
    root = Path(target)
    root.mkdir(parents=True, mode=0o755)
    for entry in sorted(entries, key=lambda e: e.path):
        parts = entry.path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise FileError(f"the sandbox named a file {entry.path!r}")
        path = root.joinpath(*parts)
        if entry.kind == "directory":
            path.mkdir(parents=True, exist_ok=True)
        elif entry.kind != "file":
            left_out.append(entry.path)
        else:
            data = await sandbox.read(f"{source.rstrip('/')}/{entry.path}", MAX_FILE_BYTES)
            total += len(data)
            if total > MAX_TREE_BYTES:
                raise FileError(f"{source!r} holds more than {MAX_TREE_BYTES} bytes")
            path.parent.mkdir(parents=True, exist_ok=True)
            # The tree is ours and new: nothing but what this function made is in it, so no link can be met.
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as file:
                file.write(data)
    return left_out
