"""What every role beside the policy has: its prices and its limits. The entries stand in `jaxagent.roles`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxagent.config.ranges import NonNegativeFloat, PositiveInt, Seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """A role that is not trained. Prices are in any one currency; a role without one costs nothing that is known."""

    repeatable: ClassVar[bool] = True  # whether it answers the same to the same at any time
    price_prompt: NonNegativeFloat | None = None  # of a million tokens that it is shown
    price_reply: NonNegativeFloat | None = None  # of a million tokens that it says
    reply_tokens: PositiveInt = 512  # of one reply, at most
    timeout_s: Seconds = 60.0  # for one reply

    @property
    def prices(self) -> tuple[float | None, float | None]:
        """Of a million tokens that it is shown, and that it says."""
        return self.price_prompt, self.price_reply

    def cost(self, prompt_tokens: int, reply_tokens: int) -> float | None:
        """What one reply costs; None where the role has no price."""
        prompt, reply = self.prices
        if prompt is None and reply is None:
            return None
        return ((prompt or 0.0) * prompt_tokens + (reply or 0.0) * reply_tokens) / 1e6
