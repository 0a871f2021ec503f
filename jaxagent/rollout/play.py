"""The rollout of attempts that play themselves: several conversations of the policy, and other roles, in one episode.

Each conversation of the policy is one trajectory, exactly as the engine saw it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxagent import contract
from jaxagent.config import ConfigError
from jaxagent.envs.cast import NoRoom
from jaxagent.rollout.cast import PlayedWithCast, Roles
from jaxagent.rollout.episode import EpisodeRollout, seconds, token_counts, verdict_of
from jaxagent.types import StopReason, Task


class _SelfPlayed(PlayedWithCast):
    def __init__(self, rollout: Play, task: Task, sample: int):
        super().__init__(rollout, task, sample, "verify_s", first=0)

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

    def _fields(self) -> dict[str, Any]:
        cast = self._cast
        trajectories = cast.trajectories
        counts = {"trajectories": float(len(trajectories)), **token_counts(trajectories)}
        return dict(
            trajectories=trajectories,
            turns=cast.turns,
            metrics={**cast.policy_metrics, **cast.metrics, **self._metrics, **counts},
            text=cast.text,
            heard=cast.untrained_conversations,
        )


@dataclasses.dataclass(frozen=True)
class Play(EpisodeRollout):
    """The rollout of attempts that play themselves. `company`: who plays beside the policy."""

    playing = _SelfPlayed
    company: Roles

    def __post_init__(self) -> None:
        """Raises ConfigError for what an attempt that plays itself cannot be made to do."""
        if self.forced.epsilon > 0:
            raise ConfigError("rl.tool_epsilon forces calls of an environment's tools; this environment plays itself.")
