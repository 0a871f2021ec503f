"""The RL stage run again from a bundle: the loop itself, with groups from the record and nothing that writes.

`loop.rl_stage` cannot tell: its `Workdir` is a `Rerun`, which begins at a bundle of any age or where another ended, and
its source gives the groups that were played then. The weights that come out are compared with the record's digests
version by version, and what is stored of them with what was made again (stored_results.py). At the steps that are asked
for, the episodes are sampled again, with the weights that the engine has then.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import json
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxagent.config import Config, ConfigError
from jaxagent.data import codec
from jaxagent.engine.driver import Driver
from jaxagent.learner.checkpoint import Checkpointer
from jaxagent.learner.state import TrainState
from jaxagent.observe.compiles import CompileCounter
from jaxagent.observe.files import CHECKPOINTS_FOLDER
from jaxagent.observe.progress import Progress
from jaxagent.replay import resample
from jaxagent.replay.record_diff import Difference, EpisodeDiff, compare
from jaxagent.replay.recorded_run import ranges
from jaxagent.rollout.experience import Experience
from jaxagent.runs import attempts, record
from jaxagent.runs.attempts import Rollouts, rollouts_of_step
from jaxagent.runs.parts import Parts
from jaxagent.runs.seams import Seams, one_process
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode, Group, Task

if TYPE_CHECKING:
    from jaxagent.replay.stored_results import StoredResults


class ChainEnd(Exception):
    """Nothing more of the stage is made again: all that was asked for is, or the record breaks off (`broken`)."""

    def __init__(self, broken: bool = False):
        super().__init__()
        self.broken = broken


@dataclasses.dataclass(frozen=True)
class ReplayRequest:
    """What is to be made again."""

    steps: Collection[int]
    start: int  # the step of the bundle that the chain begins at
    end: int  # the version that the last step to be trained makes; that of a step alone is not trained
    episode: str = ""  # "task", or "task#attempt"; "" = all of each step
    recorded: str = ""  # why the environment's side is the record's; "" = it is not

    @property
    def verifies(self) -> bool:
        """Whether the whole chain is compared, and not one step alone."""
        return self.end > max(self.steps)


@dataclasses.dataclass(frozen=True)
class StoredValue(Difference):
    """Something of a version that the run kept, beside the same as it is now, which may be equal; bytes by digest."""

    version: int


@dataclasses.dataclass
class ReplayedStep:
    """How a step's episodes came out when they were sampled again."""

    step: int
    version: int = -1  # of the weights that it was sampled with
    episodes: int = 0
    tokens: int = 0
    logprobs: int = 0
    gap: float = 0.0  # the largest difference of a log-prob
    not_compared: dict[str, int] = dataclasses.field(default_factory=dict)  # failed then, by why
    differences: list[Difference] = dataclasses.field(default_factory=list)

    def take(self, compared: EpisodeDiff) -> None:
        """Counts an episode."""
        self.episodes += 1
        self.tokens += compared.tokens
        self.logprobs += compared.logprobs
        self.gap = max(self.gap, compared.gap)
        self.differences += [compared.first] if compared.first else []


@dataclasses.dataclass
class Findings:
    """What a replay has compared so far."""

    steps: list[ReplayedStep] = dataclasses.field(default_factory=list)
    weights: list[StoredValue] = dataclasses.field(default_factory=list)  # by the digest in the record
    bytes: list[StoredValue] = dataclasses.field(default_factory=list)  # of bundles and exported files, by SHA-256
    results: list[StoredValue] = dataclasses.field(default_factory=list)  # that differ
    evaluated: list[int] = dataclasses.field(default_factory=list)  # versions whose evaluation was made again
    unscored: list[int] = dataclasses.field(default_factory=list)  # and those whose was not
    failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # then, in all steps
    record: list[Difference] = dataclasses.field(default_factory=list)  # what the record says against itself
    unchecked: list[str] = dataclasses.field(default_factory=list)  # what could not be compared

    @property
    def differences(self) -> list[Difference]:
        """All of them: of the record, then of versions and steps in their order."""
        values = (*self.weights, *self.bytes, *self.results)
        ordered: list[tuple[int, Difference]] = [(each.version, each) for each in values if each.logged != each.again]
        ordered += [(step.step, difference) for step in self.steps for difference in step.differences]
        return [*self.record, *(difference for _, difference in sorted(ordered, key=lambda each: each[0]))]


@dataclasses.dataclass(frozen=True)
class ChainPoint:
    """Where a chain begins, or goes on: a bundle, or what an earlier part of it has come to."""

    host: Mapping[str, Any]  # a bundle's: stage, step, tasks, results
    number: int = -1  # of the bundle
    state: TrainState | None = None  # None: the bundle's
    past: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # what was trained of earlier versions


