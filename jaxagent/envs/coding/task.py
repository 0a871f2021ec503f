"""A software task: a statement, a repository in its initial state, and how a change is judged. Read from a row."""

from __future__ import annotations

import dataclasses
import functools
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError
from jaxagent.envs.coding import patches, rows
from jaxagent.types import Task

WORKDIR = "/home/user/repo"  # of tasks without an image
PYTHON = "/usr/bin/python3"  # of the base root


@dataclasses.dataclass(frozen=True)
class Tests:
    """Resolved iff all of both lists pass. Without a command the tests' files are run by our own runner."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    framework: str = "pytest"  # whose names the lists have, and whose log the command prints
    command: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        """The union of both lists, in order."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the tests are in. Of a dotted name every file that it can mean."""
        if self.framework == "pytest":
            return tuple(dict.fromkeys(name.partition("::")[0] for name in self.required))
        files: dict[str, None] = {}
        for name in self.required:
            parts = name.partition("(")[2].rstrip(")").split(".") if "(" in name else name.split(".")
            paths = ["/".join(parts[: i + 1]) + ".py" for i in range(len(parts))]
            files |= dict.fromkeys(f"{folder}{path}" for folder in ("", "src/") for path in paths)  # see runner.py
        return tuple(files)


@dataclasses.dataclass(frozen=True)
class SwePro:
    """SWE-bench Pro: a script runs the selected files, a second one turns its output into statuses."""

    required: tuple[str, ...]
    selected: tuple[str, ...]
    run_script: Path  # on this machine
    parser_script: Path


@dataclasses.dataclass(frozen=True)
class Status:
    """A shell command, or a Python program, whose exit status 0 means resolved."""

    command: str = ""
    script: str = ""


@dataclasses.dataclass(frozen=True)
class StatusMap:
    """R2E: what a command's log says of the tests must be exactly this; the exit status does not count."""

    command: str
    expected: Mapping[str, str]


Check = Tests | SwePro | Status | StatusMap


@dataclasses.dataclass(frozen=True)
class CodingTask:
    """One task. Paths of `files` and `hidden` are relative to the repository, unless they are absolute."""

    id: str
    statement: str
    check: Check
    image: str = ""  # "" = the base root
    workdir: str = WORKDIR
    python: str = PYTHON
    archive: Path | None = None  # tar of the repository's files, on this machine
    tools: Path | None = None  # tar of Python packages that the tests need
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    setup: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    patch: str = ""  # the oracle's
    test_patch: str = ""

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files of the tests that count, and of the test patch."""
        own = self.check.files if isinstance(self.check, Tests) else ()
        return tuple(dict.fromkeys((*own, *rows.IN_PATCH.findall(self.test_patch))))

    @property
    def protected(self) -> tuple[str, ...]:
        """What the agent's change may not touch: the tests that count, their folders of tests, hidden paths. Where the
        row brings its repository, also every other file that belongs to tests and what is no Python source, but for
        what the oracle's patch changes."""
        oracle = {change.path for change in patches.split(self.patch)}
        folders = {patches.test_folder(path) for path in self.test_files} - {""}
        mine = [folder for folder in sorted(folders) if not any(path.startswith(f"{folder}/") for path in oracle)]
        rest: list[str] = []
        if oracle and not self.image and isinstance(self.check, Tests):
            there = {*self.files, *(_paths(self.archive) if self.archive is not None else ())} - oracle
            rest = [path for path in sorted(there) if not path.endswith((".py", ".pyi")) or patches.is_test(path)]
        return tuple(dict.fromkeys((*self.test_files, *mine, *self.hidden, *rest)))


@functools.lru_cache(maxsize=64)
def _paths(archive: Path) -> tuple[str, ...]:
    """The files of a tar, which do not change during a run."""
    with tarfile.open(archive) as file:
        return tuple(member.name.removeprefix("./") for member in file if not member.isdir())


def from_task(task: Task, folder: Path | None = None) -> CodingTask:
    """The software task of a dataset's row.

    Args:
      task: with `metadata["coding"]` as `rows` describes it.
      folder: of the dataset, which relative paths of archives and scripts start from.

    Raises:
      ConfigError: naming task and key; or an archive is not there.
    """
    about = task.metadata.get(rows.KEY)
    if about is None:
        raise ConfigError(f"task '{task.id}': metadata has no '{rows.KEY}' object: it is no software task.")
    try:
        about = rows.check(about, f"metadata.{rows.KEY}")
    except RowError as error:
        raise ConfigError(f"task '{task.id}': {error}.") from None

    def path(key: str, text: str) -> Path | None:
        place = (folder or Path()) / text
        if text and not place.is_file():
            raise ConfigError(f"task '{task.id}': metadata.{rows.KEY}.{key}: there is no file {place}.")
        return place if text else None

    return CodingTask(
        id=task.id,
        statement=task.prompt,
        check=_check(about, path),
        image=about.get("image", ""),
        workdir=about.get("workdir") or WORKDIR,
        python=about.get("python") or ("python3" if about.get("image") else PYTHON),
        archive=path("archive", about.get("archive", "")),
        tools=path("tools", about.get("tools", "")),
        files=dict(about.get("files", {})),
        setup=tuple(about.get("setup", ())),
        hidden=tuple(about.get("hidden", ())),
        patch=about.get("patch", ""),
        test_patch=about.get("test_patch", ""),
    )


def _check(about: Mapping[str, Any], path: Any) -> Check:
    if (tests := about.get("check_tests")) is not None:
        return Tests(
            tuple(tests.get("fail_to_pass", ())),
            tuple(tests.get("pass_to_pass", ())),
            tests.get("framework", "pytest"),
            tests.get("command", ""),
        )
    if (pro := about.get("check_swepro")) is not None:
        required = (*pro.get("fail_to_pass", ()), *pro.get("pass_to_pass", ()))
        scripts = [path(f"check_swepro.{key}", pro[key]) for key in ("run_script", "parser_script")]
        return SwePro(tuple(dict.fromkeys(required)), tuple(pro.get("selected", ())), *scripts)
    if (status := about.get("check_status")) is not None:
        return Status(status.get("command", ""), status.get("script", ""))
    return StatusMap(about["check_map"]["command"], dict(about["check_map"]["expected"]))
