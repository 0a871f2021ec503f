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


def within(folder: str, spec: Spec) -> Spec:
    """The spec with its root and layers as they really are. Raises ConfigError where one lies outside the folder."""
    root = spec.root and inside(folder, spec.root)
    return dataclasses.replace(spec, root=root, layers=tuple(inside(folder, layer) for layer in spec.layers))


def inside(folder: str, path: str) -> str:
    """The real path of a directory in the folder. Raises ConfigError."""
    real_folder = _real(folder, path)
    try:
        real = Path(path).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        raise ConfigError(f"sandbox layer '{path}' is not a directory") from None
    # What is still being written could yet become a link; a finished tree does not change.
    below = real.parts[len(real_folder.parts) :]
    if not real.is_relative_to(real_folder) or any(part.endswith(UNFINISHED) for part in below):
        raise ConfigError(f"'{path}' is not in the sandbox worker's folder {real_folder}")
    return str(real)


def new(folder: str, path: str) -> str:
    """The real path of a directory to be made. Raises ConfigError."""
    real_folder, target = _real(folder, path), Path(path)
    elsewhere = Path(os.path.realpath(target.parent)) != real_folder
    if elsewhere or target.name in ("", "..") or target.name.endswith(UNFINISHED):
        raise ConfigError(f"a snapshot must be named '{real_folder}/NAME' on this sandbox worker, not '{path}'")
    return str(real_folder / target.name)


def _real(folder: str, path: str) -> Path:
    if not folder:
        raise ConfigError(f"this sandbox worker was started without --folder, so it has no path '{path}'")
    return Path(folder).resolve()
