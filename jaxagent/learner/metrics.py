"""What an update reports: a `loss.Tally`, copied to the host, as scalars. Means are over tokens, not over weights."""

from __future__ import annotations

import numpy as np

from jaxagent.learner.loss import RATIO_EDGES, Tally


def policy_metrics(tally: Tally) -> dict[str, float]:
    """Scalars of one update from its tally."""
    s, tokens = tally.sums, max(float(tally.sums["policy_tokens"]), 1.0)
    out = {name: float(value) for name, value in s.items() if name.startswith("loss/")}
    return out | {
        "loss/total": sum(out.values()),
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

    Args:
      updates: their metrics.
      staleness: of the rollouts. Where there is any, the difference is how far the policy has gone since it sampled,
        "policy/drift_*"; where there is none, how far the engine is from the trainer, "logprob_gap/*".
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
