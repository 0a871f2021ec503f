"""The folder that COPY takes files from: patterns, .dockerignore, and what keeps a recipe from leaving it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_BYTES = 64 * 2**20  # of one file: what one write into a sandbox takes


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to put into an image."""

    path: str  # below the target; "" = the target itself
    kind: str  # "file", "directory" or "link"
    mode: int
    source: Path | None = None  # of a file
    data: bytes = b""  # of a file without a source (a heredoc), or where a link points

    def read(self) -> bytes:
        """A file's content."""
        return self.data if self.source is None else self.source.read_bytes()

    def identity(self) -> list[str | int]:
        """What the key of a step needs to know."""
        digest = hashlib.sha256(self.data if self.kind != "file" else self.read()).hexdigest()
        return [self.path, self.kind, self.mode, digest]


class Context:
    """A folder. `ignore` holds the lines of its .dockerignore."""

    def __init__(self, folder: Path, ignore: str = ""):
        self.folder = folder.resolve()
        self._ignore = [rule for line in ignore.split("\n") if (rule := _rule(line))]

    def find(self, pattern: str) -> list[Path]:
        """The sources that a pattern of COPY names, sorted: relative paths. "." is the folder itself.

        Raises:
          ValueError: none, or one that leads out of the folder.
        """
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ValueError(f"'{pattern}' leads out of the folder {self.folder}")
        matching = [Path()]
        for i, part in enumerate(parts):
            match = re.compile(_pattern(part))
            if any(c in part for c in "*?["):
                matching = [
                    p / n
                    for p in matching
                    if (self.folder / p).is_dir()
                    for n in sorted(os.listdir(self.folder / p))
                    if match.fullmatch(n)
                ]
            else:
                name = re.sub(r"\\(.)", r"\1", part)
                matching = [p / name for p in matching if os.path.lexists(self.folder / p / name)]
            matching = [p for p in matching if i < len(parts) - 1 or not self._ignored(p.as_posix())]
        if not matching:
            hint = ", or .dockerignore leaves it out" if self._ignore else ""
            raise ValueError(f"'{pattern}' is not in the folder {self.folder}{hint}")
        for path in matching:
            self._resolved(path)
        return matching

    def is_directory(self, path: Path) -> bool:
        """Whether a source is a folder, whose contents are copied, not itself."""
        return (self.folder / path).is_dir()

    def items(self, path: Path, follow: bool = False) -> list[Item]:
        """Everything below a source, or the one file, parents first. Links below are copied as links.

        Args:
          path: as `find` gives it.
          follow: take what links point to, which must be in the folder.

        Raises:
          ValueError: a file that is too large, a special file, a link that leads out.
        """
        if not self.is_directory(path):
            return [self._item(path, "", follow=True)]
        return list(self._walk(path, "", follow))

    def _walk(self, path: Path, inside: str, follow: bool) -> Iterator[Item]:
        for name in sorted(os.listdir(self.folder / path)):
            below, name = path / name, f"{inside}/{name}" if inside else name
            full = self.folder / below
            ignored = self._ignored(below.as_posix())
            if full.is_dir() and (follow or not full.is_symlink()):
                if follow and full.is_symlink() and full.parent.resolve().is_relative_to(self._resolved(below)):
                    raise ValueError(f"'{below}' is a link to a folder above it")
                if not ignored:
                    yield Item(name, "directory", stat.S_IMODE(full.stat().st_mode))
                yield from self._walk(below, name, follow)  # an exception of .dockerignore may lie below
            elif not ignored:
                yield self._item(below, name, follow)

    def _resolved(self, path: Path) -> Path:
        real = (self.folder / path).resolve()
        if not real.is_relative_to(self.folder):
            raise ValueError(f"'{path}' is a link that leads out of the folder {self.folder}")
        return real

    def _item(self, path: Path, inside: str, follow: bool) -> Item:
        full = self.folder / path
        if full.is_symlink() and not follow:
            return Item(inside, "link", 0o777, data=os.fsencode(os.readlink(full)))
        real = self._resolved(path)
        info = real.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"'{path}' is neither a file, a folder nor a link")
        if info.st_size > MAX_FILE_BYTES:
            raise ValueError(f"'{path}' has {info.st_size} bytes; one file may have {MAX_FILE_BYTES}")
        return Item(inside, "file", stat.S_IMODE(info.st_mode) & 0o777, real)

    def _ignored(self, path: str) -> bool:
        """The last rule that fits a path or a folder above it decides."""
        parts = path.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        ignored = False
        for rule, exception in self._ignore:
            if any(rule.fullmatch(p) for p in above):
                ignored = not exception
        return ignored and path not in ("", ".")


def _pattern(text: str) -> str:
    """A regular expression for Go's filepath.Match, and ** for any number of folders."""

    def translated(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] == "[" and len(token) > 1:
            negated, inner = token[1] in "^!", token[1:-1].lstrip("^!")
            return f"[{'^/' if negated else ''}{inner.replace(chr(92), chr(92) * 2)}]"
        wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        return wild.get(token) or re.escape(token[-1])

    return re.sub(r"\*\*/?|\[.[^\]]*\]|\\.|.", translated, text, flags=re.DOTALL)


def _rule(line: str) -> tuple[re.Pattern[str], bool] | None:
    """A line of .dockerignore: a pattern, and whether it is an exception."""
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    exception = line.startswith("!")
    clean = os.path.normpath(line[exception:].strip().lstrip("/") or ".")
    return re.compile(_pattern(clean)), exception
