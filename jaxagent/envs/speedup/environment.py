"""Optimise and measure: the policy writes a function, a sandbox checks and measures it beside a reference.

Each revision is a turn, and what came of it the observation. With s = the speed-up that is sure (`Measured.sure`) and
`cap` the task's `full_speedup`, an attempt earns

    correct x (c + (1 - c) x gain),  gain = log(s / (1 + margin)) / log(cap / (1 + margin)), clipped to 0..1

with c = `env.correct_reward`: what is not faster by more than `env.margin`, the noise, gains nothing. The components
`correct`, `fast_1` (here: faster by more than the margin) and `fast_2` are fast_p of KernelBench
(https://arxiv.org/abs/2502.10517): correct, and more than p times as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.config.ranges import NonNegativeFloat, PositiveInt, Seconds, ZeroToOne
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.speedup import rows, texts
from jaxagent.envs.speedup.station import COMPILE_S, Measured, Stations, open_stations
from jaxagent.types import StopReason, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speedup(Environment):
    """Functions to make faster, in NumPy or C; every revision is checked and measured in a sandbox."""

    format: texts.Format = "fenced"  # how programs are written; see texts.py
    counts: Literal["best", "last"] = "best"  # the revision that is paid: the best correct one, or the last
    correct_reward: ZeroToOne = 0.0  # what a correct program earns that is not faster
    margin: NonNegativeFloat = 0.15  # a speed-up below 1 + margin is noise
    rounds: PositiveInt = 4  # pairs of fresh processes
    timed_calls: PositiveInt = 4  # in each of them, on fresh inputs; one more comes before and is not counted
    measure_timeout_s: Seconds = 10.0  # of one measurement, the reference's calls included
    stations: PositiveInt = 1  # measurements at once, each in a sandbox
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)

    score = "gain"
    calls = "revisions"
    takes_messages = True
    repeatable = False  # a clock says it

    def __post_init__(self) -> None:
        """Refuses settings under which slow programs of the policy's could look like a failure of ours."""
        if self.episode_timeout_s <= (most_s := self.max_turns * (self.measure_timeout_s + 2 * COMPILE_S)):
            why = f"env.max_turns x (env.measure_timeout_s + {2 * COMPILE_S:g} s of compilers) = {most_s:g}"
            raise ConfigError(f"env.episode_timeout_s={self.episode_timeout_s:g} must be more than {why}.")

    @property
    def stop_strings(self) -> Sequence[str]:  # type: ignore[override]
        """What ends a program."""
        return texts.STOP_STRINGS[self.format]

    @property
    def tokens(self) -> Sequence[str]:  # type: ignore[override]
        """The tags of the format."""
        return texts.TAGS[self.format]

    def oracle(self, task: Task) -> Sequence[str] | None:
        """The row's own solution in every turn: the clock may be disturbed once."""
        solution = rows.of_task(task)["solution"]
        return (texts.program(self.format, solution),) * self.max_turns if solution else None

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt of a task."""
        return texts.messages(self.format, text)

    def observation(self, action: str, text: str) -> Observation:
        """What came of a program, or that there is none."""
        return texts.observed(self.format, text, texts.find_program(self.format, action)[0] is None)

    def problem(self, task: Task) -> dict[str, Any]:
        """What `rows.of_task` gives. Raises ConfigError: it has none, or its whole reward lies in the noise."""
        problem = rows.of_task(task)
        if problem["full_speedup"] <= 1 + self.margin:
            raise ConfigError(f"task '{task.id}': full_speedup must be more than 1 + env.margin = {1 + self.margin:g}.")
        return problem

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], SpeedupAttempt]]:
        """Looks at the tasks, finds a back end that works and tries a station."""
        opening.check(self.problem)
        languages = {rows.of_task(task)["language"] for task in (*opening.tasks, *opening.train)}
        with open_stations(opening, self.sandbox, self.stations, "c" in languages) as stations:
            yield lambda task: SpeedupAttempt(task, self, stations)


def gain(speedup: float, cap: float, margin: float) -> float:
    """What a speed-up is worth, from 0 (none that is more than noise) to 1 (`cap`, which is above 1 + margin)."""
    return min(max(math.log(max(speedup, 1.0) / (1 + margin)) / math.log(cap / (1 + margin)), 0.0), 1.0)


class SpeedupAttempt(Attempt):
    """One attempt at one task."""

    def __init__(self, task: Task, config: Speedup, stations: Stations):
        self._task, self._config, self._stations = task, config, stations
        self._problem = config.problem(task)
        self._revisions: list[Measured] = []
        self._turns_left = config.max_turns
        self.stop_strings: Sequence[str] = config.stop_strings
        self.counters = self._counts = dict.fromkeys(["revisions", "failed_revisions", "invalid_actions"], 0.0)

    async def start(self) -> Sequence[Message]:
        """The task, after what the format needs to say."""
        return self._config.prompt_messages(self._task)

    async def step(self, action: str) -> Step:
        """Measures a revision, ends, or says that there is no program."""
        self._turns_left -= 1
        code, is_done = texts.find_program(self._config.format, action)
        shown = texts.NO_PROGRAM
        if code is not None:
            settings = self._config.rounds, self._config.timed_calls, self._config.measure_timeout_s
            revision = await self._stations.measure(self._problem, self._problem["head"] + code, *settings)
            shown = texts.measured(revision.error, revision.speedup)
            self._revisions.append(revision)
            self._counts["revisions"] += 1
            self._counts["failed_revisions"] += revision.error != ""
        self._counts["invalid_actions"] += code is None and not is_done
        if is_done or self._turns_left <= 0:
            return Step(stop_reason=StopReason.ANSWER if is_done else StopReason.TURN_LIMIT)
        return Step(texts.observed(self._config.format, shown, warning=code is None))

    async def verify(self, transcript: Transcript) -> Verdict:
        """Pays the best correct revision, or the last; what was measured when it was written counts."""
        counted = self._revisions[-1:] if self._config.counts == "last" else self._revisions
        correct = [revision for revision in counted if not revision.error]
        best = max(correct, key=lambda revision: revision.sure, default=Measured("none"))
        floor, margin = self._config.correct_reward, self._config.margin
        value = gain(best.sure, self._problem["full_speedup"], margin)
        components = {"gain": value, "correct": float(bool(correct)), "fast_1": float(best.sure > 1 + margin)}
        components |= {"fast_2": float(best.sure > 2), "speedup": min(best.speedup, 1000.0)}
        return Verdict((floor + (1 - floor) * value) if correct else 0.0, components)
