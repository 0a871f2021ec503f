"""`Run`: one workdir and what goes on around training: checkpoints, metrics, episodes, progress, stopping, the summary.

A bundle holds everything that a run needs to go on, so the same command again continues where the last bundle was
taken: what `metrics.jsonl` holds beyond it is dropped, and written again by the steps that are done again.

Nothing of an earlier run is touched before it is certain that this one can go on from it: the config, the data and the
logs are compared when the run is opened (resume.py), and the first stage writes once its state is restored.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxagent.config import Config, ConfigError, to_dict
from jaxagent.data import episode_log
from jaxagent.io import files
from jaxagent.learner import checkpoint
from jaxagent.learner.checkpoint import Checkpointer
from jaxagent.learner.state import TrainState
from jaxagent.observe import health, jsonl, report
from jaxagent.observe.compiles import CompileCounter
from jaxagent.observe.episodes import episode_record
from jaxagent.observe.files import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    EPISODES_FILE,
    EPISODES_FOLDER,
    LOCK_FILE,
    METRICS_FILE,
    POLICY_FOLDER,
    RUN_FILE,
    SUMMARY_FILE,
)
from jaxagent.observe.jsonl import JsonlLog
from jaxagent.observe.metrics import MetricsWriter
from jaxagent.observe.progress import Progress
from jaxagent.runs import provenance, resume
from jaxagent.runs.failed import FailedEpisodes, end
from jaxagent.runs.stopping import Stopping
from jaxagent.types import Episode


class Run:
    """Opened by `open_run`, which has compared the config; then `begin`, then a stage after the other.

    Attributes:
      host: what the newest bundle says of the host's side; {} for a new run.
      checkpoints: there from `begin` on.
      results: numbers that end up in the summary, carried from bundle to bundle.
      failed: is told of failed episodes.
      changed: the config fields that differ from the bundle's, and are taken.
    """

    checkpoints: Checkpointer

    def __init__(self, cfg: Config, progress: Progress, compiles: CompileCounter, stopping: Stopping):
        """Reads what the workdir holds, and changes nothing.

        Raises:
          ConfigError: the run cannot be continued with this config, or from what is there.
        """
        self.cfg = cfg
        self.workdir = Path(cfg.workdir)
        self.progress = progress
        self.compiles = compiles
        self.host: dict[str, Any] = {}
        self.changed: list[tuple[str, Any, Any]] = []
        self._stopping = stopping
        self._stack = contextlib.ExitStack()
        self._starts = provenance.read(self.workdir / RUN_FILE)
        self._bundle: int | None = None
        if found := checkpoint.bundles(self.workdir / CHECKPOINTS_FOLDER):
            self._bundle = found[-1]
            self._read_bundle()
        else:
            self._check_nothing_is_lost()
        self.results: dict[str, Any] = self.host.get("results", {})
        self.stage_seconds: dict[str, float] = self.host.get("stage_seconds", {})
        self._identity: dict[str, Any] = {}
        self._devices: list[jax.Device] = []
        self._opened = False
        self._episode_logs: dict[str, JsonlLog] = {}
        self._episode_positions: dict[str, int] = dict(self.host.get("episode_positions", {}))
        self._compiles_before = self.host.get("compiles_after_warmup", 0)
        self._saved_stages: set[str] = set()
        self.failed = FailedEpisodes(cfg.env.max_failed_steps, self.results, progress.note)
        self._complained: set[str] = set()
        # Bundles are numbered in the order in which they are made: a stage's step s is bundle _first_bundle + s.
        self._last_bundle = -1 if self._bundle is None else self._bundle
        self._first_bundle = self._last_bundle - self.host.get("step", 0)
        self._saved_step = self.host.get("step", 0)
        self._stage, self._since = "", 0.0  # what `stage_seconds` is counting now

    # ---- opening

    def _read_bundle(self) -> None:
        """The newest bundle, and whether this config and these logs can go on from it."""
        directory = self.workdir / CHECKPOINTS_FOLDER
        if not checkpoint.check(directory, self._bundle):
            self.progress.note(f"{directory / str(self._bundle)} has no digests: it is read unchecked.")
        self.host = checkpoint.read_host(directory, self._bundle)
        adapting = self.host["stage"] in ("opd", "rl")
        self.changed = resume.check_config(self.host["config"], self.cfg, str(directory / str(self._bundle)), adapting)
        jsonl.check(self.workdir / METRICS_FILE, self.host["metrics_position"], parse=True)
        jsonl.check(self.workdir / EPISODES_FILE, self.host["episodes_position"], parse=False)
        for name, position in self.host.get("episode_positions", {}).items():
            jsonl.check(self.workdir / EPISODES_FOLDER / f"{name}.jsonl", position, parse=False)

    def _check_nothing_is_lost(self) -> None:
        """Records without a bundle are those of a run that was killed before its first one, or lost their bundles."""
        records = jsonl.count(self.workdir / METRICS_FILE)
        exported = (self.workdir / SUMMARY_FILE).exists() or (self.workdir / POLICY_FOLDER).exists()
        had = self._starts["checkpointed"] or exported or not (self.workdir / CHECKPOINTS_FOLDER).is_dir()
        if records and had:
            raise ConfigError(
                f"{self.workdir} holds {records} records and no checkpoint: use another workdir, or delete "
                f"{self.workdir / METRICS_FILE} to begin anew."
            )
        if records:
            self.progress.note(f"{self.workdir} has no checkpoint yet: its {records} records are made again.")

    def begin(self, identity: Mapping[str, Any], mesh: jax.sharding.Mesh) -> None:
        """Compares what the run works with, and opens the checkpoints. Leftovers of a killed save are removed.

        Args:
          identity: of `build.Parts`.
          mesh: that the run is on.

        Raises:
          ConfigError: the bundle is of other data, another tokenizer or another model.
        """
        if self.host:
            resume.check_identity(self.host.get("identity", {}), identity, self.cfg, self.host)
        self._identity, self._devices = dict(identity), list(mesh.devices.flat)
        checked = () if self._bundle is None else (self._bundle,)
        self.checkpoints = self._stack.enter_context(
            Checkpointer(self.workdir / CHECKPOINTS_FOLDER, self.cfg.checkpoint.keep, checked)
        )

    def _open(self) -> None:
        """The first write: by now the state is restored."""
        self._opened = True
        resumed_at = None
        if self.host:
            told = resume.told(self.changed)
            self.progress.note(
                f"resuming {self.host['stage']} at step {self.host['step']}"
                + (f"; changed since the checkpoint: {told}" if told else "")
            )
            resumed_at = {"stage": self.host["stage"], "step": self.host["step"], "checkpoint": self._bundle}
        else:
            self._starts = {"checkpointed": False, "starts": []}
        self._starts["starts"].append(provenance.start(self._devices, resumed_at))
        _write_json(self.workdir / RUN_FILE, self._starts)
        _write_json(self.workdir / CONFIG_FILE, to_dict(self.cfg))
        self._metrics = MetricsWriter(self.cfg.workdir, self.host.get("metrics_position", 0))
        self._stack.callback(self._metrics.close)
        self._episodes = JsonlLog(self.workdir / EPISODES_FILE, self.host.get("episodes_position", 0))
        self._stack.callback(self._episodes.close)

    # ---- progress and logs

    def resumes(self, stage: str) -> bool:
        """Whether the newest bundle is of this stage: restore it, and go on at `step_of(stage)`."""
        return self.host.get("stage") == stage

    def step_of(self, stage: str) -> int:
        """The steps of a stage that the newest bundle holds; 0 for a stage that begins."""
        return self.host["step"] if self.resumes(stage) else 0

    def restored(self, stage: str, state: TrainState) -> TrainState:
        """The state that the newest bundle holds of this stage; a stage that begins keeps the one given."""
        if not self.resumes(stage):
            return state
        with self.compiles.warm_up():
            return self.checkpoints.restore(state)[0]

    def steps(
        self,
        stage: str,
        total: int,
        bundle: Callable[[], tuple[TrainState, Mapping[str, Any]]],
        *,
        first: Callable[[], None] | None = None,
        save_after: Callable[[int], bool] | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> Iterator[int]:
        """Yields the number of every step of a stage that is left, and saves a bundle after those that are due.

        The stage's state is restored before. It is timed, over resumes, and shown; when the last step has been yielded
        and the loop over them ends, its last bundle is complete.

        Args:
          stage: its name.
          total: steps of the whole stage.
          bundle: the learner's state and the task iterator's as they are now.
          first: called before step 0 of a stage that begins: its first evaluation.
          save_after: whether a bundle is due after so many steps that are not all; by default where the config says so.
          over: whether the stage ends before its last step.

        Raises:
          Stopped: SIGTERM or Ctrl-C has asked for the end, and everything is saved.
          OSError: the disk is full, or failed.
        """
        begins, done = not self.resumes(stage), self.step_of(stage)
        with self._stage_open(stage, total, done):
            if begins and first is not None:
                first()
                if self._due(0):
                    self._save(stage, 0, *bundle())
            while done < total and not over():
                yield done
                done += 1
                due = self._due(done) if save_after is None else self.terminating or save_after(done)
                if due or done == total or over():
                    self._save(stage, done, *bundle())

    @contextlib.contextmanager
    def _stage_open(self, name: str, total: int, step: int) -> Iterator[None]:
        if not self._opened:
            self._open()
        if not self.resumes(name):
            self._first_bundle = self._last_bundle + 1
        self.progress.stage(name, total, step)
        self._stage, self._since = name, time.monotonic()
        self._stopping.training = True
        try:
            yield
            self._wait()
            self._stopping.end_if_asked(self._saved_step)
            self.host = {}  # the next stage begins at its own step 0
        finally:
            self._stopping.training = False
            self._clock()
            self._stage = ""

    def record(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """One line of metrics.jsonl, TensorBoard and the progress display; what is wrong in it, once per name.

        Args:
          stage, step: where the run stands.
          metrics: None: nothing was measured.

        Raises:
          OSError: the disk is full, now or when the newest bundle was written.
        """
        self._metrics.write(stage, step, metrics)
        self.progress.update(step, metrics)
        for name, line in health.complaints(metrics).items():
            if name not in self._complained:
                self._complained.add(name)
                self.progress.note(f"{stage} step {step}: {line}. Said once; every step is in {METRICS_FILE}.")
        if self.checkpoints.look():
            self._mark_checkpointed()

    def show_episodes(self, episodes: Sequence[Episode], token_bytes: Sequence[bytes], stage: str, step: int) -> None:
        """Keeps evaluation episodes, token by token, for the report."""
        for episode in episodes:
            self._episodes.append(episode_record(episode, token_bytes, stage=stage, step=step, split="eval"))

    def log_episodes(self, name: str, step: int, episodes: Iterable[Episode]) -> None:
        """Appends to `episodes/<name>.jsonl`, losslessly: what stages that learn from data read (data/episode_log.py).

        `name` is the stage's, or "<stage>.eval" for held-out questions.
        """
        if name not in self._episode_logs:
            path = self.workdir / EPISODES_FOLDER / f"{name}.jsonl"
            self._episode_logs[name] = JsonlLog(path, self._episode_positions.get(name, 0))
            self._stack.callback(self._episode_logs[name].close)
        log = self._episode_logs[name]
        log.extend(episode_log.record(episode, name.partition(".")[0], step) for episode in episodes)
        self._episode_positions[name] = log.position

    # ---- bundles

    def evaluates(self, step: int, total: int) -> bool:
        """Whether a stage of `total` steps evaluates after so many of them."""
        every = self.cfg.eval.every
        return step == total or bool(every and step % every == 0)

    def _due(self, step: int) -> bool:
        """Whether a bundle is to be saved after a step that is not the stage's last: by the config, or by a signal."""
        every = self.cfg.checkpoint.every
        return self.terminating or bool(every and step % every == 0)

    def _save(self, stage: str, step: int, state: TrainState, tasks: Mapping[str, Any]) -> None:
        """Starts writing a bundle; on SIGTERM or Ctrl-C, waits until it is complete and ends the run."""
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
            "identity": self._identity,
        }
        self._last_bundle = self._first_bundle + step
        # Orbax cuts arrays that several devices hold into slices, by small programs compiled at a stage's first save.
        first = stage not in self._saved_stages
        self._saved_stages.add(stage)
        with self.compiles.warm_up() if first else contextlib.nullcontext():
            self.checkpoints.save(self._last_bundle, state, host)
        self._saved_step = step
        if self.terminating:
            self._wait()
            self.end_if_asked(step)

    def end_if_asked(self, step: int) -> None:
        """Ends the process, where `terminating`: everything up to `step` is saved."""
        if self.failed.stuck:
            self.write_report()
            end(self.failed.stuck)
        self._stopping.end_if_asked(step)

    @property
    def terminating(self) -> bool:
        """SIGTERM or Ctrl-C has arrived, or nothing but failures comes: save now."""
        return self._stopping.asked is not None or bool(self.failed.stuck)

    def _wait(self) -> None:
        self.checkpoints.wait()
        self._mark_checkpointed()

    def _mark_checkpointed(self) -> None:
        """Says in run.json that there was a bundle, so that a workdir that has lost them all is not begun anew."""
        if self._saved_stages and not self._starts["checkpointed"]:
            self._starts["checkpointed"] = True
            _write_json(self.workdir / RUN_FILE, self._starts)

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
        _write_json(self.workdir / SUMMARY_FILE, summary)
        if self.changed and not self._opened:
            self.progress.note(f"the run has ended, and does not take: {resume.told(self.changed)}")
        if unexpected := self.compiles.names_after_warm_up:
            self.progress.note(f"compiled after warm-up: {', '.join(unexpected)}")
        self.progress.note(f"summary: {self.workdir / SUMMARY_FILE}   report: {self.write_report()}")
        return summary

    def write_report(self) -> Path:
        """Writes report.html of what the run has logged so far. One that cannot be written ends no training."""
        try:
            return report.write_report(self.cfg.workdir, self.results)
        except (OSError, ValueError, LookupError, TypeError) as failure:
            self.progress.note(f"{report.REPORT_FILE} was not written: {type(failure).__name__}: {failure}")
            return Path(self.cfg.workdir) / report.REPORT_FILE

    def close(self) -> None:
        """Closes the logs, and waits for a bundle that is being written."""
        self._stack.close()

    def _clock(self) -> None:
        if self._stage:
            now = time.monotonic()
            self.stage_seconds[self._stage] = self.stage_seconds.get(self._stage, 0.0) + now - self._since
            self._since = now


@contextlib.contextmanager
def open_run(cfg: Config, progress: Progress, stopping: Stopping) -> Iterator[Run]:
    """Opens the workdir, and reads what is there to be continued. Nothing that lies there changes yet.

    Raises:
      ConfigError: another process trains in it, or this config cannot go on from it.
    """
    workdir = Path(cfg.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # First of all: opening the checkpoints removes what another process may be writing there.
        alone = stack.enter_context(open(workdir / LOCK_FILE, "ab"))
        files.lock(alone.fileno(), workdir)
        compiles = stack.enter_context(CompileCounter())
        run = Run(cfg, progress, compiles, stopping)
        stack.callback(run.close)
        yield run


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """What is not finite becomes null."""
    files.replace(path, json.dumps(jsonl.plain(value), indent=2, allow_nan=False) + "\n")
