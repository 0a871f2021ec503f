"""The MCP environment: the policy answers a question with the tools of MCP servers.

    --config.env=mcp --config.env.servers='("python my_server.py",)'
    --config.env=mcp --config.env.servers='("python files.py", "http://127.0.0.1:8000/mcp")'

A server is a command, spoken to over its stdin and stdout, or a URL (streamable HTTP). The system message describes all
tools; the policy calls one by <tool_call>{"name": ..., "arguments": {...}}</tool_call> and reads its result in a
message of role "tool"; a message without a call is its answer. Each attempt has sessions of its own, and processes of
its own of the servers that are commands, so whatever a server remembers begins anew, unless `shared` is set.

The tools that the prompt describes are those of the run's start, and stay the truth of every episode: other words are
not looked at, new tools are not told and cannot be called. An episode whose server offers other names or parameters at
its beginning, or has changed or withdrawn some at its end, is a failure.

A server that does not start, hangs, dies or floods fails the attempt, which is counted and never a reward. What a tool
itself reports as an error is shown to the policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from jaxagent import contract
from jaxagent.config import ConfigError
from jaxagent.config.choice import Choice
from jaxagent.config.errors import as_config_error
from jaxagent.config.ranges import Seconds
from jaxagent.envs import tags
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.rewards.answer import ExactMatch
from jaxagent.rewards.view import Reward, ToolCall, View
from jaxagent.tools.calls import Call, Tool, tool_form, tools_text
from jaxagent.tools.hermes import CLOSE, OPEN, read_answer
from jaxagent.types import StopReason, Task, TokenKind

if TYPE_CHECKING:
    from jaxagent.envs.mcp.connection import Connection

SOLVED = "solved"
ANSWER = tags.pair("answer")
CLOSE_S = 10.0  # longer than a connection takes to close
# In a tool's words: marks of chat templates and of our prompt, and characters that turn text around or show nothing.
MARK = re.compile(
    r"<\|[^\n]{0,40}?\|>|<\uff5c|</?tools>|</?tool_call>|</?s>|\[/?INST\]|[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)
WORDS = ("description", "title")  # of a schema: they change nothing that a call depends on


@dataclasses.dataclass(frozen=True, kw_only=True)
class MCP(Environment):
    """Questions, and the tools of MCP servers to answer them with."""

    servers: tuple[str, ...] = ()  # commands and URLs
    shared: bool = False  # all attempts use the same processes and sessions: for servers that remember nothing
    instructions: str = "Answer the question with the help of the tools. End with the answer alone, without a call."
    reward: Annotated[Reward, Choice("jaxagent.rewards.answer:REWARDS")] = dataclasses.field(default_factory=ExactMatch)
    start_timeout_s: Seconds = 30.0  # until a server has said its tools
    call_timeout_s: Seconds = 60.0

    score = SOLVED
    calls = "calls"
    stop_strings = (CLOSE,)
    tokens = (OPEN, CLOSE)
    repeatable = False  # a server may answer as it likes

    def __post_init__(self) -> None:
        """Raises ConfigError where no server is named, or a command cannot be read."""
        if not self.servers:
            raise ConfigError("config.env.servers is empty: name MCP servers, such as ('python my_server.py',).")
        for i, server in enumerate(self.servers):
            try:
                words = shlex.split(server)
            except ValueError as error:
                raise ConfigError(f"config.env.servers[{i}]='{server}': {error}.") from None
            if not words:
                raise ConfigError(f"config.env.servers[{i}] is empty: name a command or a URL.")
        if not callable(self.reward):
            raise ConfigError(f"env.reward: {type(self.reward).__qualname__} needs a method __call__(view).")

    @property
    def needs_answers(self) -> bool:  # type: ignore[override]
        """Whether a task without gold answers is a mistake: as the reward says."""
        return getattr(self.reward, "needs_answers", False)

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt without the tools, which only the servers know. Demonstrations bring their own messages."""
        return self.prompt(text, ())

    def prompt(self, text: str, tools: Sequence[Tool]) -> tuple[Message, ...]:
        """The prompt: what to do and which tools there are, and the task."""
        described = tools_text(tools, several=False) if tools else ""
        system = "\n\n".join(filter(None, (self.instructions, described)))
        return (Message("system", f"{system}\n"), Message("user", f"{text}\n"))

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], MCPAttempt]]:
        """Starts every server once, to list the tools, and keeps them where they are shared."""
        try:
            from jaxagent.envs.mcp.connection import Connection
        except ImportError:
            raise ConfigError("config.env=mcp needs the package mcp: pip install mcp.") from None

        def fresh() -> list[Connection]:
            return [Connection(server) for server in self.servers]

        connections = fresh()
        try:
            with as_config_error("config.env.servers"):
                opening.run(open_all(connections, self.start_timeout_s), self.start_timeout_s + 2 * CLOSE_S)
            tools = distinct(connections)
            opening.note(f"MCP tools: {', '.join(tools)}")
            if self.shared:
                yield lambda task: MCPAttempt(task, self, tools, lambda: connections)
                return
            opening.run(close_all(connections), CLOSE_S)
            yield lambda task: MCPAttempt(task, self, tools, fresh)
        finally:
            opening.run(close_all(connections), CLOSE_S)


