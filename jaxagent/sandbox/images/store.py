"""Where layers and base roots are kept, by the hash of what they come from.

<folder>/layers/<key>/step.json, tree/      one step of a recipe; `tree` is absent where a step changes no file
<folder>/bases/<key>/step.json, tree/       a root made by debootstrap or unpacked from a tar
<folder>/work/<key>/                        being made; a rename makes it final, so a half one is never found
<folder>/locks/<key>                        held by whoever makes it, and free again however that process ends
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.io.files import try_lock
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.owner import remove_directory, sandbox_uid

FORMAT = 1  # counts up when a layer made by an older version would be wrong
KEY_CHARS = 24  # of the digest: short, because the kernel takes one page of paths for all layers
LOCK_POLL_S = 0.05
RECORD, TREE = "step.json", "tree"


def make_key(*parts: Any) -> str:
    """A key of anything JSON can say, and of the user that layers belong to."""
    text = json.dumps([FORMAT, sandbox_uid(), *parts], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARS]


class Store:
    """A folder of layers, shared by all processes of a user."""

    def __init__(self, folder: str | Path):
        """Makes the folder.

        Raises:
          ConfigError: it cannot be made, or the sandboxes' user cannot reach it.
        """
        self.folder = Path(folder).absolute()
        try:
            for name in ("layers", "bases", "work", "locks"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            if self.folder.stat().st_uid == os.geteuid():
                self.folder.chmod(0o755)
        except OSError as error:
            raise ConfigError(f"the folder of images '{self.folder}' cannot be made: {error.strerror}.") from None
        check_reachable(self.folder)

    def find(self, kind: str, key: str) -> dict[str, Any] | None:
        """The record of what is there, with "key" and "tree": its path or "". `kind`: "layers" or "bases"."""
        place = self.folder / kind / key
        try:
            record = json.loads((place / RECORD).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        if record.get("layer") != (place / TREE).is_dir():
            return None
        return {**record, "key": key, "tree": str(place / TREE) if record["layer"] else ""}

    async def get(
        self, kind: str, key: str, image: str, timeout_s: float, make: Callable[[Path], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """What `find` gives, made where it is not there, by one process at a time. "cached" in it says which it was.

        Args:
          make: fills an empty folder, and returns what the record says of it.

        Raises:
          BuildError: of `image`: another process has been making it for `timeout_s` seconds.
        """
        if (record := self.find(kind, key)) is None:
            async with self._making(key, image, timeout_s) as work:
                if (record := self.find(kind, key)) is None:  # nor made by another process meanwhile
                    begin = time.monotonic()
                    record = await make(work)
                    self._keep(kind, key, work, {**record, "seconds": round(time.monotonic() - begin, 2)})
                    return {**(self.find(kind, key) or {}), "cached": False}
        return {**record, "cached": True}

    @contextlib.asynccontextmanager
    async def _making(self, key: str, image: str, timeout_s: float) -> AsyncIterator[Path]:
        lock = os.open(self.folder / "locks" / key, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        work, end = self.folder / "work" / key, time.monotonic() + timeout_s
        try:
            while not try_lock(lock):
                if time.monotonic() > end:
                    problem = f"waited {timeout_s:.0f} s for another process that makes the same"
                    raise BuildError(image, 0, "", problem)
                await asyncio.sleep(LOCK_POLL_S)
            try:
                await asyncio.to_thread(remove_directory, work)  # what a killed build left
                work.mkdir()
                yield work
            finally:
                remove_directory(work)  # only by the one who has the lock
        finally:
            os.close(lock)

    def _keep(self, kind: str, key: str, work: Path, record: dict[str, Any]) -> None:
        """Makes what lies in `work` final."""
        size, files = measure(work / TREE)
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        record = {**record, "layer": (work / TREE).is_dir(), "bytes": size, "files": files, "made": made}
        with open(work / RECORD, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)  # a torn one after a power cut is no record, and the step runs again
        work.chmod(0o755)
        target = self.folder / kind / key
        if target.exists():  # without a readable record: not ours to trust
            remove_directory(target)
        work.rename(target)

    def listing(self) -> list[dict[str, Any]]:
        """Every record, with "kind", the oldest first."""
        places = [(kind, place.name) for kind in ("bases", "layers") for place in (self.folder / kind).iterdir()]
        records = [{**record, "kind": kind} for kind, key in places if (record := self.find(kind, key)) is not None]
        return sorted(records, key=lambda r: (r["made"], r["key"]))


def check_reachable(folder: Path) -> None:
    """Raises ConfigError where the user that sandboxes run as cannot pass through to `folder`."""
    if sandbox_uid() == os.geteuid():
        return
    for place in (folder, *folder.parents):
        if not place.stat().st_mode & 0o001:
            raise ConfigError(
                f"the folder of images '{folder}' cannot be reached by user {sandbox_uid()}, which sandboxes run as: "
                f"'{place}' is closed to others (chmod o+x, or another folder)."
            )


def measure(tree: Path) -> tuple[int, int]:
    """(bytes of regular files, number of entries) below a folder; (0, 0) where there is none."""
    size = entries = 0
    for top, folders, files in os.walk(tree):
        entries += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(top, name)).st_size
    return size, entries
