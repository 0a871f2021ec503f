"""Agent programs that a rollout starts in a sandbox: Codex, Claude Code, any command line."""

from __future__ import annotations

from jaxagent.agents.base import Agent
from jaxagent.agents.programs import ClaudeCode, Codex, Command, MiniSweAgent, OpenCode, QwenCode
from jaxagent.agents.shell import Shell

AGENTS: dict[str, type[Agent]] = {
    "shell": Shell,
    "codex": Codex,
    "claude_code": ClaudeCode,
    "opencode": OpenCode,
    "qwen_code": QwenCode,
    "mini_swe_agent": MiniSweAgent,
    "command": Command,
}
