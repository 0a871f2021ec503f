"""From hidden states to log-probabilities, without ever holding float32 logits of all tokens at once.

The vocabulary head is the largest array of a small model's training step: [B, R, V]. `token_logprobs` walks over
chunks of tokens and recomputes a chunk's logits in the backward pass. Works with the vocabulary split over "tensor".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxagent.models import sharding
from jaxagent.models.attention import MASKED
from jaxagent.models.layers import contract
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec, round_up

SUM_BLOCK = 64  # tokens whose probabilities are summed together


def logits(params: Params, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """Next-token logits f32[N, V] of hidden states x[N, E]; padded vocabulary rows get -1e30 (probability 0)."""
    return _logits(head(params, spec), spec, x)


def head(params: Params, spec: ModelSpec) -> jax.Array:
    """The output embedding [V, E] in compute dtype, whole over fsdp, split over tensor."""
    weights = params.embed if spec.tie_embeddings else params.head
    return sharding.constrain(weights.astype(spec.compute_dtype), P("tensor", None))


def token_logprobs(
    params: Params, spec: ModelSpec, x: jax.Array, targets: jax.Array, temperature: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target under softmax(logits / temperature), and that distribution's entropy.

    Args:
      params, spec: the model.
      x: compute_dtype[N, E] hidden states at the places before the targets.
      targets: i32[N] token ids.
      temperature: positive scalar; may be traced.

    Returns:
      (log-probs f32[N], entropy f32[N] in nats).
    """
    weights = head(params, spec)

    def chunk(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _score(_logits(weights, spec, x) / temperature, targets)

    n, shards = x.shape[0], sharding.row_shards(x)
    rows = n // shards  # on one device
    length = max(1, spec.logprob_chunk_tokens // shards)
    if rows <= length:
        return chunk(x, targets)
    # Chunk inside each shard, so that every device works on every chunk and no row moves.
    chunks = round_up(rows, length) // length

    def split(a: jax.Array) -> jax.Array:
        a = sharding.split_rows(a, shards, rows)
        a = jnp.pad(a, ((0, 0), (0, chunks * length - rows), *((0, 0),) * (a.ndim - 2)))
        return a.reshape(shards, chunks, length, *a.shape[2:]).swapaxes(0, 1)

    def merge(a: jax.Array) -> jax.Array:
        return sharding.merge_rows(a.swapaxes(0, 1).reshape(shards, chunks * length)[:, :rows])

    logprobs, entropy = lax.map(jax.checkpoint(lambda xs: chunk(*xs)), (split(x), split(targets)))
    return merge(logprobs), merge(entropy)


def block_sums(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[N, V] -> (the same in blocks [N, V / 64, 64] with zeros at the end, the blocks' sums [N, V / 64]).

    The sum of these sums is the engine's and exact scoring's normaliser: one order of additions for both.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % SUM_BLOCK))).reshape(rows, -1, SUM_BLOCK)
    return blocks, blocks.sum(axis=-1)


def row_logprobs(scores: jax.Array, targets: jax.Array, temperature: jax.Array) -> jax.Array:
    """Log-probs f32[N] of targets i32[N] under softmax(scores / temperature), as sampling computes them.

    Args:
      scores: f32[N, V] logits, V whole on each device.
      targets: i32[N].
      temperature: f32[N], positive.
    """
    scaled = scores / temperature[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    _, sums = block_sums(jnp.exp(scaled - peak))
    chosen = jnp.take_along_axis(scaled, targets[:, None], axis=-1)
    return (chosen - peak)[:, 0] - jnp.log(sums.sum(axis=-1))


def _logits(weights: jax.Array, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """f32[..., V] for x[..., E]."""
    scores = contract("...e,ve->...v", x, weights, dtype=jnp.float32)
    if spec.padded_vocab_size == spec.vocab_size:
        return scores
    return jnp.where(jnp.arange(spec.padded_vocab_size) < spec.vocab_size, scores, MASKED)


def _score(scores: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log-prob of the target, entropy), each f32[...], of logits f32[..., V]."""
    shifted = scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    log_total = jnp.log(total)
    # Picked by a masked sum, not by indexing: it stays inside each shard of V, and its gradient is no scatter.
    hit = jnp.arange(scores.shape[-1]) == targets[..., None]
    logprobs = jnp.where(hit, shifted, 0.0).sum(axis=-1) - log_total
    entropy = log_total - (weights * shifted).sum(axis=-1) / total
    return logprobs, entropy
