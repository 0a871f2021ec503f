"""MCP servers that a task starts in its sandbox: their tools are the agent's, beside its shell.

A server's stdin and stdout are one connection out of the sandbox, through the one port that the sandbox opens for it.
The agent writes a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, whatever form its commands have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxagent.config import ConfigError
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox.base import Sandbox
from jaxagent.tools.calls import Tool, tools_text
from jaxagent.tools.hermes import CLOSE, read_answer

if TYPE_CHECKING:
    from jaxagent.envs.mcp.connection import Connection

START_S, CALL_S = 30.0, 60.0
STOP = CLOSE  # ends a call
_CALL = re.compile(r"<tool_call>\s*\{")


class Servers:
    """The sessions of one attempt at one step with the servers of its task."""

    def __init__(self, task: TerminalTask, sandbox: Sandbox):
        self._task, self._sandbox = task, sandbox
        self._connections: list[Connection] = []
        self.tools: Mapping[str, tuple[int, Tool]] = {}

    async def open(self) -> None:
        """Starts every server. Raises VerifierError: one does not start, or two offer a tool of one name."""
        from jaxagent.envs.mcp.connection import Connection
        from jaxagent.envs.mcp.environment import distinct, open_all
        from jaxagent.envs.terminal.server_pipes import ServerPipes

        for server in self._task.servers:
            pipes = ServerPipes(self._sandbox, server, self._task)
            self._connections.append(Connection(server.name, pipes))
        try:
            await open_all(self._connections, START_S)
            self.tools = distinct(self._connections)
        except (RuntimeError, TimeoutError, ConfigError) as error:
            raise VerifierError(f"{self._task.id}: {error}") from error

    @property
    def prompt(self) -> str:
        """What the agent is told of the tools."""
        return tools_text([tool for _, tool in self.tools.values()], several=False)

    async def answer(self, action: str, left_s: float) -> tuple[str, str] | None:
        """What the call in an agent's turn gives, and the counter that it counts for; None: there is no call.

        A server that is gone, or does not answer, is a failed call: the agent has it in its own sandbox.
        """
        if not self.tools or not _CALL.search(action):
            return None
        from jaxagent.envs.mcp.connection import as_text

        reply = read_answer(action, [tool for _, tool in self.tools.values()])
        call = reply.calls[0] if reply.calls else None
        if call is None or not isinstance(call.arguments, Mapping):
            return 'Write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.', "invalid_actions"
        if call.name not in self.tools:
            return f"There is no function {call.name!r:.100}.", "invalid_actions"
        connection = self._connections[self.tools[call.name][0]]
        try:
            result = await connection.call(call.name, dict(call.arguments), min(CALL_S, left_s))
        except (RuntimeError, TimeoutError) as error:
            return f"The call failed: {error}", "failed_calls"
        return as_text(result), "failed_calls" if result.is_error else "calls"

    async def close(self) -> None:
        """Ends the sessions; the sandbox ends the servers."""
        from jaxagent.envs.mcp.environment import close_all

        await close_all(self._connections)
        self._connections, self.tools = [], {}


async def skills(sandbox: Sandbox, folder: str) -> str:
    """What the agent is told of the skills in a folder of its sandbox, as Harbor's own agent tells it; "" = none.

    A skill is a folder with a SKILL.md, at whose top YAML between two lines of --- has its name and description.
    """
    from xml.etree import ElementTree

    import yaml

    from jaxagent.sandbox.base import FileError

    try:
        entries = await sandbox.list(folder)
    except FileError:
        return ""
    root = ElementTree.Element("available_skills")
    for entry in sorted(entries, key=lambda entry: entry.path):
        if entry.kind != "file" or not re.fullmatch(r"[^/]+/SKILL\.md", entry.path):
            continue
        path = f"{folder.rstrip('/')}/{entry.path}"
        head = re.match(r"---\n(.*?)\n---", (await sandbox.read(path)).decode("utf-8", "replace"), re.DOTALL)
        try:
            about = yaml.safe_load(head[1]) if head else None
        except yaml.YAMLError:
            about = None
        if isinstance(about, dict) and {"name", "description"} <= about.keys():
            skill = ElementTree.SubElement(root, "skill")
            for name, text in (("name", about["name"]), ("description", about["description"]), ("location", path)):
                ElementTree.SubElement(skill, name).text = str(text)
    ElementTree.indent(root, space="  ")
    return ElementTree.tostring(root, encoding="unicode") if len(root) else ""
