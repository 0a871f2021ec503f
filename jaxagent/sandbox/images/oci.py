"""An exported image -> a base root: an OCI layout in a tar, or what `docker save` writes. The tar is untrusted.

Every blob is checked against its digest. All layers are unpacked over one another into one tree, so that a sandbox
needs no more than one lower directory for it. The image's ENV, WORKDIR and USER come along.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxagent.config import nearest
from jaxagent.sandbox.images import tars, tree
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.store import TREE, Store, make_key
from jaxagent.sandbox.images.unpack import TarError, Unpacker

MAX_JSON_BYTES = 8 * 2**20
MAX_IMAGE_BYTES = 64 * 2**30
MAX_LAYERS = 500
TIMEOUT_S = 3600.0  # of waiting for another process that unpacks the same
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile(r"sha(256|512):([0-9a-f]{64,128})")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


async def load(store: Store, path: Path, name: str = "", max_bytes: int = MAX_IMAGE_BYTES) -> dict[str, Any]:
    """The record of a base (see `store.Store.get`), with "env", "workdir" and "user".

    Args:
      path: the tar, plain or compressed.
      name: which image, where the tar holds several: a tag or reference name.
      max_bytes: of the unpacked files.

    Raises:
      BuildError: no such image, a digest that does not agree, an entry that leads out of the tree, another processor.
    """
    image = f"{path.name}{f' ({name})' if name else ''}"
    try:
        with tars.open_image(path) as archive:
            contents = await asyncio.to_thread(_Image, archive, name)

            async def unpack(work: Path) -> dict[str, Any]:
                return {
                    "step": f"import of {path.name}",
                    "name": name or contents.name or path.name,
                    "env": contents.env,
                    "workdir": posixpath.normpath("/" + (contents.config.get("WorkingDir") or "").lstrip("/")),
                    "user": contents.config.get("User") or "",
                    "skipped": await asyncio.to_thread(contents.unpack, work / TREE, max_bytes),
                }

            return await store.get("bases", make_key("oci", contents.identity), image, TIMEOUT_S, unpack)
    except (TarError, tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BuildError(image, 0, "", f"cannot be imported: {error}") from error


class _Image:
    """One image of an archive: its configuration and the blobs of its layers, the lowest first."""

    def __init__(self, archive: tarfile.TarFile, name: str):
        self._archive = archive
        self._members = {os.path.normpath(m.name.lstrip("/")): m for m in tars.members(archive)}
        self.name = ""
        if "index.json" in self._members:
            self._from_layout(name)
        elif "manifest.json" in self._members:
            self._from_save(name)
        else:
            raise TarError("neither index.json (OCI) nor manifest.json (docker save) is in it")
        architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
        if (theirs := self._config.get("architecture", architecture)) != architecture:
            raise TarError(f"it is for {theirs} processors, and this machine's is {architecture}")
        self.config: Mapping[str, Any] = self._config.get("config") or {}
        env = self.config.get("Env") or []
        if not isinstance(env, list) or not all(isinstance(e, str) and e.partition("=")[0] for e in env):
            raise TarError("its configuration has a malformed Env")
        if not all(isinstance(self.config.get(name) or "", str) for name in ("WorkingDir", "User")):
            raise TarError("its configuration has a malformed WorkingDir or User")
        self.env = {e.partition("=")[0]: e.partition("=")[2] for e in env}
        diffs = (self._config.get("rootfs") or {}).get("diff_ids")
        if not isinstance(diffs, list) or len(diffs) != len(self._layers) or not all(map(_digest, diffs)):
            raise TarError(f"its configuration names {diffs and len(diffs)} layers, and it has {len(self._layers)}")
        if len(diffs) > MAX_LAYERS:
            raise TarError(f"it has {len(diffs)} layers; {MAX_LAYERS} are allowed")
        self._diffs = diffs
        self.identity = [self._config_digest, *diffs]

    def _from_layout(self, name: str) -> None:
        index = self._json("index.json")
        manifests = list(self._manifests(index, 0))
        if name:
            named = [(n, d) for n, d in manifests if name in (n, n.rpartition(":")[2])]
            if not named:
                raise TarError(f"it has no image '{name}'. {nearest(name, [n for n, _ in manifests if n] or ['none'])}")
            manifests = named
        if len({d for _, d in manifests}) != 1:
            names = ", ".join(n or d for n, d in manifests)
            raise TarError(f"it has {len(manifests)} images, name one of: {names or 'none'}")
        self.name, digest = manifests[0]
        manifest = self._blob_json(digest)
        self._config_digest = _field(manifest, "config", "digest")
        self._config = self._blob_json(self._config_digest)
        self._layers = [
            (_blob_path(_field(layer, "digest")), _field(layer, "digest")) for layer in _list(manifest, "layers")
        ]

    def _manifests(self, index: Any, depth: int, name: str = "") -> Iterator[tuple[str, str]]:
        """(name, digest) of every image manifest for this machine, also in indexes inside."""
        if depth > 4:
            raise TarError("its indexes are nested too deeply")
        for entry in _list(index, "manifests"):
            digest = _field(entry, "digest")
            own = (entry.get("annotations") or {}).get("org.opencontainers.image.ref.name") or name
            where = entry.get("platform") or {}
            if where.get("architecture", "unknown") not in ("unknown", ARCHITECTURES.get(platform.machine())):
                continue
            if where.get("os") == "unknown":  # attestations
                continue
            inner = self._blob_json(digest)
            if "manifests" in inner:
                yield from self._manifests(inner, depth + 1, own)
            else:
                yield own, digest

    def _from_save(self, name: str) -> None:
        entries = self._json("manifest.json")
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise TarError("manifest.json is not a list of images")
        tags = {tag: e for e in entries for tag in e.get("RepoTags") or []}
        if name:
            if name not in tags:
                raise TarError(f"it has no image '{name}'. {nearest(name, tags or ['none'])}")
            entry = tags[name]
        elif len(entries) == 1:
            entry = entries[0]
        else:
            raise TarError(f"it has {len(entries)} images, name one of: {', '.join(tags) or 'none'}")
        self.name = name or next(iter(entry.get("RepoTags") or []), "")
        path = _field(entry, "Config")
        data = self._read(path)
        self._config_digest = "sha256:" + hashlib.sha256(data).hexdigest()
        claimed = re.sub(r"\.json$", "", path.rpartition("/")[2])
        if re.fullmatch(r"[0-9a-f]{64}", claimed) and self._config_digest != f"sha256:{claimed}":
            raise TarError(f"{path} does not have the digest that its name says")
        self._config = _parse(data, path)
        self._layers = [(str(layer), "") for layer in _list(entry, "Layers")]  # checked by the diff_ids

    def unpack(self, target: Path, max_bytes: int) -> dict[str, int]:
        """Unpacks all layers into a new folder, which then belongs to the sandboxes' user; returns what was skipped."""
        target.mkdir()
        top = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            unpacker = Unpacker(top, max_bytes)
            for (path, digest), diff in zip(self._layers, self._diffs, strict=True):
                self._layer(unpacker, path, digest, diff, max_bytes)
        finally:
            os.close(top)
        tree.prepare(target)
        return dict(unpacker.skipped)

    def _layer(self, unpacker: Unpacker, path: str, digest: str, diff: str, max_bytes: int) -> None:
        with contextlib.closing(self._file(path)) as blob:
            most = 2 * max_bytes + 2**20  # headers and padding included
            raw = _Hashing(blob, digest, most)
            start = raw.peek()
            if start.startswith(_ZSTD):
                raise TarError(f"layer {path} is compressed with zstd, which is not supported: export it with gzip")
            unpacked = gzip.GzipFile(fileobj=raw) if start.startswith(_GZIP) else raw  # type: ignore[arg-type]
            plain = _Hashing(unpacked, diff, most)
            with tars.open_layer(plain) as layer:
                unpacker.layer(tars.entries(layer), layer)
            for stream in (plain, raw):
                stream.finish(path)

    def _file(self, path: str) -> IO[bytes]:
        member = self._members.get(os.path.normpath(path.lstrip("/")))
        try:
            file = self._archive.extractfile(member) if member is not None else None  # links stay in the archive
        except (KeyError, RecursionError):
            file = None
        if file is None:
            raise TarError(f"{path} is not in it")
        return file

    def _read(self, path: str) -> bytes:
        with contextlib.closing(self._file(path)) as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise TarError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        return data

    def _json(self, path: str) -> Any:
        return _parse(self._read(path), path)

    def _blob_json(self, digest: str) -> dict[str, Any]:
        path = _blob_path(digest)
        data = self._read(path)
        if hashlib.new(digest.partition(":")[0], data).hexdigest() != digest.partition(":")[2]:
            raise TarError(f"{path} does not have its digest")
        value = _parse(data, path)
        if not isinstance(value, dict):
            raise TarError(f"{path} is not a JSON object")
        return value


