"""Harbor task directories, schema 1 and 2 (the package `harbor`, whose newest schema is 1.4).

    task.toml                 limits and metadata
    instruction.md            the prompt
    environment/Dockerfile    or [environment] docker_image
    tests/test.sh             tests/ becomes /tests at verification; writes /logs/verifier/reward.txt or reward.json
    tests/Dockerfile          where the verifier is separate: its image, which brings /tests along
    solution/solve.sh         solution/ becomes /solution when the oracle runs
    steps/NAME/               of a task of several [[steps]], each: instruction.md, tests/ over the task's, solution/ or
                              the task's, workdir/ (put into the working directory) with setup.sh

[metadata] is free text, but for `reward_range = [lowest, highest]`, our addition, for tests whose rewards are not in
[0, 1]. Every other key is honoured, says nothing of how a task is played (`_WORDS`), or is refused by name; so is one
that no schema knows. `harbor_keys` has them all.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, nearest
from jaxagent.data.fields import RowError, show
from jaxagent.envs.terminal import fields
from jaxagent.envs.terminal.harbor_keys import FORM
from jaxagent.envs.terminal.task import Artifact, Healthcheck, Image, Script, Server, TaskLimits, TerminalTask, level_of

Table = Mapping[str, Any]

TIMEOUT_S = 600.0  # Harbor's own for a verifier; an agent whose task says nothing has as long here
COLLECT_S = 60.0
PUBLISHED = "/logs/artifacts"  # what an agent leaves there, a verifier of its own gets without a word in task.toml
_OTHER_FILES = ("trajectory.json", "tests/.harborignore", "solution/.harborignore")
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)  # as the package has it
_UNITS_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}


def read(folder: Path) -> TerminalTask:
    """One task directory.

    Raises:
      ConfigError: a file that is missing, an unknown schema, or a feature that is not supported.
      RowError: a key that is missing, malformed, unknown, or not supported.
    """
    path = folder / "task.toml"
    top = fields.read(path, FORM, strict=True)
    schema = top.get("schema_version", top.get("version", "1.0"))
    if not re.fullmatch(r"[12](\.\d+)*", schema):
        raise ConfigError(f"{path}: schema_version '{schema}' is not known. Valid: 1.x, 2.x.")
    metadata, agent, environment = (top.get(section, {}) for section in ("metadata", "agent", "environment"))
    if near := [key for key in metadata if key != "reward_range" and key.startswith("reward_range"[:-2])]:
        raise RowError(f"metadata.{near[0]}", f"is unknown. {nearest(near[0], ['reward_range'])}")
    _refuse_network(top, environment, "")
    for file in (place / name for place in (folder, *sorted((folder / "steps").glob("*"))) for name in _OTHER_FILES):
        if file.exists():
            raise ConfigError(f"{file} is not supported.")
    whole = TerminalTask(
        id=folder.name,
        instruction="",
        format="harbor",
        limits=_limits(
            environment, agent.get("timeout_sec", TIMEOUT_S), top.get("verifier", {}).get("timeout_sec", TIMEOUT_S)
        ),
        image=_image(folder, environment, path),
        workdir=environment.get("workdir", ""),
        reward_from="reward_file",
        reward_range=_reward_range(metadata.get("reward_range", [0, 1])),
        env=environment.get("env", {}),
        oracle_env=top.get("solution", {}).get("env", {}),
        user=str(agent.get("user", "")),
        healthchecks=_healthchecks(environment),
        servers=[Server(one["name"], (one["command"], *one.get("args", ()))) for one in _servers(environment)],
        skills_dir=environment.get("skills_dir", ""),
        judged_when_cut=True,
        level=level_of(metadata.get("difficulty", "")),
        folder=folder,
    )
    if not (steps := top.get("steps")):
        if "multi_step_reward_strategy" in top:
            raise RowError("multi_step_reward_strategy", "is for tasks with [[steps]], which this one has not")
        return _part(whole, folder, folder, top, {})
    read_steps = [_step(whole, folder, top, step, number) for number, step in enumerate(steps)]
    return dataclasses.replace(
        whole,
        instruction=read_steps[0].instruction,
        final_test=read_steps[-1].final_test,
        oracle=read_steps[-1].oracle if all(step.oracle for step in read_steps) else None,
        steps=read_steps,
        rewards_of=top.get("multi_step_reward_strategy", "mean"),
    )


def _limits(environment: Table, agent_timeout_s: float, verifier_timeout_s: float) -> TaskLimits:
    return TaskLimits(
        agent_timeout_s=agent_timeout_s,
        verifier_timeout_s=verifier_timeout_s,
        build_timeout_s=environment.get("build_timeout_sec", TaskLimits.build_timeout_s),
        cpus=environment.get("cpus", TaskLimits.cpus),
        memory_mb=_size_mb(environment, "memory", TaskLimits.memory_mb),
        storage_mb=_size_mb(environment, "storage", TaskLimits.storage_mb),
        stated=[name for name in ("cpus", "memory_mb", "storage_mb") if {name, name[:-3]} & environment.keys()],
    )


def _step(whole: TerminalTask, folder: Path, top: Table, step: Table, number: int) -> Any:
    name = step["name"]
    names = [other["name"].casefold() for other in top["steps"]]
    if not name.strip(" .") or re.search(r'[<>:"/\\|?*\x00-\x1f\x7f]', name) or names.index(name.casefold()) != number:
        raise RowError(f"steps[{number}].name", f"must be a folder's name that no other step has, got {name!r}")
    agent, minimum = step.get("agent", {}), step.get("min_reward", {})
    if "user" in agent and str(agent["user"]) != whole.user:
        raise RowError(f"steps[{number}].agent.user", "is not supported: a sandbox has one user for all steps")
    _refuse_network(step, top.get("environment", {}), f"steps[{number}].")
    place = folder / "steps" / name
    files = place / "workdir"
    inside = {str(file.relative_to(files)): file for file in sorted(files.rglob("*")) if file.is_file()}
    setup = Script("bash ./setup.sh" if "setup.sh" in inside else ":", inside)
    # A step's verifier that says no time has Harbor's, not the task's: so it is in the package.
    seconds = (
        agent.get("timeout_sec", whole.limits.agent_timeout_s),
        step.get("verifier", {}).get("timeout_sec", TIMEOUT_S),
    )
    limits = dataclasses.replace(whole.limits, agent_timeout_s=seconds[0], verifier_timeout_s=seconds[1])
    part = dataclasses.replace(
        whole,
        id=f"{whole.id}/{name}",
        limits=limits,
        setup=setup if inside else None,
        healthchecks=_healthchecks(step),
        min_rewards=minimum if isinstance(minimum, Mapping) else {"reward": minimum},
    )
    return _part(part, folder, place, top, step)


def _part(task: TerminalTask, folder: Path, place: Path, top: Table, step: Table) -> TerminalTask:
    """The task with what its folder, or a step's `place` over it, says of instruction, tests, solution and verifier."""
    common, own = top.get("verifier", {}), step.get("verifier", {})
    solution = next((p for p in (place / "solution", folder / "solution") if (p / "solve.sh").is_file()), None)
    tests, env = _tests(folder, place), {**common.get("env", {}), **own.get("env", {})}
    user = own.get("user", common.get("user", ""))
    collected = [*common.get("collect", ()), *own.get("collect", ())]
    task = dataclasses.replace(
        task,
        instruction=_without_canary(fields.read_text(place / "instruction.md")),
        oracle=Script("bash /solution/solve.sh", {"/solution": solution}) if solution else None,
        collect=[(one["command"], one.get("timeout_sec", COLLECT_S)) for one in collected],
        verifier_env=env,
        same_user=str(user),
    )
    mode = _mode(own) or _mode(common) or "shared"
    if mode == "shared":
        if "/tests" not in tests:
            fields.read_text(place / "tests" / "test.sh")  # raises: it is missing
        return dataclasses.replace(task, final_test=Script("bash /tests/test.sh", tests))
    about = own.get("environment", common.get("environment"))
    for key, verifier in (("steps.verifier", own), ("verifier", common)):
        _refuse_network({"agent": {}}, verifier.get("environment", {}), f"{key}.environment.", base="")
    image, bundled = _verifier_image(folder, place, common, own, task.image)
    if not bundled and "/tests" not in tests:
        fields.read_text(place / "tests" / "test.sh")
    about = top.get("environment", {}) if about is None else about
    judge = TerminalTask(
        id=f"{task.id}.verifier".replace("/", "."),
        instruction="",
        format="harbor",
        limits=_limits(about, task.limits.agent_timeout_s, task.limits.verifier_timeout_s),
        image=image,
        workdir=about.get("workdir", ""),
        final_test=Script("bash /tests/test.sh", {} if bundled else tests),
        reward_from="reward_file",
        reward_range=task.reward_range,
        env=about.get("env", {}),
        verifier_env=env,
        user=str(user),
    )
    listed = [*top.get("artifacts", ()), *step.get("artifacts", ())]
    artifacts = [
        Artifact(one) if isinstance(one, str) else Artifact(one["source"], one.get("exclude", ())) for one in listed
    ]
    if all(one.source.rstrip("/") != PUBLISHED for one in artifacts):
        artifacts.insert(0, Artifact(PUBLISHED))
    return dataclasses.replace(task, verifier=judge, final_test=judge.final_test, artifacts=artifacts, same_user="")


