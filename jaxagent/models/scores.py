"""Functions of whole next-token distributions, over chunks of tokens so that their logits never exist all at once.

`map_scores` is the machinery: one or two models' hidden states in, any function of their logits out, differentiable.
`top_logprobs` is what scoring another model's samples needs. Axis letters: N tokens, E embed, V vocabulary, K top-k
tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxagent.models import logprobs, sharding
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec

Tree = Any  # a pytree of arrays


Side = tuple[Params, ModelSpec, jax.Array]  # one model's part in a comparison: its hidden states, compute_dtype[N, E]


class TopLogprobs(NamedTuple):
    """Log-probs of N positions."""

    logprobs: jax.Array  # f32[N] of the targets
    top_ids: jax.Array  # i32[N, K] the likeliest first
    top_logprobs: jax.Array  # f32[N, K]
    candidate_logprobs: jax.Array  # f32[N, C]


@jax.named_scope("map_scores")
def map_scores(function: Callable[..., Tree], sides: Sequence[Side], *rest: jax.Array) -> Tree:
    """`function(*logits, *rest)` of every token, chunk by chunk; the backward pass computes the logits again.

    Args:
      function: takes one f32[..., V] per side (V whole on each device) and its part of `rest`; returns arrays of
        the same leading axes.
      sides: the models, of the same N. All are cut to the smallest vocabulary.
      rest: [N, ...] arrays.

    Returns:
      What `function` gives, with the leading axis N.
    """
    specs, xs = [spec for _, spec, _ in sides], [x for *_, x in sides]
    chex.assert_rank(xs, 2)
    chex.assert_equal_shape_prefix([*xs, *rest], 1)
    split, merge, _ = logprobs.chunked(xs[0], min(spec.logprob_chunk_tokens for spec in specs))
    vocab = min(spec.vocab_size for spec in specs)
    axes = sharding.row_axes(xs[0])
    # Once, not per chunk: in compute dtype, whole over fsdp.
    heads = [logprobs.head(params, spec) for params, spec, _ in sides]

    @jax.checkpoint
    def chunk(heads: list[jax.Array], xs: list[jax.Array], rest: list[jax.Array]) -> Tree:
        scores = []
        for spec, head, x in zip(specs, heads, xs, strict=True):
            logits = sharding.constrain(logprobs.head_logits(head, spec, x), P(axes, None, None))
            scores.append(logits[..., :vocab])
        return function(*scores, *rest)

    parts = jax.lax.map(
        lambda part: chunk(heads, *part), ([split(x) for x in xs], [split(jnp.asarray(a)) for a in rest])
    )
    return jax.tree.map(merge, parts)


def top_logprobs(
    params: Params,
    spec: ModelSpec,
    x: jax.Array,
    targets: jax.Array,
    candidates: jax.Array,
    k: int,
    temperature: jax.Array | float,
) -> TopLogprobs:
    """Log-probs of targets, of the k most likely tokens and of given candidates, under softmax(logits / temperature).

    Args:
      params, spec: the model.
      x: compute_dtype[N, E] hidden states at the places before the targets.
      targets: i32[N].
      candidates: i32[N, C]; C may be 0.
      k: at least 1, at most V.
      temperature: positive.
    """
    chex.assert_rank([x, targets, candidates], [2, 1, 2])
    chex.assert_type([x, targets, candidates], [float, int, int])

    def score(scores: jax.Array, targets: jax.Array, candidates: jax.Array) -> TopLogprobs:
        logp = jax.nn.log_softmax(scores / temperature)
        top, ids = jax.lax.top_k(logp, k)
        of_target = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
        return TopLogprobs(of_target, ids, top, jnp.take_along_axis(logp, candidates, axis=-1))

    return map_scores(score, [(params, spec, x)], targets, candidates)
