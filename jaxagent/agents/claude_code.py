"""Claude Code (npm @anthropic-ai/claude-code): the Messages API, streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxagent.agents.base import PROGRAMS, Agent, Where
from jaxagent.config.ranges import NonNegativeInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaudeCode(Agent):
    """Claude Code as `claude -p`, with the tools that a coding task needs."""

    program: str = f"{PROGRAMS}/claude"
    tools: tuple[str, ...] = ("Bash", "Read", "Edit", "Write")  # of 25, whose descriptions have 74,000 characters
    thinking_tokens: NonNegativeInt = 0  # 0 = no thinking blocks

    def argv(self, where: Where) -> Sequence[str]:
        """One task, without a terminal; none of its tools asks for permission."""
        tools = ",".join(self.tools)
        words = ("-p", where.instruction, "--tools", tools, "--allowedTools", tools, "--output-format", "json")
        return (self.program, *words)

    def env(self, where: Where) -> Mapping[str, str]:
        """The gateway for every kind of model; no title request, telemetry or update; no header that varies."""
        return {
            **super().env(where),
            "ANTHROPIC_BASE_URL": where.url,
            "ANTHROPIC_AUTH_TOKEN": where.token,
            "ANTHROPIC_MODEL": where.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": where.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(where.turn_tokens),
            "DISABLE_PROMPT_CACHING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "MAX_THINKING_TOKENS": str(self.thinking_tokens),
        }
