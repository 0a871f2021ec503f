"""A run of one process that writes down the digest of every version of its weights: what a fleet must come to, too."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax

from jaxagent import loop
from jaxagent.config import flags
from jaxagent.fleet import manifest
from jaxagent.runs import devices
from jaxagent.runs.fleet import sink, trees
from jaxagent.runs.seams import Seams, one_process

FILE = "digests.json"


class Digests:
    """A sink that passes on, and writes down."""

    def __init__(self, inner, path: pathlib.Path, dtype: str):
        self._inner, self._path, self._dtype = inner, path, dtype
        self._found: dict[int, str] = {}

    def publish(self, version, state):
        base = "" if state.frozen is None else manifest.digest(trees.paths(jax.device_get(state.frozen.base)))
        found = sink.content_of(state, self._dtype, base)
        shares = [(one.path, one.dtype, one.shape, map(manifest.chunk_of, one.pieces.values())) for one in found.shares]
        leaves = [manifest.Leaf(*share, tuple(chunks)) for *share, chunks in shares]
        self._found[version] = manifest.manifest("", version, leaves, found.base, found.merged).digest
        self._path.write_text(json.dumps(self._found))
        self._inner.publish(version, state)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def main() -> None:
    cfg = flags.parse_argv(sys.argv).config
    devices.provide(cfg.mesh)

    workdir = pathlib.Path(cfg.workdir)
    dtype = sink.dtype_of(cfg, workdir / "none")

    def connect(*args) -> Seams:
        seams = one_process(*args)
        return dataclasses.replace(seams, sink=Digests(seams.sink, workdir / FILE, dtype))

    loop.run(cfg, connect)


if __name__ == "__main__":
    devices.use_huge_pages()
    main()
