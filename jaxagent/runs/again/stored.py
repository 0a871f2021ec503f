"""What a run stored beside its record, compared with what the chain makes as it passes: bundles, export, results.

Bundles and exported files by SHA-256 of their bytes, since somebody may have chosen them; results as the numbers that
they are. Evaluations are greedy, or seeded as all sampling is, so those that are made again have the same scores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxagent.algorithms.entropy import EntropyControl
from jaxagent.config import ConfigError
from jaxagent.learner import checkpoint, weight_digest
from jaxagent.learner.checkpoint import OneBundle
from jaxagent.learner.state import TrainState
from jaxagent.models import peft
from jaxagent.observe import jsonl
from jaxagent.observe.files import CHECKPOINTS_FOLDER, METRICS_FILE, OUTDATED_FILE, POLICY_FOLDER, SUMMARY_FILE
from jaxagent.runs.again.compare import Difference
from jaxagent.runs.again.opened import Workdir
from jaxagent.runs.again.rerun import Begin, Bytes, Found
from jaxagent.runs.parts import Parts

# Of a line of metrics.jsonl: functions of the recorded episodes and the weights, and of no clock.
RESULTS = ("reward/", "stop/", "eval/", "episode/count", "episode/turns", "episode/tokens", "logprob_gap/max")


class Stored:
    """Compares as a chain passes. See `rerun.Passing`."""

    def __init__(self, workdir: Workdir, parts: Parts, sampled: Collection[int], plays: bool, start: int, found: Found):
        """Reads metrics.jsonl.

        Args:
          workdir: of the run.
          parts: its own.
          sampled: steps that are sampled again: their evaluations are made again too, and the stage's first and last.
          plays: whether the environment can be run again: else nothing is evaluated.
          start: the step of the bundle that the chain begins at.
          found: is told.
        """
        self._workdir, self._parts, self._found = workdir, parts, found
        lines = jsonl.read(Path(workdir.cfg.workdir) / METRICS_FILE)
        self._lines = {line["step"]: line for line in lines if line["stage"] == workdir.stage}
        scored = [step for step, line in self._lines.items() if "eval/n" in line and start <= step <= workdir.end]
        self._last = max(scored, default=-1)
        wanted = {step for step in scored if step - 1 in sampled or step == self._last or step == 0}
        self.evaluations: Collection[int] = wanted if plays else ()
        self.left_out = sorted(step for step, line in self._lines.items() if "eval/n" in line and step not in wanted)

    def metrics(self, version: int, metrics: Mapping[str, Any]) -> None:
        """Compares the results in a line of metrics.jsonl."""
        logged, now = self._lines.get(version, {}), jsonl.plain(metrics)
        names = [name for name in now if name.startswith(RESULTS) and name in logged]
        if "eval/n" in now:
            self._found.evaluated.append(version)
            if version != self._last and logged["eval/n"] != now["eval/n"]:
                self._found.unchecked.append(f"the evaluation after {version} steps: it was of other held-out tasks")
                names = [name for name in names if not name.startswith("eval/")]
        for name in names:
            if logged[name] != now[name]:
                place = f"{METRICS_FILE}, {self._workdir.stage}, {version} steps"
                self._found.claims.append((version, Difference(place, name, str(logged[name]), str(now[name]))))

    def passes(self, version: int, made: Callable[[], Begin]) -> None:
        """Compares the bundle of a version, and what the run has exported of its last one."""
        number, last = self._workdir.bundles.get(version), version == self._workdir.end
        if number is None and not last:
            return
        now = made()
        assert now.state is not None
        if number is not None:
            self._bundle(number, version, now, now.state)
        if last and self._workdir.over and version == self._workdir.final:
            self._summary(now.host["results"])
            if self._workdir.stage == self._workdir.cfg.stages[-1]:
                self._exported(version, now.state)

    def _bundle(self, number: int, version: int, now: Begin, state: TrainState) -> None:
        place, directory = f"bundle {number} (step {version})", Path(self._workdir.cfg.workdir) / CHECKPOINTS_FOLDER
        try:
            if not checkpoint.check(directory, number):
                self._found.unchecked.append(f"{place}: it has no digests of its files, but what it holds is compared")
            for name in [field.name for field in dataclasses.fields(state) if field.name != "frozen"]:
                if (ours := getattr(state, name)) is not None:
                    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), ours)
                    self._compare(version, place, name, checkpoint.read_field(directory, number, name, like), ours)
            with OneBundle(directory, number) as bundle:
                for of, past in bundle.past(state.params).items() if now.past else ():
                    self._compare(version, place, f"version {of} before it", past, now.past.get(of, {}))
        except ConfigError as error:
            self._found.record.append(Difference(place, "files", "as their digests say", str(error)))
            return
        host, rl = self._workdir.hosts[version], self._parts.cfg.rl
        one, other = (EntropyControl.start(rl, each["results"]) for each in (host, now.host))
        for name, stored, again in (("tasks", host["tasks"], now.host["tasks"]), ("entropy control", one, other)):
            if stored != again:
                self._found.record.append(Difference(place, name, str(stored)[:80], str(again)[:80]))

    def _compare(self, version: int, place: str, what: str, stored: Any, again: Any) -> None:
        digests = weight_digest.sha256(stored), weight_digest.sha256(again)
        self._found.bytes.append(Bytes(version, place, what, *digests))

    def _exported(self, version: int, state: TrainState) -> None:
        """Exports once more, and compares the files."""
        workdir, parts = Path(self._workdir.cfg.workdir), self._parts
        adapter = workdir / "adapter" / peft.WEIGHTS_FILE
        with tempfile.TemporaryDirectory(dir=workdir, prefix=".replay-") as temporary:
            again = Path(temporary)
            pairs: list[tuple[Path, Path]] = []
            if (policy := workdir / POLICY_FOLDER).is_dir():
                parts.export(state.policy, again / POLICY_FOLDER)
                pairs = [(policy / path.name, path) for path in sorted((again / POLICY_FOLDER).iterdir())]
                more = {path.name for path in policy.iterdir()} - {path.name for _, path in pairs} - {OUTDATED_FILE}
                self._found.unchecked += [f"{POLICY_FOLDER}/{name}: no export makes it" for name in sorted(more)]
            if parts.cfg.model.lora.rank and adapter.is_file():
                parts.export_adapter(state.params, again / "adapter")
                pairs.append((adapter, again / "adapter" / adapter.name))
            for stored, new in pairs:
                place = f"{stored.parent.name}/"
                self._found.bytes.append(Bytes(version, place, stored.name, _sha256(stored), _sha256(new)))

    def _summary(self, results: Mapping[str, Any]) -> None:
        """Compares the scores in summary.json that were made again."""
        path, stage = Path(self._workdir.cfg.workdir) / SUMMARY_FILE, self._workdir.stage
        ends = [f"_after_{stage}"] if self._last in self.evaluations else []
        ends += [f"_before_{stage}"] if 0 in self.evaluations else []
        said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for name in [name for name in said if name.startswith("eval/") and name.endswith(tuple(ends)) and ends]:
            if said[name] != (again := jsonl.plain(results.get(name))):
                self._found.claims.append(
                    (self._workdir.end, Difference(SUMMARY_FILE, name, str(said[name]), str(again)))
                )


def _sha256(path: Path) -> str:
    if not path.is_file():
        return "not there"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