class Rerun(Workdir):
    """A stage's `Workdir` that begins at one of its bundles, and writes nothing. Use as a context manager."""

    def __init__(self, cfg: Config, progress: Progress, begin: ChainPoint, end: int, stored_results: StoredResults):
        """Begins at `begin` and ends with the step that makes version `end`; `left` is then where it has come to."""
        self.cfg, self.path, self.progress = cfg, Path(cfg.workdir), progress
        self.host = copy.deepcopy(dict(begin.host))
        self.results = self.host["results"]
        self.compiles = CompileCounter()
        quiet = lambda *_: None  # noqa: E731  what failed then was told then
        self.failed = types.SimpleNamespace(stuck="", tell=quiet, tell_step=quiet)  # type: ignore[assignment]
        self.logs = types.SimpleNamespace(keep=quiet)  # type: ignore[assignment]
        self.left = begin
        self._begin, self._end, self._stored = begin, end, stored_results
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rerun:
        self._stack.enter_context(self.compiles)
        if self._begin.state is None:
            directory = self.path / CHECKPOINTS_FOLDER
            self.checkpoints = self._stack.enter_context(Checkpointer(directory, only=self._begin.number))
        else:
            self.checkpoints = types.SimpleNamespace(past=lambda like: self._begin.past)  # type: ignore[assignment]
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def restored(self, stage: str, state: TrainState) -> TrainState:
        """The bundle's state, or the one that an earlier part of the chain has reached."""
        if self._begin.state is None:
            return super().restored(stage, state)
        return self._begin.state.replace(frozen=state.frozen)

    def steps(
        self, stage: str, total: int, bundle: Callable[[], Any], *, first: Callable[[], None] = lambda: None, **_: Any
    ) -> Iterator[int]:
        """The steps after the bundle. Raises `ChainEnd` when all are made, so that the stage exports nothing."""
        if self.host["step"] == 0 and 0 in self._stored.evaluations:
            first()

        def chain_point(version: int) -> ChainPoint:
            state, tasks, past = bundle()
            host = {"stage": stage, "step": version, "tasks": dict(tasks), "results": self.results}
            return ChainPoint(json.loads(json.dumps(host)), state=state, past=past)

        for step in range(self.host["step"], self._end):
            yield step
            self._stored.passes(step + 1, functools.partial(chain_point, step + 1))
        self.left = chain_point(self._end)
        raise ChainEnd

    def recorder(self, stage: str) -> StoredResults:  # type: ignore[override]
        """What compares the versions."""
        return self._stored

    def record(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Compares the metrics with the run's metrics.jsonl."""
        self._stored.metrics(step, metrics)

    def write_report(self) -> None:
        """Writes nothing."""

    def evaluates(self, step: int, total: int) -> bool:
        """Whether the evaluation after a step is made again, which changes no weights."""
        return step in self._stored.evaluations

    def committed(self) -> int:
        """Nothing is given up."""
        return 0


@dataclasses.dataclass(frozen=True)
class RecordedSource:
    """A source that has the groups of a step from the record, and at the wanted steps samples them again."""

    parts: Parts
    driver: Driver
    experience: Experience
    folder: Path  # of the record
    request: ReplayRequest
    findings: Findings
    note: Callable[[str], None]
    steps_before: int

    def batch(self, step: int) -> Rollouts:
        """The recorded groups of a step.

        Raises:
          ChainEnd: nothing is left to be trained, or the step cannot be read, or is of other tasks.
        """
        place = f"step {step}"
        try:
            recorded = record.read(self.folder, step)
        except ConfigError as error:
            self._break(step, Difference(place, "record", "a step's episodes", str(error)))
        self.findings.record += [Difference(place, "record", "whole", damage) for damage in recorded.damage]
        drawn: list[list[Task]] = []

        def play(number: int, tasks: list[Task]) -> list[Group]:
            drawn.append(tasks)
            groups = list(recorded.rounds[number]) if number < len(recorded.rounds) else []
            names = [task.id for task in tasks], [group.task.id for group in groups]
            if names[0] != names[1]:
                where = f"{place}, round {number}"
                self._break(step, Difference(where, "tasks", " ".join(names[1]), " ".join(names[0])))
            self._attempts(step, number, groups)
            return groups

        rollouts = rollouts_of_step(self.parts.cfg.rl, self.experience, step, play)
        if len(drawn) != len(recorded.rounds):
            self.findings.record.append(Difference(place, "rounds", str(len(recorded.rounds)), str(len(drawn))))
        if step in self.request.steps:
            self._again(step, list(zip(recorded.rounds, drawn, strict=False)))
        if step == self.request.end:
            raise ChainEnd
        return rollouts

    def _break(self, step: int, difference: Difference) -> NoReturn:
        self.findings.record.append(difference)
        steps = range(step, max(self.request.end, *(sampled_step + 1 for sampled_step in self.request.steps)))
        self.findings.unchecked.append(f"steps {ranges(steps)}: not made again, since the record breaks off")
        raise ChainEnd(broken=True)

    def _attempts(self, step: int, number: int, groups: Sequence[Group]) -> None:
        """A round has every attempt that the run begins at its tasks, and no chosen ones; counts those that failed."""
        rl = self.parts.cfg.rl
        of_group, place = attempts.of_a_group(rl), f"step {step}, round {number}"
        begin, each_step = attempts.first(rl, step, number, self.steps_before), attempts.first(rl, 1, 0, 0)
        for at, group in enumerate(groups):
            self.findings.failed.update(str(e.stop_reason) for e in group.episodes if e.stop_reason.is_failure)
            first = begin + attempts.ahead(at, self.experience.num_tasks, each_step)
            # What ended outside its rollout is numbered within its group.
            own = [e.sample if not e.stop_reason.is_failure else first + i for i, e in enumerate(group.episodes)]
            if own != list(range(first, first + of_group)):
                task, numbers = f"{place}, task {group.task.id}", f"{first} to {first + of_group - 1}"
                self.findings.record.append(Difference(task, "attempts", " ".join(map(str, own)), numbers))

    def _again(self, step: int, rounds: Sequence[tuple[Sequence[Group], Sequence[Task]]]) -> None:
        result = ReplayedStep(step)
        self.findings.steps.append(result)
        logged: list[Episode] = []
        beside: list[Episode] = []  # attempts that forks wait for, where these alone are asked for
        failed: dict[tuple[str, int], Episode] = {}
        for groups, tasks in rounds:
            for group, task in zip(groups, tasks, strict=True):
                valid = [dataclasses.replace(episode, task=task) for episode in group.valid]
                begin = min((e.sample - e.sample % len(group.episodes) for e in valid), default=0)
                failed |= {
                    (task.id, begin + place): dataclasses.replace(episode, sample=begin + place)
                    for place, episode in enumerate(group.episodes)
                    if episode.stop_reason.is_failure
                }
                beside += valid
                for episode in group.episodes:
                    place = place_of(step, episode)
                    if self.request.episode not in ("", episode.task.id, name_of(episode)):
                        continue
                    if codec.encode_task(task) != codec.encode_task(episode.task):
                        result.differences.append(Difference(place, "task", "one row of data", "another of that id"))
                    if episode.stop_reason.is_failure:
                        why = str(episode.stop_reason)
                        result.not_compared[why] = result.not_compared.get(why, 0) + 1
                    else:
                        logged.append(dataclasses.replace(episode, task=task))
        if self.request.episode and not logged and not result.not_compared:
            some = ", ".join(name_of(e) for groups, _ in rounds for e in groups[0].episodes[:2])
            raise ConfigError(f"--episode: step {step} has no episode '{self.request.episode}'. Some of it: {some}.")
        wanted = {(episode.task.id, episode.sample) for episode in logged}
        of_forks = {episode.task.id for episode in logged if episode.fork_of is not None and not self.request.recorded}
        played = [e for e in beside if e.task.id in of_forks or (e.task.id, e.sample) in wanted]
        again = resample.play(self.parts, self._rollout(step, logged, failed), played)
        for old, new in zip(played, again, strict=True):
            if (old.task.id, old.sample) not in wanted:
                continue
            result.take(compare(old, new, place_of(step, old), bool(self.request.recorded)))
            for trajectory in new.trajectories:
                result.version = max(result.version, int(trajectory.policy_versions.max(initial=-1)))
        counts = f"{result.episodes} episodes, {result.tokens} tokens, {result.logprobs} log-probs"
        equal = "equal" if not result.differences else f"{len(result.differences)} episodes differ"
        self.note(f"step {step}: {counts}: {equal}")

    def _rollout(self, step: int, logged: Sequence[Episode], failed: Mapping[tuple[str, int], Episode]) -> Any:
        rl = self.parts.cfg.rl
        if not self.request.recorded:
            return attempts.of_step(self.parts, self.driver, step, failed)
        episodes = {(episode.task.id, episode.sample): episode for episode in logged}
        timeout_s = self.parts.cfg.engine.request_timeout_s
        sampling, player = attempts.sampling(rl, step), self.parts.player
        return resample.RecordedRollout(self.driver, sampling, episodes, attempts.of_a_group(rl), timeout_s, player)


def connect(folder: Path, request: ReplayRequest, findings: Findings, note: Callable[[str], None]) -> Any:
    """What opens the seams of a stage that is run again: `loop.rl_stage` calls it."""

    def open_seams(parts: Parts, saved: Workdir, driver: Driver, experience: Experience, steps_before: int) -> Seams:
        source = RecordedSource(parts, driver, experience, folder, request, findings, note, steps_before)
        return dataclasses.replace(one_process(parts, saved, driver, experience, steps_before), batch=source.batch)

    return open_seams


def name_of(episode: Episode) -> str:
    """What `--episode` takes: "task#attempt"; attempts are numbered over the run."""
    return f"{episode.task.id}#{episode.sample}"


def place_of(step: int, episode: Episode) -> str:
    """Where an episode stands in the record, for messages."""
    return f"step {step}, episode {name_of(episode)}"
