"""A path -> the terminal tasks there, whatever their format: told apart by the file that describes a task.

task.toml   Harbor
task.yaml   terminal-bench's older layout
task.json   Endless Terminals
"""

from __future__ import annotations

from pathlib import Path

from jaxagent.config import ConfigError, nearest
from jaxagent.data.fields import RowError
from jaxagent.envs.terminal import endless, harbor, terminal_bench
from jaxagent.envs.terminal.task import TerminalTask

_READERS = {"task.toml": harbor, "task.yaml": terminal_bench, "task.json": endless}


def holds_tasks(path: Path) -> bool:
    """Whether `read_tasks` finds a task there, be it malformed or not."""
    places = [path, *path.iterdir()] if path.is_dir() else []
    return any((place / name).is_file() for place in places for name in _READERS)


def read_task(folder: Path) -> TerminalTask:
    """One task directory of any format. Raises ConfigError: no task there, several formats at once, or a malformed
    one."""
    if not folder.is_dir():
        siblings = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ConfigError(f"No task folder {folder}.{' ' + nearest(folder.name, siblings) if siblings else ''}")
    files = [name for name in _READERS if (folder / name).is_file()]
    if len(files) != 1:
        names = sorted(p.name for p in folder.iterdir())
        problem = (
            f"holds {' and '.join(files)}" if files else f"holds no {', '.join(_READERS)} (but: {', '.join(names)})"
        )
        raise ConfigError(f"{folder} {problem}: not one terminal task.")
    try:
        return _READERS[files[0]].read(folder)
    except RowError as error:
        raise ConfigError(f"{folder / files[0]}: key '{error.column}' {error.problem}.") from None


def read_tasks(path: Path) -> list[TerminalTask]:
    """All tasks below a path, by name: a task directory, or a directory of them. Raises ConfigError: none there, or
    malformed ones: all are named."""
    if path.is_dir() and not any((path / name).is_file() for name in _READERS):
        inner = [p for p in sorted(path.iterdir()) if p.is_dir() and any((p / name).is_file() for name in _READERS)]
        if not inner:
            raise ConfigError(f"{path} holds no task directories: no */{', no */'.join(_READERS)}.")
        tasks, wrong = [], []
        for folder in inner:
            try:
                tasks.append(read_task(folder))
            except ConfigError as error:
                wrong.append(str(error))
        if len(wrong) > 1:
            listed = "\n".join(f"  {line}" for line in wrong)
            raise ConfigError(f"{path}: {len(wrong)} of {len(inner)} task folders cannot be read:\n{listed}")
        if wrong:
            raise ConfigError(wrong[0])
        return tasks
    return [read_task(path)]
