"""run.json: with which code, on what and when a workdir's run was started and went on. Not among the metrics.

{"checkpointed": whether a bundle was ever complete, "starts": [{"time", "command", "resumed_at", "commit", ...}, ...]}
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.runs import devices

PACKAGES = ("jaxagent", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")
UNREAD = ("workdir", "eval", "checkpoint", "log_episodes", "fleet")  # no number of an RL step depends on these
GIT_TIMEOUT_S = 10.0
_TRUE = ("1", "on", "t", "true", "y", "yes")  # as jax reads its variables


def start(used: Sequence[Any], resumed_at: Mapping[str, Any] | None) -> dict[str, Any]:
    """One entry of "starts".

    Args:
      used: the `jax.Device`s that the run uses.
      resumed_at: {"stage", "step", "checkpoint"} that it goes on from; None for a run that begins.
    """
    kinds = [device.device_kind for device in used]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_at": resumed_at,
        "command": shlex.join([sys.executable, *sys.argv]),
        **commit(Path(__file__).parent),
        "code": code_digest(),
        **machine(),
        "host": platform.node(),
        "devices": [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)],
    }


def machine() -> dict[str, Any]:
    """What numbers can depend on beside config, data and code."""
    return {
        "python": platform.python_version(),
        "packages": packages(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_features": devices.processor(),
        "threads": devices.threads(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "few_optimizations": "1" if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "").lower() in _TRUE else "",
    }


def packages() -> dict[str, str | None]:
    """The installed versions of what a run uses."""
    return {name: _version(name) for name in PACKAGES}


def processor() -> str:
    """The name of this machine's processor, as far as it is known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def code_digest() -> str:
    """SHA-256 over every file of this package, by name and content; what is compiled or cached is left out."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of what in a config decides the numbers of a step: not where it runs, nor what it writes down.

    Args:
      config: as `to_dict` makes it, or as JSON has it.
    """
    kept = {name: value for name, value in config.items() if name not in UNREAD}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def commit(folder: Path) -> dict[str, Any]:
    """The git commit that this code is of, and whether tracked files differ from it; None where it is of none.

    A copy installed inside somebody else's checkout is not tracked there, and has none.
    """
    found = _git(folder, "ls-files", "--error-unmatch", "__init__.py") and _git(folder, "rev-parse", "HEAD")
    if not found:
        return {"commit": None, "dirty": None}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": found, "dirty": None if changed is None else bool(changed)}


def read(path: Path) -> dict[str, Any]:
    """What the file holds; an empty record where there is none.

    Raises:
      ConfigError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"checkpointed": bool(found["checkpointed"]), "starts": list(found["starts"])}
    except FileNotFoundError:
        return {"checkpointed": False, "starts": []}
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path} is damaged: it only says how the run was started. Delete it to go on.") from None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None where it fails, or there is none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, encoding="utf-8", timeout=GIT_TIMEOUT_S, env=environment
        )
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
