"""Terminal tasks as rows of a dataset (`types.Task`), and back.

A generated task is small, so its row holds it whole, in metadata["terminal"]:

    setup, initial_test, final_test   programs: sh, python3, python3
    commands                          the oracle, as an agent would send it, turn by turn
    processes                         whether the final test looks at running processes
    level, template                   also in the row's `kind`: "level1/copy_file"

A task of another format stays on disk; metadata["terminal"] is then {"folder": path}, and the folder is read when the
task is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError
from jaxagent.data.files import PROVEN
from jaxagent.envs.forms import TEXT, shaped
from jaxagent.envs.terminal import folders
from jaxagent.envs.terminal.task import TaskLimits, TerminalTask, inline
from jaxagent.types import Task

KEY = "terminal"
LIMITS = TaskLimits(  # of generated tasks: every one is a matter of milliseconds
    agent_timeout_s=300.0, verifier_timeout_s=30.0, build_timeout_s=60.0, cpus=1.0, memory_mb=512, storage_mb=64
)
_FORM = {
    **{"setup": str, "initial_test": TEXT, "final_test": TEXT, "commands": [TEXT], "processes": bool},
    **{"level": (1, 2, 3), "template": TEXT},
}


def folder_row(task: TerminalTask) -> dict[str, Any]:
    """The row of a task that was read from a folder."""
    kind = f"level{task.level}/{task.format}" if task.level else task.format
    metadata = {KEY: {"folder": str(task.folder.absolute())}, "domain": task.format}
    return {"id": task.id, "prompt": task.instruction, "answers": [], "kind": kind, "metadata": metadata}


def folder_digest(task: Task) -> str:
    """A hex digest of all files of the folder that a row names, with their modes; "" = it names none."""
    about = task.metadata.get(KEY)
    if not isinstance(about, Mapping) or "folder" not in about:
        return ""
    folder, digest = Path(str(about["folder"])), hashlib.blake2b(digest_size=8)
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != PROVEN:
            head = f"{file.relative_to(folder)}\0{file.stat().st_mode:o}\0{file.stat().st_size}\0"
            digest.update(head.encode("utf-8", "surrogateescape") + file.read_bytes())
    return digest.hexdigest()


def from_task(task: Task) -> TerminalTask:
    """The terminal task that a dataset's row describes. Raises ConfigError: the row's metadata["terminal"] is missing
    or malformed, naming the task and the key; or the folder that it names cannot be read."""
    about = task.metadata.get(KEY)
    if not isinstance(about, Mapping):
        raise ConfigError(f"task '{task.id}': metadata has no '{KEY}' object: it is no terminal task.")
    if "folder" in about:
        return folders.read_task(Path(str(about["folder"])))
    try:
        about = shaped(about, _FORM, f"metadata.{KEY}")
    except RowError as error:
        raise ConfigError(f"task '{task.id}': {error}.") from None
    if not about["commands"]:
        raise ConfigError(f"task '{task.id}': column 'metadata.{KEY}.commands': must be a list of commands, got [].")
    return TerminalTask(
        id=task.id,
        instruction=task.prompt,
        format="generated",
        limits=LIMITS,
        setup=inline("sh", about["setup"]),
        initial_test=inline("python3", about["initial_test"]),
        final_test=inline("python3", about["final_test"]),
        oracle=inline("sh", "\n".join(about["commands"])),
        looks_at_processes=about["processes"],
        level=about["level"],
    )
