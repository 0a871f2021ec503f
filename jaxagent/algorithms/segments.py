"""Reductions over the sequences of a packed row. Axis letters: B packed rows, R targets per row."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp


def sequence_mean(values: jax.Array, mask: jax.Array, sequence: jax.Array) -> jax.Array:
    """The mean over the masked targets of each target's own sequence, at every target of it.

    Args:
      values: f32[B, R]; what stands outside the mask is never read.
      mask: bool[B, R].
      sequence: i32[B, R] which sequence a target belongs to; equal ids stand side by side, in one row.

    Returns:
      f32[B, R]; 0 for a sequence without masked targets.
    """
    _check(values, mask, sequence)
    total = _total(sequence)
    count = total(mask.astype(jnp.float32))
    return total(jnp.where(mask, values, 0.0)) / jnp.maximum(count, 1.0)


def sequence_sum(values: jax.Array, mask: jax.Array, sequence: jax.Array) -> jax.Array:
    """The sum over the masked targets of each target's own sequence, at every target of it; args as above."""
    _check(values, mask, sequence)
    return _total(sequence)(jnp.where(mask, values, 0.0))


def _check(values: jax.Array, mask: jax.Array, sequence: jax.Array) -> None:
    chex.assert_rank([values, mask, sequence], 2)
    chex.assert_equal_shape([values, mask, sequence])
    chex.assert_type([values, mask, sequence], [float, bool, int])


def _total(sequence: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Sums f32[B, R] over sequences by scans along R, which no mesh splits: no sum depends on what else is in a row."""
    first = jnp.ones_like(sequence[:, :1], bool)
    change = sequence[:, 1:] != sequence[:, :-1]
    starts, ends = jnp.concatenate([first, change], 1), jnp.concatenate([change, first], 1)

    def add(a: tuple, b: tuple) -> tuple:  # a running sum that a start sets back
        return jnp.where(b[1], b[0], a[0] + b[0]), a[1] | b[1]

    def latest(a: tuple, b: tuple) -> tuple:  # from right to left: what the last end before held
        return jnp.where(b[1], b[0], a[0]), a[1] | b[1]

    def total(x: jax.Array) -> jax.Array:
        running, _ = jax.lax.associative_scan(add, (x, starts), axis=1)
        return jax.lax.associative_scan(latest, (running, ends), axis=1, reverse=True)[0]

    return total
