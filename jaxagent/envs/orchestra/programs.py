"""Programs that an expert writes: each runs in a fresh process of the attempt's sandbox, and what it prints comes back.

The sandbox is taken when the first program comes. A program that uses up the memory ends its sandbox; the next program
gets another. That is the expert's doing, and so is a program that fails or does not end: its text says so.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable

from jaxagent.envs.python import formats, hidden_tests
from jaxagent.sandbox.base import Sandbox

RUN = f"{hidden_tests.WRITE}; exec python3 -u -B {hidden_tests.MAIN}"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What became of a program."""

    output: str
    seconds: float  # between its start and its end
    failed: bool  # it raised, did not end in time or used up the memory


class Programs:
    """The programs of one attempt.

    Args:
      take: gives a sandbox that nobody used; it is closed here.
      timeout_s: of one program.
      output_chars: shown of its output, at most: beginning and end.
    """

    def __init__(self, take: Callable[[], Awaitable[Sandbox]], timeout_s: float, output_chars: int):
        self._take = take
        self._timeout_s = timeout_s
        self._output_chars = output_chars
        self._sandbox: Sandbox | None = None

    async def run(self, code: str) -> Ran:
        """Runs a program.

        Raises:
          RuntimeError: the sandbox failed, and no program is to blame.
        """
        if self._sandbox is None:
            self._sandbox = await self._take()
        else:
            await self._sandbox.stop_processes()  # what an earlier program left running
        started = time.monotonic()
        argv = ("sh", "-c", RUN, "sh", *hidden_tests.arguments({hidden_tests.MAIN: code}))
        try:
            # A character has up to four bytes, and frames of a traceback come on top.
            result = await self._sandbox.execute(argv, self._timeout_s, 8 * self._output_chars + 4000)
        except RuntimeError:
            if not await self._sandbox.oom_kills():
                raise
            await self.close()
            return Ran("(out of memory)", time.monotonic() - started, True)
        output = formats.shown(result.output, result.truncated, self._output_chars, "message").rstrip("\n")
        if result.timed_out:
            output = f"{output}\n(timed out)".lstrip("\n")
        return Ran(output, time.monotonic() - started, result.timed_out or result.exit_code != 0)

    async def close(self) -> None:
        """Ends the sandbox, if one was needed."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()
