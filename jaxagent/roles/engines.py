"""Roles that engines of this run play: the newest policy, the policy that RL began with, another checkpoint."""

from __future__ import annotations

import dataclasses

from jaxagent.config.engine import SamplingConfig
from jaxagent.config.ranges import NonNegativeInt, PositiveInt
from jaxagent.config.roles import RoleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRole(RoleConfig):
    """The policy itself, with its newest weights; what it says in this role is not trained."""

    context_tokens: PositiveInt = 4096  # of one conversation; at most env.context_tokens, which the engine is built for
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(1.0, 1.0, 0, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenRole(RoleConfig):
    """Frozen weights on the run's own mesh. Roles with the same `path` share one engine and are batched together."""

    path: str = ""  # a model folder; "" = the weights that the RL stage begins with (before it: the policy's)
    context_tokens: PositiveInt = 4096  # of one conversation
    slots: NonNegativeInt = 0  # turns that generate at once; 0 = engine.slots. Of several roles the largest counts
    pages: NonNegativeInt = 0  # of the key/value cache; 0 = engine.pages. Of several roles the largest counts
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(1.0, 1.0, 0, 0.0))
