"""Drawing the next token, and the log-prob of the distribution it was really drawn from.

logits f32[S,V] + one uniform number per slot -> tokens i32[S], logprobs f32[S]. Everything is per slot: greedy and
sampled requests of any temperature and truncation share one batch.

One uniform number and the inverse CDF instead of V Gumbel numbers: V random bits per token would cost more than the
model does for a small policy on a CPU. Truncation (top-k, top-p, min-p) finds its threshold by bisection over the bits
of the probabilities, not by sorting: 31 passes over [S,V], exact, several times cheaper than a sort.
"""

from __future__ import annotations

import hashlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.config import LEAST_TEMPERATURE
from jaxagent.models.logprobs import SUM_BLOCK, block_sums, row_logprobs


@flax.struct.dataclass
class SamplingParams:
    """Per-slot settings; the fields of `config.SamplingConfig` as arrays."""

    temperature: jax.Array  # f32[S]  below LEAST_TEMPERATURE = greedy
    top_p: jax.Array  # f32[S]  1 = off
    top_k: jax.Array  # i32[S]  0 = off
    min_p: jax.Array  # f32[S]  0 = off


def request_key(seed: int, task_id: str, sample: int, turn: int, conversation: int = 0) -> np.ndarray:
    """u32[2] key of one turn of one of an attempt's conversations. Slot, arrival and batch have no part in it."""
    text = f"{seed}\0{task_id}\0{sample}\0{turn}" + (f"\0{conversation}" if conversation else "")
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), "<u4")


def uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """f32[S] in [0, 1): one number per slot from its key u32[S,2] and the token's position i32[S]."""

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(draw)(keys, positions)


@jax.named_scope("sample")
def sample(
    logits: jax.Array, uniform: jax.Array, params: SamplingParams, truncated: bool
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per slot.

    Order of the settings: temperature, then top-k, then top-p of what top-k left, then min-p relative to the most
    likely token. Tokens that tie at a threshold are all kept.

    Args:
      logits: f32[S,V]; -inf excludes a token.
      uniform: f32[S] in [0, 1).
      params: per-slot settings.
      truncated: static; False leaves out the truncation passes, for batches in which no slot truncates.

    Returns:
      tokens i32[S], and f32[S] log-probs under the tempered, truncated and renormalised distribution. A greedy slot
      (temperature below
      LEAST_TEMPERATURE) takes the largest logit and reports its log-prob at temperature 1 without truncation.
    """
    greedy = params.temperature < LEAST_TEMPERATURE
    scaled = logits / jnp.where(greedy, 1.0, params.temperature)[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - peak)  # unnormalised probabilities, at most 1
    if truncated:
        truncated_weights = truncate(weights, params)
        weights = jnp.where(greedy[:, None], weights, truncated_weights)
    drawn = inverse_cdf(weights, uniform)
    # The first of the largest: argmax, but in the form of a plain minimum, which XLA vectorises on a CPU.
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = jnp.min(jnp.where(scaled == peak, index, logits.shape[-1] - 1), axis=-1)
    tokens = jnp.where(greedy, largest, drawn)
    if truncated:
        logits = jnp.where(weights > 0, logits, -jnp.inf)
    # Behind a barrier: fused with the sampler, `scaled` is rounded otherwise in one place than in another, and at a
    # small temperature one rounding is several nats.
    fresh, chosen = jax.lax.optimization_barrier((logits, tokens))
    return tokens, row_logprobs(fresh, chosen, jnp.where(greedy, 1.0, params.temperature))


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws an index in proportion to its weight: f32[S,V], f32[S] -> i32[S].

    Two levels, sums of blocks and then inside one block, so that the cumulative sums are short.
    """
    blocks, sums = block_sums(weights)
    block, rest = _first_past(sums, uniform * sums.sum(axis=-1))
    inside, _ = _first_past(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], rest)
    return block * SUM_BLOCK + inside


def _first_past(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index whose cumulative weight exceeds the target [S], and the target less what stands before it."""
    cumulative = jnp.cumsum(weights, axis=-1)
    index = jnp.sum(cumulative <= target[:, None], axis=-1, dtype=jnp.int32)
    # Rounding may leave the target past the last sum, or on an empty index: never choose a weight of 0.
    indices = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(weights > 0, indices, 0), axis=-1)
    index = jnp.minimum(index, last)
    before = jnp.take_along_axis(cumulative - weights, index[:, None], axis=-1)[:, 0]
    return index, target - before


def truncate(weights: jax.Array, params: SamplingParams) -> jax.Array:
    """f32[S,V] weights in [0, 1] -> the same with the excluded tokens at 0."""
    vocab = weights.shape[-1]
    top_k = jnp.where(params.top_k > 0, params.top_k, vocab).astype(jnp.float32)
    weights = jnp.where(weights >= _threshold(weights, jnp.ones_like(weights), top_k), weights, 0.0)
    # A target of 0 would let every threshold pass; with top-p off it is ignored, since rounding may miss the sum.
    target = jnp.maximum(params.top_p * weights.sum(axis=-1), 1e-30)
    nucleus = jnp.where(params.top_p[:, None] < 1, _threshold(weights, weights, target), 0.0)
    floor = params.min_p[:, None] * jnp.max(weights, axis=-1, keepdims=True)
    return jnp.where((weights >= nucleus) & (weights >= floor), weights, 0.0)


def _threshold(values: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """Largest f32 t (as [S,1]) such that the mass of the values >= t is at least the target [S].

    Non-negative floats order like their bits, so 31 halvings over the bits find t exactly.
    """

    def halve(i: jax.Array, low: jax.Array) -> jax.Array:
        middle = low | (jnp.int32(1) << (30 - i))
        t = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(values >= t, mass, 0.0), axis=-1, keepdims=True) >= target[:, None]
        return jnp.where(enough, middle, low)

    bits = jax.lax.fori_loop(0, 31, halve, jnp.zeros_like(target, jnp.int32)[:, None])
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
