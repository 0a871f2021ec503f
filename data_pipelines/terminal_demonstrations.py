"""Generated tasks -> warm-start demonstrations: what an agent that knows the oracle's commands would say and see.

One command per turn, all in one shell as in an episode; the observations are what the commands really print, in a
fresh home directory. The last turn says that the agent has finished.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data_pipelines.home_workspace import HomeWorkspace
from jaxagent.envs.terminal import dialogue
from jaxagent.envs.terminal.rows import KEY

# Never in an output: setups write words only.
_AFTER_COMMAND, _AFTER_TASK = "\x01", "\x02"
_RESULT = re.compile(rf"{_AFTER_COMMAND}(\d+){_AFTER_COMMAND}")
_TASKS_PER_PROCESS = 16  # starting a process of ours costs more than a task does
_TIMEOUT_S = 120.0


def demonstrations(
    rows: Iterable[Mapping[str, Any]], style: dialogue.Style, early_done_frac: float = 0.0, jobs: int = 2
) -> Iterable[dict[str, Any]]:
    """{"prompt", "turns": [{"action", "observation"}], "id", "kind"} of each generated task's row, in order.

    Args:
      rows: of generated tasks.
      style: how commands are written.
      early_done_frac: of the tasks of two operations, those whose demonstration finishes after the first: what
        reinforcement learning then has to unlearn.
      jobs: processes at once.

    Raises:
      ConfigError: a command fails: then the oracle is wrong.
    """
    rows = iter(rows)
    chunks = iter(lambda: list(itertools.islice(rows, _TASKS_PER_PROCESS)), [])
    with ThreadPoolExecutor(jobs) as pool:
        for chunk, played in pool.map(lambda chunk: (chunk, _play(chunk)), chunks):
            for row, results in zip(chunk, played, strict=True):
                yield _demonstration(row, results[: _shown(row, early_done_frac)], style)


def _shown(row: Mapping[str, Any], early_done_frac: float) -> int | None:
    """How many commands are shown; None = all. Depends on the task alone."""
    early = random.Random(f"early/{row['id']}").random() < early_done_frac
    return (row["metadata"]["first_commands"] or None) if early else None


def _demonstration(row: Mapping[str, Any], results: Sequence[tuple[str, int]], style: dialogue.Style) -> dict[str, Any]:
    turns = []
    for command, (output, status) in zip(row["metadata"][KEY]["commands"], results, strict=False):
        if status != 0:
            raise ConfigError(f"{row['id']}: the oracle's command {command!r} ended with status {status}: {output}")
        said = dialogue.observation(style, command, output, status)
        turns.append({"action": dialogue.action(style, command), "observation": said})
    turns.append({"action": dialogue.finish(style), "observation": ""})
    return {"prompt": row["prompt"], "turns": turns, "id": row["id"], "kind": row["kind"]}


def _play(rows: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, int]]]:
    """(output without blanks at its end, exit status) of each command of each task, each in a home of its own."""
    script = "\n".join(_in_a_home(number, row["metadata"][KEY]) for number, row in enumerate(rows))
    *tasks, rest = asyncio.run(_run(script)).split(_AFTER_TASK)
    if len(tasks) != len(rows):
        raise ConfigError(f"{', '.join(row['id'] for row in rows)}: one of them stops the shell: {rest[-500:]}")
    results = []
    for row, said in zip(rows, tasks, strict=True):
        *pieces, after = _RESULT.split(said)
        if after or len(pieces) != 2 * len(row["metadata"][KEY]["commands"]):
            raise ConfigError(f"{row['id']}: setup or the oracle failed: {said[-500:]}")
        results.append(
            [(output.rstrip(), int(status)) for output, status in zip(pieces[::2], pieces[1::2], strict=True)]
        )
    return results


def _in_a_home(number: int, about: Mapping[str, Any]) -> str:
    """Shell lines: setup and commands, each in a subshell: setup's `set -e` is not the agent's."""
    steps = "".join(
        f"{{ {command}\n}} 2>&1\nprintf '{_AFTER_COMMAND}%d{_AFTER_COMMAND}' $?\n" for command in about["commands"]
    )
    home = f'(mkdir {number} && cd {number} || exit\nHOME="$PWD"; export HOME\n'
    return f"{home}(\n{about['setup']}) && (\n{steps}))\nprintf '{_AFTER_TASK}'"


async def _run(command: str) -> str:
    workspace = HomeWorkspace()
    try:
        return (await workspace.run(command, timeout_s=_TIMEOUT_S)).output.decode("utf-8", "replace")
    finally:
        await workspace.close()
