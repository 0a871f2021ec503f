"""How long an expert takes (`env.latency`): simulated from its tokens, or measured.

Latency is a part of the reward. Measured, it follows the machine and its load, so two runs of one config differ.
Simulated, it follows from what was said alone, and a run repeats exactly; that is what a laptop wants.
"""

from __future__ import annotations

import dataclasses

from jaxagent.config.ranges import NonNegativeFloat, PositiveFloat
from jaxagent.envs.cast import Said


@dataclasses.dataclass(frozen=True)
class FromTokens:
    """Seconds that a server of these speeds would take."""

    prompt_tokens_per_s: PositiveFloat = 5_000.0
    reply_tokens_per_s: PositiveFloat = 50.0
    program_s: NonNegativeFloat = 1.0  # of every program

    def of_reply(self, said: Said) -> float:
        """Seconds of an expert's reply."""
        return said.prompt_tokens / self.prompt_tokens_per_s + said.reply_tokens / self.reply_tokens_per_s

    def of_program(self, seconds: float) -> float:
        """Seconds of a program that took `seconds`."""
        return self.program_s


@dataclasses.dataclass(frozen=True)
class Measured:
    """The clock's seconds, as published."""

    def of_reply(self, said: Said) -> float:
        """Seconds of an expert's reply."""
        return said.seconds

    def of_program(self, seconds: float) -> float:
        """Seconds of a program that took `seconds`."""
        return seconds


LATENCIES: dict[str, type] = {"tokens": FromTokens, "measured": Measured}
