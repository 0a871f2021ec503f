"""Runs the steps of a recipe, each once: a sandbox over the layers so far, one step in it, what it changed kept.

A step's key is the hash of its parent's key, its text, everything it is told (variables, directory, user, whether it
has the network) and the content of the files it copies. So a second build finds every layer, and two recipes that begin
alike share them. What was killed half way leaves nothing that is found.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.sandbox.base import FileError, Sandbox, SandboxError, Spec
from jaxagent.sandbox.images import bases
from jaxagent.sandbox.images.build_backend import LIMITS, BuildBackend
from jaxagent.sandbox.images.built import TAIL_CHARS, BuildError, Built
from jaxagent.sandbox.images.context import Item
from jaxagent.sandbox.images.store import TREE, Store, make_key

MAX_LAYERS_TEXT = 3_800  # characters of all their paths: the kernel takes one page of mount options
SHELLS_OWN = ("_", "PWD", "OLDPWD", "SHLVL")  # variables
SMALL_S = 60.0  # for the small commands that make folders and links
_OFFLINE = re.compile(
    r"[Tt]emporary failure (?:in name )?resol|[Cc]ould ?n.t resolve|[Cc]ould not resolve|Name or service not known|"
    r"Network is unreachable|getaddrinfo|EAI_AGAIN|Failed to establish a new connection|unable to resolve host"
)

Action = Callable[[Sandbox], Awaitable[dict[str, Any] | None]]  # None: no file changed


class Steps:
    """Runs the steps of one image.

    Args:
      backend: where they run, with or without the network.
      store: where they are kept.
      table: what FROM may name.
      image: its name, for messages.
      timeout_s: of the whole build, from now; a base that is made for it does not count.
      progress: told of every step.
    """

    def __init__(
        self,
        backend: BuildBackend,
        store: Store,
        table: Sequence[bases.Base],
        image: str,
        timeout_s: float,
        progress: Callable[[str], None] = lambda line: None,
    ):
        self.backend, self.store, self.table = backend, store, table
        self.image, self.progress = image, progress
        self._ends_at = time.monotonic() + timeout_s
        self.number, self._text = 0, ""  # of the step that runs

    async def base(self, name: str) -> Built:
        """What a FROM of this name gives; programs do not run yet in the folder and as the user that it names."""
        begin = time.monotonic()
        built = await bases.resolve(self.table, name, self.image, self.store, self.progress)
        self._ends_at += time.monotonic() - begin
        return built

    async def begin(self, name: str) -> Built:
        """The same with the base's own folder and user, where it names them."""
        built = await self.base(name)
        if built.directory != "/":
            built = await self.workdir(built, f"the base's folder {built.directory}", built.directory)
        if built.user in ("0", "root", "0:0", "root:root"):
            return dataclasses.replace(built, user="root")
        return await self.user(built, f"the base's user {built.user}", built.user)

    async def run(self, built: Built, text: str, argv: Sequence[str], env: Mapping[str, str]) -> Built:
        """A program that must end with status 0. `env`: beyond the image's own."""

        async def action(sandbox: Sandbox) -> dict[str, Any]:
            await self._program(sandbox, built, argv, env)
            return {}

        inputs = ["run", list(argv), {**built.env, **env}, built.directory, built.uid, built.home, self.backend.network]
        return (await self.step(built, text, inputs, action))[0]

    async def workdir(self, built: Built, text: str, path: str) -> Built:
        """Makes a folder where it is missing; later steps run there."""

        async def action(sandbox: Sandbox) -> dict[str, Any] | None:
            return {} if await _make_folder(sandbox, path) else None

        built = built if path == "/" else (await self.step(built, text, ["workdir", path], action, as_root=True))[0]
        return dataclasses.replace(built, directory=path)

    async def copy(
        self,
        built: Built,
        text: str,
        sources: Sequence[tuple[str, Sequence[Item]]],
        target: str,
        into: bool,
        mode: int | None = None,
        unpack: Sequence[str] = (),
    ) -> Built:
        """Puts files into the image.

        Args:
          sources: (name, items) of each source: "" for a folder whose contents are copied, else its own name.
          target: absolute.
          into: `target` is a folder; else it is one where the image has a folder of that name, or a source is one.
          mode: of all files; None = their own.
          unpack: names of sources that are archives, whose contents are wanted.
        """

        async def action(sandbox: Sandbox) -> dict[str, Any]:
            folder = into or await is_folder(sandbox, target)
            for name, items in sources:
                under = f"{target.rstrip('/')}/{name}" if folder and name else target
                if name in unpack:
                    await self._unpack(sandbox, built, items[0], target)
                else:
                    await _put(sandbox, under, items, mode)
            return {}

        inputs = ["copy", target, into, mode, list(unpack)]
        inputs += [[name, [item.identity() for item in items]] for name, items in sources]
        return (await self.step(built, text, inputs, action, as_root=True))[0]

    async def user(self, built: Built, text: str, name: str) -> Built:
        """Later steps, and the image, run as a user of the image's /etc/passwd, or as a number."""
        user = name.partition(":")[0]

        async def action(sandbox: Sandbox) -> dict[str, Any]:
            try:
                lines = (await sandbox.read("/etc/passwd")).decode("utf-8", "replace").splitlines()
            except FileError:
                lines = []
            rows = [row for line in lines if len(row := line.split(":")) >= 6]
            row = next((r for r in rows if user in (r[0], r[2]) and r[2].isdigit()), None)
            if row is None and not user.isdigit():
                raise self.wrong(f"names the user '{user}', who is not in /etc/passwd")
            name, uid, home = (row[0], row[2], row[5]) if row else (user, user, "/")
            return {"uid": int(uid), "user": name, "home": home or "/"}

        built, account = await self.step(built, text, ["user", user], action, keep=False)
        return dataclasses.replace(built, uid=account["uid"], user=account["user"], home=account["home"])

    async def environment(self, built: Built, text: str, script: str) -> Built:
        """What a shell script exports becomes the image's environment."""

        async def action(sandbox: Sandbox) -> dict[str, Any]:
            program = f"{script}\nexec env -0"
            before = await self._program(sandbox, built, ("/bin/sh", "-c", "exec env -0"), {})
            after = await self._program(sandbox, built, ("/bin/sh", "-c", program), {})
            old, new = _variables(before), _variables(after)
            return {"env": {k: v for k, v in new.items() if old.get(k) != v and k not in SHELLS_OWN}}

        inputs = ["environment", script, dict(built.env), built.directory]
        built, result = await self.step(built, text, inputs, action, keep=False)
        return dataclasses.replace(built, env={**built.env, **result["env"]})

    async def step(
        self, built: Built, text: str, inputs: Sequence[Any], action: Action, keep: bool = True, as_root: bool = False
    ) -> tuple[Built, dict[str, Any]]:
        """One step: taken from the store, or done in a sandbox and kept.

        Args:
          inputs: everything that decides what it does, as JSON.
          action: does it; what it returns is kept beside the layer.
          keep: whether files may change; else only what `action` returned is kept.
          as_root: inside, as user 0 whatever the image's user is.

        Raises:
          BuildError: it failed.
        """
        self.number, self._text = self.number + 1, text
        key = make_key(built.key, *inputs)

        async def make(work: Path) -> dict[str, Any]:
            self.progress(f"{self.image}: step {self.number}: {' '.join(text.split())[:150]}")
            self._left_s()
            async with await self.backend.start(self._spec(built, as_root)) as sandbox:
                data = await action(sandbox)
                if keep and data is not None:
                    try:
                        async with asyncio.timeout(max(0.0, self._ends_at - time.monotonic())):
                            await sandbox.snapshot(str(work / TREE))
                    except TimeoutError:
                        raise self.wrong("ran past the build's deadline while what it changed was kept") from None
            return {"step": text[:2000], "name": self.image, "data": data or {}}

        try:
            record = await self.store.get("layers", key, self.image, max(0.0, self._ends_at - time.monotonic()), make)
        except (SandboxError, OSError) as error:
            raise self.wrong(f"failed: {error}") from error
        layers = (*built.layers, record["tree"]) if record["tree"] else built.layers
        if sum(len(layer) + 1 for layer in layers) > MAX_LAYERS_TEXT:
            raise self.wrong(f"is one layer too many ({len(layers)}): join steps, or use a folder with a shorter name")
        changes = {"built": built.built + (not record["cached"]), "cached": built.cached + record["cached"]}
        return dataclasses.replace(built, key=key, layers=layers, **changes), record.get("data", {})

    def _spec(self, built: Built, as_root: bool) -> Spec:
        spec = built.spec(LIMITS)
        layers = (*spec.layers, *self.backend.network_layer())
        return dataclasses.replace(spec, layers=layers, uid=0 if as_root else spec.uid, hostname="build")

    def wrong(self, problem: str, output: str = "") -> BuildError:
        """What is wrong with the step that runs."""
        return BuildError(self.image, self.number, self._text, problem, output)

    def _left_s(self) -> float:
        if (remaining_s := self._ends_at - time.monotonic()) <= 0:
            raise self.wrong("did not begin before the build's deadline")
        return remaining_s

    async def _program(self, sandbox: Sandbox, built: Built, argv: Sequence[str], env: Mapping[str, str]) -> bytes:
        """Its output. Raises BuildError unless it ends with status 0 in time."""
        left_s = self._left_s()
        result = await sandbox.execute(argv, left_s, 2**20, env, built.directory)
        if result.exit_code == 0 and not result.timed_out and not result.flooded:
            return result.output
        problem = f"ended with status {result.exit_code}"
        if result.timed_out:
            problem = f"ran past the build's deadline ({left_s:.0f} s were left)"
        elif result.flooded:
            problem = "printed too much"
        output = result.output.decode("utf-8", "replace")
        raise self.wrong(problem + self._hint(built, output), output[-TAIL_CHARS:])

    def _hint(self, built: Built, output: str) -> str:
        if not self.backend.network and _OFFLINE.search(output):
            return ", it seems for lack of the network, which builds have only where it is switched on (build_network)"
        if not built.root and os.strerror(errno.EROFS) in output:
            return ": the base 'host' is this machine's own /usr, which is read-only; debootstrap makes one that is not"
        return ""

    async def _unpack(self, sandbox: Sandbox, built: Built, item: Item, target: str) -> None:
        """ADD of a local archive: the image's own tar unpacks it, as its user."""
        await _make_folder(sandbox, target)
        path = "/dev/shm/archive"  # not part of the root, so not of the layer
        await sandbox.write(path, item.read())
        at_root = dataclasses.replace(built, directory="/")
        await self._program(sandbox, at_root, ("tar", "-x", "--no-same-owner", "-f", path, "-C", target), {})