class MCPAttempt(Attempt):
    """One attempt at one question."""

    stop_strings: Sequence[str] = (CLOSE,)

    def __init__(
        self,
        task: Task,
        config: MCP,
        tools: Mapping[str, tuple[int, Tool]],
        connect: Callable[[], list[Connection]],
    ) -> None:
        self._task, self._config, self._tools, self._connect = task, config, tools, connect
        self._connections: list[Connection] = []
        self._turns = 0
        self._tool_calls: list[ToolCall] = []
        self._answer: str | None = None
        self.counters: dict[str, float] = {"calls": 0.0, "failed_calls": 0.0, "invalid_actions": 0.0}

    async def start(self) -> Sequence[Message]:
        """Starts the servers; the prompt describes the tools that they had when the run began."""
        self._connections = self._connect()
        if not self._config.shared:
            await open_all(self._connections, self._config.start_timeout_s)
            offered, shown = _shape(distinct(self._connections)), _shape(self._tools)
            if others := sorted(name for name in offered | shown if offered.get(name) != shown.get(name)):
                raise ValueError(f"the MCP servers offer other tools than when the run began: {', '.join(others)}")
        return self._config.prompt(self._task.prompt, [tool for _, tool in self._tools.values()])

    async def step(self, action: str) -> Step:
        """Makes the call, ends with an answer, or says what is wrong with the call. The last turn's is not made."""
        self._turns += 1
        last = self._turns >= self._config.max_turns
        reply = read_answer(action, [tool for _, tool in self._tools.values()])
        if reply.malformed or any(call.name not in self._tools for call in reply.calls):
            self.counters["invalid_actions"] += 1
        elif not reply.calls:
            self._answer = (tags.inside(*ANSWER, reply.text) or [reply.text])[-1].strip() or None
            return Step(stop_reason=StopReason.ANSWER)
        if last:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        if reply.malformed:
            return _observation_step(f'Write {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}.', TokenKind.WARNING)
        texts = []
        for call in reply.calls:
            if call.name not in self._tools:
                return _observation_step(f"There is no function {call.name!r:.100}.", TokenKind.WARNING)
            texts.append(await self._call(call))
        return _observation_step("\n".join(texts), TokenKind.OBSERVATION)

    async def verify(self, transcript: Transcript) -> Verdict:
        """The configured reward of the answer.

        Raises:
          ValueError: a server has changed or withdrawn a tool since the prompt described it: the policy was misled.
        """
        for number in sorted({self._tools[call.name][0] for call in self._tool_calls}):
            connection = self._connections[number]
            now = _shape(
                {tool.name: (number, tool) for tool in await connection.list_again(self._config.call_timeout_s)}
            )
            shown = _shape({name: (at, tool) for name, (at, tool) in self._tools.items() if at == number})
            if changed := [name for name in shown if now.get(name) != shown[name]]:
                names = ", ".join(changed)
                raise ValueError(
                    f"the MCP server '{connection.server}' has changed its tools during the episode: {names}"
                )
        view = View(
            self._task,
            transcript.turns,
            answer=self._answer,
            tool_calls=tuple(self._tool_calls),
            action_tokens=transcript.action_tokens,
            prompt=transcript.prompt,
        )
        scores = contract.scores(self._config.reward, view)
        reward = scores.pop("reward")
        return Verdict(reward, {SOLVED: reward, **scores})

    async def close(self) -> None:
        """Ends the servers that are this attempt's own."""
        if not self._config.shared:
            await close_all(self._connections)

    async def _call(self, call: Call) -> str:
        from jaxagent.envs.mcp.connection import as_text

        arguments: dict[str, Any] = dict(call.arguments) if isinstance(call.arguments, Mapping) else {}
        number, _ = self._tools[call.name]
        self.counters["calls"] += 1
        self._tool_calls.append(ToolCall(call.name, arguments, self._turns - 1))
        result = await self._connections[number].call(call.name, arguments, self._config.call_timeout_s)
        self.counters["failed_calls"] += result.is_error
        return as_text(result)


