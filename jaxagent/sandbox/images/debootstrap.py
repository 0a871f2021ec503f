"""A base root made by debootstrap: a Debian or Ubuntu system from a mirror of packages, no registry of images."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxagent.sandbox.images import tree
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.store import TREE, Store, make_key

TIMEOUT_S = 3600.0
TAIL_BYTES = 4000
# Nothing of a root that is being made needs to survive a crash: dpkg need not wait for the disk at every file.
DPKG = {"etc/dpkg/dpkg.cfg.d/jaxagent": "force-unsafe-io\n"}


async def make(
    store: Store,
    suite: str,
    mirror: str = "",
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str], None] = lambda line: None,
    include: str = "",
) -> dict[str, Any]:
    """The record of a base (see `store.Store.get`). Variant minbase, this processor.

    Args:
      suite: "bookworm", "jammy", ...
      mirror: URL of packages; "" = debootstrap's own choice for the suite.
      include: further packages, separated by commas.

    Raises:
      BuildError: debootstrap is missing, not allowed, or failed.
    """
    name = f"debootstrap:{suite}"

    async def bootstrap(work: Path) -> dict[str, Any]:
        program = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if program is None:
            raise BuildError(name, 0, "", "needs debootstrap, which is not installed here: apt-get install debootstrap")
        if os.geteuid() != 0:
            raise BuildError(name, 0, "", "needs root, as debootstrap does: make it as root, or import an exported tar")
        words, target = ["--variant=minbase", *([f"--include={include}"] if include else []), suite], work / TREE
        after = [mirror] if mirror else []
        command_line = " ".join(["debootstrap", *words, *after])
        for path, text in DPKG.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text, encoding="utf-8")
        progress(f"{command_line} (some minutes)")
        await _run(name, [program, *words, str(target), *after], work / "log", timeout_s)
        (work / "log").unlink()
        await asyncio.to_thread(_finish, target)
        return {"step": command_line, "name": name}

    key = make_key("debootstrap", suite, mirror, include, platform.machine())
    return await store.get("bases", key, name, timeout_s, bootstrap)


def _finish(target: Path) -> None:
    """Leaves nothing in the root that only its making needed, and gives it to the sandboxes' user."""
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists", "dev", "debootstrap"):
        for path in (target / folder).glob("*"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    tree.prepare(target)


async def _run(name: str, command: list[str], log: Path, timeout_s: float) -> None:
    """Runs the command with a deadline. Its whole process group ends with it."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    environment |= {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy", "no_proxy")}
    with open(log, "wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        status = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        raise BuildError(name, 1, " ".join(command), f"ran past {timeout_s:g} s", _tail(log)) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status != 0:
        problem = f"ended with status {status} (is the mirror of packages reached?)"
        raise BuildError(name, 1, " ".join(command), problem, _tail(log))


def _tail(log: Path) -> str:
    return log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
