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
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, EnvConfig, SourceConfig
from jaxagent.config.errors import failure_line
from jaxagent.io.files import make_folder_once


@dataclasses.dataclass(frozen=True)
class Files(SourceConfig):
    """Tasks that are there already."""

    path: str  # a TFDS folder; a folder of <split>.parquet / .jsonl / .array_record files; or one such file

    def __post_init__(self) -> None:
        """Raises ConfigError for an empty path, which would be the folder that the program runs in."""
        if not self.path.strip():
            raise ConfigError("config.data.source is empty: name a folder or a file of tasks.")

    def folder(self, workdir: str, seed: int, env: EnvConfig, note: Callable[[str], None]) -> Path:
        """The path."""
        return Path(self.path)


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
        try:
            self.write(folder, seed, env)
        except (ConfigError, OSError):
            raise
        except Exception as error:  # whatever the user's own class raises
            raise ConfigError(f"data.source: {type(self).__qualname__}.write: {failure_line(error)}.") from error
        if not folder.is_dir():
            raise ConfigError(f"data.source: {type(self).__qualname__}.write made no folder of tasks.")