async def open_all(connections: Sequence[Connection], timeout_s: float) -> None:
    """Opens all at once, and raises what the first of them that fails raises."""
    outcomes = await asyncio.gather(*(connection.open(timeout_s) for connection in connections), return_exceptions=True)
    for failure in outcomes:
        if isinstance(failure, BaseException):
            raise failure


async def close_all(connections: Sequence[Connection]) -> None:
    """Closes all at once."""
    await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)


def distinct(connections: Sequence[Connection]) -> dict[str, tuple[int, Tool]]:
    """Every tool by its name, with the number of its server.

    Raises:
      ConfigError: two tools have one name, there is none, or one's words are no plain text.
    """
    tools: dict[str, tuple[int, Tool]] = {}
    for number, connection in enumerate(connections):
        for tool in connection.tools:
            if not tool.name.isprintable() or not tool.name.strip():
                problem = f"has a tool with the name {tool.name[:100]!r}"
                raise ConfigError(f"config.env.servers: '{connection.server}' {problem}, which cannot be shown.")
            if mark := MARK.search(json.dumps(tool_form(tool), ensure_ascii=False)):
                problem = f"describes its tool {tool.name:.100} with {mark[0][:40]!r}"
                reason = "which chat templates take for the border of a message, or which is not to be seen"
                raise ConfigError(f"config.env.servers: '{connection.server}' {problem}, {reason}.")
            if tool.name in tools:
                first, name = connections[tools[tool.name][0]], f"named {tool.name:.100}"
                both = f"'{first.server}' and '{connection.server}' both have a tool {name}"
                twice = f"'{first.server}' has two tools {name}"
                raise ConfigError(f"config.env.servers: {twice if first is connection else both}.")
            tools[tool.name] = (number, tool)
    if not tools:
        raise ConfigError("config.env.servers: no server offers a tool.")
    return tools


def _shape(tools: Mapping[str, tuple[int, Tool]]) -> Any:
    """What calls depend on: names and schemas. Words that describe them may hold the time of day."""

    def without_words(schema: Any) -> Any:
        if isinstance(schema, Mapping):
            return {k: without_words(v) for k, v in schema.items() if not (k in WORDS and isinstance(v, str))}
        return [without_words(item) for item in schema] if isinstance(schema, list) else schema

    return {name: (number, without_words(tool.parameters)) for name, (number, tool) in tools.items()}


def _observation_step(text: str, kind: TokenKind) -> Step:
    return Step(Observation(((f"\n{text}\n", kind),), "tool"))
