"""Metrics of a run: `metrics.jsonl` (the truth), and the trackers that `config.track` names (views of it).

A record is {"stage": str, "step": int, name: number, ...}; names are "topic/what", with units as suffixes.

No tracker can stop the run or slow it. All but TensorBoard's read the run's folder in processes of their own
(track.py); here they are started and, at the end, waited for: `END_S` for all of them together. One that fails or is
late is dropped, and that is said once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.errors import failure_line
from jaxagent.observe import jsonl
from jaxagent.observe.files import METRICS_FILE
from jaxagent.observe.tensorboard import TensorBoard
from jaxagent.observe.track import DONE, SILENT_S, without_secrets

END_S = 4.0  # for trackers to send what is left when the run ends


def check_trackers(names: Iterable[str]) -> None:
    """Whether the packages are there. Raises ConfigError."""
    for name in names:
        spec = importlib.util.find_spec({"tensorboard": "tensorboardX"}.get(name, name))
        if spec is None or spec.origin is None:  # a folder that wandb left is no package
            raise ConfigError(f"config.track names '{name}', which is not installed: pip install {name}.")


class MetricsWriter:
    """Writes records. Checkpoints keep `position`, and a resumed run passes it to `__init__`.

    Attributes:
      dropped: trackers that are told nothing any more, and why.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        position: int = 0,
        trackers: Iterable[str] = ("tensorboard",),
        note: Callable[[str], None] = lambda line: None,
    ):
        """Opens the workdir's log at `position` records; what an interrupted run wrote after it is dropped."""
        self._workdir, self._note = Path(workdir), note
        self._log = jsonl.JsonlLog(self._workdir / METRICS_FILE, position)
        self.dropped: dict[str, str] = {}
        self._trackers: dict[str, TensorBoard | TrackerProcess] = {}
        for name in trackers:
            with self._drops(name):
                here = name == "tensorboard"
                self._trackers[name] = TensorBoard(self._workdir) if here else TrackerProcess(self._workdir, name, note)

    @property
    def position(self) -> int:
        """Number of records written since the run's very first start."""
        return self._log.position

    def write(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one record of scalars (Python, NumPy or JAX)."""
        record = {"stage": stage, "step": int(step), **metrics}
        self._log.append(record)
        for name, tracker in list(self._trackers.items()):
            with self._drops(name):
                tracker.record(record)

    def end_tracking(self, finished: bool) -> None:
        """Gives trackers the time to send what is left; `finished`: the run has come to its end, with a summary."""
        trackers, self._trackers = self._trackers, {}
        by_s = time.monotonic() + END_S
        for tracker in trackers.values():
            tracker.ask_to_end(finished)
        for name, tracker in trackers.items():
            with self._drops(name):
                tracker.end(by_s)

    def close(self) -> None:
        """Closes what is open; a second call does nothing."""
        self._log.close()
        self.end_tracking(finished=False)

    @contextlib.contextmanager
    def _drops(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = without_secrets(str(error) if isinstance(error, ChildProcessError) else failure_line(error))
            self.dropped[name] = reason
            self._trackers.pop(name, None)
            command = f"python -m jaxagent.observe.track {shlex.quote(str(self._workdir))} {name}"
            rest = "" if name == "tensorboard" else f" `{command}` sends the rest."
            self._note(f"config.track: {name} is dropped, and the run goes on: {reason}.{rest} Said once.")


class TrackerProcess:
    """The process that tells one tracker of this run."""

    def __init__(self, workdir: Path, name: str, note: Callable[[str], None]):
        """Starts it."""
        self._name, self._note, self._last = name, note, ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxagent.observe.track", str(workdir), name, "--live"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the run's
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    def record(self, record: Mapping[str, Any]) -> None:
        """Looks what it says: records it reads itself. Raises ChildProcessError, with the reason: it has ended."""
        code = self._process.poll()
        for line in (self._stdout.read() or b"").decode(errors="replace").splitlines():
            if code != 1 and line:  # else the line says why
                self._note(f"{self._name}: {line}")
            self._last = line
        if code or (code == 0 and not self._stdin.closed):
            reasons = {1: self._last, -signal.SIGALRM: f"no answer for {SILENT_S} s"}
            raise ChildProcessError(reasons.get(code) or f"its process has ended with code {code}")

    def ask_to_end(self, finished: bool) -> None:
        """Says that nothing more comes."""
        with contextlib.suppress(OSError):  # it is gone
            self._stdin.write(DONE if finished else b"")
            self._stdin.close()

    def end(self, by_s: float) -> None:
        """Waits until it has sent all, until `by_s` on the monotonic clock; then kills it. Raises ChildProcessError."""
        try:
            self._process.wait(max(0.0, by_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):  # what it has started, too
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
            raise ChildProcessError(f"it was not ready {END_S:g} s after the run's end") from None
        self.record({})
