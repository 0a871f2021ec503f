"""What an objective reads of the tokens that the policy is trained on, and what it gives. `objectives.py` has them.

Gradients flow through `logprobs` alone. `old_logprobs` are those of the policy that the ratio r = p / p_old is taken
to: the one that sampled, or the learner's own before the step's first update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxagent import contract
from jaxagent.algorithms.segments import sequence_mean, sequence_sum
from jaxagent.config import ConfigError

# exp(20) is far outside any clip range; the bound keeps values and gradients finite for tokens of weight 0.
_MAX_LOG_RATIO = 20.0
Losses = tuple[jax.Array, jax.Array]


def _by_hand(values: jax.Array) -> jax.Array:
    raise NotImplementedError("tokens made by hand, not by `tokens_of`, have no sequences")


class Tokens(NamedTuple):
    """What an objective may read of the tokens that the policy is trained on, f32[...] each; 0 at all other targets.

    Gradients flow through `logprobs` alone, and through sums of what is made of them. A sequence is one trajectory, and
    lies whole in one row; nothing else of a row, and no group, may be read: what is packed together is chance.
    """

    logprobs: jax.Array  # under the policy that is trained
    old_logprobs: jax.Array  # of the policy that the ratio is taken to
    advantages: jax.Array
    sequence_mean: Callable[[jax.Array], jax.Array] = (
        _by_hand  # f32[...] -> the mean over each token's sequence, no gradient
    )
    sequence_sum: Callable[[jax.Array], jax.Array] = _by_hand  # -> the sum over it, at each of its tokens
    mask: jax.Array | None = None  # bool[...] which targets are such tokens
    behaviour_logprobs: jax.Array | None = None  # as recorded when sampled
    entropy: jax.Array | None = None  # of the policy's distribution, in nats; no gradient
    rewards: jax.Array | None = None  # the episode's; only where the objective's `reads` has "rewards"
    ages: jax.Array | None = None  # versions between the sampler and the step's policy; where it has "ages"

    @property
    def ratio(self) -> jax.Array:
        """f32[...]: r = p / p_old, between e^-20 and e^20."""
        log_ratio = self.logprobs - jax.lax.stop_gradient(self.old_logprobs)
        return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))

    @property
    def lengths(self) -> jax.Array:
        """f32[...]: how many such tokens the sequence of each has."""
        return self.sequence_sum(jnp.ones_like(self.logprobs))


READABLE = ("rewards", "ages")  # what `reads` of an objective may name


def reads_of(objective: Any) -> tuple[str, ...]:
    """What an objective reads of `READABLE`. Raises ConfigError where its `reads` has something else."""
    reads = getattr(objective, "reads", ())
    if not isinstance(reads, (tuple, list)) or not set(reads) <= set(READABLE):
        raise ConfigError(f"{contract.name_of(objective)}.reads is {reads!r:.100}: a tuple of {', '.join(READABLE)}.")
    return tuple(reads)


def tokens_of(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    sequence: jax.Array,
    **more: jax.Array | None,
) -> Tokens:
    """The tokens of packed rows, f32[B, R] each; mask and sequence as of `segments.sequence_sum`."""
    chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask, sequence])  # others would broadcast
    chex.assert_type([logprobs, old_logprobs, advantages, mask, sequence], [float, float, float, bool, int])
    old_logprobs, advantages, more = jax.lax.stop_gradient((old_logprobs, advantages, more))

    def mean(values: jax.Array) -> jax.Array:
        return sequence_mean(jax.lax.stop_gradient(values), mask, sequence)

    def total(values: jax.Array) -> jax.Array:
        return sequence_sum(values, mask, sequence)

    return Tokens(logprobs, old_logprobs, advantages, mean, total, mask, **more)
