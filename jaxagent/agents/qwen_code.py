"""Qwen Code (npm @qwen-code/qwen-code): the Chat Completions API, streamed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxagent.agents.base import PROGRAMS, Agent, Where, with_blank


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenCode(Agent):
    """Qwen Code as `qwen -p`."""

    spawns: ClassVar[tuple[str, ...]] = ("agent", "task")
    program: str = f"{PROGRAMS}/qwen"

    def files(self, where: Where) -> Mapping[str, bytes]:
        """settings.json: no telemetry, no updates, an API key instead of a log-in."""
        settings = {
            "security": {"auth": {"selectedType": "openai"}},
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
        }
        return {f"{where.home}/.qwen/settings.json": json.dumps(settings, indent=1).encode()}

    def argv(self, where: Where) -> Sequence[str]:
        """One task, without a terminal; no tool asks for permission."""
        return (self.program, "--yolo", f"--prompt={with_blank(where.instruction)}")

    def env(self, where: Where) -> Mapping[str, str]:
        """The gateway."""
        openai = {"OPENAI_BASE_URL": f"{where.url}/v1", "OPENAI_API_KEY": where.token, "OPENAI_MODEL": where.model}
        return {**super().env(where), **openai}
