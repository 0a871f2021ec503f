"""openenv.yaml, the manifest of an OpenEnv environment's folder: every key is used, named as unused, or refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, nearest
from jaxagent.envs.openenv.wire import finite

FILE = "openenv.yaml"
RUNTIME = "fastapi"
VALIDATION = "validation"
# Keys that say how a run goes here.
USED = ("app", "runtime", "spec_version", "variables", "validation.reward.range", "validation.reward.oracle_tolerance")
USED += ("validation.resources.episode_timeout_s", "validation.resources.gpus", "validation.network.mode")
USED += ("validation.capabilities.declared_tools", "validation.execution.kind")
# Keys that only say something about the environment, or to who hosts or grades it: a line names those that are there.
UNUSED = ("name", "version", "description", "type", "port", "action", "observation", "validation.judge")
UNUSED += tuple(f"validation.reward.{key}" for key in ("floor_margin", "variance_tolerance"))
UNUSED += tuple(f"validation.resources.{key}" for key in ("cpu", "memory_mb", "disk_mb", "gpu_types"))
UNUSED += ("validation.network.allowed_hosts", "validation.task_distribution", "validation.types")
_CAPABILITIES = ("oracle", "verifier", "set_state", "llm_judged", "rubric_tree", "task_api", "canaries")
UNUSED += tuple(f"validation.capabilities.{key}" for key in (*_CAPABILITIES, "declared_task_count"))
_EXECUTION = ("probe_path", "dockerfile", "context", "agent_boundary", "requires_credentials")
UNUSED += tuple(f"validation.execution.{key}" for key in _EXECUTION)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What of a manifest says how a run goes."""

    target: str  # "package.module:app"
    folder: Path  # where Python finds it
    variables: Mapping[str, str]
    solved_reward: float | None  # from which reward its author calls an episode solved
    time_limit_s: float  # of an episode
    tools: frozenset[str]  # that it says it has; none: it says nothing
    unused: tuple[str, ...]


def read(folder: Path) -> Manifest:
    """The manifest of an environment's folder. Raises ConfigError: it cannot be started so; names the key."""
    import yaml  # ml-collections brings it; only folders need it

    path = folder / FILE
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config.env.server: {path} cannot be read: {' '.join(str(error).split())}.") from None
    keys = dict(_leaves(value, path, ""))
    for key in keys:
        if key not in USED and key not in UNUSED:
            raise ConfigError(f"{path}: the key '{key}' is unknown. {nearest(key, (*USED, *UNUSED))}")
    if keys.get("spec_version", 1) != 1 or keys.get("runtime", RUNTIME) != RUNTIME:
        key = "runtime" if keys.get("runtime", RUNTIME) != RUNTIME else "spec_version"
        raise ConfigError(f"{path}: {key}: {keys[key]!r} is not known here: 1 and '{RUNTIME}' are.")
    if (mode := keys.get("validation.network.mode", "public")) != "public":
        raise ConfigError(
            f"{path}: validation.network.mode: '{mode}' cannot be kept by a process on this machine: start the server "
            "in a container that keeps it, and name its URL in config.env.server."
        )
    if keys.get("validation.resources.gpus"):
        raise ConfigError(f"{path}: validation.resources.gpus: start the server where it has them, and name its URL.")
    if keys.get("validation.execution.kind", "openenv_ws") != "openenv_ws":
        raise ConfigError(f"{path}: validation.execution.kind: {keys['validation.execution.kind']!r} is not known.")
    target = keys.get("app")
    if not isinstance(target, str) or ":" not in target:
        raise ConfigError(f"{path}: app: must be 'package.module:app', got {target!r}.")
    parent = (folder / "__init__.py").is_file() and not target.startswith(f"{folder.name}.")
    try:
        low_high = keys.get("validation.reward.range")
        tolerance = finite(keys.get("validation.reward.oracle_tolerance", 0.0))
        solved = None if low_high is None else finite(low_high[1]) - tolerance
        limit = keys.get("validation.resources.episode_timeout_s", math.inf)
        limit_s = math.inf if limit == math.inf else finite(limit)
    except (TypeError, ValueError, LookupError, OverflowError):
        raise ConfigError(f"{path}: validation: reward and episode_timeout_s must be finite numbers.") from None
    return Manifest(
        target=f"{folder.name}.{target}" if parent else target,
        folder=folder.parent if parent else folder,
        variables={str(name): str(one) for name, one in (keys.get("variables") or {}).items()},
        solved_reward=solved,
        time_limit_s=limit_s,
        tools=frozenset(map(str, keys.get("validation.capabilities.declared_tools") or ())),
        unused=tuple(key for key in keys if key in UNUSED),
    )


def _leaves(value: Any, path: Path, prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys with their values; those of `validation` and what is in its parts by their whole names."""
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {prefix.rstrip('.') or 'it'} must be a mapping of keys.")
    all_keys = {*USED, *UNUSED}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if name == "variables" and inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"{path}: variables must be a mapping of keys.")
        if name not in all_keys and any(one.startswith(f"{name}.") for one in all_keys):
            yield from _leaves(inner, path, f"{name}.")
        else:
            yield name, inner
