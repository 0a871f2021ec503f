"""The real thing: where docker or podman runs the sandboxes, it also builds and loads the images."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path

from jaxagent.sandbox.base import SandboxError
from jaxagent.sandbox.container_engine import ContainerEngine
from jaxagent.sandbox.images.built import BuildError, Built
from jaxagent.sandbox.images.store import make_key

_STEP = re.compile(r"(?:STEP|Step) (\d+)/\d+ ?:\s*(.*)|\[(?:[\w.-]+ +)?(\d+)/\d+\] (.*)")


async def build(
    engine: ContainerEngine,
    dockerfile: Path,
    context: Path,
    name: str,
    timeout_s: float,
    network: bool = False,
    args: Mapping[str, str] | None = None,
) -> Built:
    """`build` of the engine, whose own cache is used.

    Raises:
      BuildError: it failed; the step is the last one that the engine named.
    """
    tag = f"jaxagent/{make_key('engine', str(dockerfile.resolve()), str(context.resolve()))}:latest"
    words = ["build", "--tag", tag, "--file", str(dockerfile), *([] if network else ["--network", "none"])]
    words += [word for k, v in (args or {}).items() for word in ("--build-arg", f"{k}={v}")]
    await _call(engine, name, [*words, str(context)], timeout_s)
    return await asyncio.to_thread(inspect, engine, tag, name)


async def load(engine: ContainerEngine, tar: Path, timeout_s: float, name: str = "") -> Built:
    """`load` of the engine. `name`: which image, where the tar holds several. Raises BuildError."""
    said = await _call(engine, tar.name, ["load", "--input", str(tar)], timeout_s)
    loaded = re.findall(r"Loaded image(?:\(s\)| ID)?: *(\S+)", said)
    if name not in (*loaded, "") or not loaded:
        raise BuildError(tar.name, 0, "", f"holds {', '.join(loaded) or 'no image'}, not '{name}'")
    return await asyncio.to_thread(inspect, engine, name or loaded[0], tar.name)


def inspect(engine: ContainerEngine, tag: str, name: str) -> Built:
    """What an image of the engine's store tells its programs. Raises BuildError where it has none of that name."""
    try:
        about = json.loads(engine.call("image", "inspect", tag))[0]
    except (SandboxError, ValueError, IndexError) as error:
        raise BuildError(name, 0, "", f"is not in {engine.name}'s store: {error}") from None
    config = about.get("Config") or {}
    env = dict(item.partition("=")[::2] for item in config.get("Env") or [])
    user = (config.get("User") or "").partition(":")[0]
    # Files may belong to users that the sandbox does not have; user 0 needs the engine's own user namespace.
    uid = int(user) if user.isdigit() else (0 if engine.own_users else 1000)
    home = "/root" if uid == 0 else env.get("HOME", "/home/user")
    directory = config.get("WorkingDir") or "/"
    return Built(about.get("Id", tag), image=tag, env=env, directory=directory, uid=uid, user=user or "root", home=home)


async def _call(engine: ContainerEngine, name: str, words: list[str], timeout_s: float) -> str:
    try:
        return await asyncio.to_thread(lambda: engine.call(*words, timeout_s=timeout_s, both=True))
    except SandboxError as error:
        steps = list(_STEP.finditer(str(error)))
        number, text = (int(steps[-1][1] or steps[-1][3]), steps[-1][2] or steps[-1][4]) if steps else (0, "")
        raise BuildError(name, number, text, f"failed in {engine.name} {words[0]}", str(error)) from None
