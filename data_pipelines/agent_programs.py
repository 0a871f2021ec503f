"""Agent programs -> one folder that every sandbox can have as a layer: Codex, Claude Code, opencode, Qwen Code, mini.

    python -m data_pipelines.agent_programs --out=layers/agents                       # all of them: 1.7 GB on disk
    python -m data_pipelines.agent_programs --out=layers/agents --programs=codex,mini_swe_agent

Then `Spec(layers=("/absolute/path/of/layers/agents",))` shows them inside below /opt/agents, started as
/opt/agents/bin/codex, claude, opencode, qwen and mini. The versions are pinned. Those from npm come without their
install scripts, so nothing that is downloaded runs here; Node itself is in the layer where a program needs it.
mini-swe-agent is for one version of Python, which must be /usr/bin/python3 inside (--python).

Each program appears whole or not at all. One that cannot be installed is named, the others are installed, and the
same command later installs only what is missing. opt/agents/manifest.json says versions, sizes and digests.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code
from jaxagent.io.files import lock, replace
from jaxagent.sandbox.owner import sandbox_uid

NAME = "python -m data_pipelines.agent_programs"
PLACE = "opt/agents"  # in the layer; absolute inside a sandbox
DOWNLOAD_TIMEOUT_S = 900.0  # one program
MIB = 2**20
MACHINES = {"x86_64": "x64", "aarch64": "arm64"}  # the kernel's name: npm's
NODE = "node", "24.21.0"
LAUNCHER = "launch.py"
START_PYTHON = """# Run by `python3 -I`. No variable says where the packages are: the agent's commands would inherit it.
import site
import sys

sys.path.insert(0, {packages!r})
site.addsitedir({packages!r})

from {module} import {function}

sys.argv[0] = {name!r}
sys.exit({function}())
"""


class InstallError(Exception):
    """One program cannot be installed; the others can."""


@dataclasses.dataclass(frozen=True)
class Npm:
    """A program from npm.

    `package` is what to install, `start` the one file that is executed, a pattern relative to the program's folder; in
    both, {machine} stands for npm's name of the machine and {version} for the version. `node`: Node executes it.
    """

    version: str
    command: str
    package: str
    start: str
    node: bool = False
    baseline: bool = False  # take the build for every x64 processor, where there are two


@dataclasses.dataclass(frozen=True)
class PyPI:
    """A program from PyPI, with what it requires; `besides`: what it imports and does not say that it requires."""

    version: str
    command: str
    package: str
    module: str
    function: str
    besides: tuple[str, ...] = ()


# The packages of one machine's build are named directly: the package that everybody installs would only choose it.
PROGRAMS: dict[str, Npm | PyPI] = {
    "codex": Npm(
        version="0.169.0",
        command="codex",
        package="@openai/codex@{version}-linux-{machine}",
        start="node_modules/@openai/codex/vendor/*/bin/codex",
    ),
    "claude_code": Npm(
        version="2.1.197",
        command="claude",
        package="@anthropic-ai/claude-code-linux-{machine}@{version}",
        start="node_modules/@anthropic-ai/claude-code-linux-{machine}/claude",
    ),
    "opencode": Npm(
        version="1.18.33",
        command="opencode",
        package="opencode-linux-{machine}@{version}",
        start="node_modules/opencode-linux-{machine}/bin/opencode",
        baseline=True,
    ),
    "qwen_code": Npm(
        version="0.15.10",
        command="qwen",
        package="@qwen-code/qwen-code@{version}",
        start="node_modules/@qwen-code/qwen-code/cli.js",
        node=True,
    ),
    "mini_swe_agent": PyPI(
        version="2.4.6",
        command="mini",
        package="mini-swe-agent",
        module="minisweagent.run.mini",
        function="app",
        besides=("mcp",),  # its client of models (litellm 1.106) imports it at the first request
    ),
}


def machine() -> str:
    """npm's name of this machine. Raises ConfigError where the programs are not built for it."""
    found = MACHINES.get(platform.machine())
    if found is None or sys.platform != "linux":
        raise ConfigError(f"The programs are built for Linux on {' and '.join(MACHINES)}, not on {platform.machine()}.")
    return found


