"""Our layout of one array <-> the layout of its Hugging Face tensor, for whole arrays and for slices. NumPy only.

We keep heads as axes of their own and inputs first ([E, H, D]); a checkpoint merges heads and puts outputs first
([H*D, E]). `HFArray.dims` says which of our dimensions each stored dimension merges.
"""

from __future__ import annotations

import math

import numpy as np

from jaxagent.models.params import ArraySpec

Spans = tuple[tuple[int, int], ...]  # (start, stop) of each of our dimensions, the layer axis left out


def stored_slices(array: ArraySpec, spans: Spans) -> tuple[slice, ...]:
    """Which part of the stored tensor holds our `spans`. Padded vocabulary rows are not there: cut off."""
    sizes = array.shape[1:] if array.stacked else array.shape
    slices = []
    for merged, length in zip(array.hf.dims, array.hf.shape, strict=True):
        inner = math.prod(sizes[d] for d in merged[1:])
        if any(spans[d] != (0, sizes[d]) for d in merged[1:]):
            raise ValueError(f"{array.hf.name}: only the first of the merged dimensions {merged} can be sliced")
        start, stop = spans[merged[0]]
        slices.append(slice(min(start * inner, length), min(stop * inner, length)))
    return tuple(slices)


def from_stored(stored: np.ndarray, array: ArraySpec, spans: Spans) -> np.ndarray:
    """The stored part as our block of `spans`; padded vocabulary rows become zeros."""
    order = [d for merged in array.hf.dims for d in merged]
    lengths = [stop - start for start, stop in spans]
    wanted = [math.prod(lengths[d] for d in merged) for merged in array.hf.dims]
    if list(stored.shape) != wanted:
        stored = np.pad(stored, [(0, want - have) for want, have in zip(wanted, stored.shape, strict=True)])
    return stored.reshape([lengths[d] for d in order]).transpose(np.argsort(order))


def to_stored(single: np.ndarray, array: ArraySpec) -> np.ndarray:
    """Our whole single-layer array as stored: contiguous, without padded vocabulary rows."""
    order = [d for merged in array.hf.dims for d in merged]
    merged = single.transpose(order).reshape([math.prod(single.shape[d] for d in dims) for dims in array.hf.dims])
    return np.ascontiguousarray(merged[tuple(slice(0, length) for length in array.hf.shape)])
