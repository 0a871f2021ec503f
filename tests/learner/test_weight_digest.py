"""A digest that every bit of the weights moves, and no mesh does."""

import hashlib
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import MeshConfig
from jaxagent.learner.weight_digest import digest
from jaxagent.models.sharding import make_mesh
from jaxagent.replay.stored_results import sha256
from tests.replay import forging

KINDS = ("float32", "bfloat16", "int8", "int32", "bool")


def tree() -> dict:
    rng = np.random.default_rng(0)
    arrays = {kind: jnp.asarray(rng.normal(size=(4, 8)) * 3, kind) for kind in KINDS}
    return arrays | {"deep": (jnp.float32(1.5), jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32))}


def flipped(array: jax.Array, place: int, bit: int) -> jax.Array:
    raw = np.array(array).reshape(-1)
    raw.view(f"u{raw.itemsize}")[place] ^= 1 << bit
    return jnp.asarray(raw.reshape(array.shape))


def test_one_flipped_bit_anywhere_changes_it():
    given = tree()
    was, seen = digest(given), set()
    for kind, bits in (("float32", 32), ("bfloat16", 16), ("int8", 8)):
        for place in (0, 17, 31):
            for bit in range(bits):
                seen.add(digest(given | {kind: flipped(given[kind], place, bit)}))
    assert len(seen) == 3 * (32 + 16 + 8) and was not in seen  # no two alike
    assert len(was) == 32 and digest(tree()) == was


def test_names_order_shapes_and_dtypes_count():
    zeros = jnp.zeros((2, 3), jnp.float32)
    trees = [
        {"a": zeros}, {"b": zeros}, {"a": zeros.T}, {"a": zeros.astype(jnp.int32)}, {"a": zeros, "b": zeros},
        {"a": zeros[:1]}, {"a": zeros.at[0, 1].set(1)}, {"a": zeros.at[1, 0].set(1)}, {"a": -zeros},
    ]  # fmt: skip
    assert len({digest(each) for each in trees}) == len(trees) == len({sha256(each) for each in trees})


def test_weights_that_somebody_chose_have_the_same_digest_and_another_sha256():
    """Two elements exchanged, and all of them in another order, each with the bits that its new place asks for."""
    leaf = np.random.default_rng(0).normal(size=(512, 128)).astype(np.float32)
    swapped, moved = leaf.copy(), leaf.copy()
    forging.colliding(swapped, "w")
    places = forging.places(leaf, "w")
    order, bits = np.random.default_rng(1).permutation(leaf.size), leaf.reshape(-1).view(np.uint32)
    moved.reshape(-1).view(np.uint32)[order] = bits ^ places ^ places[order]
    trees = [{"w": each} for each in (leaf, swapped, moved)]
    assert (swapped != leaf).sum() == 2 and (moved != leaf).mean() > 0.9
    assert len({digest(each) for each in trees}) == 1 and len({sha256(each) for each in trees}) == 3
    named = [[["w"], "float32", [512, 128], [hashlib.sha256(leaf.tobytes()).hexdigest()]]]
    assert (
        sha256({"w": jnp.asarray(leaf)})
        == hashlib.sha256(json.dumps(named, separators=(",", ":")).encode()).hexdigest()
    )


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 2), (1, 1, 4)])
def test_every_mesh_gives_the_same(sizes):
    data, fsdp, tensor = sizes
    given, mesh = tree(), make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor, context=1))
    split = jax.device_put(given["float32"], jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))
    whole = jax.device_put(given["deep"], jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        found = [of({"float32": split, "deep": whole}) for of in (digest, sha256)]
    assert found == [of({name: given[name] for name in ("float32", "deep")}) for of in (digest, sha256)]


def test_it_is_what_it_says():
    """Number by number in Python, of one array: a record of an old run must stay comparable."""

    def mixed(x):
        x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
        x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
        return x ^ x >> 16

    values = np.arange(6, dtype=np.float32)
    name, lanes = zlib.crc32(b"w float32 (2, 3)"), (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
    sums = [0, 0, 0, 0]
    for place, bits in enumerate(values.view(np.uint32).tolist()):
        element = mixed(bits ^ mixed((name + place) % 2**32))
        sums = [(total + mixed(element ^ lane)) % 2**32 for total, lane in zip(sums, lanes, strict=True)]
    expected = "".join(f"{mixed((total + name) % 2**32):08x}" for total in sums)
    assert digest({"w": jnp.asarray(values.reshape(2, 3))}) == expected == "716191b7de53e0ab719802c6ab6f6842"
