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

import dataclasses

import numpy as np

from jaxagent.config.ranges import PositiveFloat
from jaxagent.contract import check_arrays
from jaxagent.types import TokenKind

_EPSILON = 1e-3  # published; keeps an empty denominator harmless

_TARGET_KINDS = {
    "env_only": (TokenKind.OBSERVATION,),
    "full_observation": (TokenKind.OBSERVATION, TokenKind.WARNING),
    "warning_plus_env": (TokenKind.OBSERVATION, TokenKind.WARNING),
    "warning_only": (TokenKind.WARNING,),
}


def target_mask(kinds: np.ndarray, targets: str, max_tokens: int) -> np.ndarray:
    """Which tokens are predicted, bool[T], of kinds u8[T]; never the first, which nothing predicts.

    `targets`: "env_only", "full_observation" (everything inside an observation), "warning_only" or "warning_plus_env".
    `max_tokens`: the first so many targets of the sequence are kept; 0 = all.
    """
    check_arrays(kinds, types=int, rank=1)
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


@dataclasses.dataclass(frozen=True)
class Denominator:
    """What the targets of an optimiser update are divided by."""

    def __call__(self, targets: np.ndarray, observed: np.ndarray) -> np.ndarray:
        """The factor of every target of a sequence, f64[n], before the coefficient.

        From the targets of each sequence of the update, and its observation tokens, warnings included: f64[n].
        """
        check_arrays(targets, observed, types=float, rank=1)
        return 1.0 / self.divisor(targets, observed, max(len(targets), 1))

    def divisor(self, targets: np.ndarray, observed: np.ndarray, sequences: int) -> np.ndarray:
        """f64[n], not 0 anywhere."""
        raise NotImplementedError


class FullObservation(Denominator):
    """Every sequence's observation tokens, warnings included, and the number of sequences: the published default."""

    def divisor(self, targets: np.ndarray, observed: np.ndarray, sequences: int) -> np.ndarray:
        return (observed + _EPSILON) * sequences


class Targets(Denominator):
    """Every sequence's targets, and the number of sequences."""

    def divisor(self, targets: np.ndarray, observed: np.ndarray, sequences: int) -> np.ndarray:
        return (targets + _EPSILON) * sequences


class TokenMean(Denominator):
    """All targets of the optimiser update."""

    def divisor(self, targets: np.ndarray, observed: np.ndarray, sequences: int) -> np.ndarray:
        return np.full(len(targets), targets.sum() + _EPSILON)


@dataclasses.dataclass(frozen=True)
class Constant(Denominator):
    """A constant, and the number of sequences."""

    constant: PositiveFloat = 3000.0  # tokens; Dr. GRPO's limit

    def divisor(self, targets: np.ndarray, observed: np.ndarray, sequences: int) -> np.ndarray:
        return np.full(len(targets), self.constant * sequences)


class ConstantSum(Constant):
    """A constant alone: the published "seq_mean_token_sum_norm"."""

    def divisor(self, targets: np.ndarray, observed: np.ndarray, sequences: int) -> np.ndarray:
        return np.full(len(targets), self.constant)


# What `rl.echo.denominator` can name.
DENOMINATORS: dict[str, type] = {
    "full_observation": FullObservation,
    "targets": Targets,
    "token_mean": TokenMean,
    "constant": Constant,
    "constant_sum": ConstantSum,
}
