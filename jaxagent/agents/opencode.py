"""opencode (npm opencode-ai): the Chat Completions API, streamed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxagent.agents.base import PROGRAMS, Agent, Where

PROVIDER = "rl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenCode(Agent):
    """opencode as `opencode run`."""

    spawns: ClassVar[tuple[str, ...]] = ("task",)
    program: str = f"{PROGRAMS}/opencode"

    def files(self, where: Where) -> Mapping[str, bytes]:
        """opencode.json: the gateway as the only provider, everything allowed, nothing shared or updated."""
        limit = {"context": where.context_tokens, "output": where.turn_tokens}
        model = {"name": where.model, "limit": limit, "tool_call": True}
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # comes with the program
            "name": PROVIDER,
            "options": {"baseURL": f"{where.url}/v1", "apiKey": where.token},
            "models": {where.model: model},
        }
        config = {
            "$schema": "https://opencode.ai/config.json",
            "provider": {PROVIDER: provider},
            "enabled_providers": [PROVIDER],
            "model": f"{PROVIDER}/{where.model}",
            "small_model": f"{PROVIDER}/{where.model}",
            "autoupdate": False,
            "share": "disabled",
            "permission": {"*": "allow"},
        }
        return {f"{where.home}/.config/opencode/opencode.json": json.dumps(config, indent=1).encode()}

    def argv(self, where: Where) -> Sequence[str]:
        """One task, without a terminal. It joins its words with blanks, and puts quotes around one that has blanks."""
        words = ("run", "--title", "task", "--model", f"{PROVIDER}/{where.model}", "--")
        return (self.program, *words, *where.instruction.split(" "))

    def env(self, where: Where) -> Mapping[str, str]:
        """No list of models, plug-ins, language servers or updates from elsewhere."""
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE", "CLAUDE_CODE")
        home = {"XDG_CONFIG_HOME": f"{where.home}/.config", "XDG_DATA_HOME": f"{where.home}/.local/share"}
        return {**super().env(where), **home, **{f"OPENCODE_DISABLE_{name}": "1" for name in off}}
