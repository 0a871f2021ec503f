"""The multi-turn rollout: one policy, one environment, turn by turn, into an `Episode`.

Task + sample index in -> `Episode` out, always: whatever fails becomes a `StopReason` with one line of error, never an
exception, so that a broken tool costs one attempt and not a run. Every wait has the episode's deadline above it.

A generation that ends because its tokens ran out ends the episode (TOKEN_LIMIT), as in slime's Search-R1; it is not
handed to the environment. The verifier judges the episode all the same.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxagent import contract
from jaxagent.config import EnvConfig, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Attempt, Step, Verdict, check_messages, check_texts
from jaxagent.envs.cast import NoRoom
from jaxagent.rollout.bookkeeping import judged, seconds, token_counts, verdict_of
from jaxagent.rollout.cast import Company, EpisodeCast, Voice, policy_voice
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.ending import add_counters, close, ended, engine_failures
from jaxagent.rollout.forced import NEVER, ForcedTools
from jaxagent.rollout.templates import Template
from jaxagent.types import Episode, Generation, StopReason, Task

logger = logging.getLogger(__name__)

OWN_CONVERSATION = 0  # the number of the policy's own; those that the environment begins follow


class Policy(Protocol):
    """What a rollout needs of an engine. `session` is opaque; times are seconds from now."""

    async def open(self, task_id: str, sample: int, group_size: int, domain: str) -> Any:
        """A new sequence; the last two arguments only say what is urgent."""

    async def generate(
        self,
        session: Any,
        new_tokens: Sequence[int],
        max_tokens: int,
        sampling: SamplingConfig,
        turn: int,
        deadline_s: float,
        *,
        stop_strings: Sequence[str],
    ) -> Generation:
        """Samples one turn after appending `new_tokens` to the session's sequence; ends at a stop string."""
        ...

    def close(self, session: Any) -> None:
        """Ends the sequence, also in the middle of a turn."""


ALONE = Company({}, {})


@dataclasses.dataclass(frozen=True)
class MultiTurn:
    """The rollout with everything that is the same for all episodes. `await rollout(task, sample)`.

    Attributes:
      begin: task -> a fresh attempt of the environment; where there are roles, (task, cast).
      policy: the engine, or anything that generates.
      tokenizer, template: how text becomes tokens.
      config: turn, observation and context budgets, and the episode's deadline.
      sampling: the distribution to sample from.
      request_timeout_s: longest wait for one generation.
      group_size: attempts at a task that are wanted together, for the engine's order.
      forced: turns that begin with a random tool call.
      company: who plays beside the policy.
    """

    begin: Callable[..., Attempt]
    policy: Policy
    tokenizer: Tokenizer
    template: Template
    config: EnvConfig
    sampling: SamplingConfig
    request_timeout_s: float
    group_size: int = 1
    forced: ForcedTools = NEVER
    company: Company = ALONE

    @property
    def voice(self) -> Voice:
        """How the policy speaks in conversations that the environment begins."""
        return policy_voice(
            self.policy, self.tokenizer, self.template, self.config, self.sampling, self.request_timeout_s
        )

    async def __call__(self, task: Task, sample: int) -> Episode:
        """Runs one attempt. Only cancellation of the caller's own task passes through, after cleaning up."""
        return await _Attempt(self, task, sample).run()


