"""Digests of weights, computed where they lie, and of a folder's files.

A tree's digest is 128 bits of every bit of every array, its name, dtype, shape and order. Each element's bits are mixed
with its position into four words of 32 bits, and the words are summed: a sum of integers is the same in any order, so
that equal weights have equal digests on every mesh. A change of one element always changes the digest; of several it is
as good as random. It finds accidents, at every step, since nothing leaves the device but the four words. It is no
signature: who can choose weights makes two trees with one digest in a second. Where somebody may have chosen them,
replay compares SHA-256 of all bytes (`replay/stored_results.py`).

`write_digests` leaves one file with the SHA-256 of every other file of a folder; `check_files` compares them, so that a
file that changed after it was written is named when it is read. A few threads read the files at once: the digest itself
runs outside Python's lock.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import pathlib
import zlib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.config import ConfigError

_LANES = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by an element's bytes; 8: as two of 4


def digest(tree: Any) -> str:
    """32 hex digits of a tree of arrays. Call under `jax.set_mesh` of their mesh; compiled once per tree of shapes."""
    return "".join(f"{int(word):08x}" for word in np.asarray(_words(tree)))


@jax.jit
def _words(tree: Any) -> jax.Array:
    """u32[4]."""
    total = jnp.zeros(len(_LANES), jnp.uint32)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"{jax.tree_util.keystr(path, simple=True, separator='.')} {leaf.dtype} {leaf.shape}"
        total += _of_leaf(leaf, zlib.crc32(name.encode()))
    return total


def _of_leaf(leaf: jax.Array, name: int) -> jax.Array:
    """u32[4] of one array."""
    if leaf.dtype == jnp.bool:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    position, stride = jnp.full((), name, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        place = jax.lax.iota(jnp.uint32, bits.shape[axis]) * jnp.uint32(stride % 2**32)
        position = position + jnp.expand_dims(place, [other for other in range(bits.ndim) if other != axis])
        stride *= bits.shape[axis]
    mixed = _mixed(bits ^ _mixed(position))  # for one position another value of the bits is another value of this
    lanes = [jnp.sum(_mixed(mixed ^ jnp.uint32(lane)), dtype=jnp.uint32) for lane in _LANES]
    return _mixed(jnp.stack(lanes) + jnp.uint32(name))


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the result depends on every bit given: MurmurHash3's finaliser."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


FILE = "digests.json"
_THREADS = 4


def write_digests(folder: pathlib.Path, leave_out: Collection[str] = ()) -> None:
    """Writes `folder`/digests.json. `leave_out`: paths inside the folder that go on changing."""
    digests = _digests(folder, [name for name in _files(folder) if name not in leave_out])
    (folder / FILE).write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def file_digests(folder: pathlib.Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, by its path inside."""
    return _digests(folder, _files(folder))


def check_files(folder: pathlib.Path, leave_out: Collection[str] = ()) -> bool:
    """Compares every file with its digest; False where the folder has none. `leave_out` as of `write_digests`.

    Raises ConfigError, which says in a few words, without the folder's name, which file is missing, differs or has no
    digest.
    """
    try:
        expected = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if not isinstance(expected, dict):
            raise ValueError
    except FileNotFoundError:
        return False
    except ValueError:  # not JSON, not UTF-8
        raise ConfigError(f"{FILE} is damaged") from None
    names = set(_files(folder))
    if missing := sorted(set(expected) - names):
        raise ConfigError(f"{missing[0]} is missing")
    if unknown := sorted(names - set(expected) - set(leave_out)):
        raise ConfigError(f"{unknown[0]} has no digest in {FILE}")
    actual = _digests(folder, sorted(expected))
    if different := [name for name in expected if actual[name] != expected[name]]:
        raise ConfigError(f"{different[0]} differs from its digest")
    return True


def _files(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != FILE)


def _digests(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    def digest_of(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(digest_of, names), strict=True))
