"""Places where programs are measured: each is one sandbox with `bench.py` in it, which does one job at a time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, SandboxConfig, SoftwareConfig
from jaxagent.envs.base import Opening
from jaxagent.envs.speedup.rows import Problem
from jaxagent.sandbox.base import MIB, Sandbox, SandboxError
from jaxagent.sandbox.images.many import TaskImage
from jaxagent.sandbox.of_config import Sandboxes, open_sandboxes

BENCH = Path(__file__).with_name("bench.py")
FOLDER = "/tmp/bench"
PACKAGES = "/opt/bench"  # NumPy of this process, where the sandbox's python3 has none
START = (
    f"command -v python3 >/dev/null || exit 3; cd {FOLDER} && mkdir open && mkfifo job result && "
    f"(setsid python3 -I -B bench.py {FOLDER} {PACKAGES} </dev/null >log 2>&1 &) && cat result"
)
JOB = f"cd {FOLDER} && echo >job && cat result"
START_S, COMPILE_S = 60.0, 20.0  # the latter: twice, beside a job's own time
REPORT_BYTES = 100_000


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of a candidate.

    Attributes:
      error: why it is not correct, in one line; "" = it is.
      speedup: the reference's time divided by its own, each the shortest of all calls: what disturbs adds time. 0 where
        it is not correct.
      lowest: of the rounds' own speed-ups, so what all of them agree on: chance makes it smaller, hardly ever larger.
      candidate_s, reference_s: processor time of the shortest call.
    """

    error: str
    speedup: float = 0.0
    lowest: float = 0.0
    candidate_s: float = 0.0
    reference_s: float = 0.0


class Station:
    """A sandbox with the server of `bench.py`.

    Attributes:
      about: what the server found there: versions, and what a candidate could do that it must not.
    """

    def __init__(self, sandbox: Sandbox, about: Mapping[str, Any]):
        self._sandbox, self.about = sandbox, about

    @classmethod
    async def start(cls, sandbox: Sandbox) -> Station:
        """Starts the server. Raises SandboxError: it does not start; the sandbox is closed."""
        try:
            await sandbox.write(f"{FOLDER}/bench.py", BENCH.read_bytes())
            result = await sandbox.execute(("sh", "-c", START), START_S, REPORT_BYTES)
            try:
                return cls(sandbox, json.loads(result.output))
            except ValueError:
                log = (await sandbox.read(f"{FOLDER}/log")).decode(errors="replace") if result.timed_out else ""
                raise SandboxError(f"python3 does not measure there: {log.strip()[-300:] or result.output!r}") from None
        except BaseException:
            await sandbox.close()
            raise

    async def measure(self, problem: Problem, code: str, timeout_s: float, limits: Mapping[str, int]) -> Measured:
        """Measures a program. Raises SandboxError: there is no report, and RuntimeError: the task is at fault."""
        nonce = secrets.token_hex(16)  # no program of the agent's can write a report
        public = {"language": problem.language, "code": code, "inputs": problem.inputs, "output": problem.output}
        public |= {"seconds": timeout_s, **limits}
        secret = {"nonce": nonce, "reference": problem.reference, "draws": problem.draws}
        secret |= {"tolerance": problem.tolerance}
        for name, content in (("public", public), ("secret", secret)):
            await self._sandbox.write(f"{FOLDER}/{name}.json", json.dumps(content).encode(), 0o600)
        result = await self._sandbox.execute(("sh", "-c", JOB), timeout_s + 2 * COMPILE_S + 10.0, REPORT_BYTES)
        try:
            report = json.loads(result.output)
        except ValueError:
            report = {}
        if report.get("nonce") != nonce:
            what = report.get("failure", "it takes too long" if result.timed_out else "somebody ended it")
            raise SandboxError(f"the measurement gave no report: {what}")
        if report["fault"] == "task":
            raise RuntimeError(f"the task's reference or inputs fail: {report['error']}")
        if report["fault"]:
            return Measured(report["error"])

        shortest = [[max(min(times), 1) for times in report[f"{name}_ns"]] for name in ("reference", "candidate")]
        reference_ns, candidate_ns = map(min, shortest)
        lowest = min(r / c for r, c in zip(*shortest, strict=True))
        return Measured("", reference_ns / candidate_ns, lowest, candidate_ns * 1e-9, reference_ns * 1e-9)

    async def close(self) -> None:
        """Ends it."""
        await self._sandbox.close()


