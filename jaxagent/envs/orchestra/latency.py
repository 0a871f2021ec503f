"""How long an expert takes (`env.latency`): simulated from its tokens, or measured.

Latency is a part of the reward. Measured, it follows the machine and its load, so two runs of one config differ.
Simulated, it follows from what was said alone, and a run repeats exactly; that is what a laptop wants.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxagent.config.errors import Removed
from jaxagent.envs.cast import Said

PROMPT_TOKENS_PER_S, REPLY_TOKENS_PER_S = 5_000.0, 50.0  # what one accelerator does for a model of 8B, about
PROGRAM_S = 1.0  # of every program


@dataclasses.dataclass(frozen=True)
class FromTokens:
    """Seconds that a server of these speeds would take."""

    removed: ClassVar = {
        "prompt_tokens_per_s": Removed(f"it is {PROMPT_TOKENS_PER_S:g}", PROMPT_TOKENS_PER_S),
        "reply_tokens_per_s": Removed(f"it is {REPLY_TOKENS_PER_S:g}", REPLY_TOKENS_PER_S),
        "program_s": Removed(f"it is {PROGRAM_S:g}", PROGRAM_S),
    }

    def of_reply(self, said: Said) -> float:
        """Seconds of an expert's reply."""
        return said.prompt_tokens / PROMPT_TOKENS_PER_S + said.reply_tokens / REPLY_TOKENS_PER_S

    def of_program(self, seconds: float) -> float:
        """Seconds of a program that took `seconds`."""
        return PROGRAM_S


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
