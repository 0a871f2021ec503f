"""Attention on NVIDIA GPUs: over pages of keys, and writing those pages, by kernels of our own (Pallas, through
Triton), and within packed training rows by tokamax's flash attention. And tokamax's product of rows with their
experts' matrices.

The arithmetic of `attention.attend_pages`, in parts: a sequence's keys are cut into parts of `PART` tokens from its
first one on. A program of the grid takes some parts of one sequence and one key head, each page after page with a
running softmax, and a second kernel puts a row's parts together in their order. Which program takes which part changes
nothing, so what a row gets depends on its own sequence alone, while few long sequences still keep the whole chip busy.
The engine's cache and the trainer's packed rows can share the kernels (docs/design.md, "Exact numerics").

In packed rows a query's keys are those from the first of its own segment to itself, and blocks of keys outside are
skipped. tokamax exports neither the operation's object nor its mask, hence the private import.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxagent.models import gpu_calls
from jaxagent.models.layers import MASKED

PART = 256  # keys of one part of a sequence, or one page where pages are longer; part of the exact numerics
_LEAST = 16  # rows of the smallest tensor-core product, and its depth
_MOST = {2: 64, 4: 16}  # rows of one program's, by the bytes of a number: larger ones do not fit into registers
_STAGES = 3  # pages of keys and values that are on their way to a program at a time
_PROGRAMS = 1024  # that fill a chip, several to each of its some hundred processors


def supports_pages(head_dim: int, page_tokens: int) -> bool:
    """Whether the kernels have tiles for these sizes: powers of two, 16 or more."""
    return all(size >= _LEAST and size & (size - 1) == 0 for size in (head_dim, page_tokens))


def attend_pages(
    q: jax.Array,
    positions: jax.Array,
    page_tokens: int,
    keys: jax.Array,
    values: jax.Array,
    blocks: jax.Array,
    starts: jax.Array | None,
) -> jax.Array:
    """As `attention.attend_pages`, by Triton kernels.

    Rows that share a sequence read its pages together, as the rows of one product.
    """
    n, h, d = q.shape
    kv_heads, group, share = keys.shape[1], h // keys.shape[1], n // len(blocks)
    while share % 2 == 0 and share * group > _MOST[q.dtype.itemsize]:
        share //= 2
    m = n // share
    pages = max(1, PART // page_tokens)  # of one part
    longest = blocks.shape[1] if starts is None else keys.shape[3] // page_tokens
    parts, queries = pl.cdiv(longest, pages), share * group
    workers = min(parts, max(1, _PROGRAMS // (m * kv_heads)))
    tables = {"of_table": m // len(blocks), "page_tokens": page_tokens, "pages": pages, "moving": starts is not None}
    sizes = {"group": group, "queries": queries, "rows": max(_LEAST, pl.next_power_of_2(queries))}
    index = [positions.reshape(m, share), blocks, *([] if starts is None else [starts])]
    in_parts = (m, kv_heads, parts, queries)
    of_parts = gpu_calls.call(
        q,
        *index,
        keys,
        values,
        kernel=_paged_attention,
        grid=(workers, kv_heads, m),
        outputs=((in_parts, jnp.float32), (in_parts, jnp.float32), ((*in_parts, d), jnp.float32)),
        settings=tuple((tables | sizes).items()),
        stages=_STAGES,
    )
    return gpu_calls.call(
        index[0],
        *of_parts,
        kernel=_paged_attention_parts,
        grid=(kv_heads, m),
        outputs=(((n, h, d), q.dtype),),
        settings=(("tokens", pages * page_tokens), *sizes.items()),
        stages=_STAGES,
    )[0]


def write(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, page: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `attention.write_pages`; of rows with the same place any one wins."""
    outputs, same = ((keys.shape, keys.dtype), (values.shape, values.dtype)), ((4, 0), (5, 1))
    arrays = (page, offset, k, v, keys, values)
    return tuple(gpu_calls.call(*arrays, kernel=_write_pages, grid=k.shape[:2], outputs=outputs, in_place=same))