class _Attempt:
    """The state of one running attempt."""

    def __init__(self, rollout: MultiTurn, task: Task, sample: int):
        self._rollout = rollout
        self._task = task
        self._sample = sample
        self._conversation = Conversation(rollout.tokenizer, rollout.template, rollout.config.observation_tokens)
        self._cast = EpisodeCast(
            rollout.company, rollout.voice, task, sample, rollout.group_size, first=OWN_CONVERSATION + 1
        )
        self._environment: Attempt | None = None
        self._verdict = Verdict(0.0)
        self._metrics: dict[str, float] = dict.fromkeys(
            ("env_s", "engine_s", "open_s", "queue_s", "prefill_s", "decode_s", "cached_tokens", "overshoots"), 0.0
        )

    async def run(self) -> Episode:
        started = time.monotonic()
        try:
            stop_reason, error = await ended(self._attempt, self._rollout.config.episode_timeout_s)
        finally:
            self._cast.close()
            await close(self._environment, self._task)
        stop_reason, error = add_counters(self._metrics, self._environment, stop_reason, error)
        if error:
            logger.info("task %s, sample %d: %s: %s", self._task.id, self._sample, stop_reason, error)
        return self._episode(stop_reason, error, time.monotonic() - started)

    async def _attempt(self) -> StopReason:
        """Plays the attempt: every step of it may fail."""
        with seconds(self._metrics, "env_s"):
            self._environment = self._begin()
            messages = await contract.awaited(self._environment, "start")
            check_messages(self._environment, messages, "start")
        self._check()
        self._conversation.add_prompt(messages)
        length, limit = len(self._conversation), self._rollout.config.context_tokens
        if length >= limit:
            raise ValueError(f"the prompt has {length} tokens and env.context_tokens is {limit}")
        stop_reason = await self._converse(self._environment)
        with seconds(self._metrics, "env_s"):
            transcript = dataclasses.replace(self._conversation.transcript, ended=stop_reason)
            self._verdict = await verdict_of(self._environment, self._conversation.turns, transcript)
        self._check()
        return stop_reason

    def _begin(self) -> Attempt:
        if not self._rollout.company.roles:
            return self._rollout.begin(self._task)
        return self._rollout.begin(self._task, self._cast)

    def _check(self) -> None:
        """An attempt may have gone on without a role that failed; nothing that follows is the policy's doing."""
        if self._cast.failure is not None:
            raise self._cast.failure

    async def _converse(self, environment: Attempt) -> StopReason:
        policy, task = self._rollout.policy, self._task
        domain = str(task.metadata.get("domain", ""))
        with seconds(self._metrics, "open_s"), engine_failures():
            session = await policy.open(task.id, self._sample, self._rollout.group_size, domain)
        try:
            while True:
                self._force_tool(environment)
                check_texts("stop_strings", environment.stop_strings)
                generation = await self._generate(session, environment.stop_strings)
                action = self._conversation.add_action(generation)
                if generation.finish == "length":
                    return StopReason.TOKEN_LIMIT
                with seconds(self._metrics, "env_s"):
                    step = await contract.awaited(environment, "step", action, wanted=Step)
                self._check()
                if step.stop_reason is not None:
                    return StopReason(step.stop_reason)
                self._conversation.add_observation(step.observation)
                if len(self._conversation) >= self._rollout.config.context_tokens:
                    return StopReason.TOKEN_LIMIT
        except NoRoom:  # of a role's context, which the policy has filled
            return StopReason.TOKEN_LIMIT
        finally:
            policy.close(session)

    def _force_tool(self, environment: Attempt) -> None:
        rollout, conversation = self._rollout, self._conversation
        if rollout.forced.epsilon <= 0:
            return
        prefixes = getattr(environment, "tool_prefixes", ())
        text = rollout.forced.choose(prefixes, self._task.id, self._sample, conversation.turns)
        forced = bool(text) and conversation.force(text, rollout.config.context_tokens - len(conversation))
        self._metrics["forced_turns"] = self._metrics.get("forced_turns", 0.0) + forced

    async def _generate(self, session: Any, stop_strings: Sequence[str]) -> Generation:
        rollout, conversation = self._rollout, self._conversation
        budget = min(rollout.config.turn_tokens, rollout.config.context_tokens - len(conversation))
        with seconds(self._metrics, "engine_s"), engine_failures():
            generation = await rollout.policy.generate(
                session,
                conversation.pending,
                budget,
                rollout.sampling,
                conversation.turns,
                rollout.request_timeout_s,
                stop_strings=stop_strings,
            )
            if not np.isfinite(generation.logprobs).all():
                raise ValueError("the log-prob of a sampled token is not finite: are the weights?")
        for name in ("queue_s", "prefill_s", "decode_s", "cached_tokens"):
            self._metrics[name] += getattr(generation, name)
        self._metrics["overshoots"] += generation.overshoot_bytes > 0
        return generation

    def _episode(self, stop_reason: StopReason, error: str, total_s: float) -> Episode:
        trajectory = self._conversation.trajectory()
        verdict = judged(self._verdict, stop_reason)
        metrics = {
            **self._cast.metrics,
            **self._metrics,
            **token_counts((trajectory,)),
            "total_s": total_s,
        }
        transcript = self._conversation.transcript
        return Episode(
            task=self._task,
            sample=self._sample,
            trajectories=(trajectory,) if trajectory.action_mask.any() else (),
            reward=verdict.reward,
            rewards=verdict.components,
            stop_reason=stop_reason,
            turns=self._conversation.turns,
            metrics=metrics,
            text=transcript.prompt + transcript.response,
            error=error,
            turn_rewards=verdict.turn_rewards,
            heard=self._cast.heard,
        )