async def is_folder(sandbox: Sandbox, path: str) -> bool:
    """Whether the image has a folder of this name; needs no program of the image's."""
    try:
        await sandbox.list(path, 1)
    except FileError as error:
        return os.strerror(errno.EFBIG) in str(error)  # it is one, and has more than one entry
    return True


async def _make_folder(sandbox: Sandbox, path: str) -> bool:
    """Whether it was missing."""
    if await is_folder(sandbox, path):
        return False
    await _command(sandbox, ("mkdir", "-p", "--", path))
    return True


async def _put(sandbox: Sandbox, target: str, items: Sequence[Item], mode: int | None) -> None:
    """Writes items below a folder of the image, or the one file itself."""
    if len(items) != 1 or items[0].path:
        await _make_folder(sandbox, target)
    for item in items:
        path = f"{target.rstrip('/')}/{item.path}" if item.path else target
        if item.kind == "file":
            await sandbox.write(path, item.read(), item.mode if mode is None else mode)
        elif item.kind == "directory":
            await _make_folder(sandbox, path)
            if mode is not None or item.mode != 0o755:
                await _command(sandbox, ("chmod", f"{item.mode if mode is None else mode:o}", "--", path))
        else:
            await _command(sandbox, ("ln", "-sfnT", "--", os.fsdecode(item.data), path))


async def _command(sandbox: Sandbox, argv: Sequence[str]) -> None:
    result = await sandbox.execute(argv, SMALL_S, 4000, None, "/")
    if result.exit_code != 0:
        output = result.output.decode("utf-8", "replace").strip()
        raise SandboxError(f"{shlex.join(argv)} ended with status {result.exit_code}: {output}")


def _variables(output: bytes) -> dict[str, str]:
    lines = output.decode("utf-8", "replace").split("\0")
    return {k: v for k, _, v in (line.partition("=") for line in lines if "=" in line)}
