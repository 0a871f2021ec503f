"""Episodes of a step sampled again: whole through engine and environment, or the policy's tokens alone.

Each episode is one of its own, keyed by (seed, task, attempt, conversation, turn): with exact numerics it does not
matter which others are sampled beside it, so one of them can be made again without the rest of its step.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.engine.driver import Driver
from jaxagent.gateway.harness import HarnessRollout
from jaxagent.gateway.threads import conversation_key
from jaxagent.rollout.multi_turn import OWN_CONVERSATION, MultiTurn
from jaxagent.rollout.workers import STOP_TIMEOUT_S, Rollout, batch_deadline_s, guarded
from jaxagent.runs.parts import Parts
from jaxagent.types import Episode, Trajectory


@dataclasses.dataclass(frozen=True)
class RecordedRollout:
    """A rollout whose environment is the record: every turn's context is taken from it, and the turn sampled again.

    Why a turn ended is not known from the record, so that a turn gets as many tokens as were sampled then; that its
    last one ended it is not looked at. Conversations of roles are the environment's side.

    Attributes:
      driver: with the weights that the step was sampled with.
      sampling: of the step.
      logged: the episodes, by (task, attempt).
      group_size, timeout_s: as in the step.
      player: the class of the environment's own rollout.
    """

    driver: Driver
    sampling: SamplingConfig
    logged: dict[tuple[str, int], Episode]
    group_size: int
    timeout_s: float
    player: type

    async def __call__(self, task: object, sample: int) -> Episode:
        """Samples the policy's tokens of one episode."""
        episode = self.logged[getattr(task, "id", ""), sample]
        again = [
            await self._trajectory(episode, number, trajectory)
            for number, trajectory in zip(conversations(episode, self.player), episode.trajectories, strict=True)
        ]
        return dataclasses.replace(episode, trajectories=tuple(again))

    async def _trajectory(self, episode: Episode, conversation: int, logged: Trajectory) -> Trajectory:
        """The trajectory as it is now, up to the end of the first turn that differs."""
        domain = str(episode.task.metadata.get("domain", ""))
        tokens, logprobs = logged.tokens.copy(), logged.logprobs.copy()
        versions, prefix_end = logged.policy_versions.copy(), 0
        session = await self.driver.open(
            episode.task.id, episode.sample, self.group_size, domain, conversation=conversation
        )
        try:
            for start, end in turns(logged):
                generation = await self.driver.generate(
                    session,
                    logged.tokens[prefix_end:start],
                    end - start,
                    self.sampling,
                    int(logged.turns[start]),
                    self.timeout_s,
                    stop_strings=(),
                )
                upto = start + len(generation.tokens)
                tokens[start:upto], logprobs[start:upto] = generation.tokens, generation.logprobs
                versions[start:upto] = generation.policy_versions
                if upto < end or not np.array_equal(tokens[start:end], logged.tokens[start:end]):
                    return _beginning(dataclasses.replace(logged, tokens=tokens), logprobs, versions, upto)
                prefix_end = end
        finally:
            self.driver.close(session)
        return _beginning(dataclasses.replace(logged, tokens=tokens), logprobs, versions, len(logged))


def turns(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Where sampled tokens of one turn begin and end."""
    spans: list[tuple[int, int]] = []
    for at in np.flatnonzero(trajectory.action_mask).tolist():
        if spans and spans[-1][1] == at and trajectory.turns[at] == trajectory.turns[at - 1]:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            spans.append((at, at + 1))
    return spans


def conversations(episode: Episode, player: type) -> list[int]:
    """The number that keys the randomness of each trajectory, which are in the order of their beginning.

    `player`: the class of the rollout.
    """
    if issubclass(player, MultiTurn):
        return [OWN_CONVERSATION]
    if issubclass(player, HarnessRollout):
        begun: collections.Counter[bytes] = collections.Counter()
        keys = []
        for trajectory in episode.trajectories:
            context = trajectory.tokens[: turns(trajectory)[0][0]]
            keys.append(conversation_key(context.tolist(), begun[context.tobytes()]))
            begun[context.tobytes()] += 1
        return keys
    # Counted in the order of their beginning, roles' among them.
    before = [
        sum(conversation.after <= number for conversation in episode.heard)
        for number in range(len(episode.trajectories))
    ]
    return [number + others for number, others in enumerate(before)]


def play(parts: Parts, rollout: Rollout, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes, which have the run's own tasks, made again, in their order."""
    places = asyncio.Semaphore(parts.cfg.concurrent_episodes)

    async def play_one(episode: Episode) -> Episode:
        async with places:
            return await guarded(rollout, episode.task, episode.sample)

    async def everyone() -> list[Episode]:
        return await asyncio.gather(*(play_one(episode) for episode in episodes))

    deadline = batch_deadline_s(len(episodes), parts.cfg.concurrent_episodes, parts.cfg.env.episode_timeout_s)
    return parts.workers.run(everyone(), deadline + STOP_TIMEOUT_S)


def _beginning(logged: Trajectory, logprobs: np.ndarray, versions: np.ndarray, end: int) -> Trajectory:
    return Trajectory(logged.tokens[:end], logged.kinds[:end], logprobs[:end], versions[:end], logged.turns[:end])
