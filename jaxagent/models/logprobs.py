"""From hidden states to log-probabilities, without ever holding float32 logits of all tokens at once.

The vocabulary head is the largest array of a small model's training step: [B, R, V]. `token_scores` walks over
chunks of tokens, best so small that their logits stay in cache, and recomputes them in the backward pass. Works with
the vocabulary split over "tensor".
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxagent.models import gpu_products, kernels, sharding
from jaxagent.models.layers import MASKED, Int8Array, contract
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec

SUM_BLOCK = 64  # tokens whose probabilities are summed together


def logits(params: Params, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """Next-token logits f32[N, V] of hidden states x[N, E]; padded vocabulary rows get -1e30 (probability 0)."""
    return head_logits(head(params, spec, x), spec, x)


def head(params: Params, spec: ModelSpec, x: jax.Array | None = None) -> jax.Array:
    """The output embedding [V, E] in compute dtype, whole over fsdp, split over tensor; of int8 once `x` is there."""
    weights = params.embed if spec.tie_embeddings else params.head
    weights = weights.after(x) if isinstance(weights, Int8Array) else weights
    return sharding.constrain(weights.astype(spec.compute_dtype), P("tensor", None))


@jax.named_scope("token_scores")
def token_scores(
    params: Params,
    spec: ModelSpec,
    x: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float,
    live: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of each target under softmax(logits / temperature), that distribution's entropy, and log Z.

    Args:
      params, spec: the model.
      x: compute_dtype[N, E] hidden states at the places before the targets.
      targets: i32[N] token ids.
      temperature: positive scalar; may be traced.
      live: bool[N], which targets count. Chunks are then made of those first, and those without any are not computed;
        the results of the other targets are unspecified.

    Returns:
      (log-probs f32[N], entropy f32[N] in nats, log Z f32[N]: the logarithm of the sum of exp(logits / temperature)).
    """
    chex.assert_rank(x, 2)
    chex.assert_shape([targets] if live is None else [targets, live], x.shape[:1])
    chex.assert_type([x, targets], [float, int])
    split, merge, length = chunked(x, spec.logprob_chunk_tokens)
    shards = sharding.row_shards(x)
    temperature, live_chunks = jnp.asarray(temperature, jnp.float32), None
    if live is not None and length * shards < len(x):
        live = sharding.split_rows(live, shards, len(x) // shards)
        order = jnp.argsort(~live, axis=1, stable=True)
        x, targets = (_permuted(a, order) for a in (x, targets))
        live_chunks = -(-live.sum(axis=1).max() // length)
    scores = [merge(a) for a in _score(spec, head(params, spec), split(x), split(targets), temperature, live_chunks)]
    return tuple(scores) if live_chunks is None else tuple(_permuted(a, jnp.argsort(order, axis=1)) for a in scores)


def chunked(x: jax.Array, most: int) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array], int]:
    """How the N rows of x[N, ...] are cut into chunks of `most` or fewer, over all devices.

    Inside each shard, so that every device works on every chunk and no row moves.

    Returns:
      [N, ...] -> [chunks, shards, rows, ...], filled up; the inverse; and the rows of a chunk on one device.
    """
    shards = sharding.row_shards(x)
    rows = len(x) // shards  # on one device
    chunks = -(-rows // max(1, most // shards))
    length = -(-rows // chunks)

    def split(a: jax.Array) -> jax.Array:
        a = sharding.split_rows(a, shards, rows)
        a = jnp.pad(a, ((0, 0), (0, chunks * length - rows), *((0, 0),) * (a.ndim - 2)))
        return a.reshape(shards, chunks, length, *a.shape[2:]).swapaxes(0, 1)

    def merge(a: jax.Array) -> jax.Array:
        return sharding.merge_rows(a.swapaxes(0, 1).reshape(shards, chunks * length, *a.shape[3:])[:, :rows])

    return split, merge, length


def _permuted(a: jax.Array, order: jax.Array) -> jax.Array:
    """a[N, ...] with the rows of each of S shards in another order, i32[S, N / S]."""
    a = sharding.split_rows(a, *order.shape)
    return sharding.merge_rows(jnp.take_along_axis(a, order.reshape(*order.shape, *(1,) * (a.ndim - 2)), axis=1))


def block_sums(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[N, V] -> (the same in blocks [N, V / 64, 64] with zeros at the end, the blocks' sums [N, V / 64]).

    The sum of these sums is the engine's and exact scoring's normaliser: one order of additions for both.
    """
    chex.assert_rank(weights, 2)
    chex.assert_type(weights, float)
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % SUM_BLOCK))).reshape(rows, -1, SUM_BLOCK)
    return blocks, blocks.sum(axis=-1)


@jax.named_scope("row_logprobs")
def row_logprobs(scores: jax.Array, targets: jax.Array, temperature: jax.Array) -> jax.Array:
    """Log-probs f32[N] of targets i32[N] under softmax(scores / temperature), as sampling computes them.

    Args:
      scores: f32[N, V] logits, V whole on each device.
      targets: i32[N].
      temperature: f32[N], positive.
    """
    chex.assert_rank(scores, 2)
    chex.assert_shape([targets, temperature], scores.shape[:1])
    chex.assert_type([scores, targets, temperature], [float, int, float])
    if kernels.products(kernels.platform(), exact=True).name == "pinned":  # in fast numerics, too: one pass, not five
        return gpu_products.row_logprobs(scores, targets, temperature)
    scaled = scores / temperature[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    _, sums = block_sums(jnp.exp(scaled - peak))
    chosen = jnp.take_along_axis(scaled, targets[:, None], axis=-1)
    return (chosen - peak)[:, 0] - jnp.log(sums.sum(axis=-1))


@jax.named_scope("head")
def head_logits(weights: jax.Array, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """f32[..., V] for x[..., E]."""
    scores = contract("...e,ve->...v", x, weights, dtype=jnp.float32)
    if spec.padded_vocab_size == spec.vocab_size:
        return scores
    return jnp.where(jnp.arange(spec.padded_vocab_size) < spec.vocab_size, scores, MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(
    spec: ModelSpec,
    weights: jax.Array,
    x: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    live_chunks: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log-prob of the target, entropy, log Z), each f32[C, S, N], of C chunks of hidden states x[C, S, N, E].

    Only the first `live_chunks` i32[] chunks are computed, where given; the others get zeros. Differentiated by hand,
    in `weights` and `x`: given the normalisers, a logit's gradient is one elementwise formula.
    """
    return _score_forward(spec, weights, x, targets, temperature, live_chunks)[0]


def _score_forward(
    spec: ModelSpec,
    weights: jax.Array,
    x: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    live_chunks: jax.Array | None,
):
    only = x.shape[0] == 1  # then its logits are kept: nothing is saved by computing them again

    def chunk(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
        x, targets = xs
        scores = head_logits(weights, spec, x) / temperature
        top = scores.max(axis=-1)
        shifted = scores - top[..., None]
        unnormalised = jnp.exp(shifted)
        total = unnormalised.sum(axis=-1)
        # Picked by a masked sum, not by indexing: it stays inside each shard of V.
        picked = jnp.where(_hit(spec, targets), shifted, 0.0).sum(axis=-1)
        entropy = jnp.log(total) - (unnormalised * shifted).sum(axis=-1) / total
        return picked - jnp.log(total), entropy, top + jnp.log(total), scores if only else None

    def chunk_if_used(xs: tuple) -> tuple[jax.Array | None, ...]:
        def unused(xs: tuple) -> tuple[jax.Array | None, ...]:
            return (*(jnp.zeros_like(xs[1], jnp.float32),) * 3, None)

        return lax.cond(xs[0] < live_chunks, chunk, unused, xs[1:])

    if live_chunks is None:
        logprobs, entropy, log_total, scores = lax.map(chunk, (x, targets))
    else:
        logprobs, entropy, log_total, scores = lax.map(chunk_if_used, (jnp.arange(len(x)), x, targets))
    return (logprobs, entropy, log_total), (weights, x, targets, temperature, live_chunks, log_total, entropy, scores)


def _score_backward(spec: ModelSpec, residuals: tuple[jax.Array | None, ...], gradients: tuple[jax.Array, ...]):
    weights, x, targets, temperature, live_chunks, log_total, entropy, scores = residuals
    rows = jax.typeof(x).sharding.spec[1] if sharding.in_mesh() else None

    def chunk(to_weights: jax.Array, xs: tuple) -> tuple[jax.Array, jax.Array]:
        x, targets, scores, *per_target = xs
        log_total, entropy, to_logprob, to_entropy, to_log_z = (a[..., None] for a in per_target)
        scores = head_logits(weights, spec, x) / temperature if scores is None else scores
        logprobs = scores - log_total
        to_scores = jnp.where(_hit(spec, targets), to_logprob, 0.0)
        to_scores -= jnp.exp(logprobs) * ((to_logprob - to_log_z) + to_entropy * (logprobs + entropy))
        to_scores = (to_scores / temperature).astype(x.dtype)
        # [E, V], not [V, E]: the product then transposes x, not the many times larger gradient of the logits.
        to_weights += contract("sne,snv->ev", x, to_scores, sharding.out(None, "tensor"), jnp.float32)
        return to_weights, contract("snv,ve->sne", to_scores, weights, sharding.out(rows, None, None))

    none = sharding.constrain(jnp.zeros(weights.shape[::-1], jnp.float32), P(None, "tensor"))
    xs = (x, targets, scores, log_total, entropy, *gradients)
    if live_chunks is None:
        to_weights, to_x = lax.scan(chunk, none, xs)
    else:

        def chunk_if_used(to_weights: jax.Array, xs: tuple) -> tuple[jax.Array, jax.Array]:
            skip = lambda to_weights, xs: (to_weights, jnp.zeros_like(xs[0]))  # noqa: E731
            return lax.cond(xs[0] < live_chunks, chunk, skip, to_weights, xs[1:])

        to_weights, to_x = lax.scan(chunk_if_used, none, (jnp.arange(len(x)), *xs))
    return to_weights.T.astype(weights.dtype), to_x, None, jnp.zeros_like(temperature), None


_score.defvjp(_score_forward, _score_backward)


def _hit(spec: ModelSpec, targets: jax.Array) -> jax.Array:
    """bool[..., V], True at the target."""
    return jnp.arange(spec.padded_vocab_size) == targets[..., None]
