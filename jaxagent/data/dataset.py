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
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, EnvConfig, SourceConfig
from jaxagent.config.errors import failure_line
from jaxagent.io.files import one_at_a_time


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
        """Makes the data set.

        Args:
          folder: where; does not exist yet, and is moved to its place when it is complete. Makes train.jsonl and
            heldout.jsonl in it, and for a warm start full.jsonl.
          seed: data.seed; with the settings it decides every row.
          env: the environment's settings, for demonstrations.
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
            folder.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(folder.with_name(f".{folder.name}.lock")):
                if not folder.exists():  # else another process of the run was first
                    self._write_whole(folder, seed, env)
        return folder

    def _write_whole(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes beside `folder` and moves there what is complete: half a data set would look like a whole one."""
        partial = folder.with_name(f".{folder.name}.partial-{socket.gethostname()}-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            self.write(partial, seed, env)
            if not partial.is_dir():
                raise ConfigError(f"data.source: {type(self).__qualname__}.write made no folder of tasks.")
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # else a process of another host was first, whose lock is not seen here
                    raise
        except (ConfigError, OSError):
            raise
        except Exception as error:  # whatever the user's own class raises
            raise ConfigError(f"data.source: {type(self).__qualname__}.write: {failure_line(error)}.") from error
        finally:
            for left in folder.parent.glob(f".{folder.name}.partial-{socket.gethostname()}-*"):
                if (
                    left == partial or not Path("/proc", left.name.rpartition("-")[2]).exists()
                ):  # of a run that was killed
                    shutil.rmtree(left, ignore_errors=True)
