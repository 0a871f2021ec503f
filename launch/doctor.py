"""What this machine has for a run, what is missing, and the command that brings it.

    python -m launch.doctor
    python -m launch.doctor --workdir=/data/runs --json

A line per finding: "ok"; "note" for what some runs need; "fault" for what stops even a run on a laptop. Whatever may
hang or end a process (jax and its plug-ins, sandboxes) is tried in processes of its own, for --wait_s seconds each.
Exit codes: 0 a laptop's run works here, 1 it does not.
"""

from __future__ import annotations

import argparse
import contextlib
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
    "wandb": "config.track=wandb",
    "mlflow": "config.track=mlflow",
    "trackio": "config.track=trackio",
    "track": "all of these trackers",
    "peft": "loading a run's adapter in PyTorch",
    "notebook": "running examples/first_run.ipynb without a browser",
    "browser": "tests of the page of `jaxagent view`",
    "test": "tests",
    "peers": "benchmarks against other trainers",
    "dev": "working on jaxagent",
}
ACCELERATORS = {"cuda12": "/dev/nvidia0", "tpu": "/dev/accel0"}  # jax's extra: the file that drivers make of the first
PIP = f"{shlex.quote(sys.executable)} -m pip install"
# Which devices jax has, and then whether everything that a run imports can be imported.
_JAX = """
import json, jax
print(json.dumps([f"{device.platform} ({device.device_kind})" for device in jax.devices()]), flush=True)
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
    parser = Parser("python -m launch.doctor", description=__doc__, formatter_class=form)
    parser.add_argument("--workdir", default="runs", help="where runs will write (default %(default)s)")
    parser.add_argument("--wait_s", type=seconds, default=60.0, help="for each process (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(argv)
    findings = []
    for finding in look(pathlib.Path(options.workdir), options.wait_s):
        findings.append(finding)
        if not options.json:
            do = f"\n       -> {finding.do}" if finding.do else ""
            print(f"{finding.state:<5}  {finding.name}: {finding.text}{do}", flush=True)
    works = all(finding.state != "fault" for finding in findings)
    if options.json:
        print(json.dumps({"works": works, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
    else:
        print("\na laptop's run works here" if works else "\nno run works here: mend the faults above, first to last")
    return 0 if works else 1


def look(workdir: pathlib.Path, wait_s: float) -> Iterator[Finding]:
    """Everything, one after the other, what is cheap first."""
    yield from packages()
    elsewhere = "--workdir=FOLDER here, --config.workdir=FOLDER of a run: on another disk"
    yield disk("workdir", workdir, "fault", elsewhere)
    elsewhere = "export XDG_CACHE_HOME=FOLDER, one that can be written"
    try:
        cache = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or files.cache_directory())
        yield disk("compile cache", cache, "note", elsewhere)
    except RuntimeError:
        yield Finding("compile cache", "note", "this user has no home: every run compiles anew, for minutes", elsewhere)
    yield Finding("cores", "ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} are this process's")
    free = free_memory()
    state = "fault" if free < LEAST_MEMORY else "note" if free < ENOUGH_MEMORY else "ok"
    yield Finding("memory", state, f"{free:.1f} GB free", "" if state == "ok" else "end other programs")
    yield from devices(wait_s)
    yield sandboxes(wait_s)


def packages() -> Iterator[Finding]:
    """Python, jaxagent, the packages that it requires, and its extras."""
    python = f"{platform.python_version()} in {sys.executable}"
    try:
        from packaging.specifiers import SpecifierSet  # required as the others are, so it may be what is missing

        own = importlib.metadata.distribution("jaxagent")
    except ImportError as error:
        missing = "packaging" if error.name == "packaging" else "jaxagent"
        do = f"{PIP} {missing if missing == 'packaging' else '-e .    (in the checkout)'}"
        yield Finding("packages", "note", f"{missing} is not installed in {python}: versions are not known", do)
        return
    wanted = own.metadata["Requires-Python"] or ""
    fits = SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
    do = "" if fits else f"make a virtual environment with a Python {wanted}"
    yield Finding("Python", "ok" if fits else "fault", f"{python} (wanted: {wanted})", do)
    required, there = requirements("jaxagent"), []
    for text in required:
        if why := lack(text):
            yield Finding(text, "fault", why, f"{PIP} {shlex.quote(text)}")
        else:
            name = re.split(r"[^\w.-]", text, maxsplit=1)[0]
            there.append(f"{name} {importlib.metadata.version(name)}")
    yield Finding("packages", "ok", f"jaxagent {own.version}, {len(there)} of {len(required)}: {', '.join(there)}")
    for extra in own.metadata.get_all("Provides-Extra") or []:
        missing = {text: why for text in requirements("jaxagent", extra) if (why := lack(text))}
        state = f"note:{'; '.join(dict.fromkeys(missing.values()))}" if missing else "ok:installed"
        do = f"{PIP} {' '.join(map(shlex.quote, missing))}" if missing else ""
        yield Finding(
            f"[{extra}]", state.partition(":")[0], f"for {EXTRAS.get(extra, '?')}: {state.partition(':')[2]}", do
        )


def requirements(name: str, extra: str = "") -> list[str]:
    """What an installed package requires here, or what one of its extras adds: "jax[cuda12]>=0.10"."""
    from packaging.requirements import Requirement

    out = []
    for requirement in map(Requirement, importlib.metadata.requires(name) or []):
        marker, requirement.marker = requirement.marker, None
        always = marker is None or marker.evaluate({"extra": ""})
        if always if not extra else marker is not None and not always and marker.evaluate({"extra": extra}):
            out.append(str(requirement))
    return out


def lack(text: str) -> str:
    """Why a requirement is not met; "" where it is."""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, wanted {requirement.specifier}"
    parts = (part for extra in sorted(requirement.extras) for part in requirements(requirement.name, extra))
    return next(filter(None, map(lack, parts)), "")


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


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> float:
    """GB that this process may still take: of the machine's, and of its container's."""
    available = re.search(
        r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    free = int(available[1]) * 1024 if available else 0
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # another kind of machine, or "max"
        most, taken = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        free = min(free, most - taken)
    return free / 1e9


def devices(wait_s: float) -> Iterator[Finding]:
    """What jax computes on, and whether everything that a run imports is there."""
    status, out, why = try_process([sys.executable, "-c", _JAX], wait_s)
    first, _, rest = out.partition("\n")
    if not first.startswith("["):
        on_cpu, _, _ = try_process([sys.executable, "-c", _JAX], wait_s, {"JAX_PLATFORMS": "cpu"})
        do = "export JAX_PLATFORMS=cpu    (jax works so; docs/gpu.md for GPUs)"
        do = do if on_cpu == 0 else f"{PIP} --force-reinstall jax jaxlib"
        yield Finding("devices", "fault", f"jax cannot say its devices: {why}", do)
        return
    names = json.loads(first)
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    idle = [extra for extra, path in ACCELERATORS.items() if os.path.exists(path)]
    if idle and all(name.startswith("cpu") for name in names):
        do = f"{PIP} 'jax[{idle[0]}]'    (and leave JAX_PLATFORMS unset)"
        yield Finding("devices", "note", f"{kinds}, though this machine has an accelerator", do)
    else:
        yield Finding("devices", "ok", kinds)
    if rest.strip() != "imported" or status != 0:
        missing = re.search(r"No module named '(\w+)", why)
        do = f"{PIP} {missing[1].replace('_', '-') if missing else '-e .    (in the checkout)'}"
        yield Finding("imports", "fault", f"a run cannot be imported: {why}", do)


def sandboxes(wait_s: float) -> Finding:
    """Which sandbox a run takes. Runs whose agents start no commands need none, so that it is never a fault."""
    status, out, why = try_process([sys.executable, "-m", "jaxagent.sandbox"], wait_s)
    lines = out.strip().splitlines()
    if status == 0:
        working = [line.partition(":")[0] for line in lines[:-1] if ": works" in line]
        return Finding("sandboxes", "ok", f"{', '.join(working)}; {lines[-1]}")
    do = "apt-get install gcc libc6-dev bubblewrap    (or another back end: docs/sandboxes.md)"
    return Finding("sandboxes", "note", f"agents' commands cannot run here: {'; '.join([*lines, why])}", do)


def try_process(
    command: Sequence[str], wait_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Runs a process, and ends whatever it has started.

    Returns:
      Its exit code (None: it was killed after `wait_s`), its stdout, and why it failed, in a line.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        env = {**os.environ, **(environment or {})}
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=error, start_new_session=True, env=env
        )
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(wait_s)
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):  # nobody is left, or a driver keeps it
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(5.0)
        for file in (out, error):
            file.seek(0)
        printed, said = (file.read(1_000_000).decode(errors="replace") for file in (out, error))
    if status is None:
        return status, printed, f"nothing came in {wait_s:g} s, and the process was killed"
    if status < 0:
        return status, printed, f"killed by {signal.Signals(-status).name}"
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), f"exit code {status}")
    return status, printed, last.removeprefix("error: ")


if __name__ == "__main__":
    sys.exit(main())
