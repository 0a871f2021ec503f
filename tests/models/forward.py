"""Logits of whole rows, as the tests compare them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.models import attention, logprobs, recurrence, transformer


@functools.partial(jax.jit, static_argnames="spec")
def every_logit(params, spec, tokens, segments=None):
    """f32[B, T, V] with the padded rows, traceable; all are one sequence a row unless `segments` says else."""
    b, t = tokens.shape
    segments = jnp.ones_like(tokens) if segments is None else segments
    positions = jnp.tile(jnp.arange(t, dtype=jnp.int32), b)
    x, _ = transformer.hidden(
        params, spec, tokens.reshape(-1), positions, attention.packed(segments), recur=recurrence.PackedRows(segments)
    )
    return logprobs.logits(params, spec, x).reshape(b, t, -1)


def all_logits(params, spec, tokens: np.ndarray) -> np.ndarray:
    """f32[B, T, V] without the padded vocabulary rows; every row is one sequence."""
    return np.asarray(every_logit(params, spec, tokens))[..., : spec.vocab_size]
