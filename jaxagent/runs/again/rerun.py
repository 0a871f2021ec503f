"""The RL stage run again from a bundle: the loop itself, with groups from the record and nothing that writes.

`loop.rl_stage` cannot tell: its `Workdir` is a `Rerun`, which begins at a bundle of any age or where another ended, and
its source gives the groups that were played then. The weights that come out are compared with the record's digests
version by version, and all that is stored of them with what was made again (stored.py); at the steps that are wanted
the episodes are sampled again, with the weights that the engine has then.
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
from typing import TYPE_CHECKING, Any

from jaxagent.config import Config, ConfigError
from jaxagent.data import codec
from jaxagent.engine.driver import Driver
from jaxagent.learner import weight_digest
from jaxagent.learner.checkpoint import OneBundle
from jaxagent.learner.state import TrainState
from jaxagent.observe.compiles import CompileCounter
from jaxagent.observe.files import CHECKPOINTS_FOLDER
from jaxagent.observe.progress import Progress
from jaxagent.rollout.experience import Experience
from jaxagent.runs import attempts, record
from jaxagent.runs.again import sample
from jaxagent.runs.again.compare import Compared, Difference, compare
from jaxagent.runs.attempts import Rollouts, rollouts_of_step
from jaxagent.runs.parts import Parts
from jaxagent.runs.seams import Seams, one_process
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode, Group, Task

if TYPE_CHECKING:
    from jaxagent.runs.again.stored import Stored


class Over(Exception):
    """Everything that was wanted of the stage has been made again."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be made again."""

    steps: Collection[int]
    start: int  # the step of the bundle that the chain begins at
    end: int  # the version that the last step to be trained makes; that of a step alone is not trained
    episode: str = ""  # "task", or "task#attempt"; "" = all of each step
    recorded: str = ""  # why the environment's side is the record's; "" = it is not

    @property
    def verifies(self) -> bool:
        """It is of the whole chain, and not of one step."""
        return self.end > max(self.steps)


@dataclasses.dataclass(frozen=True)
class Kept(Difference):
    """Something of a version that the run kept, beside the same as it is now, which may be equal; bytes by digest."""

    version: int


@dataclasses.dataclass
class StepFound:
    """What was found of one step."""

    step: int
    version: int = -1  # of the weights that it was sampled with
    episodes: int = 0
    tokens: int = 0
    logprobs: int = 0
    gap: float = 0.0  # the largest difference of a log-prob
    not_compared: dict[str, int] = dataclasses.field(default_factory=dict)  # failed then, by why
    differences: list[Difference] = dataclasses.field(default_factory=list)

    def take(self, compared: Compared) -> None:
        """Counts an episode."""
        self.episodes += 1
        self.tokens += compared.tokens
        self.logprobs += compared.logprobs
        self.gap = max(self.gap, compared.gap)
        self.differences += [compared.first] if compared.first else []


@dataclasses.dataclass
class Found:
    """What a replay has found so far."""

    steps: list[StepFound] = dataclasses.field(default_factory=list)
    weights: list[Kept] = dataclasses.field(default_factory=list)  # by the digest in the record
    bytes: list[Kept] = dataclasses.field(default_factory=list)  # of bundles and exported files, by SHA-256
    results: list[Kept] = dataclasses.field(default_factory=list)  # that differ
    evaluated: list[int] = dataclasses.field(default_factory=list)  # versions whose evaluation was made again
    unscored: list[int] = dataclasses.field(default_factory=list)  # and those whose was not
    failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # then, in all steps
    record: list[Difference] = dataclasses.field(default_factory=list)  # what the record says against itself
    unchecked: list[str] = dataclasses.field(default_factory=list)  # what could not be compared, found on the way

    @property
    def differences(self) -> list[Difference]:
        """All of them: of the record, then of versions and steps in their order."""
        kept = (*self.weights, *self.bytes, *self.results)
        found: list[tuple[int, Difference]] = [(each.version, each) for each in kept if each.logged != each.again]
        found += [(step.step, difference) for step in self.steps for difference in step.differences]
        return [*self.record, *(difference for _, difference in sorted(found, key=lambda each: each[0]))]


class Digests:
    """In the place of the record's writer: compares the weights of every version with it."""

    def __init__(self, headers: Mapping[int, Mapping[str, Any]], found: Found):
        self._headers, self._found = headers, found

    def played(self, rounds: object) -> None:
        """They are the record's."""

    def published(self, version: int, params: Any) -> None:
        """Compares the weights after `version` steps."""
        after = self._headers[version - 1]["after"] if version - 1 in self._headers else None
        logged = self._headers[version]["before"] if version in self._headers else after
        if logged is not None and not any(each.version == version for each in self._found.weights):
            place = f"version {version} ({'trained' if self._found.weights else 'restored'})"
            self._found.weights.append(Kept(place, "weights", logged, weight_digest.digest(params), version))

    def commit(self, step: int) -> None:
        """Nothing is forgotten."""


