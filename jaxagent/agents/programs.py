"""The agent programs that people use, and any other one by its command line: how each is pointed at the gateway."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from jaxagent.agents.base import Agent, Where
from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeInt, PositiveInt

PROGRAMS = "/opt/agents/bin"  # where the layer of `python -m data_pipelines.agent_programs` has them
PROVIDER = "rl"  # the gateway's name in Codex and opencode
CLAUDE_LEAST_WINDOW = 100_000  # that it takes; the context's own size counts where it is less
CLAUDE_RESERVE = 13_000  # tokens that it keeps free, beside an answer's
PLACES = re.compile(r"\{(url|token|model|instruction|directory|home)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codex(Agent):
    """Codex (npm @openai/codex) as `codex exec`: Responses, streamed.

    What it may do is limited by the sandbox around it, not by itself.
    """

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaudeCode(Agent):
    """Claude Code (npm @anthropic-ai/claude-code) as `claude -p`: Messages, streamed."""

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
        own = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(max(CLAUDE_LEAST_WINDOW, where.context_tokens))}
        late = where.context_tokens < 2 * (where.turn_tokens + CLAUDE_RESERVE)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenCode(Agent):
    """opencode (npm opencode-ai) as `opencode run`: Chat Completions, streamed."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenCode(Agent):
    """Qwen Code (npm @qwen-code/qwen-code) as `qwen -p`: Chat Completions, streamed."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniSweAgent(Agent):
    """mini-swe-agent (PyPI) as `mini`, with its own prompt (mini.yaml): Chat Completions, with one tool, `bash`."""

    program: str = f"{PROGRAMS}/mini"
    steps: NonNegativeInt = 0  # most requests of an episode; 0 = no limit of its own
    command_timeout_s: PositiveInt = 30

    def files(self, where: Where) -> Mapping[str, bytes]:
        """What is laid over mini.yaml (JSON is YAML)."""
        config = {
            "agent": {"step_limit": self.steps, "cost_limit": 0},
            "environment": {"cwd": where.directory, "timeout": self.command_timeout_s},
            "model": {"model_kwargs": {"drop_params": True, "api_base": f"{where.url}/v1", "api_key": where.token}},
        }
        return {f"{where.settings}/mini.yaml": json.dumps(config, indent=1).encode()}

    def argv(self, where: Where) -> Sequence[str]:
        """One task, without questions."""
        configs = ("-c", "mini.yaml", "-c", f"{where.settings}/mini.yaml")
        ends = ("--yolo", "--exit-immediately", "-o", f"{where.settings}/trajectory.json")
        return (self.program, "-m", f"openai/{where.model}", *configs, *ends, "-t", where.instruction)

    def env(self, where: Where) -> Mapping[str, str]:
        """No first-time questions, no prices, which would be looked up elsewhere."""
        return {
            **super().env(where),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": where.settings,
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Agent):
    """Any program that speaks one of the gateway's dialects, by its command line.

    {url}, {token}, {model}, {instruction}, {directory} and {home} are filled in. The official clients find
    the gateway by themselves: the variables that they read are set.
    """

    foreign: Literal["drop", "train"] = "train"  # nobody knows how many conversations it means to hold
    words: tuple[str, ...] = ()  # ("python3", "/opt/agent.py", "{instruction}"); each stays one argument

    def argv(self, where: Where) -> Sequence[str]:
        """The words with what the episode says.

        Raises:
          ConfigError: there are none.
        """
        if not self.words:
            raise ConfigError('env.agent \'command\' needs its words, such as ("python3", "agent.py", "{instruction}")')
        return tuple(_filled(word, where) for word in self.words)

    def env(self, where: Where) -> Mapping[str, str]:
        """What the openai and anthropic packages read."""
        return {**super().env(where), **client_variables(where)}


def client_variables(where: Where) -> dict[str, str]:
    """The variables by which clients of OpenAI's and Anthropic's interfaces find the gateway, and the model's name.

    All names are set that clients read, so that no key and no address of the user's own stays in the place of one, and
    no proxy of the user's is asked for this machine.
    """
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{where.url}/v1"),
        "OPENAI_API_KEY": where.token,
        "OPENAI_MODEL": where.model,
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL", "ANTHROPIC_API_BASE"), where.url),
        **dict.fromkeys(("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), where.token),
        "ANTHROPIC_MODEL": where.model,
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    }


def _filled(word: str, where: Where) -> str:
    """Other braces stay, and so do those in what is filled in."""
    return PLACES.sub(lambda place: getattr(where, place[1]), word)


def with_blank(instruction: str) -> str:
    """An instruction for programs that take a slash at its beginning for a command of their own: a blank before it."""
    return f" {instruction}" if instruction.startswith("/") else instruction
