"""The folder of a worker's host that its clients may name: roots and layers lie in it, snapshots are made in it.

Below it lie trees that untrusted programs wrote, with links to anywhere. So what is named must exist and really lie
inside, links followed; and what is made is always an entry of the folder itself.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.sandbox.base import Spec
from jaxagent.sandbox.snapshot import UNFINISHED


class Folder:
    """What clients may name.

    Args:
      path: the folder; "" for none, and then every path is refused.

    Raises:
      ConfigError: it is not a directory.
    """

    def __init__(self, path: str):
        if path and not Path(path).is_dir():
            raise ConfigError(f"the sandbox worker's --folder '{path}' is not a directory")
        self._path = Path(path).resolve() if path else None

    def spec(self, spec: Spec) -> Spec:
        """The spec with its root and layers as they really are. Raises ConfigError where one lies elsewhere."""
        root, layers = spec.root and self.inside(spec.root), tuple(self.inside(layer) for layer in spec.layers)
        return dataclasses.replace(spec, root=root, layers=layers)

    def inside(self, path: str) -> str:
        """The real path of a directory in the folder. Raises ConfigError."""
        folder = self._given(path)
        try:
            real = Path(path).resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            raise ConfigError(f"sandbox layer '{path}' is not a directory") from None
        # What is still being written could yet become a link; a finished tree does not change.
        if not real.is_relative_to(folder) or any(p.endswith(UNFINISHED) for p in real.relative_to(folder).parts):
            raise ConfigError(f"'{path}' is not in the sandbox worker's folder {folder}")
        return str(real)

    def new(self, path: str) -> str:
        """The real path of a directory to be made. Raises ConfigError."""
        folder, wanted = self._given(path), Path(path)
        if (
            Path(os.path.realpath(wanted.parent)) != folder
            or wanted.name in ("", "..")
            or wanted.name.endswith(UNFINISHED)
        ):
            raise ConfigError(f"a snapshot must be named '{folder}/NAME' on this sandbox worker, not '{path}'")
        return str(folder / wanted.name)

    def _given(self, path: str) -> Path:
        if self._path is None:
            raise ConfigError(f"this sandbox worker was started without --folder, so it has no path '{path}'")
        return self._path