class _Quiet:
    """In the place of `FailedEpisodes`: what failed then was told then."""

    stuck = ""

    def tell(self, where: str, step: int, failures: object) -> None:
        """Nothing."""

    tell_step = tell


@dataclasses.dataclass(frozen=True)
class Begin:
    """Where a chain begins, or goes on: a bundle, or what an earlier part of it has come to."""

    host: Mapping[str, Any]  # a bundle's: stage, step, tasks, results
    number: int = -1  # of the bundle
    state: TrainState | None = None  # None: the bundle's
    past: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # what was trained of earlier versions


class Rerun(Workdir):
    """A stage's `Workdir` that begins at one of its bundles, and writes nothing. Use as a context manager."""

    def __init__(self, cfg: Config, progress: Progress, begin: Begin, end: int, digests: Digests, passing: Stored):
        """Up to the step that makes version `end`; what it has come to is in `left` then."""
        self.cfg, self.path, self.progress = cfg, Path(cfg.workdir), progress
        self.host = copy.deepcopy(dict(begin.host))
        self.results = self.host["results"]
        self.compiles = CompileCounter()
        self.failed = _Quiet()  # type: ignore[assignment]
        self.left = begin
        self._begin, self._end, self._digests, self._passing = begin, end, digests, passing
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rerun:
        self._stack.enter_context(self.compiles)
        if self._begin.state is None:
            directory = self.path / CHECKPOINTS_FOLDER
            self.checkpoints = self._stack.enter_context(OneBundle(directory, self._begin.number))
        else:
            self.checkpoints = types.SimpleNamespace(past=lambda like: self._begin.past)  # type: ignore[assignment]
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def restored(self, stage: str, state: TrainState) -> TrainState:
        """The bundle's, or what an earlier part has come to."""
        if self._begin.state is None:
            return super().restored(stage, state)
        return self._begin.state.replace(frozen=state.frozen)

    def steps(
        self, stage: str, total: int, bundle: Callable[[], Any], *, first: Callable[[], None] = lambda: None, **_: Any
    ) -> Iterator[int]:
        """The steps after the bundle. Raises `Over` when all are made, so that the stage exports nothing."""
        if self.host["step"] == 0 and 0 in self._passing.evaluations:
            first()

        def made(version: int) -> Begin:
            state, tasks, past = bundle()
            host = {"stage": stage, "step": version, "tasks": dict(tasks), "results": self.results}
            return Begin(json.loads(json.dumps(host)), state=state, past=past)

        for step in range(self.host["step"], self._end):
            yield step
            self._passing.passes(step + 1, functools.partial(made, step + 1))
        self.left = made(self._end)
        raise Over

    def recorder(self, stage: str) -> Digests:  # type: ignore[override]
        """What compares the versions."""
        return self._digests

    def record(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Metrics are in metrics.jsonl."""
        self._passing.metrics(step, metrics)

    def log_episodes(self, *_: object) -> None:  # type: ignore[override]
        """The run has written it."""

    show_episodes = write_report = log_episodes  # type: ignore[assignment]

    def evaluates(self, step: int, total: int) -> bool:
        """Where the evaluation is made again: it changes nothing."""
        return step in self._passing.evaluations

    def committed(self) -> int:
        """Nothing is given up."""
        return 0


@dataclasses.dataclass(frozen=True)
class Played:
    """A source that has the groups of a step from the record, and at the wanted steps samples them again."""

    parts: Parts
    driver: Driver
    experience: Experience
    folder: Path  # of the record
    wanted: Wanted
    found: Found
    note: Callable[[str], None]
    steps_before: int

    def batch(self, step: int) -> Rollouts:
        """The recorded groups of a step.

        Raises:
          Over: nothing is left to be trained.
          ConfigError: the record is not there, or of other tasks.
        """
        recorded = record.read(self.folder, step)
        place = f"step {step}"
        self.found.record += [Difference(place, "record", "whole", damage) for damage in recorded.damage]
        drawn: list[list[Task]] = []

        def play(number: int, tasks: list[Task]) -> list[Group]:
            drawn.append(tasks)
            groups = list(recorded.rounds[number]) if number < len(recorded.rounds) else []
            names = [task.id for task in tasks], [group.task.id for group in groups]
            if names[0] != names[1]:
                raise ConfigError(
                    f"step {step}, round {number}: the run drew the tasks {names[0]} and its record has {names[1]}: "
                    "it is of another run, or was changed."
                )
            self._attempts(step, number, groups)
            return groups

        rollouts = rollouts_of_step(self.parts.cfg.rl, self.experience, step, play)
        if len(drawn) != len(recorded.rounds):
            self.found.record.append(Difference(place, "rounds", str(len(recorded.rounds)), str(len(drawn))))
        if step in self.wanted.steps:
            self._again(step, list(zip(recorded.rounds, drawn, strict=False)))
        if step == self.wanted.end:
            raise Over
        return rollouts

    def _attempts(self, step: int, number: int, groups: Sequence[Group]) -> None:
        """A round has every attempt that the run begins at its tasks, and no chosen ones; counts those that failed."""
        rl = self.parts.cfg.rl
        of_group, place = attempts.of_a_group(rl), f"step {step}, round {number}"
        begin, each_step = attempts.first(rl, step, number, self.steps_before), attempts.first(rl, 1, 0, 0)
        for at, group in enumerate(groups):
            self.found.failed.update(str(e.stop_reason) for e in group.episodes if e.stop_reason.is_failure)
            first = begin + attempts.ahead(at, self.experience.num_tasks, each_step)
            # What ended outside its rollout is numbered within its group.
            own = [e.sample if not e.stop_reason.is_failure else first + i for i, e in enumerate(group.episodes)]
            if own != list(range(first, first + of_group)):
                task, wanted = f"{place}, task {group.task.id}", f"{first} to {first + of_group - 1}"
                self.found.record.append(Difference(task, "attempts", " ".join(map(str, own)), wanted))

    def _again(self, step: int, rounds: Sequence[tuple[Sequence[Group], Sequence[Task]]]) -> None:
        found = StepFound(step)
        self.found.steps.append(found)
        logged: list[Episode] = []
        for groups, tasks in rounds:
            for group, task in zip(groups, tasks, strict=True):
                for episode in group.episodes:
                    place = place_of(step, episode)
                    if not self._selected(episode):
                        continue
                    if codec.encode_task(task) != codec.encode_task(episode.task):
                        found.differences.append(Difference(place, "task", "one row of data", "another of that id"))
                    if episode.stop_reason.is_failure:
                        why = str(episode.stop_reason)
                        found.not_compared[why] = found.not_compared.get(why, 0) + 1
                    else:
                        logged.append(dataclasses.replace(episode, task=task))
        if self.wanted.episode and not logged and not found.not_compared:
            some = ", ".join(name_of(e) for groups, _ in rounds for e in groups[0].episodes[:2])
            raise ConfigError(f"--episode: step {step} has no episode '{self.wanted.episode}'. Some of it: {some}.")
        again = sample.play(self.parts, self._rollout(step, logged), logged)
        for one, other in zip(logged, again, strict=True):
            found.take(compare(one, other, place_of(step, one), bool(self.wanted.recorded)))
            for trajectory in other.trajectories:
                found.version = max(found.version, int(trajectory.policy_versions.max(initial=-1)))
        told = f"{found.episodes} episodes, {found.tokens} tokens, {found.logprobs} log-probs"
        equal = "equal" if not found.differences else f"{len(found.differences)} episodes differ"
        self.note(f"step {step}: {told}: {equal}")

    def _selected(self, episode: Episode) -> bool:
        wanted = self.wanted.episode
        return not wanted or wanted in (episode.task.id, name_of(episode))

    def _rollout(self, step: int, logged: Sequence[Episode]) -> Any:
        rl = self.parts.cfg.rl
        sampling = dataclasses.replace(rl.sampling, temperature=attempts.temperature(rl, step))
        own = self.parts.rollout(self.driver, sampling, attempts.of_a_group(rl), rl.tool_epsilon)
        if not self.wanted.recorded:
            return own
        episodes = {(episode.task.id, episode.sample): episode for episode in logged}
        timeout_s = self.parts.cfg.engine.request_timeout_s
        return sample.Recorded(self.driver, sampling, episodes, attempts.of_a_group(rl), timeout_s, type(own))


def connect(folder: Path, wanted: Wanted, found: Found, note: Callable[[str], None]) -> Any:
    """What opens the seams of a stage that is run again: `loop.rl_stage` calls it."""

    def opened(parts: Parts, saved: Workdir, driver: Driver, experience: Experience, steps_before: int) -> Seams:
        source = Played(parts, driver, experience, folder, wanted, found, note, steps_before)
        return dataclasses.replace(one_process(parts, saved, driver, experience, steps_before), batch=source.batch)

    return opened


def name_of(episode: Episode) -> str:
    """What `--episode` takes: "task#attempt"; attempts are numbered over the run."""
    return f"{episode.task.id}#{episode.sample}"


def place_of(step: int, episode: Episode) -> str:
    """For messages."""
    return f"step {step}, episode {name_of(episode)}"
