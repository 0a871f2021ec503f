"""What every rollout shares: the settings of a run's episodes, and how one attempt is played to its end.

Task + sample index in -> `Episode` out, always: whatever fails becomes a `StopReason` with one line of error, never an
exception, so that a broken tool costs one attempt and not a run. Every wait has the episode's deadline above it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar

from jaxagent.config import EnvConfig, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Verdict
from jaxagent.rollout.bookkeeping import counted, judged, one_line
from jaxagent.rollout.cast import Engine, Voice
from jaxagent.rollout.ending import close, ended
from jaxagent.rollout.forced import NEVER, ForcedTools
from jaxagent.rollout.templates import Template
from jaxagent.types import Episode, StopReason, Task

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EpisodeRollout:
    """A rollout with everything that is the same for all episodes. `await rollout(task, sample)`.

    Attributes:
      playing: the class of an attempt that is played.
      begin: task -> a fresh attempt of the environment; where others play beside the policy, (task, cast).
      policy: the engine, or anything that generates.
      tokenizer, template: how text becomes tokens.
      config: turn, observation and context budgets, and the episode's deadline.
      sampling: the distribution that the policy samples from.
      request_timeout_s: longest wait for one generation.
      group_size: attempts at a task that are wanted together, for the engine's order.
      forced: turns that begin with a random tool call.
    """

    playing: ClassVar[type[Playing]]

    begin: Callable[..., Any]
    policy: Engine
    tokenizer: Tokenizer
    template: Template
    config: EnvConfig
    sampling: SamplingConfig
    request_timeout_s: float
    group_size: int = dataclasses.field(default=1, kw_only=True)
    forced: ForcedTools = dataclasses.field(default=NEVER, kw_only=True)

    @property
    def voice(self) -> Voice:
        """How the policy speaks in conversations that the environment begins."""
        return Voice(
            engine=self.policy,
            tokenizer=self.tokenizer,
            template=self.template,
            sampling=self.sampling,
            turn_tokens=self.config.turn_tokens,
            context_tokens=self.config.context_tokens,
            observation_tokens=self.config.observation_tokens,
            timeout_s=self.request_timeout_s,
        )

    async def __call__(self, task: Task, sample: int) -> Episode:
        """Runs one attempt. Only its cancellation and `SandboxLost` pass through, after cleaning up."""
        return await self.playing(self, task, sample).run()


class Playing:
    """The state of one attempt that is played. A subclass says how it is, and what its episode holds.

    Args:
      rollout, task, sample: of the attempt.
      metrics: names of what it measures.
    """

    def __init__(self, rollout: Any, task: Task, sample: int, *metrics: str) -> None:
        self._rollout, self._task, self._sample = rollout, task, sample
        self._attempt: Any = None  # the environment's, once it is begun
        self._verdict = Verdict(0.0)
        self._metrics = dict.fromkeys(metrics, 0.0)

    async def run(self) -> Episode:
        """Plays the attempt, and closes it, whatever happens."""
        started = time.monotonic()
        try:
            stop_reason, error = await ended(self._play, self._rollout.config.episode_timeout_s)
        finally:
            try:
                await self._hang_up()
            finally:  # also where that fails, or is cancelled
                await close(self._attempt, self._task)
        try:
            self._metrics |= counted(self._attempt) if self._attempt else {}
        except Exception as failure:  # environments are other people's code
            if not error:
                stop_reason, error = StopReason.ENV_ERROR, one_line(failure, "")
        if error:
            logger.info("task %s, sample %d: %s: %s", self._task.id, self._sample, stop_reason, error)
        verdict, fields = judged(self._verdict, stop_reason), self._fields()
        fields["metrics"]["total_s"] = time.monotonic() - started
        return Episode(
            task=self._task,
            sample=self._sample,
            reward=verdict.reward,
            rewards=verdict.components,
            turn_rewards=verdict.turn_rewards,
            stop_reason=stop_reason,
            error=error,
            **fields,
        )

    async def _play(self) -> StopReason:
        """Plays the attempt and has it judged: every step of it may fail."""
        raise NotImplementedError

    async def _hang_up(self) -> None:
        """Ends what the policy and others have open for the attempt."""
        raise NotImplementedError

    def _fields(self) -> dict[str, Any]:
        """Of the episode: trajectories, turns, metrics, text, and what else it has."""
        raise NotImplementedError