def install(out: Path, names: Sequence[str], python: str, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> dict[str, str]:
    """Installs what is not there yet; says one line for each program.

    Args:
      out: the layer's folder. A folder beside it, `out`.partial, holds what is on its way.
      names: keys of `PROGRAMS`.
      python: version of /usr/bin/python3 inside, such as "3.11".
      timeout_s: for each program.

    Returns:
      Why a program is not there, by its name.

    Raises:
      ConfigError: another process installs there, or the machine is of no known kind.
    """
    here, work = machine(), out.with_name(out.name + ".partial")
    (out / PLACE / "bin").mkdir(parents=True, exist_ok=True)
    work.mkdir(exist_ok=True)
    held = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    failures = {}
    try:
        lock(held, work)
        layer = _Layer(out, work, python, here, timeout_s)
        wanted = [name for name in names if not layer.has(name)]
        for name in names:
            if name not in wanted:
                print(f"{name}: there already", flush=True)
        for name in wanted:
            try:
                print(f"{name}: {layer.add(name)}", flush=True)
            except InstallError as failure:
                failures[name] = str(failure)
                print(f"{name}: not installed: {failure}", file=sys.stderr, flush=True)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(held)
    return failures


class _Layer:
    """One folder, and what its manifest says of it."""

    def __init__(self, out: Path, work: Path, python: str, here: str, timeout_s: float):
        self._out, self._work, self._python, self._here, self._timeout_s = out, work, python, here, timeout_s
        self._place = out / PLACE
        self._file = self._place / "manifest.json"
        try:
            self._manifest: dict[str, Any] = json.loads(self._file.read_text("utf-8"))
        except FileNotFoundError:
            self._manifest = {}
        except ValueError as error:
            raise ConfigError(f"'{self._file}' is no JSON ({error}): remove the folder '{self._out}'.") from error

    def has(self, name: str) -> bool:
        """Whether it is there as the manifest says, in this version."""
        known, script = self._manifest.get(name, {}), self._place / "bin" / _command(name)
        there = known.get("version") == self._id(name) and script.is_file()
        return there and known.get("bytes") == _size(self._place / name)

    def add(self, name: str) -> str:
        """Installs a program; returns a line about it. Raises InstallError."""
        program, begin = PROGRAMS.get(name), time.monotonic()
        if isinstance(program, Npm) and program.node and not self.has(NODE[0]):
            self.add(NODE[0])
        part = self._work / name
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        start: str | None = None
        if program is None:
            packages = self._npm(part, f"node-linux-{self._here}@{NODE[1]}")
            start = f"exec {self._inside(part, name, f'node_modules/node-linux-{self._here}/bin/node')}"
        elif isinstance(program, Npm):
            kind = f"{self._here}-baseline" if program.baseline and self._here == "x64" else self._here
            packages = self._npm(part, program.package.format(machine=kind, version=program.version))
            runner = f"/{PLACE}/bin/node " if program.node else ""
            start = f"exec {runner}{self._inside(part, name, program.start.format(machine=kind))}"
        else:
            packages = self._pypi(part, program)
            inside = {"packages": f"/{PLACE}/{name}/packages", "name": program.command}
            text = START_PYTHON.format(module=program.module, function=program.function, **inside)
            (part / LAUNCHER).write_text(text, "utf-8")
            start = f"exec /usr/bin/python3 -I /{PLACE}/{name}/{LAUNCHER}"
        return self._keep(name, part, packages, start, time.monotonic() - begin)

    def _keep(self, name: str, part: Path, packages: Mapping[str, str], start: str, seconds: float) -> str:
        _open_to_all(part)
        digest, size = _digest(part), _size(part)
        place, command = self._place / name, _command(name)
        self._manifest.pop(name, None)  # what is replaced is not there until its successor is
        self._write_manifest()
        if place.exists():
            place.rename(self._work / f"{name}.old")  # removed with all that was on its way
        part.rename(place)
        script = self._place / "bin" / command
        replace(script, f'#!/bin/sh\n{start} "$@"\n')
        script.chmod(0o755)
        known = {"version": self._id(name), "bytes": size, "sha256": digest, "command": f"/{PLACE}/bin/{command}"}
        self._manifest[name] = {**known, "packages": dict(packages)}
        self._write_manifest()
        return f"{self._id(name)}, {size / MIB:.0f} MiB in {seconds:.0f} s"

    def _write_manifest(self) -> None:
        replace(self._file, json.dumps(self._manifest, indent=1, sort_keys=True) + "\n")
        self._file.chmod(0o644)
        for path in (self._out, self._out / "opt", self._place, self._place / "bin"):
            path.chmod(0o755)
        if os.geteuid() == 0:
            for path in (self._out, self._out / "opt", self._place, *self._place.glob("bin/*"), self._place / "bin"):
                os.chown(path, sandbox_uid(), sandbox_uid())

    def _id(self, name: str) -> str:
        """The version, and for which Python or machine."""
        program = PROGRAMS.get(name)
        version = program.version if program is not None else NODE[1]
        return f"{version} for Python {self._python}" if isinstance(program, PyPI) else f"{version} for {self._here}"

    def _inside(self, part: Path, name: str, pattern: str) -> str:
        """The absolute path inside a sandbox of the one file that the pattern names. Raises InstallError."""
        found = sorted(part.glob(pattern))
        if len(found) != 1:
            raise InstallError(f"{len(found)} files are {pattern}, where one should be")
        return f"/{PLACE}/{name}/{found[0].relative_to(part)}"

    def _npm(self, part: Path, package: str) -> dict[str, str]:
        npm = shutil.which("npm")
        if npm is None:
            raise InstallError("npm is not on the PATH: install Node.js, or run this on a machine that has it")
        words = [npm, "install", "--prefix", str(part), "--ignore-scripts", "--no-audit", "--no-fund", "--no-bin-links"]
        self._call("npm", [*words, "--no-save", package])
        locked = json.loads((part / "node_modules/.package-lock.json").read_text("utf-8"))["packages"]
        return {
            place.removeprefix("node_modules/"): f"{found.get('version', '')} {found.get('integrity', '')}".strip()
            for place, found in locked.items()
        }

    def _pypi(self, part: Path, program: PyPI) -> dict[str, str]:
        words = [sys.executable, "-m", "pip", "install", "--target", str(part / "packages"), "--only-binary=:all:"]
        words += ["--python-version", self._python, "--implementation", "cp", "--quiet"]
        words += ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
        if self._python != f"{sys.version_info[0]}.{sys.version_info[1]}":
            words.append("--no-compile")  # this Python's bytecode is not that one's
        self._call("pip", [*words, f"{program.package}=={program.version}", *program.besides])
        shutil.rmtree(part / "packages/bin", ignore_errors=True)  # scripts that name this machine's Python
        found = sorted(path.name.removesuffix(".dist-info") for path in (part / "packages").glob("*.dist-info"))
        return {name.rpartition("-")[0]: name.rpartition("-")[2] for name in found}

    def _call(self, program: str, words: Sequence[str]) -> None:
        """Runs an installer to its end, or ends it with all its children. Raises InstallError."""
        process = subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=self._timeout_s)
        except BaseException as failure:
            os.killpg(process.pid, 9)
            process.communicate()
            if isinstance(failure, subprocess.TimeoutExpired):
                raise InstallError(f"{program} was not done within {self._timeout_s:g} s: try again") from None
            raise
        if process.returncode:
            raise InstallError(f"{program} failed: {_reason(said)}")


