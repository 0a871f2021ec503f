"""What an objective reads of the tokens that the policy is trained on, and the KL divergence to a frozen reference.

`objectives.py` has the objectives. Gradients flow through `logprobs` alone. `old_logprobs` are those of the policy that
the ratio r = p / p_old is taken to: the one that sampled, or the learner's own before the step's first update.

KL is estimated per token, from the sampled token alone. With d = log p - log p_ref of a token sampled from p (see
Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html):

  k1   d                    unbiased, high variance
  k2   d^2 / 2              biased, low variance
  k3   exp(-d) - 1 + d      unbiased and non-negative; "low_var_kl"; GRPO's (arXiv 2402.03300, eq. 4)
  abs  |d|

In the reward an estimator is a number. In the loss its gradient is what matters, and that of k1 is useless:
E_p[grad d] = E_p[grad log p] = 0. So k1 in the loss has k1's value and k2's gradient, whose expectation
E_p[d * grad log p] is the gradient of KL(p || p_ref). k2, k3 and abs are differentiated as they stand; the expected
gradient of k3 is that of the OTHER divergence, KL(p_ref || p), so "k3+" has k3's value and k2's gradient too.
Axis letters: B packed rows, R targets per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent import contract
from jaxagent.config import ConfigError


def sequence_mean(values: jax.Array, mask: jax.Array, sequence: jax.Array) -> jax.Array:
    """The mean of f32[B, R] over the targets of each target's own sequence in the mask, at every target of it.

    What stands outside the mask, bool[B, R], is never read; a sequence without masked targets has 0. `sequence`
    i32[B, R]: which one a target belongs to; equal ids stand side by side, in one row.
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
    contract.check_arrays(values, mask, sequence, types=[float, bool, int], rank=2)


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


# exp(20) is far outside any clip range; the bound keeps values and gradients finite for tokens of weight 0.
_MAX_LOG_RATIO = 20.0
_MOST_TURNS = 4096  # of a sequence
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
    # f32[...] -> the sum over each token's turn, at each of its tokens; where it has "turns".
    turn_sum: Callable[[jax.Array], jax.Array] = _by_hand
    reference_logprobs: jax.Array | None = None  # under rl.kl's reference; where the objective has `reads_reference`
    kl_coefficient: float = 1.0  # of rl.kl; the same

    @property
    def ratio(self) -> jax.Array:
        """f32[...]: r = p / p_old, between e^-20 and e^20."""
        log_ratio = self.logprobs - jax.lax.stop_gradient(self.old_logprobs)
        return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))

    @property
    def lengths(self) -> jax.Array:
        """f32[...]: how many such tokens the sequence of each has."""
        return self.sequence_sum(jnp.ones_like(self.logprobs))


READABLE = ("rewards", "ages", "turns")  # what `reads` of an objective may name


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
    turns: jax.Array | None = None,
    kl_coefficient: float = 1.0,
    **more: jax.Array | None,
) -> Tokens:
    """The tokens of packed rows, f32[B, R] each; mask and sequence as of `sequence_sum`. `turns`: whole numbers."""
    types = [float, float, float, bool, int]
    contract.check_arrays(logprobs, old_logprobs, advantages, mask, sequence, types=types)
    old_logprobs, advantages, more = jax.lax.stop_gradient((old_logprobs, advantages, more))

    def mean(values: jax.Array) -> jax.Array:
        return sequence_mean(jax.lax.stop_gradient(values), mask, sequence)

    def total(values: jax.Array) -> jax.Array:
        return sequence_sum(values, mask, sequence)

    def of_turn(values: jax.Array) -> jax.Array:
        assert turns is not None
        return sequence_sum(values, mask, _MOST_TURNS * sequence + turns.astype(sequence.dtype))

    turn_sum = _by_hand if turns is None else of_turn
    return Tokens(
        logprobs, old_logprobs, advantages, mean, total, mask,
        turn_sum=turn_sum, kl_coefficient=kl_coefficient, **more,
    )  # fmt: skip


Array = Any  # numpy.ndarray or jax.Array

_MAX_DIFFERENCE = 20.0  # of d inside exp: finite values and gradients
_MAX_K3 = 10.0  # published implementations clamp k3 here


def kl_estimate(logprobs: Array, reference_logprobs: Array, estimator: str) -> Array:
    """The estimate of each token, float of the inputs' shape. Runs on NumPy and JAX arrays.

    Raises:
      ValueError: unknown estimator.
    """
    contract.check_arrays(logprobs, reference_logprobs, types=float)
    xp = logprobs.__array_namespace__()
    d = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return 0.5 * d * d
        case "k3" | "k3+":
            bounded = xp.clip(d, -_MAX_DIFFERENCE, _MAX_DIFFERENCE)
            return xp.clip(xp.exp(-bounded) - 1.0 + bounded, -_MAX_K3, _MAX_K3)
        case "abs":
            return xp.abs(d)
    raise ValueError(f"unknown KL estimator '{estimator}'")


def kl_loss(logprobs: jax.Array, reference_logprobs: jax.Array, estimator: str) -> jax.Array:
    """The estimate of each token, f32[...], with a gradient that lowers the KL (see the module docstring)."""
    reference_logprobs = jax.lax.stop_gradient(reference_logprobs)
    if estimator not in ("k1", "k3+"):
        return kl_estimate(logprobs, reference_logprobs, estimator)
    value = kl_estimate(logprobs, reference_logprobs, estimator)
    with_gradient = kl_estimate(logprobs, reference_logprobs, "k2")
    return jax.lax.stop_gradient(value - with_gradient) + with_gradient
