"""Programs of one attempt: each runs in a fresh process of a sandbox of its own, and what it prints comes back.

The sandbox is taken when the first program comes. A program that uses up the memory ends it; the next program gets
another. That is the doing of whoever wrote it, and so is a program that fails or does not end: `Ran` tells which.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

from jaxagent.envs.python import formats, hidden_tests
from jaxagent.sandbox.base import Sandbox

RUN = f"{hidden_tests.WRITE}; exec python3 -u -B {hidden_tests.MAIN}"

Take = Callable[[], Awaitable[Sandbox]]


@dataclasses.dataclass(frozen=True)
class Ran:
    """What became of a program.

    Attributes:
      output: its beginning and its end, as far as they are shown.
      seconds: between its start and its end.
    """

    output: str
    seconds: float
    exit_code: int
    timed_out: bool = False
    out_of_memory: bool = False


class Programs:
    """Runs the programs of one attempt."""

    def __init__(
        self, take: Take, timeout_s: float, output_chars: int, traceback: Literal["whole", "message"] = "message"
    ):
        self._take, self._timeout_s, self._output_chars = take, timeout_s, output_chars
        self._traceback: Literal["whole", "message"] = traceback
        self._sandbox: Sandbox | None = None

    async def run(self, code: str, files: Mapping[str, str] | None = None) -> Ran:
        """Runs a program, with other files beside it. Raises RuntimeError: the sandbox does not start, or died of
        something else than the program's memory."""
        argv = ("sh", "-c", RUN, "sh", *hidden_tests.arguments({**(files or {}), hidden_tests.MAIN: code}))
        started = time.monotonic()
        try:
            if self._sandbox is None:
                self._sandbox = await self._take()
            else:
                await self._sandbox.stop_processes()  # what an earlier program left running
            started = time.monotonic()
            # A character has up to four bytes, and frames that are not shown come on top.
            result = await self._sandbox.execute(argv, self._timeout_s, 8 * self._output_chars + 4000)
        except RuntimeError:
            if self._sandbox is None or not await self._sandbox.oom_kills():
                raise
            await self.close()
            return Ran("", time.monotonic() - started, exit_code=1, out_of_memory=True)
        output = formats.shortened_output(result.output, result.truncated, self._output_chars, self._traceback)
        return Ran(output, time.monotonic() - started, result.exit_code, result.timed_out)

    async def close(self) -> None:
        """Ends the sandbox, if one was needed."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()
