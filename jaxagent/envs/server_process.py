"""`ServerProcess`: somebody's server on this machine, started from a package that its own Python has, and killed.

Its parent is a small process of ours (keeper.py), which kills it and all that it has started when we say so, or when we
are gone. What it prints is read and forgotten, but for the end, which messages quote.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxagent.config import ConfigError
from jaxagent.envs.serve_app import PORT
from jaxagent.io.http import HttpClient, HttpError

HERE = Path(__file__).parent
STOP_S, REAP_S = 20.0, 5.0  # for a process to end, and the keeper to kill what is left; and then, killed
TAIL_BYTES = 2_000  # kept of what it prints
PAUSE_S = 0.05  # between two looks whether it answers
LOOK_S = 5.0  # for one look
REPLY_BYTES = 16 << 20  # of an answer over HTTP


@dataclasses.dataclass(frozen=True)
class ServerProgram:
    """What to start: "package.module:app" in `folder`, by `python` ("" = this one), with more variables than ours."""

    target: str
    python: str = ""
    folder: str = "."
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def variables_of(settings: tuple[str, ...], field: str) -> dict[str, str]:
    """Variables from a setting's "KEY=value" texts. Raises ConfigError: one is none."""
    for text in settings:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise ConfigError(f"{field}: '{text}' is no variable: write KEY=value.")
    return dict(text.split("=", 1) for text in settings)


class ServerProcess:
    """One process. Started once, and closed in any case.

    Attributes:
      url: once it has started.
    """

    def __init__(self, program: ServerProgram) -> None:
        self.url = ""
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tail = b""
        self._port: asyncio.Future[int] | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def last_words(self) -> str:
        """The end of what it printed, for messages."""
        lines = self._tail.decode("utf-8", "replace").splitlines()
        words = " ".join(line.strip() for line in lines if any(map(str.isalnum, line)) and not line.startswith(PORT))
        return f"; it wrote: {words[-300:]}" if words else ""

    async def start(self, ready: str, timeout_s: float) -> None:
        """Starts it and waits until GET of the path `ready` is answered with status 200.

        Raises:
          ConnectionError: it has ended, or does not start.
          TimeoutError: it was not ready in time.
        """
        command = (self._program.python or sys.executable, "-u", str(HERE / "serve_app.py"), self._program.target)
        self._port = asyncio.get_running_loop().create_future()
        self._process = await keep(command, subprocess.PIPE, self._program.variables, self._program.folder)
        self._reader = asyncio.create_task(self._read(self._process))
        try:
            async with asyncio.timeout(timeout_s):
                self.url = f"http://127.0.0.1:{await self._port}"
                async with HttpClient(LOOK_S, REPLY_BYTES) as client:
                    while not await answers(client, f"{self.url}{ready}"):
                        if not self.alive:
                            raise ConnectionError
                        await asyncio.sleep(PAUSE_S)
        except ConnectionError:
            raise ConnectionError(f"the server '{self._program.target}' has ended{self.last_words}") from None
        except TimeoutError:
            reason = f"the server '{self._program.target}' was not ready in {timeout_s:g} s{self.last_words}"
            raise TimeoutError(reason) from None

    async def close(self) -> None:
        """Kills it and all that it has started."""
        if self._process is not None:
            await end(self._process)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Keeps the end of what it prints; the first line that names a port says where it serves."""
        assert process.stdout is not None and self._port is not None
        while chunk := await process.stdout.read(64 * 1024):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            for line in self._tail.decode("utf-8", "replace").splitlines(keepends=True):
                number = line.strip().removeprefix(PORT)
                if line.startswith(PORT) and line.endswith("\n") and number.isdigit() and not self._port.done():
                    self._port.set_result(int(number))
        if not self._port.done():
            self._port.set_exception(ConnectionError())


async def keep(
    argv: Sequence[str], output: int | IO[bytes], variables: Mapping[str, str], folder: str | None
) -> asyncio.subprocess.Process:
    """Starts a program under a keeper, which `end` ends with all that it has started; what it prints to `output`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(HERE / "keeper.py"), *argv),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
        cwd=folder,
        start_new_session=True,
    )


async def end(process: asyncio.subprocess.Process, timeout_s: float = STOP_S) -> None:
    """Closes the standard input of a process that then ends by itself; kills one that does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.kill()
            await asyncio.wait_for(process.wait(), REAP_S)


async def answers(client: HttpClient, url: str) -> bool:
    """Whether a server answers GET with status 200."""
    try:
        await client.request("GET", url)
    except HttpError:
        return False
    return True
