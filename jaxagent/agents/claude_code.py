"""Claude Code (npm @anthropic-ai/claude-code): the Messages API, streamed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxagent.agents.base import PROGRAMS, Agent, Where, with_blank
from jaxagent.config.ranges import NonNegativeInt

LEAST_WINDOW = 100_000  # that it takes; the context's own size counts where it is less
RESERVE = 13_000  # tokens that it keeps free, beside an answer's


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaudeCode(Agent):
    """Claude Code as `claude -p`, with the tools that a coding task needs."""

    spawns: ClassVar[tuple[str, ...]] = ("Agent", "Task")
    program: str = f"{PROGRAMS}/claude"
    tools: tuple[str, ...] = ("Bash", "Read", "Edit", "Write")  # of 25, whose descriptions have 74,000 characters
    thinking_tokens: NonNegativeInt = 0  # 0 = no thinking blocks

    def files(self, where: Where) -> Mapping[str, bytes]:
        """The token, which its helper reads once and removes: no command finds it in a variable or a file."""
        key = f"{where.settings}/key"
        settings = json.dumps({"apiKeyHelper": f"cat {key} && rm {key}"})
        return {key: where.token.encode(), f"{where.home}/.claude/settings.json": settings.encode()}

    def argv(self, where: Where) -> Sequence[str]:
        """One task, without a terminal; none of its tools asks for permission."""
        tools = ",".join(self.tools)
        words = ("-p", "--tools", tools, "--allowedTools", tools, "--output-format", "json", "--")
        return (self.program, *words, with_blank(where.instruction))

    def env(self, where: Where) -> Mapping[str, str]:
        """The gateway for every kind of model; no title request, telemetry or update; no header that varies.

        It compacts its talk in time where it is told a window of its own, and where what it keeps free of that is not
        most of it; else when a request is refused.
        """
        own = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(max(LEAST_WINDOW, where.context_tokens))}
        late = where.context_tokens < 2 * (where.turn_tokens + RESERVE)
        return {
            **super().env(where),
            "ANTHROPIC_BASE_URL": where.url,
            "CLAUDE_CODE_API_KEY_HELPER_TTL_MS": str(30 * 24 * 3600 * 1000),
            "ANTHROPIC_MODEL": where.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": where.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(where.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(where.turn_tokens),
            "DISABLE_PROMPT_CACHING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "MAX_THINKING_TOKENS": str(self.thinking_tokens),
            **({} if late else own),
        }
