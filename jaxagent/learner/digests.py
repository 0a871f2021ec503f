"""Digests of a folder's files: a file that changed after it was written is found, and named, when it is read.

`write` leaves one file with the SHA-256 of every other; `check` compares. Files are read by a few threads at once (the
digest itself runs outside Python's lock), so the cost is that of reading the folder, at a gigabyte or more per second.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import pathlib
from collections.abc import Collection

from jaxagent.config import ConfigError

FILE = "digests.json"
_THREADS = 4


def write(folder: pathlib.Path, leave_out: Collection[str] = ()) -> None:
    """Writes `folder`/digests.json.

    Args:
      folder: its files are complete, but for those left out.
      leave_out: paths inside the folder that go on changing.
    """
    found = _digests(folder, [name for name in _files(folder) if name not in leave_out])
    (folder / FILE).write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def of(folder: pathlib.Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, by its path inside."""
    return _digests(folder, _files(folder))


def check(folder: pathlib.Path, leave_out: Collection[str] = ()) -> bool:
    """Compares every file with its digest.

    Args:
      leave_out: see `write`.

    Returns:
      False where the folder has no digests, so that nothing could be compared.

    Raises:
      ConfigError: says in a few words, without the folder's name, which file is missing, differs or has no digest.
    """
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if not isinstance(said, dict):
            raise ValueError
    except FileNotFoundError:
        return False
    except ValueError:  # not JSON, not UTF-8
        raise ConfigError(f"{FILE} is damaged") from None
    there = set(_files(folder))
    if missing := sorted(set(said) - there):
        raise ConfigError(f"{missing[0]} is missing")
    if unknown := sorted(there - set(said) - set(leave_out)):
        raise ConfigError(f"{unknown[0]} has no digest in {FILE}")
    found = _digests(folder, sorted(said))
    if different := [name for name in said if found[name] != said[name]]:
        raise ConfigError(f"{different[0]} differs from its digest")
    return True


def _files(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != FILE)


def _digests(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    def one(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
