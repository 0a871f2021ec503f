"""What is dear to make and only read: made once for all workers of pytest-xdist, by the first that asks."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
from collections.abc import Callable

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """The folder of this name, which `make` fills; others wait meanwhile.

    Args:
      factory: of this session.
      name: of what is made; another name for whatever is made in another way.
      make: gets the folder, which is there and empty. If it fails, the next one that asks makes it anew.
    """
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # each worker has a folder of its own in it
    place = root / f"once-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    place.mkdir(exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = sorted(place.glob("made-*"))
        if not made or not (place / "done").exists():
            folder = place / f"made-{len(made)}"
            folder.mkdir()
            make(folder)
            (place / "done").touch()
        return sorted(place.glob("made-*"))[-1]
