"""The rollout of attempts that play themselves: several conversations of the policy, and other roles, in one episode.

Task + sample index in -> `Episode` out, always: whatever fails becomes a `StopReason` with one line of error. Each
conversation of the policy is one trajectory, exactly as the engine saw it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from jaxagent import contract
from jaxagent.config import ConfigError, EnvConfig, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Verdict
from jaxagent.envs.cast import Cast, NoRoom, PlayedAttempt
from jaxagent.rollout.bookkeeping import judged, seconds, token_counts, verdict_of
from jaxagent.rollout.cast import Company, Engine, EpisodeCast, Voice, policy_voice
from jaxagent.rollout.ending import add_counters, close, ended
from jaxagent.rollout.forced import NEVER, ForcedTools
from jaxagent.rollout.templates import Template
from jaxagent.types import Episode, StopReason, Task

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Play:
    """The rollout with everything that is the same for all episodes. `await rollout(task, sample)`.

    Attributes:
      begin: (task, cast) -> a fresh attempt of the environment.
      policy: the engine, or anything that generates.
      tokenizer, template: how text becomes tokens.
      config: turn, observation and context budgets of each conversation, and the episode's deadline.
      sampling: the distribution that the policy samples from.
      request_timeout_s: longest wait for one generation.
      company: who plays beside the policy.
      group_size: attempts at a task that are wanted together, for the engine's order.
      forced: turns that begin with a random tool call: not here, an attempt has no tool prefixes.
    """

    begin: Callable[[Task, Cast], PlayedAttempt]
    policy: Engine
    tokenizer: Tokenizer
    template: Template
    config: EnvConfig
    sampling: SamplingConfig
    request_timeout_s: float
    company: Company
    group_size: int = 1
    forced: ForcedTools = NEVER

    def __post_init__(self) -> None:
        """Raises ConfigError for what an attempt that plays itself cannot be made to do."""
        if self.forced.epsilon > 0:
            raise ConfigError("rl.tool_epsilon forces calls of an environment's tools; this environment plays itself.")

    @property
    def voice(self) -> Voice:
        """How the policy speaks."""
        return policy_voice(
            self.policy, self.tokenizer, self.template, self.config, self.sampling, self.request_timeout_s
        )

    async def __call__(self, task: Task, sample: int) -> Episode:
        """Runs one attempt. Only cancellation of the caller's own task passes through, after cleaning up."""
        return await _Attempt(self, task, sample).run()


class _Attempt:
    """The state of one running attempt."""

    def __init__(self, rollout: Play, task: Task, sample: int):
        self._rollout, self._task, self._sample = rollout, task, sample
        self._cast = EpisodeCast(rollout.company, rollout.voice, task, sample, rollout.group_size)
        self._attempt: PlayedAttempt | None = None
        self._verdict = Verdict(0.0)
        self._metrics: dict[str, float] = {"verify_s": 0.0}

    async def run(self) -> Episode:
        started = time.monotonic()
        try:
            stop_reason, error = await ended(self._play, self._rollout.config.episode_timeout_s)
        finally:
            self._cast.close()
            await close(self._attempt, self._task)
        stop_reason, error = add_counters(self._metrics, self._attempt, stop_reason, error)
        if error:
            logger.info("task %s, sample %d: %s: %s", self._task.id, self._sample, stop_reason, error)
        return self._episode(stop_reason, error, time.monotonic() - started)

    async def _play(self) -> StopReason:
        self._attempt = self._rollout.begin(self._task, self._cast)
        try:
            stop_reason = StopReason(await contract.awaited(self._attempt, "play"))
        except NoRoom:  # of a role's context: the policy's doing, or else the cast remembers it as a failure
            stop_reason = StopReason.TOKEN_LIMIT
        self._check()
        with seconds(self._metrics, "verify_s"):
            self._verdict = await verdict_of(self._attempt, self._cast.turns, stop_reason)
        self._check()
        return stop_reason

    def _check(self) -> None:
        """An attempt may have gone on without a role that failed; nothing that follows is the policy's doing."""
        if self._cast.failure is not None:
            raise self._cast.failure

    def _episode(self, stop_reason: StopReason, error: str, total_s: float) -> Episode:
        cast, verdict = self._cast, judged(self._verdict, stop_reason)
        trajectories = cast.trajectories
        metrics = {
            **cast.policy_metrics,
            **cast.metrics,
            **self._metrics,
            "trajectories": float(len(trajectories)),
            **token_counts(trajectories),
            "total_s": total_s,
        }
        return Episode(
            task=self._task,
            sample=self._sample,
            trajectories=trajectories,
            reward=verdict.reward,
            rewards=verdict.components,
            stop_reason=stop_reason,
            turns=cast.turns,
            metrics=metrics,
            text=cast.text,
            error=error,
            turn_rewards=verdict.turn_rewards,
            heard=cast.heard,
        )
