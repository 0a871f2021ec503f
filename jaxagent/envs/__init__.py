"""Environments: what a policy acts in. One folder each; `config.env.name` chooses one, or names one of yours.

A folder has all that the package knows of one benchmark: settings and attempts, rows as they are published, rewards and
roles of its own. Nothing outside a folder imports it: it is named here, in `roles.ROLES` and in `data.rows.LAYOUTS`.
"""

import importlib

from jaxagent.envs.base import Environment as Environment

# Name -> "module:Class"
ENVIRONMENTS: dict[str, str] = {
    "search": "jaxagent.envs.search.environment:Search",
    "terminal": "jaxagent.envs.terminal.environment:Terminal",
    "python": "jaxagent.envs.python.environment:Python",
    "coding": "jaxagent.envs.coding.environment:Coding",
    "gymnasium": "jaxagent.envs.gymnasium.environment:Gymnasium",
    "textarena": "jaxagent.envs.textarena.environment:TextArena",
    "reasoning_gym": "jaxagent.envs.reasoning_gym.environment:ReasoningGym",
    "mcp": "jaxagent.envs.mcp.environment:MCP",
    "verifiers": "jaxagent.envs.verifiers.environment:Verifiers",
    "verifiers_v1": "jaxagent.envs.verifiers.tasksets:Taskset",
    "openenv": "jaxagent.envs.openenv.environment:OpenEnv",
    "nemo_gym": "jaxagent.envs.nemo_gym.environment:NemoGym",
    "script": "jaxagent.envs.script.environment:Script",
    "tau_bench": "jaxagent.envs.tau.environment:TauBench",
    "agentflow": "jaxagent.envs.agentflow.environment:AgentFlow",
    "memagent": "jaxagent.envs.memagent.environment:MemAgent",
    "tool_orchestra": "jaxagent.envs.orchestra.environment:ToolOrchestra",
    "toolrl": "jaxagent.envs.toolcalls.environment:ToolCalls",
    "ragen": "jaxagent.envs.ragen.environment:Ragen",
    "browser": "jaxagent.envs.browser.environment:Browser",
    "tau2": "jaxagent.envs.tau2.environment:Tau2",
    "speedup": "jaxagent.envs.speedup.environment:Speedup",
}


def __getattr__(name: str) -> type:
    """The class of one of them, imported when it is asked for: `from jaxagent.envs import Search`."""
    for path in ENVIRONMENTS.values():
        module, _, cls = path.partition(":")
        if cls == name:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