class Stations:
    """So many stations; each job has one for itself. One whose job gave no report is replaced."""

    def __init__(self, sandboxes: Sandboxes, config: SandboxConfig, count: int, image: TaskImage | None):
        self._sandboxes, self._image = sandboxes, image
        self._memory_bytes = config.memory_mb * MIB // 2
        self._free: asyncio.Queue[Station | None] = asyncio.Queue()
        for _ in range(count):
            self._free.put_nowait(None)

    async def start(self) -> Station:
        """A new station. Raises SandboxError."""
        return await Station.start(await self._sandboxes.take(self._image))

    async def measure(self, problem: Problem, code: str, rounds: int, calls: int, timeout_s: float) -> Measured:
        """What comes of a program, when a station is free. Raises as `Station.measure`."""
        limits = {"rounds": rounds, "calls": calls, "memory_bytes": self._memory_bytes}
        station = await self._free.get()
        try:
            station = station or await self.start()
            return await station.measure(problem, code, timeout_s, limits)
        except BaseException as failure:
            if station is not None and (isinstance(failure, SandboxError) or not isinstance(failure, RuntimeError)):
                dead, station = station, None
                await dead.close()
            raise
        finally:
            self._free.put_nowait(station)

    async def close(self) -> None:
        """Ends those that are idle."""
        while not self._free.empty():
            if (station := self._free.get_nowait()) is not None:
                await station.close()


@contextlib.contextmanager
def open_stations(opening: Opening, config: SandboxConfig, count: int, compiler: bool) -> Iterator[Stations]:
    """Finds a back end that works, tries a station, and yields stations.

    Args:
      opening: of the run.
      config: of the sandboxes.
      count: how many measure at once.
      compiler: whether tasks need cc.

    Raises:
      ConfigError: no sandbox, no NumPy or compiler in it, or a candidate could do there what it must not.
    """
    software = config.software or SoftwareConfig()
    with contextlib.ExitStack() as stack:
        own = not software.layers and config.backend != "remote"
        if own:
            layers = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxagent-bench-")))
            layers.chmod(0o711)  # the sandboxes' user passes through
            config = dataclasses.replace(config, software=dataclasses.replace(software, layers=str(layers)))
        sandboxes = stack.enter_context(open_sandboxes(opening, dataclasses.replace(config, warm=0)))
        stations = Stations(sandboxes, config, count, None)
        try:
            station = opening.run(stations.start(), 2 * START_S)
            if station.about["numpy"] is None and own and tuple(station.about["python"]) == sys.version_info[:2]:
                opening.run(station.close(), START_S)
                _copy_numpy(layers / "numpy" / PACKAGES.lstrip("/"))
                stations = Stations(sandboxes, config, count, TaskImage("numpy"))
                station = opening.run(stations.start(), 2 * START_S)
        except (SandboxError, RuntimeError) as failure:
            raise ConfigError(f"env.sandbox: {failure}") from failure
        about = station.about
        opening.run(station.close(), START_S)
        if about["numpy"] is None:
            raise ConfigError(
                "env.sandbox: its python3 has no NumPy, and this process's is for another Python: install Debian's "
                "python3-numpy on this host, or name a root that has it by env.sandbox.software.root."
            )
        if compiler and not about["cc"]:
            raise ConfigError("env.sandbox: tasks in C need a compiler there, and cc is not found: install gcc.")
        if about["able"] and not config.unsafe:
            raise ConfigError(f"env.sandbox: a program that is measured is not shut in: {'; '.join(about['able'])}.")
        opening.note(f"measuring: processor time, NumPy {about['numpy']}, {count} at once")
        try:
            yield stations
        finally:
            opening.run(stations.close(), START_S)


def _copy_numpy(folder: Path) -> None:
    """This process's NumPy, for everybody to read."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        raise ConfigError("NumPy is not installed here.")
    package = Path(spec.origin).parent
    for source in (package, package.with_name("numpy.libs")):
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("tests"))
    for path in (folder, *folder.parents[: len(Path(PACKAGES).parts)]):
        path.chmod(0o755)
