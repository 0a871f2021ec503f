"""A minimal root from the host: /usr and the library directories read-only, a made-up rest, none of its secrets."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from jaxagent.sandbox.base import Spec

FROM_HOST = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
SYSTEM = (*FROM_HOST, "etc", "opt")  # programs and what they load: an agent that is not user 0 cannot change them
OPEN = ("/opt/", "/usr/src/")  # a working or home directory below one of these is the agent's nevertheless
ETC = (  # configuration without which programs of /usr misbehave; nothing that names people, hosts or keys
    "alternatives",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "os-release",
    "perl",
    "protocols",
    "services",
    "terminfo",
)
MAX_ETC_FILE_BYTES = 2**20
DIRECTORIES = {  # path: mode
    "dev": 0o755,
    "etc": 0o755,
    "home/user": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "srv": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "var/log": 0o755,
    "var/tmp": 0o1777,
}


@dataclasses.dataclass(frozen=True)
class Root:
    """Directories for an overlay, the lowest first, and host directories to bind read-only on top."""

    layers: tuple[str, ...]
    binds: tuple[tuple[str, str], ...]  # source on the host, target in the root
    read_only: tuple[tuple[str, str], ...] = ()  # source in the root, target in the root


def make_base(directory: Path, host_uid: int, uid: int) -> None:
    """Makes the lowest layer: directories, accounts and the few files of /etc. It belongs to the sandboxes' user."""
    directory.mkdir(mode=0o755)
    for name, mode in DIRECTORIES.items():
        path = directory / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
    etc = directory / "etc"
    users = ["root:x:0:0:root:/root:/bin/bash", "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"]
    groups = ["root:x:0:", "nogroup:x:65534:"]
    if uid not in (0, 65534):
        users.insert(1, f"user:x:{uid}:{uid}:user:/home/user:/bin/bash")
        groups.insert(1, f"user:x:{uid}:")
    (etc / "passwd").write_text("\n".join(users) + "\n", encoding="utf-8")
    (etc / "group").write_text("\n".join(groups) + "\n", encoding="utf-8")
    (etc / "hosts").write_text(f"127.0.0.1 localhost {Spec.hostname}\n::1 localhost\n", encoding="utf-8")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n", encoding="utf-8")
    (etc / "resolv.conf").write_text("", encoding="utf-8")
    for name in ETC:
        _copy_public(Path("/etc") / name, etc / name)
    if os.geteuid() == 0:
        for path in [directory, *directory.rglob("*")]:
            os.chown(path, host_uid, host_uid, follow_symlinks=False)


def add_host(directory: Path) -> tuple[tuple[str, str], ...]:
    """Adds the places of /usr and its like to a base layer; returns what to bind.

    A host's link (/lib64 to usr/lib64) becomes a directory too: a link in the root could be replaced, by whoever owns
    the root, and with it the loader of every program; a mount point cannot.
    """
    binds = []
    for name in FROM_HOST:
        host = Path("/") / name
        if host.is_dir():
            (directory / name).mkdir(exist_ok=True)
            binds.append((str(host.resolve()), str(host)))
    return tuple(binds)


def _copy_public(source: Path, target: Path) -> None:
    """Copies what every user of the host may read."""
    try:
        info = source.lstat()
    except OSError:
        return
    if stat.S_ISLNK(info.st_mode):
        target.symlink_to(os.readlink(source))
    elif stat.S_ISDIR(info.st_mode) and info.st_mode & 0o005 == 0o005:
        target.mkdir(exist_ok=True)
        for entry in source.iterdir():
            _copy_public(entry, target / entry.name)
    elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size <= MAX_ETC_FILE_BYTES:
        shutil.copyfile(source, target)
        target.chmod(0o644)


def give(host_uid: int, *paths: Path) -> None:
    """Files and folders of a layer become the sandboxes' user's, where that is another; everybody may read them."""
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
        if os.geteuid() == 0:
            os.chown(path, host_uid, host_uid)


def _folders(root: Root, name: str) -> list[Path]:
    """The places of the entry `name` in the layers, the highest layer first."""
    return [Path(layer, name) for layer in reversed(root.layers)]


class Roots:
    """Base layers of one run, made once for each user id seen inside.

    Attributes:
      named: of a root and a host name: the same root with an address for the sandbox's own name, as containers have,
        where its /etc/hosts has none.
      protected: of a root: the same with everything of `SYSTEM` read-only, whoever owns it.
    """

    def __init__(self, directory: Path, host_uid: int):
        self._directory, self._host_uid = directory, host_uid
        self._base = functools.cache(self._make_base)
        self.named, self.protected = functools.cache(self._named), functools.cache(self._protected)

    def root(self, root: str, layers: tuple[str, ...], uid: int) -> Root:
        """The root for a spec: our base layer, then the given root (or the host's programs), then the layers."""
        base = self._base(uid, not root)
        return Root((*base.layers, *([root] if root else []), *layers), base.binds)

    def _make_base(self, uid: int, with_host: bool) -> Root:
        # A folder of its own: several back ends of one run may each make theirs.
        own = Path(tempfile.mkdtemp(prefix="roots-", dir=self._directory))
        own.chmod(0o755)
        directory = own / f"{uid}-{'host' if with_host else 'given'}"
        make_base(directory, self._host_uid, uid)
        return Root((str(directory),), add_host(directory) if with_host else ())

    def _named(self, root: Root, hostname: str) -> Root:
        etc, hosts = next((e, e / "hosts") for e in _folders(root, "etc") if os.path.lexists(e / "hosts"))
        if etc.is_symlink() or hosts.is_symlink() or not hosts.is_file():  # the image's own doing
            return root
        text = hosts.read_text(encoding="utf-8", errors="surrogateescape")
        names = [name for name in ("localhost", hostname) if name not in text.split()]
        if not names:
            return root
        layer = Path(tempfile.mkdtemp(prefix="hosts-", dir=self._directory))
        (layer / "etc").mkdir()
        text = "\n".join(filter(None, [text.rstrip("\n"), f"127.0.0.1 {' '.join(names)}\n"]))
        (layer / "etc/hosts").write_text(text, encoding="utf-8", errors="surrogateescape")
        give(self._host_uid, layer, layer / "etc", layer / "etc/hosts")
        return Root((*root.layers, str(layer)), root.binds)

    def _protected(self, root: Root) -> Root:
        """Mounts on themselves protect folders, and keep them where they are.

        In the place of a link, which nothing can be mounted on, comes a directory that shows what it led to.
        """
        layers, read_only, bound, links = root.layers, [], {target for _, target in root.binds}, []
        for name in SYSTEM:
            highest = next((str(path) for path in _folders(root, name) if os.path.lexists(path)), "")
            if f"/{name}" in bound or not highest:
                continue
            if os.path.islink(highest):
                links.append(name)
                read_only.append((os.path.normpath(f"/{os.readlink(highest)}"), f"/{name}"))
            elif os.path.isdir(highest):
                read_only.append((f"/{name}", f"/{name}"))
        if links:
            cover = Path(tempfile.mkdtemp(prefix="cover-", dir=self._directory))
            for name in links:
                (cover / name).mkdir()
            give(self._host_uid, cover, *cover.iterdir())
            layers = (*layers, str(cover))
        return Root(layers, root.binds, tuple(read_only))
