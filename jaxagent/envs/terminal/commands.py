"""Commands that a policy writes turn by turn, of terminal and coding tasks: their settings, and the attempt's shell."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxagent.config.ranges import PositiveInt, Seconds
from jaxagent.envs.base import Message, Observation, Step
from jaxagent.envs.terminal import dialogue, replies
from jaxagent.envs.terminal_text import clean
from jaxagent.sandbox.base import Sandbox
from jaxagent.types import StopReason, TokenKind

COMMAND_COUNTERS = ("commands", "failed_commands", "timed_out_commands", "invalid_actions", "warnings")
ENTER_TIMEOUT_S = 30.0
_CLEANED_BYTES = 1000  # room for escape sequences and line ends that are not shown


class CommandSettings:
    """What follows from how commands are written, for an environment with these settings."""

    tools: dialogue.Style  # these four are fields of the environment
    max_turns: PositiveInt
    command_timeout_s: Seconds
    output_chars: PositiveInt

    @property
    def stop_strings(self) -> Sequence[str]:
        """What ends a command."""
        return dialogue.STOP_STRINGS[self.tools]

    @property
    def tokens(self) -> Sequence[str]:
        """The tags of the dialogue."""
        return dialogue.TAGS[self.tools]

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt of a task. The plain format has no system prompt: its policy learns it from examples."""
        if self.tools == "plain":
            return (Message("user", f"{text}\n"),)
        return (Message("system", dialogue.SYSTEM[self.tools]), Message("user", text))

    def observation(self, action: str, text: str) -> Observation:
        """An output, with the warnings before it that the action has earned."""
        return _observed(self.tools, replies.parse(self.tools, action), text)


class SandboxAttempt:
    """An attempt with a sandbox of its own, which an agent may break by using up its memory."""

    _sandbox: Sandbox | None = None
    _oom_kills: int | None = None  # before the agent came
    _sandbox_lost = False  # the sandbox died for want of memory

    async def _memory_ran_out(self, before: int | None) -> bool:
        """Whether the attempt's sandbox has killed something for memory since `before` was counted."""
        return self._sandbox is not None and await memory_ran_out(self._sandbox, before)

    async def close(self) -> None:
        """Ends the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.close()


class CommandAttempt(SandboxAttempt):
    """An attempt whose turns are commands in the sandbox's shell; `counters` has COMMAND_COUNTERS."""

    counters: dict[str, float]

    def __init__(self, config: CommandSettings):
        self._config = config
        self._turns_left = config.max_turns
        self._ends_at = 0.0  # of time.monotonic()
        self.stop_strings: Sequence[str] = config.stop_strings
        self.tool_prefixes: Sequence[str] = dialogue.PREFIXES[config.tools]

    async def step(self, action: str) -> Step:
        """Runs a command, ends, or says that there is no command."""
        self._turns_left -= 1
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            return Step(stop_reason=StopReason.TIME_LIMIT)
        reply = replies.parse(self._config.tools, action)
        self.counters["warnings"] += len(reply.warnings)
        if reply.done:
            return Step(stop_reason=StopReason.ANSWER)
        text = reply.error
        if reply.command:
            try:
                text = await self._run(reply.command, left_s)
            except RuntimeError:
                if not await self._memory_ran_out(self._oom_kills):
                    raise
                self._sandbox_lost = True
                return Step(stop_reason=StopReason.TURN_LIMIT)  # there can be no other turn
            if time.monotonic() >= self._ends_at:
                return Step(stop_reason=StopReason.TIME_LIMIT)
        else:
            self.counters["invalid_actions"] += 1
        if self._turns_left <= 0:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        return Step(_observed(self._config.tools, reply, _warnings_text(reply) + text))

    async def _run(self, command: str, left_s: float) -> str:
        config = self._config
        assert self._sandbox is not None
        self.counters["commands"] += 1
        keep = config.output_chars + _CLEANED_BYTES
        result = await self._sandbox.run(command, min(config.command_timeout_s, left_s), 2 * keep)
        at_end = config.tools == "qwen3_xml"
        output = shortened_output(result.output, result.truncated, config.output_chars, at_end)
        if result.timed_out:
            self.counters["timed_out_commands"] += 1
            return dialogue.timed_out(config.tools, command, output, config.command_timeout_s)
        self.counters["failed_commands"] += result.exit_code != 0
        return dialogue.observation(config.tools, command, output, result.exit_code)


async def memory_ran_out(sandbox: Sandbox, before: int | None) -> bool:
    """Whether something was killed for memory since `before` was counted; False where nobody counts."""
    now = await sandbox.oom_kills()
    return now is not None and before is not None and now > before


def shortened_output(output: bytes, truncated: bool, chars: int, at_end: bool) -> str:
    """What the policy sees of an output: its beginning as Endless Terminals has it, or its end as ECHO has it.

    Args:
      output: as the sandbox kept it: of a truncated one the first and the last half of what it was asked for.
      truncated: whether there was more.
      chars: how much is shown, at most.
      at_end: show the end.
    """
    half = len(output) // 2 if truncated else 0
    text = clean(output[half:] if at_end else output[: len(output) - half])
    return text[-chars:] if at_end else text[:chars]


def _observed(style: dialogue.Style, reply: replies.ParsedTurn, text: str) -> Observation:
    """A text that the policy is shown after its reply, with the warnings before it that the reply has earned."""
    # ECHO counts the errors of its parser as the environment's words, and only the list before as warnings.
    kind = TokenKind.OBSERVATION if reply.command or style == "qwen3_xml" else TokenKind.WARNING
    warnings = _warnings_text(reply)
    parts = [(warnings, TokenKind.WARNING)] if warnings and text.startswith(warnings) else []
    return Observation((*parts, (text[len(warnings) if parts else 0 :], kind)), dialogue.ROLES[style])


def _warnings_text(reply: replies.ParsedTurn) -> str:
    """What stands before an output; "" without warnings."""
    return "WARNINGS:\n" + "".join(f"- {line}\n" for line in reply.warnings) + "\n" if reply.warnings else ""
