"""The blind learner's losses: arrays in, one weighted sum and its metrics out. No model here.

In: per-target log-probs and entropies (or values) and a `Batch` of the same [B, R]. Out: the loss of a micro-batch,
which is exactly its share of the update's loss, and a `Tally` that adds up over micro-batches. An update's tally
becomes scalars on the host. Means are over tokens, not over weights.
Axis letters: B packed rows, R target positions per row, K histogram edges.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxagent import contract
from jaxagent.algorithms.corrections import OPSM
from jaxagent.algorithms.objectives import NoObjective
from jaxagent.algorithms.policy_loss import Losses, Tokens, kl_estimate, kl_loss, tokens_of
from jaxagent.algorithms.value_losses import Categorical, Squared
from jaxagent.config import RLConfig
from jaxagent.learner.state import Batch, check_batch
from jaxagent.models import balance

# Upper edges for quantiles of the log importance ratio: 257 of them, dense at 0 (5e-4 apart), reaching +-2.
RATIO_EDGES = (0.01 * np.sinh(np.linspace(-6.0, 6.0, 257))).astype(np.float32)


@flax.struct.dataclass
class Tally:
    """Metrics that combine over micro-batches: sums add, maxima take the larger. Log-probs are of one micro-batch."""

    sums: dict[str, Any]  # f32[] or f32[K]
    maxima: dict[str, Any]  # f32[]
    logprobs: jax.Array | None = None  # f32[B, R] of the policy's targets, where somebody keeps them

    def add(self, other: Tally) -> Tally:
        """The tally of both micro-batches together."""
        return Tally(jax.tree.map(jnp.add, self.sums, other.sums), jax.tree.map(jnp.maximum, self.maxima, other.maxima))


# What a loss may read of the targets' distributions beside log-probs and entropies, f32[B, R] by name: "log_z", the
# logarithms of the softmax's normalisers, "divergence" to a teacher's, in nats, finite at all targets; where routing is
# replayed "routing_recorded", 1 where the token before a target has recorded experts, and "routing_differs", the part
# of them to which it would not go by itself. And of a mixture "load", a `balance.Load`.
Extras = Mapping[str, Any]
PolicyLoss = Callable[[jax.Array, jax.Array, Batch, Extras], tuple[jax.Array, Tally]]


def policy_loss_of(rl: RLConfig) -> PolicyLoss:
    """`policy_loss` with the choices of the RL stage."""
    return functools.partial(
        policy_loss,
        objective=rl.objective,
        kl_estimator=rl.kl.estimator if rl.kl else "k3",
        kl_coefficient=rl.kl.coefficient if rl.kl else 1.0,
        opsm=rl.correction if isinstance(rl.correction, OPSM) else None,
        balance_coefficient=rl.routes.balance_loss,
    )


@jax.named_scope("policy_loss")
def policy_loss(
    logprobs: jax.Array,
    entropy: jax.Array,
    batch: Batch,
    extras: Extras = types.MappingProxyType({}),
    objective: Callable[[Tokens], Losses] = NoObjective(),  # noqa: B008
    kl_estimator: str = "k3",
    kl_coefficient: float = 1.0,
    opsm: OPSM | None = None,
    balance_coefficient: float = 0.0,
    keeps_logprobs: bool = False,
) -> tuple[jax.Array, Tally]:
    """Policy, KL, entropy, z-loss, cross-entropy and distillation terms of a micro-batch.

    Args:
      logprobs: f32[B, R] of the targets; anything (even inf or nan) at targets without weight.
      entropy: f32[B, R] of the distributions the targets were drawn from.
      extras: what the z-loss ("PaLM", arXiv 2204.02311, section 5) and distillation read, where these are on.
      kl_coefficient: of rl.kl, for an objective that reads the reference itself.
      opsm: off-policy sequence masking; None: no sequence is masked.
      balance_coefficient: of `balance.loss`, in which a micro-batch counts by its part of the policy's weights.
      keeps_logprobs: whether the tally has the policy's log-probs.

    Returns:
      f32[] share of the update's loss, and its tally.
    """
    check_batch(batch)
    load = extras.get("load")
    outputs = [logprobs, entropy, *(extra for name, extra in extras.items() if name != "load")]
    chex.assert_shape(outputs, batch.targets.shape)
    chex.assert_type(outputs, float)
    policy, kl = batch.policy_weights != 0, batch.kl_weights != 0
    ce, nll, bonus = batch.ce_weights != 0, batch.nll_weights != 0, batch.entropy_weights != 0
    z, distilled = batch.z_weights != 0, batch.distill_weights != 0
    # Double where: a target without weight must give neither a value nor a gradient, whatever it holds.
    logprobs = jnp.where(policy | kl | ce | nll, logprobs, 0.0)
    entropy = jnp.where(policy | bonus, entropy, 0.0)
    behaviour = jnp.where(policy, batch.behaviour_logprobs, 0.0)
    old = jnp.where(policy, batch.old_logprobs, 0.0)
    on_policy = jnp.where(policy, logprobs, 0.0)
    tokens = tokens_of(on_policy, old, batch.advantages, policy, batch.sequence, behaviour_logprobs=behaviour,
                       entropy=entropy, rewards=batch.rewards, ages=batch.ages, turns=batch.turns,
                       reference_logprobs=jnp.where(policy, batch.reference_logprobs, 0.0),
                       kl_coefficient=kl_coefficient)  # fmt: skip
    with jax.named_scope(type(objective).__name__):
        surrogate, clipped = contract.loss_and_clipped(objective, tokens, like=logprobs)
    if opsm is not None:
        factor = contract.array(opsm, contract.call(opsm, tokens), contract.per_target(logprobs, "a factor"))
        surrogate = factor * surrogate
    reference = batch.reference_logprobs
    divergence = kl_loss(jnp.where(kl, logprobs, reference), reference, kl_estimator)
    losses = {
        "loss/policy": jnp.sum(batch.policy_weights * surrogate),
        "loss/kl": jnp.sum(batch.kl_weights * divergence),
        "loss/entropy": -jnp.sum(batch.entropy_weights * entropy),
        "loss/ce": -jnp.sum(batch.ce_weights * logprobs),
        "loss/nll": -jnp.sum(batch.nll_weights * logprobs),
    }
    if "log_z" in extras:
        losses["loss/z"] = jnp.sum(batch.z_weights * jnp.square(jnp.where(z, extras["log_z"], 0.0)))
    if "divergence" in extras:
        losses["loss/distill"] = jnp.sum(batch.distill_weights * jnp.where(distilled, extras["divergence"], 0.0))
    if load is not None and balance_coefficient:
        losses["loss/balance"] = balance_coefficient * jnp.sum(batch.policy_weights) * balance.loss(load)
    gap = jnp.where(policy, jax.lax.stop_gradient(on_policy - behaviour), 0.0)
    below = (gap[..., None] <= RATIO_EDGES) & policy[..., None]
    sums = losses | {
        "policy_tokens": jnp.sum(policy),
        "kl_tokens": jnp.sum(kl),
        "ce_tokens": jnp.sum(ce),
        "targets": jnp.sum(policy | kl | ce | nll | bonus | z | distilled),
        "clipped": jnp.sum(jnp.where(policy, clipped, 0.0)),
        "entropy": jnp.sum(jnp.where(policy, entropy, 0.0)),
        "kl": jnp.sum(jnp.where(kl, divergence, 0.0)),
        # Of the sampler to the policy: k3 is unbiased for samples of its first argument, and these are the sampler's.
        "kl_behaviour": jnp.sum(jnp.where(policy, kl_estimate(behaviour, on_policy, "k3"), 0.0)),
        "nll": -jnp.sum(jnp.where(ce, logprobs, 0.0)),
        "gap": jnp.sum(jnp.abs(gap)),
        "ratios_below": jnp.sum(below, axis=(0, 1)),
    }
    if "routing_differs" in extras:
        seen = jnp.where(policy, extras["routing_recorded"], 0.0)
        sums |= {"replayed": jnp.sum(seen), "replayed_differ": jnp.sum(seen * extras["routing_differs"])}
    if load is not None:
        sums |= {"load": load.chosen, "load_entropy": jnp.sum(load.entropy), "load_tokens": jnp.sum(load.tokens)}
    maxima = {"gap": jnp.max(jnp.abs(gap)), "log_ratio": jnp.max(gap)}
    tally = _tally(sums, maxima)
    return sum(losses.values()), tally.replace(logprobs=jax.lax.stop_gradient(on_policy)) if keeps_logprobs else tally


@jax.named_scope("value_loss")
def value_loss(outputs: jax.Array, batch: Batch, loss_of: Squared | Categorical) -> tuple[jax.Array, Tally]:
    """The critic's term of a micro-batch: f32[] share of the update's loss, and its tally.

    `outputs`: of the critic's head, f32[B, R], or f32[B, R, N] where `loss_of` (algorithms/value_losses.py) has N bins.
    """
    check_batch(batch)
    chex.assert_shape(outputs, (*batch.targets.shape, loss_of.heads) if loss_of.heads else batch.targets.shape)
    chex.assert_type(outputs, float)
    live = batch.value_weights != 0
    old, returns = jnp.where(live, batch.old_values, 0.0), jnp.where(live, batch.returns, 0.0)
    outputs = jnp.where(live[..., None] if loss_of.heads else live, outputs, 0.0)
    per_token, clipped = contract.loss_and_clipped(loss_of, outputs, old, returns, like=returns)
    values = contract.call(loss_of, outputs, method="values")
    values = contract.array(loss_of, values, contract.per_target(returns, "values"), "values")
    values = jnp.where(live, values, 0.0)
    loss = jnp.sum(batch.value_weights * per_token)
    sums = {
        "loss/value": loss,
        "targets": jnp.sum(live),
        "squared_error": jnp.sum(jnp.square(values - returns)),
        "returns": jnp.sum(returns),
        "squared_returns": jnp.sum(jnp.square(returns)),
        "clipped": jnp.sum(jnp.where(live, clipped, 0.0)),
    }
    return loss, _tally(sums, {})


def _tally(sums: dict[str, jax.Array], maxima: dict[str, jax.Array]) -> Tally:
    f32 = lambda tree: jax.tree.map(lambda x: jax.lax.stop_gradient(x).astype(jnp.float32), tree)  # noqa: E731
    return Tally(f32(sums), f32(maxima))


def policy_metrics(tally: Tally) -> dict[str, float]:
    """Scalars of one update from its tally."""
    s, tokens = tally.sums, max(float(tally.sums["policy_tokens"]), 1.0)
    out = {name: float(value) for name, value in s.items() if name.startswith("loss/")}
    total = sum(out.values())
    if "load" in s:
        out |= balance.metrics(np.asarray(s["load"]), float(s["load_entropy"]), float(s["load_tokens"]))
    if "replayed" in s:
        replayed = float(s["replayed"])
        out["routing/replayed_frac"] = replayed / tokens
        out["routing/replayed_differ_frac"] = float(s["replayed_differ"]) / replayed if replayed else math.nan
    return out | {
        "loss/total": total,
        "policy/tokens": float(s["policy_tokens"]),
        "policy/entropy": float(s["entropy"]) / tokens,
        "policy/clip_frac": float(s["clipped"]) / tokens,
        "policy/kl_behaviour": float(s["kl_behaviour"]) / tokens,
        "policy/kl_reference": float(s["kl"]) / max(float(s["kl_tokens"]), 1.0),
        "policy/ratio_p99": _ratio_quantile(np.asarray(s["ratios_below"]), float(s["policy_tokens"]), 0.99),
        "policy/ratio_max": float(np.exp(tally.maxima["log_ratio"])),
        "policy/logprob_gap_mean": float(s["gap"]) / tokens,
        "policy/logprob_gap_max": float(tally.maxima["gap"]),
        "ce/tokens": float(s["ce_tokens"]),
        "ce/nll": float(s["nll"]) / max(float(s["ce_tokens"]), 1.0),
    }


def value_metrics(tally: Tally) -> dict[str, float]:
    """Scalars of one critic update. `explained_variance` is 0 for the best constant and 1 for a perfect critic."""
    s, tokens = tally.sums, max(float(tally.sums["targets"]), 1.0)
    error = float(s["squared_error"]) / tokens
    variance = max(float(s["squared_returns"]) / tokens - (float(s["returns"]) / tokens) ** 2, 0.0)
    return {
        "loss/value": float(s["loss/value"]),
        "critic/squared_error": error,
        "critic/constant_squared_error": variance,
        "critic/explained_variance": 1.0 - error / variance if variance > 1e-8 else 0.0,
        "critic/clip_frac": float(s["clipped"]) / tokens,
    }


def over_updates(updates: list[dict[str, float]], staleness: int = 0) -> dict[str, float]:
    """Means over a step's updates; the difference to the engine's log-probs is the first's: no weight has moved then.

    Where rollouts have any staleness, it is how far the policy has gone since it sampled, "policy/drift_*"; else how
    far the engine is from the trainer, "logprob_gap/*".
    """
    if not updates:
        return {}
    metrics = {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
    if tokens := sum(u.get("policy/tokens", 0.0) for u in updates):  # a part without any says nothing of the entropy
        metrics["policy/entropy"] = sum(u["policy/entropy"] * u["policy/tokens"] for u in updates) / tokens
    if "policy/logprob_gap_max" in metrics:
        del metrics["policy/logprob_gap_max"], metrics["policy/logprob_gap_mean"]
        name = "policy/drift_" if staleness else "logprob_gap/"
        metrics[f"{name}max"] = updates[0]["policy/logprob_gap_max"]
        metrics[f"{name}mean"] = updates[0]["policy/logprob_gap_mean"]
    return metrics


def _ratio_quantile(counts_below: np.ndarray, tokens: float, quantile: float) -> float:
    """The upper edge of the histogram bin that holds the quantile (never below the true one, 5 % too high at most)."""
    if tokens == 0:
        return 1.0
    index = min(int(np.searchsorted(counts_below, quantile * tokens)), len(RATIO_EDGES) - 1)
    return float(np.exp(RATIO_EDGES[index]))
