"""What a run stored beside its record, compared with what the chain makes as it passes: bundles, export, results.

Bundles and exported files by SHA-256 of their bytes, since somebody may have chosen them; results as the numbers that
they are. Evaluations are greedy, or seeded as all sampling is, so those that are made again have the same scores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxagent.algorithms.compose import EntropyControl
from jaxagent.config import ConfigError
from jaxagent.fleet import manifest
from jaxagent.learner import checkpoint, digests
from jaxagent.learner.checkpoint import Checkpointer
from jaxagent.learner.state import TrainState
from jaxagent.models import peft
from jaxagent.observe import jsonl
from jaxagent.observe.files import CHECKPOINTS_FOLDER, METRICS_FILE, OUTDATED_FILE, POLICY_FOLDER, SUMMARY_FILE
from jaxagent.replay.record_diff import Difference
from jaxagent.replay.recorded_run import RecordedRun
from jaxagent.replay.rerun import ChainPoint, Findings, ReplayRequest, StoredValue
from jaxagent.runs.parts import Parts

# Of a line of metrics.jsonl: functions of the recorded episodes and the weights, and of no clock.
GAP = "logprob_gap/max"  # of all recorded log-probs from the weights that are made again, drawn or not
RESULTS = ("reward/", "stop/", "eval/", "episode/count", "episode/turns", "episode/tokens", GAP)


def sha256(tree: Any) -> str:
    """64 hex digits of a tree of arrays, by their bytes, names, dtypes and shapes: one array at a time on the host."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves)
    return manifest.manifest("", 0, (manifest.describe((name,), np.asarray(leaf)) for name, leaf in named)).digest