def _command(name: str) -> str:
    return PROGRAMS[name].command if name in PROGRAMS else name  # Node is installed with the first that needs it


def _reason(said: str) -> str:
    """The lines of an installer's output that say why, at most three."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(npm )?err(or)?\b", line, re.IGNORECASE)]
    errors = [line for line in errors if "complete log" not in line]
    return " | ".join((errors or lines[-1:] or ["it said nothing"])[:3])[:500]


def _open_to_all(folder: Path) -> None:
    """Everybody may read it, and execute what its owner may; under root it belongs to the sandboxes' user."""
    for path in [folder, *folder.rglob("*")]:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            path.chmod(0o755 if mode & 0o100 else 0o644)
        if os.geteuid() == 0:
            os.chown(path, sandbox_uid(), sandbox_uid(), follow_symlinks=False)


def _files(folder: Path) -> Iterator[Path]:
    """All files below it, in the order of their paths, but bytecode, which a start outside of a sandbox adds to."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix != ".pyc":
            yield path


def _size(folder: Path) -> int:
    """Bytes of all its files."""
    return sum(path.stat().st_size for path in _files(folder))


def _digest(folder: Path) -> str:
    """One digest of all files' paths and contents, in the order of their paths."""
    total = hashlib.sha256()
    for path in _files(folder):
        with open(path, "rb") as file:
            one = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder)}\0{one}\n".encode())
    return total.hexdigest()


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PROGRAMS:
            raise ConfigError(f"--programs: '{name}' is not one of {', '.join(PROGRAMS)}.")
    if not names:
        raise ConfigError(f"--programs names none of {', '.join(PROGRAMS)}.")
    return list(dict.fromkeys(names))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 where a program is missing."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__, formatter_class=form)
    parser.add_argument("--out", type=Path, required=True, help="the layer's folder")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="separated by commas (default: all)")
    parser.add_argument("--python", default=_python_of_usr(), help="of /usr/bin/python3 inside (default: %(default)s)")
    options = parser.parse_args(argv)

    def run() -> int:
        names = _names(options.programs)
        if not re.fullmatch(r"3\.\d+", options.python):
            raise ConfigError(f"--python must be a version such as 3.11, not '{options.python}'.")
        failures = install(options.out.absolute(), names, options.python)
        print(f"layer: {options.out.absolute()}" + (f"; missing: {', '.join(failures)}" if failures else ""))
        return 1 if failures else 0

    return exit_code(run)


def _python_of_usr() -> str:
    """The version of this machine's /usr/bin/python3, which sandboxes without a root of their own have."""
    target = os.path.realpath("/usr/bin/python3")
    found = re.search(r"python(3\.\d+)$", target)
    return found[1] if found else f"{sys.version_info[0]}.{sys.version_info[1]}"


if __name__ == "__main__":
    sys.exit(main())