def _tests(folder: Path, place: Path) -> dict[str, Path]:
    """What becomes /tests: the task's folder, then the step's files over it; {} = neither has a test.sh."""
    places = [p / "tests" for p in dict.fromkeys((folder, place)) if (p / "tests").is_dir()]
    if not any((p / "test.sh").is_file() for p in places):
        return {}
    fields.read_text(next(p / "test.sh" for p in reversed(places) if (p / "test.sh").is_file()))
    files = {"/tests": places[0]}
    for over in places[1:]:
        files |= {f"/tests/{file.relative_to(over)}": file for file in sorted(over.rglob("*")) if file.is_file()}
    return files


def _mode(verifier: Table) -> str:
    if verifier.get("environment_mode") == "shared" and "environment" in verifier:
        raise RowError("verifier.environment", "contradicts verifier.environment_mode = 'shared'")
    return verifier.get("environment_mode", "separate" if "environment" in verifier else "")


def _verifier_image(folder: Path, place: Path, common: Any, own: Any, agents: Image) -> tuple[Image, bool]:
    """A separate verifier's image, and whether its tests are in it: a step's, the task's, or a fresh copy of the
    agent's, in the order of the package's `resolve_verifier_environment_definition`."""
    candidates = [] if place == folder else [(own, place / "tests")]
    for verifier, tests in (*candidates, (common, folder / "tests")):
        if name := verifier.get("environment", {}).get("docker_image"):
            return Image(name), True
        if (tests / "docker-compose.yaml").is_file():
            raise ConfigError(f"{tests / 'docker-compose.yaml'}: a verifier of several containers is not supported.")
        if (tests / "Dockerfile").is_file():
            return Image(dockerfile=tests / "Dockerfile", context=tests), True
    return agents, False