class StoredResults:
    """Compares what a chain makes with the record's digests, and the run's bundles, export and results."""

    def __init__(self, workdir: RecordedRun, parts: Parts, request: ReplayRequest, findings: Findings):
        """Reads metrics.jsonl. Evaluations are made again after wanted steps, and the stage's first and last."""
        self._workdir, self._parts, self._findings = workdir, parts, findings
        lines = jsonl.read(Path(workdir.cfg.workdir) / METRICS_FILE)
        self._lines = {line["step"]: line for line in lines if line["stage"] == workdir.stage}
        # Every stage evaluates before its first and after its last step, whatever metrics.jsonl says.
        scored = {0, *([workdir.final] if workdir.over else ())}
        scored |= {step for step, line in self._lines.items() if "eval/n" in line}
        can = [step for step in scored if request.start <= step <= workdir.end]
        self._last = max(can, default=-1)
        again = {step for step in can if step - 1 in request.steps or step in (0, self._last)}
        self.evaluations = again if request.verifies and not request.recorded else set()
        findings.unscored += sorted(scored - again)

    def add_groups(self, rounds: object) -> None:
        """Writes nothing, in the place of the record's writer: the groups are the record's own."""

    def commit(self, step: int) -> None:
        """Forgets nothing: the record is the run's."""

    def published(self, version: int, params: Any) -> None:
        """Compares the digest of the weights after `version` steps."""
        headers, weights = self._workdir.headers, self._findings.weights
        after = headers[version - 1]["after"] if version - 1 in headers else None
        logged = headers[version]["before"] if version in headers else after
        if logged is not None and not any(each.version == version for each in weights):
            place = f"version {version} ({'trained' if weights else 'restored'})"
            weights.append(StoredValue(place, "weights", logged, digests.digest(params), version))

    def metrics(self, version: int, metrics: Mapping[str, Any]) -> None:
        """Compares the results in a line of metrics.jsonl."""
        logged, now = self._lines.get(version, {}), jsonl.plain(metrics)
        unknown = "" if now.get(GAP) is not None else GAP  # of a version that is not kept
        names = [name for name in now if name.startswith(RESULTS) and name != unknown]
        if "eval/n" in now:
            self._findings.evaluated.append(version)
            others = logged.get("eval/n", now["eval/n"]) != now["eval/n"]
            if others and (version != self._last or not self._workdir.over):  # what ended it, this config did
                self._findings.unchecked.append(f"the evaluation after {version} steps: it was of other held-out tasks")
                names = [name for name in names if not name.startswith("eval/")]
                self.evaluations.discard(version)
        if lacks := [name for name in names if name not in logged]:
            self._findings.unchecked.append(
                f"{METRICS_FILE}, {version} steps: {len(lacks)} results lack, as {lacks[0]}"
            )
        if self._workdir.cfg.numerics == "exact" and now.get(GAP):  # which metrics.jsonl may say as well
            self._findings.unchecked.append(
                f"log-probs of step {version - 1}: off the exact ones by {now[GAP]:g}, not 0"
            )
        for name in [name for name in names if name in logged]:
            if logged[name] != now[name]:
                place = f"{METRICS_FILE}, {self._workdir.stage}, {version} steps"
                self._findings.results.append(StoredValue(place, name, str(logged[name]), str(now[name]), version))

    def passes(self, version: int, make_point: Callable[[], ChainPoint]) -> None:
        """Compares the bundle of a version, and what the run has exported of its last one."""
        number, last = self._workdir.bundles.get(version), version == self._workdir.end
        directory = Path(self._workdir.cfg.workdir) / CHECKPOINTS_FOLDER
        there = number is not None and (directory / str(number)).is_dir()  # the run may have deleted it meanwhile
        if not there and not last:
            return
        now = make_point()
        assert now.state is not None
        if number is not None and there:
            self._bundle(directory, number, version, now, now.state)
        if last and self._workdir.over and version == self._workdir.final:
            self._summary(now.host["results"])
            if self._workdir.stage == self._workdir.cfg.stages[-1]:
                self._exported(version, now.state)

    def _bundle(self, directory: Path, number: int, version: int, now: ChainPoint, state: TrainState) -> None:
        place = f"bundle {number} (step {version})"
        try:
            if not checkpoint.check(directory, number):
                self._findings.unchecked.append(
                    f"{place}: it has no digests of its files, but what it holds is compared"
                )
            for name in [field.name for field in dataclasses.fields(state) if field.name != "frozen"]:
                if (ours := getattr(state, name)) is not None:
                    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), ours)
                    self._compare(version, place, name, checkpoint.read_field(directory, number, name, like), ours)
            with Checkpointer(directory, only=number) as bundle:
                past = bundle.past(state.params)
            for of in past.keys() & now.past.keys():
                self._compare(version, place, f"version {of} before it", past[of], now.past[of])
            self._findings.unchecked += [f"{place}: version {of} before it" for of in past.keys() - now.past.keys()]
        except ConfigError as error:
            self._findings.record.append(Difference(place, "files", "as their digests say", str(error)))
            return
        host, rl = self._workdir.hosts[version], self._parts.cfg.rl
        logged_control, control = (EntropyControl.start(rl, each["results"]) for each in (host, now.host))
        for name, logged, again in (
            ("tasks", host["tasks"], now.host["tasks"]),
            ("entropy control", logged_control, control),
        ):
            if logged != again:
                self._findings.record.append(Difference(place, name, str(logged)[:80], str(again)[:80]))

    def _compare(self, version: int, place: str, what: str, logged: Any, again: Any) -> None:
        logged_digest, digest = sha256(logged), sha256(again)
        self._findings.bytes.append(StoredValue(place, what, logged_digest, digest, version))

    def _exported(self, version: int, state: TrainState) -> None:
        """Exports once more, and compares the files."""
        workdir, parts = Path(self._workdir.cfg.workdir), self._parts
        exports = {POLICY_FOLDER: lambda folder: parts.export(state.policy, folder)}
        if parts.cfg.model.lora:
            exports["adapter"] = lambda folder: parts.export_adapter(state.params, folder)
        for name in [name for name in exports if (workdir / name).is_dir()]:
            with tempfile.TemporaryDirectory(dir=workdir, prefix=".replay-") as again:
                exports[name](Path(again))
                logged, again_digests = digests.file_digests(workdir / name), digests.file_digests(Path(again))
                if peft.CONFIG_FILE in logged.keys() & again_digests.keys():
                    logged[peft.CONFIG_FILE], again_digests[peft.CONFIG_FILE] = (
                        _adapter_settings(folder / peft.CONFIG_FILE) for folder in (workdir / name, Path(again))
                    )
            place, none = f"{name}/", "not there"
            self._findings.bytes += [
                StoredValue(place, file, logged.get(file, none), again_digests[file], version) for file in again_digests
            ]
            more = logged.keys() - again_digests.keys() - {OUTDATED_FILE}
            self._findings.unchecked += [f"{name}/{file}: it is not made again" for file in sorted(more)]

    def _summary(self, results: Mapping[str, Any]) -> None:
        """Compares the scores in summary.json that were made again."""
        path, stage = Path(self._workdir.cfg.workdir) / SUMMARY_FILE, self._workdir.stage
        versions = {"before": 0, "after": self._last}
        ends = tuple(f"_{when}_{stage}" for when, at in versions.items() if at in self.evaluations)
        summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for name in [name for name in summary if name.startswith("eval/") and name.endswith(ends)]:
            if name not in results:  # of an earlier evaluation, with other settings
                self._findings.unchecked.append(f"{SUMMARY_FILE}, '{name}': it is not made again")
            elif summary[name] != (again := jsonl.plain(results[name])):
                self._findings.results.append(
                    StoredValue(SUMMARY_FILE, name, str(summary[name]), str(again), self._workdir.end)
                )


def _adapter_settings(path: Path) -> str:
    """SHA-256 of what an adapter's settings say, but for where the base lies, which may have been moved since."""
    try:
        settings = json.loads(path.read_bytes())
        settings.pop("base_model_name_or_path", None)
    except (ValueError, AttributeError) as error:
        return f"no settings ({error})"
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
