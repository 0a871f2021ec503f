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
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.envs.terminal import fields
from jaxagent.envs.terminal.fields import Fields
from jaxagent.envs.terminal.task import Image, Script, TaskLimits, TerminalTask, level_of

TIMEOUT_S = 600.0  # Harbor's own default, for agent and verifier

_TOP = ("version", "schema_version", "task", "metadata", "verifier", "agent", "environment", "solution", "artifacts")
_ENVIRONMENT = (
    *("build_timeout_sec", "docker_image", "cpus", "memory_mb", "storage_mb", "memory", "storage", "gpus", "env"),
    *("network_mode", "allow_internet", "workdir"),
)
_UNITS_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}


def read(folder: Path) -> TerminalTask:
    """One task directory.

    Raises:
      ConfigError: a file or key that is missing or malformed, an unknown schema, or a feature that is not supported.
    """
    path = folder / "task.toml"
    top = Fields(fields.read_toml(path), path, _TOP)
    schema = top.text("schema_version", top.text("version", "1.0"))
    if not re.fullmatch(r"[12](\.\d+)*", schema):
        raise ConfigError(f"{path}: schema_version '{schema}' is not known. Valid: 1.x, 2.x.")
    if top.values.get("steps"):
        raise ConfigError(f"{path}: tasks of several [[steps]] are not supported.")
    top.section("task", ("name", "authors", "description", "keywords"))
    metadata = top.section("metadata", ("difficulty", "category", "tags", "reward_range"))
    agent = top.section("agent", ("timeout_sec", "network_mode"))
    verifier = top.section("verifier", ("timeout_sec", "env", "network_mode", "environment_mode", "environment"))
    if verifier.text("environment_mode", "shared") != "shared" or "environment" in verifier.values:
        raise ConfigError(f"{path}: key 'verifier.environment_mode': only the shared verifier is supported.")
    environment = top.section("environment", _ENVIRONMENT)
    fields.read_text(folder / "tests" / "test.sh")
    solution = folder / "solution" / "solve.sh"
    return TerminalTask(
        id=folder.name,
        instruction=fields.read_text(folder / "instruction.md"),
        format="harbor",
        limits=TaskLimits(
            agent_timeout_s=agent.number("timeout_sec", TIMEOUT_S),
            verifier_timeout_s=verifier.number("timeout_sec", TIMEOUT_S),
            build_timeout_s=environment.number("build_timeout_sec", TaskLimits.build_timeout_s),
            cpus=environment.number("cpus", TaskLimits.cpus),
            memory_mb=_size_mb(environment, "memory", TaskLimits.memory_mb),
            storage_mb=_size_mb(environment, "storage", TaskLimits.storage_mb),
        ),
        image=_image(folder, environment),
        workdir=environment.text("workdir", ""),
        final_test=Script("bash /tests/test.sh", {"/tests": folder / "tests"}),
        oracle=Script("bash /solution/solve.sh", {"/solution": solution.parent}) if solution.is_file() else None,
        reward_from="reward_file",
        reward_range=_reward_range(metadata),
        env=environment.texts("env"),
        verifier_env=verifier.texts("env"),
        oracle_env=top.section("solution", ("env",)).texts("env"),
        level=level_of(metadata.text("difficulty", "unknown")),
        folder=folder,
    )


def _image(folder: Path, environment: Fields) -> Image:
    if environment.values.get("gpus"):
        raise ConfigError(f"{environment.path}: key 'environment.gpus': sandboxes have no GPU.")
    context = folder / "environment"
    dockerfile = context / "Dockerfile"
    composed = any((context / f"docker-compose.{ending}").is_file() for ending in ("yaml", "yml"))
    name = environment.text("docker_image", "")
    if not name and not dockerfile.is_file() and not composed:
        raise ConfigError(f"{dockerfile} is missing, and {environment.path} names no 'environment.docker_image'.")
    if dockerfile.is_file():
        fields.read_text(dockerfile)
    return Image(name, dockerfile if dockerfile.is_file() else None, context=context)


def _reward_range(metadata: Fields) -> tuple[float, float]:
    value = metadata.values.get("reward_range", [0, 1])
    numbers = [x for x in value if isinstance(x, (int, float)) and math.isfinite(x)] if isinstance(value, list) else []
    if len(numbers) != 2 or numbers != value or not numbers[0] < numbers[1]:
        raise metadata.wrong("reward_range", "must be [lowest, highest]", value)
    return float(numbers[0]), float(numbers[1])


def _size_mb(environment: Fields, name: str, default: int) -> int:
    """`memory_mb = 2048`, or the older `memory = "2G"`."""
    if f"{name}_mb" in environment.values or name not in environment.values:
        return int(environment.number(f"{name}_mb", default))
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])i?B?", environment.text(name).strip().upper().replace("I", "i"))
    if size is None:
        raise environment.wrong(name, 'must be a size such as "2G"', environment.values[name])
    return max(1, int(float(size[1]) * _UNITS_MB[size[2]]))
