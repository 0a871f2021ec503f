"""The process that plays tasksets for a run (`player.py`), and the seat in it of one attempt."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.envs import server_process
from jaxagent.envs.script.host import Host
from jaxagent.sandbox.base import CommandResult, SandboxError

PROGRAM = Path(__file__).with_name("player.py")
TAIL_CHARS = 800  # of what the process printed, in errors
LINE_BYTES = 256 * 2**20  # of one answer: a taskset's prompts
STOP_S = 10.0  # for the process to end its episodes when nobody wants them any more
KILLED = 137


def described_tasks(
    interpreter: str, settings: Mapping[str, Any], split: str, timeout_s: float
) -> list[dict[str, Any]]:
    """The tasks of a split, as `player.py` describes them, by a process of its own. Raises ConfigError."""
    request = json.dumps({"do": "tasks", "split": split})
    try:
        done = subprocess.run(
            _argv(interpreter, settings),
            input=request,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except OSError as failure:
        raise ConfigError(f"config.env.interpreter={interpreter!r} does not start: {failure}.") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"its tasks were not loaded within config.env.init_s={timeout_s:g}.") from None
    if not done.stdout.strip():
        raise ConfigError(f"config.env.interpreter={interpreter!r} has no verifiers 0.4: {_tail(done.stderr)}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise ConfigError(f"verifiers does not load it: {answer['error']}.")
    return answer["tasks"]


class Player:
    """The process, on the loop of the attempts. One that has died is started again by the next attempt."""

    def __init__(self, interpreter: str, settings: Mapping[str, Any]) -> None:
        self._argv = _argv(interpreter, settings)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`; a pipe could stop who prints
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lock = asyncio.Lock()

    async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One episode; cancelled, it is stopped. Raises SandboxError: the process has died."""
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        try:
            await self._write({"id": number, "do": "play", **request}).drain()
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._write({"id": number, "do": "stop"})  # not waited for: a process that hangs reads nothing
            raise
        except OSError as failure:
            raise SandboxError(f"the process that plays the taskset has ended: {self._tail()}") from failure
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Ends the process; what it plays is stopped."""
        if self._process is not None and self._process.returncode is None:
            await server_process.end(self._process, STOP_S)
        if self._reader is not None:
            await self._reader
        self._printed.close()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            limit=LINE_BYTES,
        )
        self._reader = asyncio.create_task(self._read(self._process))

    def _write(self, request: Mapping[str, Any]) -> asyncio.StreamWriter:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return self._process.stdin

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Gives answers to who waits for them; when the process has ended, nobody waits any longer."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (ValueError, LookupError, TypeError):  # no answer of ours, or one of more than LINE_BYTES
            await server_process.end(process, 0)
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SandboxError(f"the process that plays the taskset has ended: {self._tail()}"))

    def _tail(self) -> str:
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - 4 * TAIL_CHARS))
        return _tail(self._printed.read().decode("utf-8", "replace"))


class Seat(Host):
    """The host, for an attempt that the process plays: its program is a request.

    Attributes:
      answer: what the process said of the episode; None while it plays, and where it was stopped.
    """

    def __init__(self, player: Player, split: str, row: int) -> None:
        super().__init__()
        self._player, self._place = player, {"split": split, "row": row}
        self.answer: dict[str, Any] | None = None

    async def execute(
        self,
        argv: Sequence[str],
        deadline_s: float,
        output_bytes: int,
        env: Mapping[str, str] | None = None,
        directory: str = "",
    ) -> CommandResult:
        """Has the episode played, given the gateway's url and the session's token."""
        url, token = argv
        began = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                self.answer = await self._player.play({**self._place, "url": f"{url}/v1", "token": token})
        except TimeoutError:
            return CommandResult(b"", KILLED, timed_out=True, duration_s=time.monotonic() - began)
        output = self.answer["error"].encode()[-output_bytes:]
        over = self.answer.get("stop") == "agent_timeout"
        return CommandResult(output, int(bool(output)), over, duration_s=time.monotonic() - began)


def _argv(interpreter: str, settings: Mapping[str, Any]) -> list[str]:
    return [interpreter, "-P", str(PROGRAM), json.dumps(settings)]


def _tail(text: str) -> str:
    return " ".join(text.split())[-TAIL_CHARS:] or "it printed nothing"
