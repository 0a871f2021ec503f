"""What this machine has for a run, what is missing, and the command that brings it.

    python -m jaxagent.doctor
    python -m jaxagent.doctor --workdir=/data/runs --json

A line per finding: "ok"; "note" for what some runs need; "fault" for what stops even a run on a laptop. Whatever may
hang or end a process (jax and its plug-ins, sandboxes) is tried in processes of its own, for --wait_s seconds each.
Exit codes: 0 a laptop's run works here, 1 it does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from jaxagent.config.command import Parser, exit_code, seconds
from jaxagent.io import files

LEAST_DISK, ENOUGH_DISK = 0.5, 5.0  # GB: logs and two bundles of a laptop's run; what a few of them write
LEAST_MEMORY, ENOUGH_MEMORY = 1.0, 3.0  # GB: search_r1 compiles and trains in less than the second
EXTRAS = {  # of setup.py: who needs it
    "cuda": "NVIDIA GPUs",
    "cuda-plan": "--dry_run for NVIDIA GPUs on a machine without one",
    "tpu": "TPUs",
    "dense": "search by meaning (env.retriever=dense)",
    "gguf": "data_pipelines.smollm2",
    "jetstream": "examples/jetstream_engine.py",
    "ray": "launch.ray_fleet",
    "tensorboard": "looking at WORKDIR/tensorboard",
    "peft": "loading a run's adapter in PyTorch",
    "notebook": "examples/first_run.ipynb without a browser",
    "browser": "tests of the page of `jaxagent view`",
    "test": "tests",
    "peers": "benchmarks against other trainers",
    "dev": "working on jaxagent",
}
ACCELERATORS = {"cuda12": "/dev/nvidia0", "tpu": "/dev/accel0"}  # jax's extra: the file that drivers make of the first
# Which devices jax has, and then whether everything that a run imports can be imported.
_JAX = """
import json, jax
devices = [(device.platform, device.device_kind) for device in jax.devices()]
print(json.dumps(devices), flush=True)
import jaxagent.loop
print("imported", flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: str  # "ok", "note" or "fault"
    text: str
    do: str = ""  # the command, or the advice; "" where there is nothing to do


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return exit_code(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m jaxagent.doctor", description=__doc__, formatter_class=form)
    parser.add_argument("--workdir", default="runs", help="where runs will write (default %(default)s)")
    parser.add_argument("--wait_s", type=seconds, default=60.0, help="for each process (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(argv)
    findings = []
    for finding in look(pathlib.Path(options.workdir), options.wait_s):
        findings.append(finding)
        if not options.json:
            print(f"{finding.state:<5}  {finding.name}: {finding.text}", flush=True)
            if finding.do:
                print(f"{'':<7}-> {finding.do}", flush=True)
    works = all(finding.state != "fault" for finding in findings)
    if options.json:
        print(json.dumps({"works": works, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
    else:
        print("\na laptop's run works here" if works else "\nno run works here: mend the faults above, first to last")
    return 0 if works else 1


def look(workdir: pathlib.Path, wait_s: float) -> Iterator[Finding]:
    """Everything, one after the other, what is cheap first."""
    yield from packages()
    yield from disks(workdir)
    yield from machine()
    yield from devices(wait_s)
    yield sandboxes(wait_s)


def packages() -> Iterator[Finding]:
    """Python, jaxagent, the packages that it requires, and its extras."""
    python = f"{platform.python_version()} in {sys.executable}"
    try:
        own = importlib.metadata.distribution("jaxagent")
        from packaging.specifiers import SpecifierSet  # required as the others are, so it may be what is missing
    except ImportError as error:
        yield Finding("Python", "ok", python)
        what = "jaxagent" if isinstance(error, importlib.metadata.PackageNotFoundError) else "packaging"
        do = f"{_pip()} -e .    (in the checkout)" if what == "jaxagent" else f"{_pip()} packaging"
        yield Finding("packages", "note", f"{what} is not installed in this Python, so their ranges are unknown", do)
        return
    wanted = own.metadata["Requires-Python"] or ""
    fits = SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
    do = "" if fits else f"make a virtual environment with a Python {wanted}"
    yield Finding("Python", "ok" if fits else "fault", f"{python} (wanted: {wanted})", do)
    yield Finding("jaxagent", "ok", own.version)
    required, of_extras = _requirements(own.requires or [])
    lacking = {text: why for text in required if (why := lack(text))}
    for text, why in lacking.items():
        yield Finding(text, "fault", why, f"{_pip()} {shlex.quote(text)}")
    versions = (f"{name} {_version(name)}" for name in map(_name, required) if _version(name))
    yield Finding("packages", "ok", f"{len(required) - len(lacking)} of {len(required)}: {', '.join(versions)}")
    for extra, texts in of_extras.items():
        missing = {text: why for text in texts if (why := lack(text))}
        what = f"for {EXTRAS.get(extra, 'what setup.py says')}"
        if not missing:
            yield Finding(f"[{extra}]", "ok", f"{what}: installed")
        else:
            why = "; ".join(dict.fromkeys(missing.values()))
            yield Finding(f"[{extra}]", "note", f"{what}: {why}", f"{_pip()} {' '.join(map(shlex.quote, missing))}")


def lack(text: str) -> str:
    """Why a requirement ("jax[cuda12]>=0.10") is not met; "" where it is, or is none on this platform."""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return ""
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        return f"{requirement.name} is {distribution.version}, wanted {requirement.specifier}"
    _, of_extras = _requirements(distribution.requires or [])
    parts = (part for extra in sorted(requirement.extras) for part in of_extras.get(extra.lower(), ()))
    return next(filter(None, map(lack, parts)), "")


def _requirements(lines: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """What a package requires here, and what each of its extras adds, without the markers that say so."""
    from packaging.requirements import Requirement

    required: list[str] = []
    of_extras: dict[str, list[str]] = {}
    for requirement in map(Requirement, lines):
        marker, requirement.marker = requirement.marker, None
        extras = re.findall(r"""extra == ['"]([\w.-]+)['"]""", str(marker))
        if not extras and (marker is None or marker.evaluate({"extra": ""})):
            required.append(str(requirement))
        for extra in extras:
            if marker is not None and marker.evaluate({"extra": extra}):
                of_extras.setdefault(extra.lower(), []).append(str(requirement))
    return required, of_extras


def disks(workdir: pathlib.Path) -> Iterator[Finding]:
    """Where runs write, and where compiled programs are kept."""
    yield disk("workdir", workdir, "fault", "--workdir=FOLDER here, --config.workdir=FOLDER of a run: on another disk")
    try:
        cache = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or files.cache_directory())
    except RuntimeError:
        text = "this user has neither a home nor $XDG_CACHE_HOME: every run compiles anew, which takes minutes"
        yield Finding("compile cache", "note", text, "export XDG_CACHE_HOME=FOLDER")
        return
    yield disk("compile cache", cache, "note", "export XDG_CACHE_HOME=FOLDER, one that can be written")


def disk(name: str, folder: pathlib.Path, worst: str, do: str) -> Finding:
    """Whether a folder, or what it will be made in, can be written and has room. `worst`: the state where not."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
            file.flush()
        of_disk = os.statvfs(there)
    except OSError as error:
        return Finding(name, worst, f"'{folder}' cannot be written: {error.strerror}", do)
    free = of_disk.f_bavail * of_disk.f_frsize / 1e9
    text = f"'{folder}' has {free:.1f} GB free"
    if of_disk.f_files and not of_disk.f_favail:
        return Finding(name, worst, f"{text}, but no more files can be made there (no inodes)", do)
    state = worst if free < LEAST_DISK else "note" if free < ENOUGH_DISK else "ok"
    return Finding(name, state, text, "" if state == "ok" else f"free some, or {do}")


def machine() -> Iterator[Finding]:
    """Cores and memory."""
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", "ok", f"{cores} of {os.cpu_count()} are this process's")
    free = _free_memory()
    state = "fault" if free < LEAST_MEMORY else "note" if free < ENOUGH_MEMORY else "ok"
    yield Finding("memory", state, f"{free:.1f} GB free", "" if state == "ok" else "end other programs")


def _free_memory(root: pathlib.Path = pathlib.Path("/")) -> float:
    """GB that this process may still take: of the machine's, and of its container's."""
    known = dict(re.findall(r"^(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE))
    free = int(known["MemAvailable"]) * 1024
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        folder = root / "sys/fs/cgroup"
        try:
            free = min(free, int((folder / most).read_text()) - int((folder / used).read_text()))
        except (OSError, ValueError):  # another kind of machine, or "max"
            continue
    return free / 1e9


def devices(wait_s: float) -> Iterator[Finding]:
    """What jax computes on, and whether everything that a run imports is there."""
    status, out, error = try_process([sys.executable, "-c", _JAX], wait_s)
    lines = out.splitlines()
    if not lines or not lines[0].startswith("["):
        on_cpu, _, _ = try_process([sys.executable, "-c", _JAX], wait_s, {"JAX_PLATFORMS": "cpu"})
        do = "export JAX_PLATFORMS=cpu    (jax works so; docs/gpu.md for GPUs)"
        do = do if on_cpu == 0 else f"{_pip()} --force-reinstall jax jaxlib"
        yield Finding("devices", "fault", f"jax cannot say its devices: {_why(status, error, wait_s)}", do)
        return
    found = [tuple(device) for device in json.loads(lines[0])]
    kinds = ", ".join(f"{found.count(one)} {one[0]} ({one[1]})" for one in dict.fromkeys(found))
    idle = [extra for extra, path in ACCELERATORS.items() if os.path.exists(path)]
    if idle and all(name == "cpu" for name, _ in found):
        do = f"{_pip()} 'jax[{idle[0]}]'    (and leave JAX_PLATFORMS unset)"
        yield Finding("devices", "note", f"{kinds}, though this machine has an accelerator", do)
    else:
        yield Finding("devices", "ok", kinds)
    if lines[1:] != ["imported"] or status != 0:
        why = _why(status, error, wait_s)
        do = f"{_pip()} -e .    (in the checkout)"
        if missing := re.search(r"No module named '(\w+)", why):
            do = f"{_pip()} {missing[1].replace('_', '-')}"
        yield Finding("imports", "fault", f"a run cannot be imported: {why}", do)


def sandboxes(wait_s: float) -> Finding:
    """Which sandbox a run takes. Runs whose agents start no commands need none, so that it is never a fault."""
    status, out, error = try_process([sys.executable, "-m", "jaxagent.sandbox"], wait_s)
    if status == 0:
        *each, last = out.strip().splitlines()
        working = [line.partition(":")[0] for line in each if ": works" in line]
        return Finding("sandboxes", "ok", f"{', '.join(working)}; {last}")
    why = "; ".join([*out.strip().splitlines(), *([] if out and status == 1 else [_why(status, error, wait_s)])])
    do = "apt-get install gcc libc6-dev bubblewrap    (or another back end: docs/sandboxes.md)"
    return Finding("sandboxes", "note", f"agents' commands cannot run here: {why}", do)


def try_process(
    command: Sequence[str], wait_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Exit code (None: it was killed after `wait_s`), stdout and stderr of a process and whatever it starts."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            status: int | None = child.wait(wait_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait(5.0)
            except (ProcessLookupError, subprocess.TimeoutExpired):  # nobody is left, or a device's driver keeps it
                pass
        texts = []
        for file in (out, error):
            file.seek(0)
            texts.append(file.read(1_000_000).decode(errors="replace"))
        return status, texts[0], texts[1]


def _why(status: int | None, error: str, wait_s: float) -> str:
    """Why a process came to nothing, in a line."""
    if status is None:
        return f"nothing came in {wait_s:g} s, and the process was killed"
    last = next((line.strip() for line in reversed(error.splitlines()) if line.strip()), "it said nothing")
    return f"killed by {signal.Signals(-status).name}" if status < 0 else last.removeprefix("error: ")


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install"


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
