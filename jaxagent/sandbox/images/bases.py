"""What FROM may name. There is no registry: a table says which root on this machine stands for which image.

    NAME=host                          this machine's /usr, read-only, as in `Spec(root="")`
    NAME=debootstrap:SUITE             a root made by debootstrap when it is first needed
    NAME=debootstrap:SUITE@MIRROR      from that mirror of packages
    NAME=/folder                       a whole root
    NAME=/file.tar                     an exported image: OCI layout or `docker save`; /file.tar#NAME one of several

NAME is an image's name as recipes have it, with * for any part: "ubuntu:22.04", "python:3.*". The first that fits is
taken.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import ConfigError, nearest
from jaxagent.sandbox.images import debootstrap, oci, tree
from jaxagent.sandbox.images.built import BuildError, Built
from jaxagent.sandbox.images.store import Store, check_reachable, make_key

HOST, DEBOOTSTRAP = "host", "debootstrap:"


Base = tuple[str, str]  # a normalised name, perhaps with *, and what stands for it


def parse(entries: Sequence[str]) -> tuple[Base, ...]:
    """The table of a config or a command line.

    Raises:
      ConfigError: an entry that is not NAME=SOURCE, or whose folder or file is not there.
    """
    table = []
    for entry in entries:
        name, equals, source = entry.partition("=")
        if not equals or not name.strip() or not source.strip():
            raise ConfigError(f"bases: '{entry}' must be NAME=SOURCE, such as 'debian:12=debootstrap:bookworm'.")
        source = source.strip()
        if source.startswith(DEBOOTSTRAP):
            if not re.fullmatch(r"debootstrap:[a-z][a-z0-9-]*(@\S+)?", source):
                raise ConfigError(f"bases: '{source}' must be debootstrap:SUITE or debootstrap:SUITE@MIRROR.")
        elif source != HOST:
            path = Path(source.partition("#")[0])
            if not path.exists():
                hint = f" {nearest(source, (HOST, DEBOOTSTRAP + 'bookworm'))}" if "/" not in source else ""
                raise ConfigError(f"bases: '{name}' is '{source}', and no such folder or tar is there.{hint}")
            source = str(path.absolute()) + source[len(source.partition("#")[0]) :]
        table.append((normal(name.strip()), source))
    return tuple(table)


def normal(name: str) -> str:
    """An image's name as the table compares it: no default registry, no digest, and a tag."""
    name = re.sub(r"@sha256:[0-9a-f]+$", "", name.strip())
    name = re.sub(r"^(docker://|docker\.io/|index\.docker\.io/)+", "", name)
    name = name.removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] or name.endswith((".sif", "*")) else f"{name}:latest"


async def resolve(
    table: Sequence[Base], name: str, image: str, store: Store, progress: Callable[[str], None] = lambda line: None
) -> Built:
    """The root for a name in FROM, its user not looked up; debootstrap and tars are made when they are not stored.

    Raises:
      BuildError: the table has no such name, or its root cannot be made.
    """
    if name == "scratch":
        folder = store.folder / "bases" / "empty"
        folder.mkdir(exist_ok=True)
        tree.prepare(folder)
        return Built(make_key("scratch"), root=str(folder))
    names = {normal(name), normal(Path(name).name)} if name.endswith(".sif") else {normal(name)}
    source = next((source for pattern, source in table if any(fnmatch.fnmatchcase(w, pattern) for w in names)), "")
    if not source:
        patterns = [pattern for pattern, _ in table]
        hint = nearest(normal(name), patterns) if patterns else "No bases are given."
        raise BuildError(image, 0, "", f"is FROM {name}, which the bases do not have (there is no registry). {hint}")
    if source == HOST:
        packages = _packages(Path("/"))  # the key changes when packages of this machine do
        return Built(make_key("host", json.dumps(sorted(os.listdir("/usr"))), *packages))
    if source.startswith(DEBOOTSTRAP):
        suite, _, mirror = source.removeprefix(DEBOOTSTRAP).partition("@")
        record = await debootstrap.make(store, suite, mirror, progress=progress)
        return Built(make_key("base", record["key"]), root=record["tree"])
    path, _, which = source.partition("#")
    if os.path.isdir(path):
        check_reachable(Path(path))
        info = os.stat(path)
        key = make_key("folder", path, info.st_ino, info.st_mtime_ns, *_packages(Path(path)))
        return Built(key, root=path)
    return loaded(await oci.load(store, Path(path), which))


def loaded(record: dict) -> Built:
    """The root that `oci.load` gave."""
    key, env = make_key("base", record["key"]), record["env"]
    return Built(key, record["tree"], env=env, directory=record["workdir"], user=record["user"] or "root")


def _packages(root: Path) -> list[str]:
    """Changes when packages of a root do."""
    parts = []
    for path in ("etc/os-release", "var/lib/dpkg/status", "var/lib/rpm/rpmdb.sqlite", "lib/apk/db/installed"):
        try:
            parts.append(hashlib.sha256((root / path).read_bytes()).hexdigest())
        except OSError:
            parts.append("")
    return parts
