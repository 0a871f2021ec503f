"""Generated tasks -> warm-start demonstrations: what an agent that knows the oracle's commands would say and see.

One command per turn, all in one shell as in an episode; the observations are what the commands really print, in a
fresh home directory. The last turn says that the agent has finished.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from data_pipelines.local_place import HomePlace
from jaxagent.config import ConfigError
from jaxagent.envs.terminal_tasks import dialogue
from jaxagent.envs.terminal_tasks.rows import KEY
from jaxagent.envs.terminal_tasks.task import inline

_MARK = "\x01"  # never in an output: setup writes words only
_RESULT = re.compile(rf"{_MARK}(\d+){_MARK}")
_TIMEOUT_S = 30.0


def demonstration(row: Mapping[str, Any], style: dialogue.Style) -> dict[str, Any]:
    """{"prompt", "turns": [{"action", "observation"}], "id", "kind"} of a generated task's row.

    Raises:
      ConfigError: a command fails: then the oracle is wrong.
    """
    about = row["metadata"][KEY]
    turns = []
    for command, (output, status) in zip(about["commands"], _play(row["id"], about), strict=True):
        if status != 0:
            raise ConfigError(f"{row['id']}: the oracle's command {command!r} ended with status {status}: {output}")
        said = dialogue.observation(style, command, output, status)
        turns.append({"action": dialogue.action(style, command), "observation": said})
    turns.append({"action": dialogue.done(style), "observation": ""})
    return {"prompt": row["prompt"], "turns": turns, "id": row["id"], "kind": row["kind"]}


def demonstrations(rows: Iterable[Mapping[str, Any]], style: dialogue.Style, jobs: int = 2) -> Iterable[dict[str, Any]]:
    """One demonstration per row, in order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda row: demonstration(row, style), rows)


def _play(name: str, about: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(output without blanks at its end, exit status) of each command."""
    steps = "".join(f"{{ {command}\n}} 2>&1\nprintf '{_MARK}%d{_MARK}' $?\n" for command in about["commands"])
    # Setup in a process of its own: its `set -e` is not the agent's.
    result = asyncio.run(_run(f"{{\n{inline('sh', about['setup']).command}}} && {inline('sh', steps).command}"))
    *pieces, rest = _RESULT.split(result)
    if rest or len(pieces) != 2 * len(about["commands"]):
        raise ConfigError(f"{name}: setup or the oracle failed: {result}")
    return [(output.rstrip(), int(status)) for output, status in zip(pieces[::2], pieces[1::2], strict=True)]


async def _run(command: str) -> str:
    place = HomePlace()
    try:
        return (await place.run(command, timeout_s=_TIMEOUT_S)).output
    finally:
        await place.close()
