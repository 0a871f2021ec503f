"""What each process copies of an array that several share: every byte once, as one process would have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxagent.models import global_arrays


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3)


@pytest.mark.parametrize(
    ("shape", "spec", "dtype", "size", "group"),
    [
        ((6, 64, 128), (None, "fsdp", "tensor"), "bfloat16", 1024, 1 << 20),  # at once
        ((6, 64, 128), (None, "fsdp", "tensor"), "bfloat16", 1024, 1 << 14),  # in groups of two pieces a device
        ((1000, 64), ("tensor", "fsdp"), "float32", 4096, 1),  # its first axis is split, too
        ((9999,), (None,), "float32", 256, 1),  # on every device, and the last piece is smaller
        ((7, 8, 10), (None, "fsdp", "tensor"), "float32", 256, 1),  # rows that are no multiple of a piece
        ((2, 4, 4096), (None, None, "tensor"), "bfloat16", 1024, 1),  # a row is many groups
        ((3, 4, 8), (None, "fsdp", None), "float32", 4096, 1 << 20),  # less than a piece
    ],
)
def test_the_pieces_of_all_devices_are_the_bytes_of_the_array(mesh, shape, spec, dtype, size, group):
    host = np.random.default_rng(0).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    array = jax.device_put(host, NamedSharding(mesh, jax.P(*spec)))
    found = global_arrays.pieces(array, size, size % 7, group)
    expected = [host.tobytes()[start : start + size] for start in range(0, host.nbytes, size)]
    assert [bytes(found[number]) for number in sorted(found)] == expected and max(found) == len(expected) - 1


def test_no_device_has_more_than_its_part(mesh, monkeypatch):
    """Each piece lies on one device; with 75 pieces on eight devices none has more than ten, and another has five."""
    array = jax.device_put(np.zeros((6, 50, 64), np.float32), NamedSharding(mesh, jax.P(None, None, "tensor")))
    laid_out, parts = global_arrays._laid_out, []

    def seen(*of):
        found = laid_out(*of)
        parts.extend(np.asarray(part.data).shape[0] for part in found.addressable_shards)
        return found

    monkeypatch.setattr(global_arrays, "_laid_out", seen)
    assert list(global_arrays.pieces(array, 1024)) == list(range(75)) and parts == [10] * 8
    assert list(global_arrays.pieces(array, 1024, turn=2))[:20] == [*range(60, 75), *range(5)]
