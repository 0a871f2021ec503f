"""Steps that are made again on request: `python -m jaxagent.replay --step=N` as a process of its own, one at a time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError

LINES, LINE_CHARS = 60, 400  # of what it prints, for people


class Verifier:
    """Starts replays, and keeps what each has said by (run, stage, step)."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def verdict(self, run: str, stage: str, step: int) -> dict[str, Any]:
        """{"state": "none", "running" or "ended", "lines"}; of an ended one "verdict", "code" and what was counted."""
        return self._verdicts.get((run, stage, step), {"state": "none"})

    def start(self, run: str, folder: Path, step: int, stage: str) -> dict[str, Any]:
        """Begins; one that is under way goes on. Raises ConfigError: another step is being made again."""
        if self._task is not None and not self._task.done():
            if self.verdict(run, stage, step)["state"] == "running":
                return self.verdict(run, stage, step)
            raise ConfigError("Another step is being made again: wait for its verdict.")
        self._verdicts[run, stage, step] = {"state": "running", "lines": []}
        self._task = asyncio.create_task(self._run(run, folder, step, stage))
        return self.verdict(run, stage, step)

    async def close(self) -> None:
        """Ends the replay that is under way."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, run: str, folder: Path, step: int, stage: str) -> None:
        state = self._verdicts[run, stage, step]
        command = [sys.executable, "-m", "jaxagent.replay", f"--config.workdir={folder}", f"--step={step}"]
        pipe, env = asyncio.subprocess.PIPE, os.environ | {"PYTHONUNBUFFERED": "1"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, f"--stage={stage}", stdin=asyncio.subprocess.DEVNULL, stdout=pipe,
                stderr=asyncio.subprocess.STDOUT, env=env,
            )  # fmt: skip
            assert self._process.stdout is not None
            rest = b""
            while chunk := await self._process.stdout.read(1 << 16):
                *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
                rest = rest[-(1 << 20) :]
                state["lines"] = [*state["lines"], *filter(None, map(_text, lines))][-LINES:]
                _take_verdict(state, lines)
            code = await self._process.wait()
        except OSError as error:
            state |= {"state": "ended", "verdict": "not made", "code": 2, "lines": [str(error)]}
            return
        names = {0: "passed", 1: "failed", 3: "incomplete"}
        state |= {"state": "ended", "code": code, "verdict": names.get(code, "not made")}


def _text(row: bytes) -> str:
    return row.decode("utf-8", "replace").strip()[:LINE_CHARS]


def _take_verdict(state: dict[str, Any], lines: list[bytes]) -> None:
    """The last line for programs, which a replay prints when it is done."""
    for row in lines:
        if row.startswith(b'{"verdict"'):
            content = json.loads(row)
            state |= {
                "checked": content["checked"],
                "differences": content["differences_in_all"],
                "why": content["why"],
            }