def _healthchecks(about: Table) -> list[Healthcheck]:
    check = about.get("healthcheck")
    return [] if check is None else [Healthcheck(**{key.replace("_sec", "_s"): value for key, value in check.items()})]


def _servers(environment: Table) -> list[Table]:
    servers = environment.get("mcp_servers", [])
    for number, server in enumerate(servers):
        if server.get("transport", "sse") != "stdio":
            raise RowError(
                f"environment.mcp_servers[{number}].transport",
                "must be 'stdio': sandboxes have neither a network nor a second container for a server at a URL",
            )
        if not server.get("command"):
            raise RowError(f"environment.mcp_servers[{number}].command", "is missing")
    return servers


def _refuse_network(part: Table, environment: Table, prefix: str, base: str = "environment.") -> None:
    """Raises RowError where the agent or the verifier is to have a network. Nothing said is none wanted: the check of a
    task that needs one without a word fails."""
    legacy = "public" if environment.get("allow_internet") else None
    baseline, name = environment.get("network_mode", legacy), "network_mode"
    if "network_mode" not in environment and legacy:
        name = "allow_internet"
    for phase in ("agent", "verifier"):
        own = part.get(phase, {}).get("network_mode")
        if (own or baseline) not in (None, "no-network"):
            key = f"{prefix}{phase}.network_mode" if own else f"{base or prefix}{name}"
            raise RowError(key, f"asks for a network ({own or baseline}), which sandboxes have not")


def _without_canary(text: str) -> str:
    """An instruction without the lines at its beginning that mark a benchmark's data, which no agent is shown."""
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if not _CANARY.match(line.strip())), len(lines))
    return "\n".join(lines[first:]).lstrip("\n") if first else text


def _image(folder: Path, environment: Table, path: Path) -> Image:
    context = folder / "environment"
    dockerfile = context / "Dockerfile"
    composed = next((p for e in ("yaml", "yml") if (p := context / f"docker-compose.{e}").is_file()), None)
    if composed is not None:
        raise ConfigError(f"{composed}: a task of several containers is not supported.")
    name = environment.get("docker_image", "")
    if not name and not dockerfile.is_file():
        raise ConfigError(f"{dockerfile} is missing, and {path} names no 'environment.docker_image'.")
    if dockerfile.is_file():
        fields.read_text(dockerfile)
    return Image(name, dockerfile if dockerfile.is_file() else None, context=context)


def _reward_range(value: Any) -> tuple[float, float]:
    numbers = [x for x in value if isinstance(x, (int, float)) and math.isfinite(x)] if isinstance(value, list) else []
    if len(numbers) != 2 or numbers != value or not numbers[0] < numbers[1]:
        raise RowError("metadata.reward_range", f"must be [lowest, highest], got {show(value)}")
    return float(numbers[0]), float(numbers[1])


def _size_mb(environment: Table, name: str, default: int) -> int:
    """`memory_mb = 2048`, or the older `memory = "2G"`. Raises RowError where both are there and differ."""
    sizes = [int(environment[f"{name}_mb"])] if f"{name}_mb" in environment else []
    if name in environment:
        size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])i?B?", environment[name].strip().upper().replace("I", "i"))
        if size is None:
            raise RowError(f"environment.{name}", f'must be a size such as "2G", got {environment[name]!r}')
        sizes.append(max(1, int(float(size[1]) * _UNITS_MB[size[2]])))
    if len(set(sizes)) > 1:
        raise RowError(f"environment.{name}", f"is {sizes[1]} MB, and environment.{name}_mb says {sizes[0]}")
    return sizes[0] if sizes else default
