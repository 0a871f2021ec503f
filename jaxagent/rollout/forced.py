"""Epsilon tool choice: now and then the first words of a turn are not the policy's but those of a random tool call.

With probability epsilon a turn begins with one of the environment's `tool_prefixes`, each as likely. These tokens enter
the sequence as context (kind PROMPT): they were not sampled, no log-prob is recorded for them and no policy loss falls
on them; what the policy writes after them is sampled, recorded and trained as always. So the log-probs stay those of
the distribution that was sampled. The choice is keyed by (seed, task, attempt, turn), apart from the engine's keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

_UNIT = 2.0**-64


@dataclasses.dataclass(frozen=True)
class ForcedTools:
    """How often a turn begins with a forced tool call, and the seed of that choice."""

    epsilon: float  # chance per turn; 0 = never
    seed: int  # of the run

    def choose(self, prefixes: Sequence[str], task_id: str, sample: int, turn: int) -> str:
        """The prefix that a turn must begin with; "" = none, the policy is free."""
        if self.epsilon <= 0 or not prefixes:
            return ""
        key = f"forced tool\0{self.seed}\0{task_id}\0{sample}\0{turn}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        if int.from_bytes(digest[:8], "little") * _UNIT >= self.epsilon:
            return ""
        return prefixes[int.from_bytes(digest[8:], "little") * len(prefixes) >> 64]


NEVER = ForcedTools(0.0, 0)
