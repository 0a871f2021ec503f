"""The RL stage run again from a bundle: the loop itself, with groups from the record and nothing that writes.

`loop.rl_stage` cannot tell: its `Run` is a `Rerun`, which begins at a bundle of any age, and its source gives the
groups that were played then. The weights that come out are compared with the record's digests version by version; at
the steps that are wanted the episodes are sampled again, with the weights that the engine has then.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError
from jaxagent.data import codec
from jaxagent.engine.driver import Driver
from jaxagent.learner import weight_digest
from jaxagent.learner.checkpoint import OneBundle
from jaxagent.observe.compiles import CompileCounter
from jaxagent.observe.files import CHECKPOINTS_FOLDER
from jaxagent.observe.progress import Progress
from jaxagent.rollout.experience import Experience
from jaxagent.runs import local, record
from jaxagent.runs.again import sample
from jaxagent.runs.again.compare import Compared, Difference, compare
from jaxagent.runs.attempts import of_a_group, temperature
from jaxagent.runs.collect import assembled
from jaxagent.runs.parts import Parts
from jaxagent.runs.seams import Rollouts, Seams
from jaxagent.runs.workdir import Run
from jaxagent.types import Episode, Group, Task


class Over(Exception):
    """Everything that was wanted of the stage has been made again."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be made again."""

    steps: Collection[int]
    episode: str = ""  # "task", or "task#attempt"; "" = all of each step
    recorded: bool = False  # the environment's side is the record's


@dataclasses.dataclass(frozen=True)
class Weights:
    """A version of the policy, as it is recorded and as it is now."""

    version: int
    logged: str
    again: str
    origin: str  # "restored" of a bundle and gone on from, "stored" in another one, "exported", "trained" again


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
    weights: list[Weights] = dataclasses.field(default_factory=list)
    record: list[Difference] = dataclasses.field(default_factory=list)  # what the record says against itself

    @property
    def differences(self) -> list[Difference]:
        """All of them: of the record, of weights and episodes in the order of steps."""
        weights = [
            (
                found.version,
                0,
                Difference(f"version {found.version} ({found.origin})", "weights", found.logged, found.again),
            )
            for found in self.weights
            if found.logged != found.again
        ]
        episodes = [(step.step, 1, difference) for step in self.steps for difference in step.differences]
        return [*self.record, *(each[2] for each in sorted([*weights, *episodes], key=lambda each: each[:2]))]


class Digests:
    """In the place of the record's writer: compares the weights of every version with it."""

    def __init__(self, headers: Mapping[int, Mapping[str, Any]], found: Found):
        self._headers, self._found, self._origin = headers, found, "restored"

    def played(self, rounds: object) -> None:
        """They are the record's."""

    def published(self, version: int, params: Any) -> None:
        """Compares the weights after `version` steps."""
        logged = logged_digest(self._headers, version)
        if logged is None:
            return
        self._found.weights.append(Weights(version, logged, weight_digest.digest(params), self._origin))
        self._origin = "trained"

    def commit(self, step: int) -> None:
        """Nothing is forgotten."""


class _Quiet:
    """In the place of `FailedEpisodes`: what failed then was told then."""

    stuck = ""

    def tell_step(self, where: str, step: int, failures: object) -> None:
        """Nothing."""


