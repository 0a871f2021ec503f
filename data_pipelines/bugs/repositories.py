"""Where bugs are put in: the source distribution of a package, or a git repository, as tar files that tasks bring.

A source distribution comes through pip, which runs the package's own build program to learn its requirements, as
`pip install` would: name packages that you trust. Their tests run in sandboxes only.
"""

from __future__ import annotations

import dataclasses
import email
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.envs.coding.patches import is_test

ARCHIVES = "archives"  # the folder beside the rows
PYTEST = "pytest<8.4"  # the last without Pygments, which is larger than all the rest
MAX_BYTES = 30_000_000  # of a repository
TIMEOUT_S = 600.0
_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|tests)\.py$")
_NO_SOURCE = re.compile(
    r"(^|/)(docs?|examples?|benchmarks?|scripts|tools|build|setup\.py|conftest\.py|_version\.py|\.[^/]*)(/|$)"
)


@dataclasses.dataclass(frozen=True)
class Repository:
    """One state of a repository."""

    name: str  # "toolz"
    version: str  # of a release, or the first letters of a commit
    files: Mapping[str, bytes]  # path -> content

    @property
    def tests(self) -> tuple[str, ...]:
        """Files of tests."""
        return tuple(sorted(path for path in self.files if is_test(path) and _TEST_FILE.search(path)))

    @property
    def sources(self) -> dict[str, str]:
        """Python files that are no tests."""
        found = {}
        for path, data in sorted(self.files.items()):
            if path.endswith(".py") and not is_test(path) and not _NO_SOURCE.search(path):
                try:
                    found[path] = data.decode()
                except UnicodeDecodeError:
                    continue
        return found

    def pack(self, folder: Path) -> str:
        """Writes the files as a tar below a data set's folder, unless they are there; returns the relative path."""
        return _pack(self.files, folder, f"{self.name}-{self.version}")


def from_package(requirement: str) -> tuple[Repository, list[str]]:
    """The newest source distribution of a package, or of the version that the requirement names; and what it needs.

    Raises:
      ConfigError: there is none, or pip fails; its last line is in the message.
    """
    name = re.split(r"[<>=!~\[ ]", requirement, maxsplit=1)[0]
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--no-deps", "--no-binary", name, "--dest", folder, requirement)
        (path,) = list(Path(folder).iterdir())
        if not path.name.endswith((".tar.gz", ".tgz")):
            raise ConfigError(f"--package={requirement}: its source distribution is {path.name}, no .tar.gz.")
        files = _files_of(path)
    about = email.message_from_bytes(files.get("PKG-INFO", b""))
    needs = [need for need in about.get_all("Requires-Dist") or [] if "extra" not in need]
    version = about.get("Version") or path.name.removesuffix(".tar.gz").rpartition("-")[2]
    return Repository(name, version, files), needs


def from_git(path: Path, commit: str = "HEAD") -> Repository:
    """The files of a commit.

    Raises:
      ConfigError: no repository there, or no such commit.
    """
    sha = git(path, "rev-parse", commit).decode().strip()
    files = _unpacked(io.BytesIO(git(path, "archive", "--format=tar", sha)), strip=False)
    return Repository(path.resolve().name, sha[:12], files)


def git(path: Path, *arguments: str) -> bytes:
    """What git prints. Its hooks and its pager are off.

    Raises:
      ConfigError: it fails.
    """
    command = ["git", "--no-pager", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-C", str(path)]
    done = subprocess.run([*command, *arguments], capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise ConfigError(f"--repository={path}: git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def pack_tools(folder: Path, needs: Sequence[str]) -> str:
    """Installs pytest and what the tests need into a tar below a data set's folder; returns the relative path."""
    wanted = sorted({PYTEST, *needs})
    label = f"tools-{hashlib.blake2b(repr(wanted).encode(), digest_size=4).hexdigest()}"
    target = folder / ARCHIVES / f"{label}.tar"
    if not target.exists():
        with tempfile.TemporaryDirectory() as place:
            _pip("install", "--no-compile", "--target", place, *wanted)
            files = {
                str(path.relative_to(place)): path.read_bytes()
                for path in sorted(Path(place).rglob("*"))
                if path.is_file() and path.relative_to(place).parts[0] != "bin"
            }
        _write_tar(files, target)
    return f"{ARCHIVES}/{target.name}"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip {arguments[0]} {arguments[-1]} does not end in {TIMEOUT_S:g} s.") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
        raise ConfigError(f"pip {arguments[0]} {arguments[-1]}: {said[-1]}")


def _files_of(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        return _unpacked(file, strip=True)


def _unpacked(file: io.BufferedIOBase, strip: bool) -> dict[str, bytes]:
    """Regular files of a tar, by path; nothing that leads outside.

    Raises:
      ConfigError: it is too large.
    """
    found: dict[str, bytes] = {}
    left = MAX_BYTES
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            path = member.name.partition("/")[2] if strip else member.name
            data = archive.extractfile(member) if member.isfile() else None
            if not path or path.startswith("/") or ".." in path.split("/") or data is None:
                continue
            left -= member.size
            if left < 0:
                raise ConfigError(f"a repository of more than {MAX_BYTES:,} bytes is too large for a task.")
            found[path] = data.read()
    return found


def _pack(files: Mapping[str, bytes], folder: Path, name: str) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    target = folder / ARCHIVES / f"{name}-{digest.hexdigest()}.tar"
    if not target.exists():
        _write_tar(files, target)
    return f"{ARCHIVES}/{target.name}"


def _write_tar(files: Mapping[str, bytes], target: Path) -> None:
    """Whole or not at all; the same files give the same bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    with tarfile.open(partial, "w") as archive:
        for path, data in sorted(files.items()):
            about = tarfile.TarInfo(path)
            about.size, about.mode = len(data), 0o644
            archive.addfile(about, io.BytesIO(data))
    partial.rename(target)
