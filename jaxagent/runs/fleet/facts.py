"""What a process tells the coordinator of itself: whatever the bits of a token hang on, and where it is."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
from typing import Any

import jax
import jaxlib.version

from jaxagent.config import Config
from jaxagent.fleet import settings
from jaxagent.runs import devices, provenance

PACKAGE = pathlib.Path(__file__).parents[2]


def facts(cfg: Config, name: str, host: str, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Of this process. `fleet/members.py` says which of them must be equal in all."""
    return {
        "process": name,
        "host": host,
        "pid": os.getpid(),
        "config": settings.digest_of(cfg),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "xla_flags": provenance.deciding_flags(os.environ.get("XLA_FLAGS", "")),
        "cpu_features": devices.processor(),
        "threads": devices.threads(explicit=True),  # of a mesh's virtual devices the probe tells
        "device_kind": next(iter(mesh.devices.flat)).device_kind,
        "program": program(),
        "mesh": dict(mesh.shape),
    }


@functools.cache
def program() -> str:
    """A digest of the package's own code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
