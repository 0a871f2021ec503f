"""Agent programs that a rollout starts in a sandbox: Codex, Claude Code, any command line; one module each."""

from __future__ import annotations

from jaxagent.agents.base import Agent
from jaxagent.agents.claude_code import ClaudeCode
from jaxagent.agents.codex import Codex
from jaxagent.agents.command import Command
from jaxagent.agents.mini_swe_agent import MiniSweAgent
from jaxagent.agents.opencode import OpenCode
from jaxagent.agents.qwen_code import QwenCode
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
