"""Roles that engines of this run play: the newest policy, the policy that RL began with, another checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxagent.config import RoleConfig, SamplingConfig
from jaxagent.config.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRole(RoleConfig):
    """The policy itself, with its newest weights; what it says in this role is not trained."""

    context_tokens: PositiveInt = 4096  # of one conversation; at most env.context_tokens, which the engine is built for
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(1.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenRole(RoleConfig):
    """Frozen weights on the run's own mesh. Roles with the same `path` share one engine and are batched together."""

    path: str = ""  # a model folder; "" = the weights that the RL stage begins with (before it: the policy's)
    context_tokens: PositiveInt = 4096  # of one conversation
    slots: PositiveInt | None = None  # turns that generate at once; None = engine.slots. The largest of several counts
    pages: PositiveInt | None = None  # of the key/value cache; None = engine.pages. The largest of several counts
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(1.0))

    @classmethod
    def of_earlier_version(cls, section: dict[str, Any]) -> dict[str, Any]:
        """Reads a 0, with which earlier versions said that a size is the engine's."""
        return section | {name: section.get(name) or None for name in ("slots", "pages")}
