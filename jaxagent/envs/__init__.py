"""Environments: what a policy acts in. One folder each; `config.env.name` chooses one, or names one of yours."""

from __future__ import annotations

from jaxagent.envs.agentflow.environment import AgentFlow
from jaxagent.envs.base import Environment
from jaxagent.envs.coding.environment import Coding
from jaxagent.envs.gymnasium.environment import Gymnasium
from jaxagent.envs.mcp.environment import MCP
from jaxagent.envs.memagent.environment import MemAgent
from jaxagent.envs.orchestra.environment import ToolOrchestra
from jaxagent.envs.python.environment import Python
from jaxagent.envs.ragen.environment import Ragen
from jaxagent.envs.script.environment import Script
from jaxagent.envs.search.environment import Search
from jaxagent.envs.tau.environment import TauBench
from jaxagent.envs.tau2.environment import Tau2
from jaxagent.envs.terminal.environment import Terminal
from jaxagent.envs.toolcalls.environment import ToolCalls
from jaxagent.envs.verifiers.environment import Verifiers

ENVIRONMENTS: dict[str, type[Environment]] = {
    "search": Search,
    "terminal": Terminal,
    "python": Python,
    "coding": Coding,
    "gymnasium": Gymnasium,
    "mcp": MCP,
    "verifiers": Verifiers,
    "script": Script,
    "tau_bench": TauBench,
    "agentflow": AgentFlow,
    "memagent": MemAgent,
    "tool_orchestra": ToolOrchestra,
    "toolrl": ToolCalls,
    "ragen": Ragen,
    "tau2": Tau2,
}
