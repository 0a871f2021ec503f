"""`Workdir`: a run's folder and what goes on around training: checkpoints, metrics, episodes, stopping, the summary.

A bundle holds everything that a run needs to go on, so the same command again continues where the last bundle was
taken: what `metrics.jsonl` holds beyond it is dropped, and written again by the steps that are done again.

Nothing of an earlier run is touched before it is certain that this one can go on from it: the config, the data and the
logs are compared when the run is opened (resume.py), and the first stage writes once its state is restored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxagent.config import Config, ConfigError, to_dict
from jaxagent.io import files
from jaxagent.learner import checkpoint, peers
from jaxagent.learner.checkpoint import Checkpointer
from jaxagent.learner.state import TrainState
from jaxagent.observe import alarms, health, jsonl, model_card, report
from jaxagent.observe.compiles import CompileCounter
from jaxagent.observe.files import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    CONSOLE_FILE,
    LOCK_FILE,
    METRICS_FILE,
    OUTDATED_FILE,
    POLICY_FOLDER,
    RECORD_FOLDER,
    RUN_FILE,
    SUMMARY_FILE,
)
from jaxagent.observe.progress import Progress
from jaxagent.rollout.groups import FailedEpisodes, end
from jaxagent.runs import devices, provenance, resume
from jaxagent.runs.logs import Logs
from jaxagent.runs.record import Recorder
from jaxagent.runs.stopping import Stopping, asks_to_end


class Workdir:
    """Opened by `open_workdir`, which has compared the config; then `begin`, then a stage after the other.

    Attributes:
      host: what the newest bundle says of the host's side; {} for a new run.
      checkpoints: there from `begin` on.
      logs: keep its episodes.
      results: numbers that end up in the summary, carried from bundle to bundle.
      failed: is told of failed episodes.
      changed: the config fields that differ from the bundle's, and are taken.
      other_rounding: what of this machine is not as it was and is taken, though bits come out otherwise.
    """

    checkpoints: Checkpointer

    def __init__(self, cfg: Config, progress: Progress, compiles: CompileCounter, stopping: Stopping):
        """Reads what the workdir holds, and changes nothing.

        Raises:
          ConfigError: the run cannot be continued with this config, or from what is there.
        """
        self.cfg = cfg
        self.path = Path(cfg.workdir)
        self.progress = progress
        self.compiles = compiles
        self._stopping = stopping
        self._stack = contextlib.ExitStack()
        self._ending = False
        self._starts, self._bundle, self.host, self.changed = resume.newest_bundle(cfg, progress.note)
        self.logs = Logs(cfg, self.host, progress.note)
        self.results: dict[str, Any] = self.host.get("results", {})
        self.stage_seconds: dict[str, float] = self.host.get("stage_seconds", {})
        self._identity: dict[str, Any] = {}
        self._own_code: dict[str, str] = {}
        self._devices: list[jax.Device] = []
        self._rounding, self.other_rounding = provenance.rounding(jax.devices()[0]), ""
        self._opened = False
        self._compiles_before = self.host.get("compiles_after_warmup", 0)
        self._saved_stages: set[str] = set()
        self._recorded: set[str] = set()  # stages whose first bundle stays
        self._recorders: dict[str, Recorder] = {}
        self.failed = FailedEpisodes(cfg.env.max_failed_steps, self.results, progress.note)
        self._complained: set[str] = set()
        # Bundles are numbered in the order in which they are made: a stage's step s is bundle _first_bundle + s.
        self._last_bundle = -1 if self._bundle is None else self._bundle
        self._first_bundle = self._last_bundle - self.host.get("step", 0)
        self._saved = self.host.get("stage", ""), self.host.get("step", 0)
        self._save_now: Callable[[], None] = lambda: None
        self._stage, self._since = "", 0.0  # what `stage_seconds` is counting now

    # ---- opening

    def check_rounding(self) -> None:
        """Whether this machine rounds as that of the bundle from which the run goes on. Raises ConfigError."""
        if not self.host:
            return
        name, then = str(self.path / CHECKPOINTS_FOLDER / str(self._bundle)), self.host.get("rounding")
        if then is None and self.cfg.numerics == "exact":
            self.progress.note(f"{name} does not say on what it was made: whether numbers round as there is not known")
        numerics = self.host["config"].get("numerics", "exact")
        self.other_rounding = resume.other_rounding(then, self._rounding, self.cfg, name, numerics)

    def begin(self, identity: Mapping[str, Any], mesh: jax.sharding.Mesh) -> None:
        """Compares what the run works with, and opens the checkpoints. Leftovers of a killed save are removed.

        Raises:
          ConfigError: the bundle is of other data, another tokenizer or another model.
        """
        if self.host:
            resume.check_identity(self.host.get("identity", {}), identity, self.cfg, self.host)
        self._own_code = provenance.own_code(self.cfg)
        if unseen := provenance.without_file(self.cfg):
            self.progress.note(f"no file has the code of {', '.join(unseen)}: no one will be told that it has changed")
        resume.check_processes_agree(self._bundle, {**identity, "code of one's own": self._own_code}, self.cfg)
        self._identity, self._devices = dict(identity), list(mesh.devices.flat)
        verified = () if self._bundle is None else (self._bundle,)
        self.checkpoints = self._stack.enter_context(
            Checkpointer(self.path / CHECKPOINTS_FOLDER, self.cfg.checkpoint.keep, verified)
        )
        self.checkpoints.pinned.update(self.host.get("pinned", ()))

    def _open(self) -> None:
        """The first write: by now the state is restored."""
        self._opened = True
        resumed_at = None
        if self.host:
            code = provenance.code_changes(self.host.get("own_code"), self._own_code)
            where = f"{self.host['stage']}, step {self.host['step']}: "
            if code:
                self.results["code_changed"] = [*self.results.get("code_changed", ()), where + ", ".join(code)]
            changes = ", ".join(filter(None, (resume.changes_line(self.changed), self.other_rounding, *code)))
            self.progress.note(
                f"resuming {self.host['stage']} at step {self.host['step']}"
                + (f"; changed since the checkpoint: {changes}" if changes else "")
            )
            resumed_at = {"stage": self.host["stage"], "step": self.host["step"], "checkpoint": self._bundle}
        else:
            self._starts = {"checkpointed": False, "starts": []}
        if peers.is_first():  # process 0 writes what all have in common
            self.progress.append_lines_to(self.path / CONSOLE_FILE)
            start = provenance.start(self._devices, resumed_at, self._own_code)
            self._starts["starts"].append(start | {"other_rounding": self.other_rounding})
            files.replace_json(self.path / RUN_FILE, jsonl.plain(self._starts))
            files.replace_json(self.path / CONFIG_FILE, jsonl.plain(to_dict(self.cfg)))
            if (policy := self.path / POLICY_FOLDER).is_dir():
                (policy / OUTDATED_FILE).touch()  # an export of fewer steps, until this run's
        self._stack.callback(self.logs.close)
        self.logs.open()

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
            return self.checkpoints.restore(state)

    def steps(
        self,
        stage: str,
        total: int,
        bundle: Callable[[], tuple[Any, ...]],
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
          bundle: the learner's state and the tasks' as they are now, and earlier versions where some are needed.
          first: called before step 0 of a stage that begins: its first evaluation.
          save_after: whether a bundle is due after so many steps that are not all; by default where the config says so.
          over: whether the stage ends before its last step.

        Raises:
          Stopped: SIGTERM or Ctrl-C has asked for the end, and everything is saved.
          OSError: the disk is full, or failed.
        """
        begins, steps_done = not self.resumes(stage), self.step_of(stage)
        with self._stage_open(stage, total, steps_done), devices.collector_frozen():
            if begins and first is not None:
                first()
                if stage in self._recorded:
                    self.checkpoints.pinned.add(self._first_bundle)
                if self._is_due(0) or stage in self._recorded:
                    self._save(stage, 0, *bundle())
            while steps_done < total and not over():
                self._save_now = lambda steps_done=steps_done: self._save(stage, steps_done, *bundle())
                yield steps_done
                steps_done += 1
                self._ending = asks_to_end(self._asked_to_end(), self._stopping)
                is_due = self._is_due(steps_done) if save_after is None else self.terminating or save_after(steps_done)
                if is_due or steps_done == total or over():
                    self._save(stage, steps_done, *bundle())

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
            if self.terminating:
                self._stopping.end_if_asked(self._saved[1])
            self.host = {}  # the next stage begins at its own step 0
        finally:
            self._stopping.training = False
            self._count_seconds()
            self._stage = ""

    def record(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """One line of metrics.jsonl, for trackers and the progress display; what is wrong in it, once per name."""
        self.logs.metrics(stage, step, metrics)
        self.progress.update(step, metrics)
        for name, line in health.complaints(metrics).items():
            if name not in self._complained:
                self._complained.add(name)
                self.progress.note(f"{stage} step {step}: {line}. Said once; every step is in {METRICS_FILE}.")
        if self.checkpoints.look():
            self._mark_checkpointed()

    def recorder(self, stage: str) -> Recorder:
        """Keeps what the steps of a stage are made of, from where it goes on, as far as `checkpoint.replay` says."""
        keep, folder = self.cfg.checkpoint.replay, self.path / RECORD_FOLDER / stage
        config_values = to_dict(self.cfg)
        config = provenance.config_digest(config_values)
        recorder = Recorder(folder, self.step_of(stage), keep, config, peers.is_first(), self._own_code, config_values)
        self._stack.callback(recorder.close)
        self._recorders[stage] = recorder
        if keep == "all":
            self._recorded.add(stage)
        return recorder

    # ---- bundles

    def evaluates(self, step: int, total: int) -> bool:
        """Whether a stage of `total` steps evaluates after so many of them."""
        every = self.cfg.eval.every
        return step == total or bool(every and step % every == 0)

    def _is_due(self, step: int) -> bool:
        """Whether a bundle is to be saved after a step that is not the stage's last: by the config, or by a signal."""
        every = self.cfg.checkpoint.every
        return self.terminating or bool(every and step % every == 0)

    def _save(self, stage: str, step: int, state: TrainState, tasks: Mapping[str, Any], past: Any = None) -> None:
        """Starts writing a bundle; on SIGTERM or Ctrl-C, waits until it is complete and ends the run."""
        self._count_seconds()
        host = {
            "stage": stage,
            "step": step,
            "tasks": dict(tasks),
            **self.logs.positions,
            "results": self.results,
            "stage_seconds": self.stage_seconds,
            "compiles_after_warmup": self.compiles_after_warmup,
            "config": to_dict(self.cfg),
            "identity": self._identity,
            "own_code": self._own_code,
            "rounding": self._rounding,
            "pinned": sorted(self.checkpoints.pinned),
        }
        self._last_bundle = self._first_bundle + step
        # Orbax cuts arrays that several devices hold into slices, by small programs compiled at a stage's first save.
        first = stage not in self._saved_stages
        self._saved_stages.add(stage)
        with self.compiles.warm_up() if first else contextlib.nullcontext():
            self.checkpoints.save(self._last_bundle, state, host, past)
        self._saved = stage, step
        if stage in self._recorders and (seal := self._recorders[stage].seal):
            self.progress.note(f"{stage} step {step} saved; seal {seal}")  # for who will hold the run to it
        if self.terminating:
            self._wait()
            self.end_if_asked(step)

    def end_if_asked(self, step: int) -> None:
        """Ends the process, where `terminating`: everything up to `step` is saved."""
        if self.failed.stuck:
            self.write_report()
            end(self.failed.stuck)
        self._stopping.end_if_asked(step)

    def committed(self) -> int:
        """The step of the stage under way that the oldest bundle holds, pinned ones aside: training needs no older."""
        numbers = set(checkpoint.bundles(self.path / CHECKPOINTS_FOLDER)) - self.checkpoints.pinned
        return max(0, min(numbers, default=0) - self._first_bundle)

    def bundled(self) -> set[int]:
        """The steps of the stage under way where a run may go on: of its bundles, and of the one being written."""
        numbers = {*checkpoint.bundles(self.path / CHECKPOINTS_FOLDER), self._last_bundle}
        return {number - self._first_bundle for number in numbers if number >= self._first_bundle}

    def end_between_steps(self, stage: str, step: int) -> None:
        """Ends the process, where `terminating`, before `step` has begun to train: what is done is saved."""
        if self.terminating:
            if self._saved != (stage, step):
                self._save_now()
            self._wait()
            self.end_if_asked(step)

    @property
    def terminating(self) -> bool:
        """SIGTERM or Ctrl-C has arrived, or nothing but failures comes: save now.

        Of several processes all have to know at the same step: what came since they last met waits for the next one.
        """
        return self._asked_to_end() if peers.count() == 1 else self._ending

    def _asked_to_end(self) -> bool:
        return self._stopping.end_signal is not None or bool(self.failed.stuck)

    def _wait(self) -> None:
        self.checkpoints.wait()
        self._mark_checkpointed()

    def _mark_checkpointed(self) -> None:
        """Says in run.json that there was a bundle, so that a workdir that has lost them all is not begun anew."""
        if self._saved_stages and not self._starts["checkpointed"] and peers.is_first():
            self._starts["checkpointed"] = True
            files.replace_json(self.path / RUN_FILE, jsonl.plain(self._starts))

    @property
    def compiles_after_warmup(self) -> int:
        """Programs compiled outside warm-up, over all resumes."""
        return self._compiles_before + self.compiles.after_warm_up

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Writes summary.json and report.html.

        Raises:
          ConfigError: the run had ended before this process began, and does not take settings that have changed.
        """
        how = "More steps of its last stage (--config.rl.steps) go on with it; another --config.workdir begins anew."
        if self.changed and not self._opened:
            refused = resume.changes_line(self.changed)
            raise ConfigError(f"The run in '{self.path}' has ended, and does not take: {refused}. {how}")
        summary = dict(summary) | {
            "stage_seconds": {name: round(seconds, 2) for name, seconds in self.stage_seconds.items()},
            "compiles_after_warmup": self.compiles_after_warmup,
        }
        if not peers.is_first():
            return summary
        watch = alarms.Watch(to_dict(self.cfg), jsonl.read(self.path / METRICS_FILE))
        summary["alarms"] = [alarm.entry() for alarm in watch.alarms]
        self._write_summary(summary)
        self.logs.end_tracking()
        if self.logs.dropped_trackers:
            self._write_summary(summary)
        self._try_to_write(model_card.CARD_FILE, lambda: model_card.write(self.path))
        if not self._opened:
            self.progress.note(f"the run in '{self.path}' has ended already, and nothing is done. {how}")
        if unexpected := self.compiles.names_after_warm_up:
            self.progress.note(f"compiled after warm-up: {', '.join(unexpected)}")
        page = self.write_report()
        self.progress.note(f"summary: {self.path / SUMMARY_FILE}" + (f"   report: {page}" if page else ""))
        return summary

    def _write_summary(self, summary: dict[str, Any]) -> None:
        if dropped := self.logs.dropped_trackers:
            summary["dropped_trackers"] = dropped
        files.replace_json(self.path / SUMMARY_FILE, jsonl.plain(summary))

    def write_report(self) -> Path | None:
        """Writes report.html of what the run has logged so far. None: it was not written, which ends no training."""
        if not peers.is_first():
            return None
        return self._try_to_write(report.REPORT_FILE, lambda: report.write_report(self.cfg.workdir, self.results))

    def _try_to_write(self, name: str, write: Callable[[], Path | None]) -> Path | None:
        try:
            return write()
        except report.DAMAGED as failure:
            return self.progress.note(f"{name} was not written: {type(failure).__name__}: {failure}")

    def close(self) -> None:
        """Closes the logs, and waits for a bundle that is being written."""
        self._stack.close()

    def _count_seconds(self) -> None:
        if self._stage:
            now = time.monotonic()
            self.stage_seconds[self._stage] = self.stage_seconds.get(self._stage, 0.0) + now - self._since
            self._since = now


@contextlib.contextmanager
def open_workdir(cfg: Config, progress: Progress, stopping: Stopping) -> Iterator[Workdir]:
    """Opens the workdir, and reads what is there to be continued. Nothing that lies there changes yet.

    Raises:
      ConfigError: another process trains in it, or this config cannot go on from it.
    """
    workdir = Path(cfg.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # First of all: opening the checkpoints removes what another process may be writing there.
        if peers.is_first():
            alone = stack.enter_context(open(workdir / LOCK_FILE, "ab"))
            files.lock(alone.fileno(), workdir)
        peers.meet("opening the workdir")
        compiles = stack.enter_context(CompileCounter())
        run = Workdir(cfg, progress, compiles, stopping)
        stack.callback(run.close)
        yield run
