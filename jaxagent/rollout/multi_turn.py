"""The multi-turn rollout: one policy, one environment, turn by turn, into an `Episode`.

A generation that ends because its tokens ran out ends the episode (TOKEN_LIMIT), as in slime's Search-R1; it is not
handed to the environment. The verifier judges the episode all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxagent import contract
from jaxagent.envs.base import Attempt, Step, check_messages, check_texts
from jaxagent.envs.cast import NoRoom
from jaxagent.rollout.cast import ALONE, TIMES, PlayedWithCast, Roles
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.episode import (
    EpisodeRollout,
    add_engine_times,
    engine_failures,
    sample_turn,
    seconds,
    token_counts,
    verdict_of,
)
from jaxagent.types import Generation, StopReason, Task

OWN_CONVERSATION = 0  # the number of the policy's own; those that the environment begins follow


class TurnByTurn(PlayedWithCast):
    """An attempt that answers the policy turn by turn."""

    def __init__(self, rollout: MultiTurn, task: Task, sample: int):
        super().__init__(rollout, task, sample, "env_s", *TIMES, first=OWN_CONVERSATION + 1)
        self._conversation = Conversation(rollout.tokenizer, rollout.template, rollout.config.observation_tokens)

    async def _play(self) -> StopReason:
        with seconds(self._metrics, "env_s"):
            self._attempt = self._begin()
            messages = await contract.awaited(self._attempt, "start")
            check_messages(self._attempt, messages, "start")
        self._check()
        self._conversation.add_prompt(messages)
        length, limit = len(self._conversation), self._rollout.config.context_tokens
        if length >= limit:
            raise ValueError(f"the prompt has {length} tokens and env.context_tokens is {limit}")
        stop_reason = await self._converse(self._attempt)
        with seconds(self._metrics, "env_s"):
            transcript = dataclasses.replace(self._conversation.transcript, ended=stop_reason)
            self._verdict = await verdict_of(self._attempt, self._conversation.turns, transcript)
        self._check()
        return stop_reason

    def _begin(self) -> Attempt:
        if not self._rollout.company.roles:
            return self._rollout.begin(self._task)
        return self._rollout.begin(self._task, self._cast)

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
                    step = await contract.awaited(environment, "step", action, expected=Step)
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
            generation = await sample_turn(self._voice, session, conversation, budget, stop_strings)
        add_engine_times(self._metrics, generation)
        return generation

    def _fields(self) -> dict[str, Any]:
        trajectory, transcript = self._conversation.trajectory(), self._conversation.transcript
        return dict(
            trajectories=(trajectory,) if trajectory.action_mask.any() else (),
            turns=self._conversation.turns,
            metrics={**self._cast.metrics, **self._metrics, **token_counts((trajectory,))},
            text=transcript.prompt + transcript.response,
            heard=self._cast.untrained_conversations,
        )


@dataclasses.dataclass(frozen=True)
class MultiTurn(EpisodeRollout):
    """The rollout of attempts that answer the policy turn by turn. `company`: who plays beside the policy."""

    playing = TurnByTurn
    company: Roles = ALONE
