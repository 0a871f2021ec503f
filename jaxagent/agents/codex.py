"""Codex (npm @openai/codex): the Responses API, streamed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxagent.agents.base import PROGRAMS, Agent, Where

PROVIDER = "rl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codex(Agent):
    """Codex as `codex exec`; what it may do is limited by the sandbox around it, not by itself."""

    spawns: ClassVar[tuple[str, ...]] = ("spawn_agent",)
    program: str = f"{PROGRAMS}/codex"
    # Without these it offers nine tools, two of which (web search, foreign agents) work only at its maker's.
    disabled: tuple[str, ...] = (
        "web_search=disabled",
        "features.multi_agent=false",
        "features.goals=false",
        "features.apps=false",
        "features.plugins=false",
        "features.unified_exec=false",
    )

    def files(self, where: Where) -> Mapping[str, bytes]:
        """config.toml: the gateway as a provider, no approvals, no telemetry, no look for updates.

        The token is read once and removed: no command finds it in a variable or a file.
        """
        key = f"{where.settings}/key"
        text = f"""model = {json.dumps(where.model)}
model_provider = "{PROVIDER}"
model_context_window = {where.context_tokens}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.{PROVIDER}]
name = "{PROVIDER}"
base_url = {json.dumps(where.url + "/v1")}
wire_api = "responses"

[model_providers.{PROVIDER}.auth]
command = "sh"
args = ["-c", "cat {key} && rm {key}"]
refresh_interval_ms = 0

[analytics]
enabled = false
"""
        return {f"{where.home}/.codex/config.toml": text.encode(), key: where.token.encode()}

    def argv(self, where: Where) -> Sequence[str]:
        """One task, without a terminal."""
        disabled = [word for setting in self.disabled for word in ("-c", setting)]
        return (self.program, "exec", "--skip-git-repo-check", "--json", *disabled, "--", where.instruction)

    def env(self, where: Where) -> Mapping[str, str]:
        """Its folder."""
        return {**super().env(where), "CODEX_HOME": f"{where.home}/.codex"}
