"""`config.data.source`: files of tasks, or a data set that a run makes for itself on first use.

A source of your own is a dataclass whose fields are its settings, with a method that writes files:

    @dataclasses.dataclass(frozen=True)
    class MyTasks(Generated):
        count: PositiveInt = 100

        def write(self, folder, seed, env):
            ...  # folder/train.jsonl and folder/heldout.jsonl, rows of {"id", "prompt", "answers", "kind", "metadata"}

`--config.data.source=my_package.my_module:MyTasks` then names it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, EnvConfig, SourceConfig
from jaxagent.config.errors import as_config_error
from jaxagent.data import files
from jaxagent.io.files import make_folder_once

HELD_OUT_FRAC, MOST_HELD_OUT = 0.2, 100  # of tasks that only the environment reads


@dataclasses.dataclass(frozen=True)
class Files(SourceConfig):
    """Tasks that are there already."""

    # A TFDS folder; a folder of <split>.parquet / .jsonl / .array_record files; one such file; or what the environment
    # itself reads, such as a folder of Harbor's tasks
    path: str

    def __post_init__(self) -> None:
        """Raises ConfigError for an empty path, which would be the folder that the program runs in."""
        if not self.path.strip():
            raise ConfigError("config.data.source is empty: name a folder or a file of tasks.")

    def folder(self, workdir: str, seed: int, env: EnvConfig, note: Callable[[str], None]) -> Path:
        """The path; or, of what only the environment reads, rows under the workdir, shuffled, a fifth held out."""
        path = Path(self.path)
        rows_of = getattr(env, "rows_of", None)  # of an `envs.base.Environment`, which this room does not know
        if rows_of is None or (rows := rows_of(path)) is None:
            return path
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        random.Random(seed).shuffle(lines)
        held_out = min(MOST_HELD_OUT, math.ceil(len(lines) * HELD_OUT_FRAC)) if len(lines) > 1 else 0
        digest = hashlib.blake2b("".join(lines).encode(), digest_size=4).hexdigest()
        folder = Path(workdir) / f"tasks-{digest}"

        def write(partial: Path) -> None:
            partial.mkdir()
            for name, part in ((files.TRAIN, lines[held_out:]), (files.HELD_OUT[0], lines[:held_out])):
                if part:
                    (partial / f"{name}.jsonl").write_text("".join(part), "utf-8")

        if not folder.exists():
            make_folder_once(folder, write)
        return folder


@dataclasses.dataclass(frozen=True)
class Generated(SourceConfig):
    """Tasks that are written under the run's workdir when they are first needed."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a class without `write`."""
        if type(self).write is Generated.write:
            raise ConfigError(
                f"{type(self).__module__}:{type(self).__qualname__} needs a method write(folder, seed, env)."
            )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Makes the data set: train.jsonl and heldout.jsonl in a folder, and for a warm start full.jsonl.

        The folder does not exist yet, and is moved to its place when it is complete. The seed (data.seed) and the
        settings decide every row. `env`: the environment's settings, for demonstrations.
        """
        raise NotImplementedError

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """All that the data set depends on, as JSON values."""
        return {**dataclasses.asdict(self), "seed": seed}

    def folder(self, workdir: str, seed: int, env: EnvConfig, note: Callable[[str], None]) -> Path:
        """Where the tasks are; made if they are not there yet. The folder's name tells their settings."""
        text = json.dumps(self.settings(seed, env), sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()
        folder = Path(workdir) / f"{name}-{digest}"
        if not folder.exists():
            note(f"building the {name} dataset in {folder}")
            if make_folder_once(folder, lambda partial: self._write(partial, seed, env)):
                note(f"{type(self).__qualname__}.write made other files than another process of this run: theirs count")
        return folder

    def _write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        with as_config_error(f"data.source: {type(self).__qualname__}.write", OSError):
            self.write(folder, seed, env)
        if not folder.is_dir():
            raise ConfigError(f"data.source: {type(self).__qualname__}.write made no folder of tasks.")
