"""Where docker or podman runs the sandboxes, it also builds their images."""

from __future__ import annotations

import asyncio
import json
import re
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
) -> Built:
    """`build` of the engine, whose own cache is used.

    Raises:
      BuildError: it failed; the step is the last one that the engine named.
    """
    tag = f"jaxagent/{make_key('engine', str(dockerfile.resolve()), str(context.resolve()))}:latest"
    words = ["build", "--tag", tag, "--file", str(dockerfile), *([] if network else ["--network", "none"])]
    try:
        await asyncio.to_thread(lambda: engine.call(*words, str(context), timeout_s=timeout_s, both=True))
    except SandboxError as error:
        steps = list(_STEP.finditer(str(error)))
        number, text = (int(steps[-1][1] or steps[-1][3]), steps[-1][2] or steps[-1][4]) if steps else (0, "")
        raise BuildError(name, number, text, f"failed in {engine.name} build", str(error)) from None
    return await asyncio.to_thread(inspect, engine, tag, name)


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
