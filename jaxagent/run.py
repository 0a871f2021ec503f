"""`Run`: one workdir and what goes on around training: checkpoints, metrics, episodes, progress, SIGTERM, the summary.

A bundle holds everything that a run needs to go on, so the same command again continues where the last bundle was
taken: what `metrics.jsonl` holds beyond it is dropped, and written again by the steps that are done again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from jaxagent.config import Config, to_dict
from jaxagent.data import episode_log
from jaxagent.failed import FailedEpisodes, end
from jaxagent.learner.checkpoint import Checkpointer
from jaxagent.learner.state import TrainState
from jaxagent.observe import report
from jaxagent.observe.compiles import CompileCounter
from jaxagent.observe.episodes import episode_record
from jaxagent.observe.files import CONFIG_FILE, EPISODES_FILE, EPISODES_FOLDER, LOCK_FILE, SUMMARY_FILE
from jaxagent.observe.jsonl import JsonlLog, lock
from jaxagent.observe.metrics import MetricsWriter
from jaxagent.observe.progress import Progress
from jaxagent.types import Episode

STOPPED = 143  # exit code after SIGTERM, as the shell has it


class Run:
    """Opened by `open_run`.

    Attributes:
      host: what the newest bundle says of the host's side; {} for a new run.
      results: numbers that end up in the summary, carried from bundle to bundle.
      failed: is told of failed episodes.
    """

    def __init__(self, cfg: Config, checkpoints: Checkpointer, progress: Progress, compiles: CompileCounter):
        self.cfg = cfg
        self.checkpoints = checkpoints
        self.progress = progress
        self.compiles = compiles
        self.host: dict[str, Any] = checkpoints.host() if checkpoints.latest is not None else {}
        self.results: dict[str, Any] = self.host.get("results", {})
        self.stage_seconds: dict[str, float] = self.host.get("stage_seconds", {})
        self._metrics = MetricsWriter(cfg.workdir, self.host.get("metrics_position", 0))
        self._episodes = JsonlLog(Path(cfg.workdir) / EPISODES_FILE, self.host.get("episodes_position", 0))
        self._episode_logs: dict[str, JsonlLog] = {}
        self._episode_positions: dict[str, int] = dict(self.host.get("episode_positions", {}))
        self._compiles_before = self.host.get("compiles_after_warmup", 0)
        self._terminated = threading.Event()
        self._saved_stages: set[str] = set()
        self.failed = FailedEpisodes(cfg.env.max_failed_steps, self.results, progress.note)
        # Bundles are numbered in the order in which they are made: a stage's step s is bundle _first_bundle + s.
        self._last_bundle = -1 if checkpoints.latest is None else checkpoints.latest
        self._first_bundle = self._last_bundle - self.host.get("step", 0)
        self._stage, self._since = "", 0.0  # what `stage_seconds` is counting now
        _write_json(Path(cfg.workdir) / CONFIG_FILE, to_dict(cfg))

    # ---- progress and logs

    def resumes(self, stage: str) -> bool:
        """Whether the newest bundle is of this stage: restore it, and go on at `step_of(stage)`."""
        return self.host.get("stage") == stage

    def step_of(self, stage: str) -> int:
        """The steps of a stage that the newest bundle holds; 0 for a stage that begins."""
        return self.host["step"] if self.resumes(stage) else 0

    @contextlib.contextmanager
    def stage(self, name: str, total: int, step: int) -> Iterator[None]:
        """Times a stage, over resumes, and shows it."""
        if not self.resumes(name):
            self._first_bundle = self._last_bundle + 1
        self.progress.stage(name, total, step)
        self._stage, self._since = name, time.monotonic()
        try:
            yield
        finally:
            self._clock()
            self._stage = ""

    def record(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """One line of metrics.jsonl, TensorBoard and the progress display. None: nothing was measured."""
        self._metrics.write(stage, step, metrics)
        self.progress.update(step, metrics)

    def show_episodes(self, episodes: Sequence[Episode], token_bytes: Sequence[bytes], stage: str, step: int) -> None:
        """Keeps evaluation episodes, token by token, for the report."""
        for episode in episodes:
            self._episodes.append(episode_record(episode, token_bytes, stage=stage, step=step, split="eval"))

    def log_episodes(self, name: str, step: int, episodes: Iterable[Episode]) -> None:
        """Appends to `episodes/<name>.jsonl`, losslessly: what stages that learn from data read (data/episode_log.py).

        `name` is the stage's, or "<stage>.eval" for held-out questions.
        """
        if name not in self._episode_logs:
            path = Path(self.cfg.workdir) / EPISODES_FOLDER / f"{name}.jsonl"
            self._episode_logs[name] = JsonlLog(path, self._episode_positions.get(name, 0))
        log = self._episode_logs[name]
        log.extend(episode_log.record(episode, name.partition(".")[0], step) for episode in episodes)
        self._episode_positions[name] = log.position

    # ---- bundles

    def save(self, state: TrainState, stage: str, step: int, tasks: Mapping[str, Any]) -> None:
        """Starts writing a bundle, inside `stage`. `tasks` is the task iterator's state."""
        self._clock()
        host = {
            "stage": stage,
            "step": step,
            "tasks": dict(tasks),
            "metrics_position": self._metrics.position,
            "episodes_position": self._episodes.position,
            "episode_positions": self._episode_positions,
            "results": self.results,
            "stage_seconds": self.stage_seconds,
            "compiles_after_warmup": self.compiles_after_warmup,
            "config": to_dict(self.cfg),
        }
        self._last_bundle = self._first_bundle + step
        # Orbax cuts arrays that several devices hold into slices, by small programs compiled at a stage's first save.
        first = stage not in self._saved_stages
        self._saved_stages.add(stage)
        with self.compiles.warm_up() if first else contextlib.nullcontext():
            self.checkpoints.save(self._last_bundle, state, host)

    def stop_if_asked(self) -> None:
        """After a bundle was started: on SIGTERM, or where nothing but failures comes, waits for it and ends."""
        if self.failed.stuck:
            self.checkpoints.wait()
            self.write_report()
            end(self.failed.stuck)
        if self._terminated.is_set():
            self.checkpoints.wait()
            self.progress.note("SIGTERM: saved; run the same command to continue.")
            raise SystemExit(STOPPED)

    @property
    def terminating(self) -> bool:
        """SIGTERM has arrived, or nothing but failures comes: save now."""
        return self._terminated.is_set() or bool(self.failed.stuck)

    @property
    def compiles_after_warmup(self) -> int:
        """Programs compiled outside warm-up, over all resumes."""
        return self._compiles_before + self.compiles.after_warm_up

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Writes summary.json and report.html."""
        summary = dict(summary) | {
            "stage_seconds": {name: round(seconds, 2) for name, seconds in self.stage_seconds.items()},
            "compiles_after_warmup": self.compiles_after_warmup,
        }
        workdir = Path(self.cfg.workdir)
        _write_json(workdir / SUMMARY_FILE, summary)
        if unexpected := self.compiles.names_after_warm_up:
            self.progress.note(f"compiled after warm-up: {', '.join(unexpected)}")
        self.progress.note(f"summary: {workdir / SUMMARY_FILE}   report: {self.write_report()}")
        return summary

    def write_report(self) -> Path:
        """Writes report.html of what the run has logged so far. One that cannot be written ends no training."""
        try:
            return report.write_report(self.cfg.workdir, self.results)
        except (OSError, ValueError, LookupError, TypeError) as failure:
            self.progress.note(f"{report.REPORT_FILE} was not written: {type(failure).__name__}: {failure}")
            return Path(self.cfg.workdir) / report.REPORT_FILE

    def close(self) -> None:
        """Closes the logs."""
        self._metrics.close()
        for log in (self._episodes, *self._episode_logs.values()):
            log.close()

    def _clock(self) -> None:
        if self._stage:
            now = time.monotonic()
            self.stage_seconds[self._stage] = self.stage_seconds.get(self._stage, 0.0) + now - self._since
            self._since = now

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self._terminated.set()


@contextlib.contextmanager
def open_run(cfg: Config, progress: Progress) -> Iterator[Run]:
    """Opens the workdir, continuing what is there, and listens for SIGTERM.

    Raises:
      ConfigError: another process trains in it.
    """
    workdir = Path(cfg.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # First of all: opening the checkpoints removes what another process may be writing there.
        alone = stack.enter_context(open(workdir / LOCK_FILE, "ab"))
        lock(alone.fileno(), workdir)
        compiles = stack.enter_context(CompileCounter())
        saved = stack.enter_context(Checkpointer(workdir / "checkpoints", cfg.checkpoint.keep))
        run = Run(cfg, saved, progress, compiles)
        before = signal.signal(signal.SIGTERM, run.on_sigterm) if _main_thread() else None
        try:
            yield run
        finally:
            run.close()
            if before is not None:
                signal.signal(signal.SIGTERM, before)


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