class Rerun(Run):
    """A stage's `Run` that begins at one of its bundles, and writes nothing. Use as a context manager."""

    def __init__(self, cfg: Config, progress: Progress, number: int, host: Mapping[str, Any], digests: Digests):
        self.cfg, self.workdir, self.progress = cfg, Path(cfg.workdir), progress
        self.host = copy.deepcopy(dict(host))
        self.results = self.host["results"]
        self.compiles = CompileCounter()
        self.failed = _Quiet()  # type: ignore[assignment]
        self._number, self._digests = number, digests
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rerun:
        self._stack.enter_context(self.compiles)
        directory = self.workdir / CHECKPOINTS_FOLDER
        self.checkpoints = self._stack.enter_context(OneBundle(directory, self._number))
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def steps(self, stage: str, total: int, bundle: Callable[[], Any], **_: Any) -> Iterator[int]:
        """The steps after the bundle."""
        yield from range(self.host["step"], total)

    def recorder(self, stage: str) -> Digests:  # type: ignore[override]
        """What compares the versions."""
        return self._digests

    def record(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Metrics are in metrics.jsonl."""

    def log_episodes(self, name: str, step: int, episodes: object) -> None:
        """They are logged."""

    def evaluates(self, step: int, total: int) -> bool:
        """Never: what is evaluated changes nothing."""
        return False

    def committed(self) -> int:
        """Nothing is given up."""
        return 0


class Played:
    """A source that has the groups of a step from the record, and at the wanted steps samples them again."""

    def __init__(
        self,
        parts: Parts,
        driver: Driver,
        experience: Experience,
        folder: Path,
        wanted: Wanted,
        found: Found,
        note: Callable[[str], None],
    ):
        self._parts, self._driver, self._experience = parts, driver, experience
        self._folder, self._wanted, self._found, self._note = folder, wanted, found, note

    def batch(self, step: int) -> Rollouts:
        """The recorded groups of a step.

        Raises:
          Over: no wanted step is left.
          ConfigError: the record is not there, or of other tasks.
        """
        if all(step > wanted for wanted in self._wanted.steps):
            raise Over
        recorded = record.read(self._folder, step)
        place = f"step {step}"
        self._found.record += [Difference(place, "record", "whole", damage) for damage in recorded.damage]
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
            return groups

        rollouts = assembled(self._parts.cfg.rl, self._experience, step, play)
        if len(drawn) != len(recorded.rounds):
            self._found.record.append(Difference(place, "rounds", str(len(recorded.rounds)), str(len(drawn))))
        if step in self._wanted.steps:
            self._again(step, list(zip(recorded.rounds, drawn, strict=False)))
            if step == max(self._wanted.steps):
                raise Over
        return rollouts

    def _again(self, step: int, rounds: Sequence[tuple[Sequence[Group], Sequence[Task]]]) -> None:
        found = StepFound(step)
        self._found.steps.append(found)
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
        if self._wanted.episode and not logged and not found.not_compared:
            some = ", ".join(name_of(e) for groups, _ in rounds for e in groups[0].episodes[:2])
            raise ConfigError(f"--episode: step {step} has no episode '{self._wanted.episode}'. Some of it: {some}.")
        again = sample.play(self._parts, self._rollout(step, logged), logged)
        for one, other in zip(logged, again, strict=True):
            found.take(compare(one, other, place_of(step, one), self._wanted.recorded))
            for trajectory in other.trajectories:
                found.version = max(found.version, int(trajectory.policy_versions.max(initial=-1)))
        told = f"{found.episodes} episodes, {found.tokens} tokens, {found.logprobs} log-probs"
        equal = "equal" if not found.differences else f"{len(found.differences)} episodes differ"
        self._note(f"step {step}: {told}: {equal}")

    def _selected(self, episode: Episode) -> bool:
        wanted = self._wanted.episode
        return not wanted or wanted in (episode.task.id, name_of(episode))

    def _rollout(self, step: int, logged: Sequence[Episode]) -> Any:
        rl = self._parts.cfg.rl
        sampling = dataclasses.replace(rl.sampling, temperature=temperature(rl, step))
        own = self._parts.rollout(self._driver, sampling, of_a_group(rl), rl.tool_epsilon)
        if not self._wanted.recorded:
            return own
        episodes = {(episode.task.id, episode.sample): episode for episode in logged}
        timeout_s = self._parts.cfg.engine.request_timeout_s
        return sample.Recorded(self._driver, sampling, episodes, of_a_group(rl), timeout_s, type(own))


def connect(folder: Path, wanted: Wanted, found: Found, note: Callable[[str], None]) -> Any:
    """What opens the seams of a stage that is run again: `loop.rl_stage` calls it."""

    def opened(parts: Parts, saved: Run, driver: Driver, experience: Experience, steps_before: int) -> Seams:
        seams = local.connect(parts, saved, driver, experience, steps_before)
        return dataclasses.replace(seams, source=Played(parts, driver, experience, folder, wanted, found, note))

    return opened


def logged_digest(headers: Mapping[int, Mapping[str, Any]], version: int) -> str | None:
    """The recorded digest of the weights after `version` steps; None where the record does not reach it."""
    if version in headers:
        return headers[version]["before"]
    return headers[version - 1]["after"] if version - 1 in headers else None


def name_of(episode: Episode) -> str:
    """What `--episode` takes: "task#attempt"; attempts are numbered over the run."""
    return f"{episode.task.id}#{episode.sample}"


def place_of(step: int, episode: Episode) -> str:
    """For messages."""
    return f"step {step}, episode {name_of(episode)}"
