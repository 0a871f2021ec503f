"""ECHO: the policy also learns to predict what the environment answers, from the same forward pass.

In: token kinds of trajectories. Out: cross-entropy weights, L = L_policy + coefficient * L_world (arXiv 2605.24517).
With m the target mask, and per sequence N_full observation tokens (warnings included) and N targets:

  full_observation  (1/B) sum_seq sum_t CE m / (N_full + 1e-3)     published default: warnings count below, not above
  targets           (1/B) sum_seq sum_t CE m / (N + 1e-3)
  token_mean        sum CE m / (sum m + 1e-3)                      over the optimiser update
  constant          sum CE m / (constant * B)                      Dr. GRPO's divisor
  constant_sum      sum CE m / constant                            published "seq_mean_token_sum_norm": no mean over B

B counts every sequence of the update, those without observations too. CE is taken at temperature 1. Template tokens
(role headers, end-of-turn marks) have kind PROMPT and are never targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import numpy as np

from jaxagent.types import TokenKind

_EPSILON = 1e-3  # published; keeps an empty denominator harmless

_TARGET_KINDS = {
    "env_only": (TokenKind.OBSERVATION,),
    "full_observation": (TokenKind.OBSERVATION, TokenKind.WARNING),
    "warning_plus_env": (TokenKind.OBSERVATION, TokenKind.WARNING),
    "warning_only": (TokenKind.WARNING,),
}


def target_mask(kinds: np.ndarray, targets: str, max_tokens: int) -> np.ndarray:
    """Which tokens are predicted.

    Args:
      kinds: u8[T], TokenKind of each token.
      targets: "env_only", "full_observation" (everything inside an observation), "warning_only" or "warning_plus_env".
      max_tokens: the first so many targets of the sequence are kept; 0 = all.

    Returns:
      bool[T]; never True for the first token, which nothing predicts.
    """
    chex.assert_rank(kinds, 1)
    chex.assert_type(kinds, int)
    mask = np.isin(kinds, _TARGET_KINDS[targets])
    mask[:1] = False
    if max_tokens > 0:
        mask &= np.cumsum(mask) <= max_tokens
    return mask


def coefficient(initial: float, schedule: str, progress: float) -> float:
    """The coefficient at `progress` in [0, 1) of the stage.

    constant: `initial`. linear_decay: falls to 0 at the end. step_decay: `initial` for the first half, then 0.

    Raises:
      ValueError: unknown schedule.
    """
    match schedule:
        case "constant":
            return initial
        case "linear_decay":
            return initial * (1.0 - min(max(progress, 0.0), 1.0))
        case "step_decay":
            return initial if progress < 0.5 else 0.0
    raise ValueError(f"unknown ECHO schedule '{schedule}'")


def world_scales(
    target_counts: Sequence[int], observation_counts: Sequence[int], denominator: str, constant: float
) -> np.ndarray:
    """The factor of every target of a sequence, before the coefficient.

    Args:
      target_counts: [n] targets of each sequence of the optimiser update.
      observation_counts: [n] observation tokens of each, warnings included.
      denominator: see the module docstring.
      constant: tokens; only read by "constant" and "constant_sum".

    Returns:
      f64[n].

    Raises:
      ValueError: unknown denominator.
    """
    targets, observed = np.asarray(target_counts, np.float64), np.asarray(observation_counts, np.float64)
    chex.assert_rank([targets, observed], 1)
    chex.assert_equal_shape([targets, observed])
    sequences = max(len(targets), 1)
    match denominator:
        case "full_observation":
            return 1.0 / ((observed + _EPSILON) * sequences)
        case "targets":
            return 1.0 / ((targets + _EPSILON) * sequences)
        case "token_mean":
            return np.full(len(targets), 1.0 / (targets.sum() + _EPSILON))
        case "constant":
            return np.full(len(targets), 1.0 / (constant * sequences))
        case "constant_sum":
            return np.full(len(targets), 1.0 / constant)
    raise ValueError(f"unknown ECHO denominator '{denominator}'")
