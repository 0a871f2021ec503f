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
from collections.abc import Iterator
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
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what JSON of another form leads to
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
            try:
                contents = await asyncio.to_thread(_Image, archive, name)
            except MALFORMED as error:
                why = f"its JSON is malformed: {type(error).__name__} {error}"
                raise error if isinstance(error, TarError) else TarError(why) from error

            async def unpack(work: Path) -> dict[str, Any]:
                return {
                    "step": f"import of {path.name}",
                    "name": name or contents.name or path.name,
                    "env": contents.env,
                    "workdir": contents.directory,
                    "user": contents.user,
                    "skipped": await asyncio.to_thread(contents.unpack, work / TREE, max_bytes),
                }

            return await store.get("bases", make_key("oci", contents.identity), image, TIMEOUT_S, unpack)
    except (TarError, tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BuildError(image, 0, "", f"cannot be imported: {error}") from error


class _Image:
    """One image of an archive: its configuration and the blobs of its layers, the lowest first.

    Its JSON may be of any form: where it is not what it should be, reading it raises one of `MALFORMED`.
    """

    def __init__(self, archive: tarfile.TarFile, name: str):
        self._archive = archive
        self._members = {os.path.normpath(m.name.lstrip("/")): m for m in tars.members(archive)}
        if "index.json" in self._members:
            self.name, about = self._from_layout(name)
        elif "manifest.json" in self._members:
            self.name, about = self._from_save(name)
        else:
            raise TarError("neither index.json (OCI) nor manifest.json (docker save) is in it")
        architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
        if (theirs := about.get("architecture", architecture)) != architecture:
            raise TarError(f"it is for {theirs} processors, and this machine's is {architecture}")
        config = about.get("config") or {}
        self.env = dict(e.partition("=")[::2] for e in config.get("Env") or [])
        if "" in self.env:
            raise TarError("its configuration has a variable without a name")
        self.directory = posixpath.normpath("/" + (config.get("WorkingDir") or "").lstrip("/"))
        self.user = str(config.get("User") or "")
        self._diffs = about["rootfs"]["diff_ids"]
        for digest in self._diffs:
            _blob_path(digest)
        if not len(self._diffs) == len(self._layers) <= MAX_LAYERS:
            counts = f"names {len(self._diffs)} layers, and it has {len(self._layers)}"
            raise TarError(f"its configuration {counts}; {MAX_LAYERS} are allowed")
        self.identity = [self._config_digest, *self._diffs]

    def _from_layout(self, name: str) -> tuple[str, dict[str, Any]]:
        manifests = list(self._manifests(self._json("index.json"), 0))
        if name:
            named = [(n, d) for n, d in manifests if name in (n, n.rpartition(":")[2])]
            if not named:
                raise TarError(f"it has no image '{name}'. {nearest(name, [n for n, _ in manifests if n] or ['none'])}")
            manifests = named
        if len({d for _, d in manifests}) != 1:
            names = ", ".join(n or d for n, d in manifests)
            raise TarError(f"it has {len(manifests)} images, name one of: {names or 'none'}")
        manifest = self._blob_json(manifests[0][1])
        self._config_digest = manifest["config"]["digest"]
        self._layers = [(_blob_path(layer["digest"]), layer["digest"]) for layer in manifest["layers"]]
        return manifests[0][0], self._blob_json(self._config_digest)

    def _manifests(self, index: Any, depth: int, name: str = "") -> Iterator[tuple[str, str]]:
        """(name, digest) of every image manifest for this machine, also in indexes inside."""
        if depth > 4:
            raise TarError("its indexes are nested too deeply")
        for entry in index["manifests"]:
            own = (entry.get("annotations") or {}).get("org.opencontainers.image.ref.name") or name
            where = entry.get("platform") or {}
            if where.get("architecture", "unknown") not in ("unknown", ARCHITECTURES.get(platform.machine())):
                continue
            if where.get("os") == "unknown":  # attestations
                continue
            inner = self._blob_json(entry["digest"])
            if "manifests" in inner:
                yield from self._manifests(inner, depth + 1, own)
            else:
                yield own, entry["digest"]

    def _from_save(self, name: str) -> tuple[str, dict[str, Any]]:
        entries = self._json("manifest.json")
        tags = {tag: e for e in entries for tag in e.get("RepoTags") or []}
        if name:
            if name not in tags:
                raise TarError(f"it has no image '{name}'. {nearest(name, tags or ['none'])}")
            entry = tags[name]
        elif len(entries) == 1:
            entry = entries[0]
        else:
            raise TarError(f"it has {len(entries)} images, name one of: {', '.join(tags) or 'none'}")
        path = entry["Config"]
        data = self._read(path)
        self._config_digest = "sha256:" + hashlib.sha256(data).hexdigest()
        claimed = re.sub(r"\.json$", "", path.rpartition("/")[2])
        if re.fullmatch(r"[0-9a-f]{64}", claimed) and self._config_digest != f"sha256:{claimed}":
            raise TarError(f"{path} does not have the digest that its name says")
        self._layers = [(str(layer), "") for layer in entry["Layers"]]  # checked by the diff_ids
        return name or next(iter(entry.get("RepoTags") or []), ""), json.loads(data)

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
            if blob.seek(0, os.SEEK_END) > most:
                raise TarError("a layer is larger than allowed")
            blob.seek(0)
            if digest:
                _check(hashlib.file_digest(blob, digest.partition(":")[0]), digest, path)  # type: ignore[arg-type]
                blob.seek(0)
            start = blob.read(4)
            blob.seek(0)
            if start == _ZSTD:
                raise TarError(f"layer {path} is compressed with zstd, which is not supported: export it with gzip")
            unpacked = gzip.GzipFile(fileobj=blob) if start.startswith(_GZIP) else blob
            plain = _Hashing(unpacked, diff, most)
            with tars.open_layer(plain) as layer:
                unpacker.layer(tars.entries(layer), layer)
            while plain.read(2**20):  # what the reader left over
                pass
            _check(plain.hash, diff, path)

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
        return json.loads(self._read(path))

    def _blob_json(self, digest: str) -> dict[str, Any]:
        path = _blob_path(digest)
        data = self._read(path)
        _check(hashlib.new(digest.partition(":")[0], data), digest, path)
        return json.loads(data)


class _Hashing(io.RawIOBase):
    """Reads through, and hashes what went by; more than `most` bytes are an error."""

    def __init__(self, source: Any, digest: str, most: int):
        self._source, self._left = source, most
        self.hash = hashlib.new(digest.partition(":")[0])

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise TarError("a layer is larger than allowed")
        self.hash.update(data)
        return data


def _check(digester: Any, digest: str, path: str) -> None:
    if digester.hexdigest() != digest.partition(":")[2]:
        raise TarError(f"{path} does not have the digest {digest}")


def _blob_path(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None or len(match[2]) != int(match[1]) // 4:
        raise TarError(f"'{digest}' is not a digest")
    return "blobs/" + digest.replace(":", "/")