class _Hashing(io.RawIOBase):
    """Reads through, and hashes what went by. A digest of "" is not checked; more than `most` bytes are an error."""

    def __init__(self, source: Any, digest: str, most: int):
        self._source, self._digest, self._left, self._ahead = source, digest, most, b""
        self._hash = hashlib.new(digest.partition(":")[0]) if digest else None

    def readable(self) -> bool:
        return True

    def peek(self) -> bytes:
        """The first bytes, which are read again."""
        self._ahead = self._source.read(8)
        return self._ahead

    def read(self, size: int = -1) -> bytes:
        data = self._ahead[:size] if size >= 0 else self._ahead
        self._ahead = self._ahead[len(data) :]
        if size < 0 or len(data) < size:
            data += self._source.read(size - len(data) if size >= 0 else -1) or b""
        self._left -= len(data)
        if self._left < 0:
            raise TarError("a layer is larger than allowed")
        if self._hash is not None:
            self._hash.update(data)
        return data

    def finish(self, path: str) -> None:
        """Reads what a reader left over. Raises TarError where the digest does not agree."""
        while self.read(2**20):
            pass
        if self._hash is not None and self._hash.hexdigest() != self._digest.partition(":")[2]:
            raise TarError(f"layer {path} does not have the digest {self._digest}")


def _digest(text: Any) -> bool:
    match = _DIGEST.fullmatch(text) if isinstance(text, str) else None
    return match is not None and len(match[2]) == int(match[1]) // 4


def _blob_path(digest: str) -> str:
    if not _digest(digest):
        raise TarError(f"'{digest}' is not a digest")
    return "blobs/" + digest.replace(":", "/")


def _parse(data: bytes, path: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise TarError(f"{path} is not JSON") from None


def _field(value: Any, *names: str) -> str:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value:
        raise TarError(f"a manifest has no '{'.'.join(names)}'")
    return value


def _list(value: Any, name: str) -> list[Any]:
    items = value.get(name) if isinstance(value, dict) else None
    if not isinstance(items, list) or (name == "manifests" and not all(isinstance(f, dict) for f in items)):
        raise TarError(f"a manifest has no list '{name}'")
    return items
