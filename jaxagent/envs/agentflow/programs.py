"""The Python tool: one program at a time in the episode's own sandbox, each in a fresh process."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Literal

from jaxagent.envs.python import formats, hidden_tests
from jaxagent.envs.python.environment import RUN, Take
from jaxagent.sandbox.base import Sandbox

NO_OUTPUT = "(no output)"
OUT_OF_MEMORY = "Execution error: out of memory"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one program."""

    timeout_s: float
    output_chars: int  # shown, at most: its beginning and its end
    traceback: Literal["whole", "message"]


class Programs:
    """Runs the programs of one episode. What a program does wrong is text; a sandbox that fails raises.

    Args:
      take: gives a sandbox that nobody used; it is taken when the first program comes, and closed here.
      limits: of each program.
      counters: "failed_programs" and "timed_out_programs" are counted there.
    """

    def __init__(self, take: Take, limits: Limits, counters: MutableMapping[str, float]):
        self._take, self._limits, self._counters = take, limits, counters
        self._sandbox: Sandbox | None = None

    async def run(self, code: str) -> str:
        """What a program prints, or what it fails with.

        Raises:
          RuntimeError: the sandbox does not start, or died of something else than the program's memory.
        """
        limits = self._limits
        if len(code) > hidden_tests.MAX_FILE_CHARS:
            self._counters["failed_programs"] += 1
            return f"Execution error: the program has more than {hidden_tests.MAX_FILE_CHARS} characters"
        if self._sandbox is None:
            self._sandbox = await self._take()
        else:
            await self._sandbox.stop_processes()  # what an earlier program left running
        argv = ("sh", "-c", RUN, "sh", *hidden_tests.arguments({hidden_tests.MAIN: code.replace("\0", "")}))
        try:
            # A character has up to four bytes, and frames that are not shown come on top.
            result = await self._sandbox.execute(argv, limits.timeout_s, 8 * limits.output_chars + 4000)
        except RuntimeError:
            if not await self._sandbox.oom_kills():
                raise
            self._counters["failed_programs"] += 1
            await self.close()  # a next program has another sandbox
            return OUT_OF_MEMORY
        output = formats.shown(result.output, result.truncated, limits.output_chars, limits.traceback).strip()
        if result.timed_out:
            self._counters["timed_out_programs"] += 1
            return f"{output}\nExecution error: timed out after {limits.timeout_s:g} s".lstrip("\n")
        if result.exit_code != 0:
            self._counters["failed_programs"] += 1
            return f"Execution error: {output or f'exit code {result.exit_code}'}"
        return output or NO_OUTPUT

    async def close(self) -> None:
        """Ends the sandbox, if one was needed."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()
