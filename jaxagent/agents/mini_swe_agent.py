"""mini-swe-agent (PyPI): the Chat Completions API, not streamed, with one tool, `bash`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from jaxagent.agents.base import PROGRAMS, Agent, Where
from jaxagent.config.ranges import NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniSweAgent(Agent):
    """mini-swe-agent as `mini`, with its own prompt (mini.yaml)."""

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
