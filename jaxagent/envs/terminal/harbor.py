"""Harbor task directories, schema 1 and 2.

    task.toml                 limits and metadata
    instruction.md            the prompt
    environment/Dockerfile    or [environment] docker_image, or docker-compose.yaml
    tests/test.sh             tests/ becomes /tests at verification; writes /logs/verifier/reward.txt or reward.json
    solution/solve.sh         solution/ becomes /solution when the oracle runs

[metadata] reward_range = [lowest, highest], our addition, is for tests whose rewards are not in [0, 1].

Schema 1 says `version = "1.0"` or nothing, and may write sizes as `memory = "2G"`, `storage = "10G"` and the network as
`allow_internet`. Schema 2 says `schema_version = "2.0"` and adds [task] name, artifacts, gpus and network_mode.
Not supported, and refused by name: [[steps]], a verifier with an image of its own, GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError, show
from jaxagent.envs.forms import EACH, TEXT
from jaxagent.envs.terminal import fields
from jaxagent.envs.terminal.task import Image, Script, TaskLimits, TerminalTask, level_of

TIMEOUT_S = 600.0  # Harbor's own default, for agent and verifier

_ENV = {EACH: fields.word}
_FORM = {
    **{"version~": TEXT, "schema_version~": TEXT, "steps~": object, "artifacts~": object},
    "task~": dict.fromkeys(("name~", "authors~", "description~", "keywords~"), object),
    "metadata~": {"difficulty~": str, "category~": object, "tags~": object, "reward_range~": object},
    "agent~": {"timeout_sec~": fields.positive, "network_mode~": object},
    "verifier~": {
        **{"timeout_sec~": fields.positive, "env~": _ENV, "network_mode~": object},
        **{"environment_mode~": ("shared", "separate"), "environment~": object},
    },
    "environment~": {
        **dict.fromkeys(("build_timeout_sec~", "cpus~", "memory_mb~", "storage_mb~"), fields.positive),
        **{"memory~": TEXT, "storage~": TEXT, "docker_image~": str, "workdir~": str, "env~": _ENV},
        **dict.fromkeys(("gpus~", "network_mode~", "allow_internet~"), object),
    },
    "solution~": {"env~": _ENV},
}
_UNITS_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}


def read(folder: Path) -> TerminalTask:
    """One task directory.

    Raises:
      ConfigError: a file that is missing, an unknown schema, or a feature that is not supported.
      RowError: a key that is missing or malformed.
    """
    path = folder / "task.toml"
    top = fields.read(path, _FORM)
    schema = top.get("schema_version", top.get("version", "1.0"))
    if not re.fullmatch(r"[12](\.\d+)*", schema):
        raise ConfigError(f"{path}: schema_version '{schema}' is not known. Valid: 1.x, 2.x.")
    if top.get("steps"):
        raise ConfigError(f"{path}: tasks of several [[steps]] are not supported.")
    metadata, agent, verifier, environment = (
        top.get(section, {}) for section in ("metadata", "agent", "verifier", "environment")
    )
    if verifier.get("environment_mode", "shared") != "shared" or "environment" in verifier:
        raise ConfigError(f"{path}: key 'verifier.environment_mode': only the shared verifier is supported.")
    fields.read_text(folder / "tests" / "test.sh")
    solution = folder / "solution" / "solve.sh"
    return TerminalTask(
        id=folder.name,
        instruction=fields.read_text(folder / "instruction.md"),
        format="harbor",
        limits=TaskLimits(
            agent_timeout_s=agent.get("timeout_sec", TIMEOUT_S),
            verifier_timeout_s=verifier.get("timeout_sec", TIMEOUT_S),
            build_timeout_s=environment.get("build_timeout_sec", TaskLimits.build_timeout_s),
            cpus=environment.get("cpus", TaskLimits.cpus),
            memory_mb=_size_mb(environment, "memory", TaskLimits.memory_mb),
            storage_mb=_size_mb(environment, "storage", TaskLimits.storage_mb),
        ),
        image=_image(folder, environment, path),
        workdir=environment.get("workdir", ""),
        final_test=Script("bash /tests/test.sh", {"/tests": folder / "tests"}),
        oracle=Script("bash /solution/solve.sh", {"/solution": solution.parent}) if solution.is_file() else None,
        reward_from="reward_file",
        reward_range=_reward_range(metadata.get("reward_range", [0, 1])),
        env=environment.get("env", {}),
        verifier_env=verifier.get("env", {}),
        oracle_env=top.get("solution", {}).get("env", {}),
        level=level_of(metadata.get("difficulty", "")),
        folder=folder,
    )


def _image(folder: Path, environment: Mapping[str, Any], path: Path) -> Image:
    if environment.get("gpus"):
        raise ConfigError(f"{path}: key 'environment.gpus': sandboxes have no GPU.")
    context = folder / "environment"
    dockerfile = context / "Dockerfile"
    composed = any((context / f"docker-compose.{ending}").is_file() for ending in ("yaml", "yml"))
    name = environment.get("docker_image", "")
    if not name and not dockerfile.is_file() and not composed:
        raise ConfigError(f"{dockerfile} is missing, and {path} names no 'environment.docker_image'.")
    if dockerfile.is_file():
        fields.read_text(dockerfile)
    return Image(name, dockerfile if dockerfile.is_file() else None, context=context)


def _reward_range(value: Any) -> tuple[float, float]:
    numbers = [x for x in value if isinstance(x, (int, float)) and math.isfinite(x)] if isinstance(value, list) else []
    if len(numbers) != 2 or numbers != value or not numbers[0] < numbers[1]:
        raise RowError("metadata.reward_range", f"must be [lowest, highest], got {show(value)}")
    return float(numbers[0]), float(numbers[1])


def _size_mb(environment: Mapping[str, Any], name: str, default: int) -> int:
    """`memory_mb = 2048`, or the older `memory = "2G"`."""
    if f"{name}_mb" in environment or name not in environment:
        return int(environment.get(f"{name}_mb", default))
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])i?B?", environment[name].strip().upper().replace("I", "i"))
    if size is None:
        raise RowError(f"environment.{name}", f'must be a size such as "2G", got {environment[name]!r}')
    return max(1, int(float(size[1]) * _UNITS_MB[size[2]]))
