"""Where programs are measured: each station is a sandbox with `bench.py` in it, which does one job at a time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError, SandboxConfig, SoftwareConfig
from jaxagent.envs.base import Opening
from jaxagent.sandbox.base import MIB, Sandbox, SandboxError
from jaxagent.sandbox.images.many import TaskImage
from jaxagent.sandbox.of_config import Sandboxes, open_sandboxes

BENCH = Path(__file__).with_name("bench.py")
FOLDER = "/tmp/bench"
PACKAGES = "/opt/bench"  # NumPy of this process, where the sandbox's python3 has none
START = (
    f"command -v python3 >/dev/null || exit 3; cd {FOLDER} && mkdir open && mkfifo job result && "
    f"(setsid python3 -I -B bench.py {FOLDER} {PACKAGES} </dev/null >/dev/null 2>&1 &) && cat result"
)
JOB = f"cd {FOLDER} && echo >job && cat result"
START_S, COMPILE_S = 60.0, 20.0  # the latter: twice, beside a job's own time


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of a candidate.

    Attributes:
      error: why it is not correct, in one line; "" = it is.
      speedup: the reference's shortest call divided by its own: what disturbs a call adds time. 0 where not correct.
      sure: the same with its own shortest call of the round that went worst. Chance makes this smaller, not larger.
    """

    error: str
    speedup: float = 0.0
    sure: float = 0.0


class Stations:
    """So many sandboxes with the server of `bench.py`, started when they are needed. One that gives no report goes."""

    def __init__(self, sandboxes: Sandboxes, config: SandboxConfig, count: int, image: TaskImage | None):
        self._sandboxes, self._image, self._memory_bytes = sandboxes, image, config.memory_mb * MIB // 2
        self._free: asyncio.Queue[Sandbox | None] = asyncio.Queue()
        for _ in range(count):
            self._free.put_nowait(None)

    async def look(self) -> dict[str, Any]:
        """What there is in a sandbox: versions, and what a candidate could do that it must not. Raises SandboxError."""
        sandbox, about = await self._start()
        await sandbox.close()
        return about

    async def measure(self, problem: Mapping[str, Any], code: str, rounds: int, calls: int, seconds: float) -> Measured:
        """Measures a program for a problem of `rows.of_task` when a sandbox is free; the rest as in the settings.

        Raises SandboxError: there is no report, or RuntimeError: the task is at fault.
        """
        nonce = secrets.token_hex(16)  # no program of the agent's can write a report
        arrays = [(array["dtype"], array["shape"]) for array in (*problem["inputs"], problem["output"])]
        public = {"language": problem["language"], "code": code, "arrays": arrays, "rounds": rounds, "calls": calls}
        public |= {"seconds": seconds, "memory_bytes": self._memory_bytes}
        secret = {"nonce": nonce, "draws": [array["draw"] for array in problem["inputs"]]}
        secret |= {name: problem[name] for name in ("reference", "tolerance")}
        sandbox, report = await self._free.get(), {}
        try:
            sandbox = sandbox or (await self._start())[0]
            for name, content in (("public", public), ("secret", secret)):
                await sandbox.write(f"{FOLDER}/{name}.json", json.dumps(content).encode(), 0o600)
            report = await _report(sandbox, JOB, seconds + 2 * COMPILE_S + 10.0)
            if report.get("nonce") != nonce:
                raise SandboxError(f"the measurement gave no report: {report.get('failure', 'somebody ended it')}")
        finally:
            if sandbox is not None and report.get("nonce") != nonce:
                await sandbox.close()
                sandbox = None
            self._free.put_nowait(sandbox)
        if report["fault"] == "task":
            raise RuntimeError(f"the task's reference or inputs fail: {report['error']}")
        if report["fault"]:
            return Measured(report["error"])
        shortest = [[max(min(times), 1) for times in report[name]] for name in ("task", "candidate")]
        sure = max(min(shortest[0]) - 1_000, 0) / (max(shortest[1]) + 1_000)  # ns, by which a call's own time varies
        return Measured("", min(shortest[0]) / min(shortest[1]), sure)

    async def _start(self) -> tuple[Sandbox, dict[str, Any]]:
        sandbox = await self._sandboxes.take(self._image)
        try:
            await sandbox.write(f"{FOLDER}/bench.py", BENCH.read_bytes())
            return sandbox, await _report(sandbox, START, START_S)
        except BaseException:
            await sandbox.close()
            raise


async def _report(sandbox: Sandbox, command: str, timeout_s: float) -> dict[str, Any]:
    """What the server says after a command. Raises SandboxError: nothing that can be read."""
    result = await sandbox.execute(("sh", "-c", command), timeout_s, 100_000)
    with contextlib.suppress(ValueError):
        if isinstance(report := json.loads(result.output), dict):
            return report
    raise SandboxError(f"python3 does not measure there: {'no answer' if result.timed_out else result.output[-300:]!r}")


@contextlib.contextmanager
def open_stations(opening: Opening, config: SandboxConfig, count: int, compiler: bool) -> Iterator[Stations]:
    """Yields `count` stations, after one was tried. `compiler`: tasks need cc.

    Raises:
      ConfigError: no sandbox, no NumPy or compiler in it, or a candidate could do there what it must not.
    """
    software = config.software or SoftwareConfig()
    with contextlib.ExitStack() as stack:
        layers = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxagent-bench-")))
        layers.chmod(0o711)  # the sandboxes' user passes through
        if own := not software.layers and config.backend != "remote":
            config = dataclasses.replace(config, software=dataclasses.replace(software, layers=str(layers)))
        sandboxes = stack.enter_context(open_sandboxes(opening, dataclasses.replace(config, warm=0)))
        stations = Stations(sandboxes, config, count, None)
        try:
            about = opening.run(stations.look(), 2 * START_S)
            if about["numpy"] is None and own and tuple(about["python"]) == sys.version_info[:2]:
                _copy_numpy(layers / "numpy")
                stations = Stations(sandboxes, config, count, TaskImage("numpy"))
                about = opening.run(stations.look(), 2 * START_S)
        except SandboxError as failure:
            raise ConfigError(f"env.sandbox: {failure}") from failure
        if about["numpy"] is None:
            raise ConfigError(
                "env.sandbox: its python3 has no NumPy, and is not of this process's version, whose NumPy could be "
                "used: install Debian's python3-numpy, or name a root that has it by env.sandbox.software.root."
            )
        if compiler and not about["cc"]:
            raise ConfigError("env.sandbox: tasks in C need a compiler there, and cc is not found: install gcc.")
        if about["able"] and not config.unsafe:
            raise ConfigError(f"env.sandbox: a program that is measured is not shut in: {'; '.join(about['able'])}.")
        opening.note(f"measuring: processor time, NumPy {about['numpy']}, {count} at once")
        yield stations


def _copy_numpy(layer: Path) -> None:
    """Puts this process's NumPy into a layer, for everybody to read."""
    package = Path(np.__file__).parent
    for source in filter(Path.is_dir, (package, package.with_name("numpy.libs"))):
        shutil.copytree(source, layer / PACKAGES.lstrip("/") / source.name)
    for path in (layer, layer / "opt", layer / PACKAGES.lstrip("/")):
        path.chmod(0o755)