def _paged_attention(
    q_ref, positions_ref, blocks_ref, *refs, of_table: int, page_tokens: int, pages: int, moving: bool,
    group: int, queries: int, rows: int,
) -> None:  # fmt: skip
    """Program (worker, head, run of rows): the parts worker, worker + workers, ... of its sequence, each by itself."""
    starts_ref = refs[0] if moving else None
    keys_ref, values_ref, peak_ref, total_ref, acc_ref = refs[-5:]
    worker, head, run = (pl.program_id(axis) for axis in range(3))
    sequence = run // of_table
    share = queries // group
    folded, live = jnp.arange(rows), jnp.arange(rows) < queries
    row, column = folded // group, head * group + folded % group
    lane = jnp.arange(q_ref.shape[2])[None]
    whole = jnp.broadcast_to(live[:, None], (rows, q_ref.shape[2]))
    q = gpu_calls.load(q_ref.at[(run * share + row)[:, None], column[:, None], lane], whole, 0.0)
    q = q * jnp.asarray(q.shape[1] ** -0.5, q.dtype)
    position = gpu_calls.load(positions_ref.at[run, row], live, 0)
    last_page = jnp.max(position) // page_tokens
    last = blocks_ref.shape[1] - 1
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def page(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, acc = carry
        block = blocks_ref[sequence, jnp.minimum(j, last)]
        columns = pl.ds(starts_ref[sequence] + j * page_tokens, page_tokens) if moving else slice(None)
        keys, values = keys_ref[block, head, :, columns], values_ref[block, head, columns, :]
        scores = dot(q, keys.astype(q.dtype))
        visible = (j * page_tokens + jnp.arange(page_tokens))[None] <= position[:, None]
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        weights = jnp.where(visible, jnp.exp(scores - new_peak[:, None]), 0.0)
        keep = jnp.exp(peak - new_peak)
        out = dot(weights.astype(q.dtype), values.astype(q.dtype))
        return new_peak, total * keep + weights.sum(axis=1), acc * keep[:, None] + out

    def part(turn: jax.Array, _: None) -> None:
        i = worker + turn * pl.num_programs(0)
        until = jnp.minimum((i + 1) * pages, last_page + 1)
        peak, total, acc = jax.lax.fori_loop(i * pages, until, page, _nothing_seen(q.shape))
        gpu_calls.store(peak_ref.at[run, head, i, folded], peak, live)
        gpu_calls.store(total_ref.at[run, head, i, folded], total, live)
        gpu_calls.store(acc_ref.at[run, head, i, folded[:, None], lane], acc, whole)

    turns = pl.cdiv(last_page // pages + 1 - worker, pl.num_programs(0))
    jax.lax.fori_loop(0, turns, part, None)


def _paged_attention_parts(
    positions_ref, peak_ref, total_ref, acc_ref, out_ref, *, tokens: int, group: int, queries: int, rows: int
):
    """Program (head, run of rows): the parts in their order; one that a row does not see adds 0."""
    head, run = pl.program_id(0), pl.program_id(1)
    share = queries // group
    folded, live = jnp.arange(rows), jnp.arange(rows) < queries
    row, column = folded // group, head * group + folded % group
    last = jnp.max(gpu_calls.load(positions_ref.at[run, row], live, 0)) // tokens
    lane = jnp.arange(out_ref.shape[2])[None]
    whole = jnp.broadcast_to(live[:, None], (rows, out_ref.shape[2]))

    def part(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, acc = carry
        own_peak = gpu_calls.load(peak_ref.at[run, head, i, folded], live, MASKED)
        own_total = gpu_calls.load(total_ref.at[run, head, i, folded], live, 1.0)
        own_acc = gpu_calls.load(acc_ref.at[run, head, i, folded[:, None], lane], whole, 0.0)
        new_peak = jnp.maximum(peak, own_peak)
        keep, scale = jnp.exp(peak - new_peak), jnp.exp(own_peak - new_peak)
        return new_peak, total * keep + own_total * scale, acc * keep[:, None] + own_acc * scale[:, None]

    _, total, acc = jax.lax.fori_loop(0, last + 1, part, _nothing_seen((rows, out_ref.shape[2])))
    out = (acc / total[:, None]).astype(out_ref.dtype)
    gpu_calls.store(out_ref.at[(run * share + row)[:, None], column[:, None], lane], out, whole)


def _nothing_seen(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Peak and total of each row, and its weighted sum, of a running softmax that begins."""
    return jnp.full(shape[:1], MASKED, jnp.float32), jnp.zeros(shape[:1], jnp.float32), jnp.zeros(shape, jnp.float32)


def _write_pages(page_ref, offset_ref, k_ref, v_ref, keys_in, values_in, keys_ref, values_ref) -> None:
    """Program (row, head)."""
    del keys_in, values_in  # the same memory as what is written
    row, head = pl.program_id(0), pl.program_id(1)
    page, offset = page_ref[row], offset_ref[row]
    there = jnp.broadcast_to(page < keys_ref.shape[0], k_ref.shape[2:])
    gpu_calls.store(keys_ref.at[page, head, :, offset], k_ref[row, head].astype(keys_ref.dtype), there)
    gpu_calls.store(values_ref.at[page, head, offset], v_ref[row, head].astype(values_ref.dtype), there)


def attend(segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention inside segments, differentiable.

    Args:
      segments: i32[B, T], equal where tokens belong together, and those lie side by side.
      q: bf16[B, T, H, D]; k, v: bf16[B, T, K, D].

    Returns:
      bf16[B, T, H, D].
    """
    from tokamax._src.ops.attention.base import Mask

    return _flash_attention()(q, k, v, mask=Mask(k_start=first_of_segment(segments)[:, None], is_causal=True))


def attend_between(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Attention to the keys first..last of each query, differentiable; see `blockwise.attend`, also for the shapes."""
    from tokamax._src.ops.attention.base import Mask

    return _flash_attention()(q, k, v, mask=Mask(k_start=first[:, None], k_end=last[:, None] + 1))


def first_of_segment(segments: jax.Array) -> jax.Array:
    """i32[B, T]: where the segment of each token begins."""
    column = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return jax.lax.cummax(jnp.where(begins, column, 0), axis=1)


def grouped_product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """[M, N]: rows x bf16[M, K], which lie group by group, times their groups' matrices w[G, K, N]; differentiable.

    Rows behind the last group, of which `sizes` i32[G] knows nothing, get whatever was in memory.
    """
    import tokamax

    return tokamax.ragged_dot(x, w, sizes, preferred_element_type=x.dtype, implementation=("mosaic", "triton"))


def _flash_attention():
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    return PallasMosaicGpuFlashAttention()
