"""Corrections for samples that the learner's policy did not quite draw: importance weights of the policy loss.

In: per token of ONE trajectory, rho = p_old / p_behaviour: the learner's own policy before the step's first update over
what the sampler recorded (another numerics, or older weights). NOT the ratio of the objective, p / p_old. Out: factors
of the per-token policy loss, applied after aggregation, so that what has factor 0, a token or a whole rejected
trajectory, still counts in the denominator. NumPy. Axis letter: T action tokens.

  truncate  w = clip(rho, low, high)                TIS: "Your Efficient RL Framework Secretly Brings You Off-Policy RL
                                                    Training" (Yao et al., 2025), low 0, high 2
  mask      w = rho inside [low, high], 0 outside   IcePop: "Every Step Evolves" (Ling team, arXiv 2510.18855)

Masked importance sampling (MIS) as slime has it is `mask` with a veto and with weights divided by `batch_mean`.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import numpy as np

NAMES = ("none", "truncate", "mask", "opsm")  # OPSM looks at the moving policy: `policy_loss.opsm_factor`
IMPORTANCE = ("truncate", "mask")  # weights that are known before the update
LEVELS = ("token", "sequence", "geometric")

_MAX_LOG_RATIO = 20.0  # of a ratio, before exp
_SMALLEST_MEAN = 1e-8  # slime's: nothing is divided by less


def importance_weights(
    old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray, name: str, level: str, low: float, high: float
) -> np.ndarray:
    """The factor of each action token.

    Args:
      old_logprobs, behaviour_logprobs: float[T] of the action tokens of one trajectory.
      name: "truncate" or "mask".
      level: rho of a token is its own ("token"), the product over the trajectory ("sequence", unbiased) or their
        geometric mean ("geometric").
      low, high: bounds of rho.

    Returns:
      f64[T].

    Raises:
      ValueError: unknown name or level.
    """
    _check(old_logprobs, behaviour_logprobs)
    log_rho = old_logprobs.astype(np.float64) - behaviour_logprobs.astype(np.float64)
    match level:
        case "token":
            pass
        case "sequence":
            log_rho = np.full_like(log_rho, np.sum(log_rho))
        case "geometric":
            log_rho = np.full_like(log_rho, np.sum(log_rho) / max(len(log_rho), 1))
        case _:
            raise ValueError(f"unknown correction level '{level}'")
    rho = np.exp(np.clip(log_rho, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    match name:
        case "truncate":
            return np.clip(rho, low, high)
        case "mask":
            return np.where((rho >= low) & (rho <= high), rho, 0.0)
    raise ValueError(f"unknown correction '{name}'")


def vetoed(old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray, veto: float) -> bool:
    """Whether a trajectory is rejected: some token's rho is below `veto`, the learner could hardly have sampled it.

    The veto of masked importance sampling (MIS); published threshold 1e-4. 0 = never. Args as above.
    """
    _check(old_logprobs, behaviour_logprobs)
    log_rho = old_logprobs.astype(np.float64) - behaviour_logprobs.astype(np.float64)
    return bool(veto > 0 and np.any(log_rho < np.log(veto)))


def batch_mean(
    old_logprobs: Sequence[np.ndarray],
    behaviour_logprobs: Sequence[np.ndarray],
    name: str,
    level: str,
    low: float,
    high: float,
) -> float:
    """The mean of a batch's bounded ratios before anything is masked or vetoed: what normalised weights are divided by.

    Over tokens where each has its own ratio, over trajectories where each has one, as slime and verl average.

    Args:
      old_logprobs, behaviour_logprobs: per trajectory, as `importance_weights`; also of vetoed ones.
      name, level, low, high: as there; "mask" bounds by `high` alone here.

    Returns:
      1 where there is nothing to average, or nothing but 0.
    """
    low = 0.0 if name == "mask" else low
    pairs = [pair for pair in zip(old_logprobs, behaviour_logprobs, strict=True) if len(pair[0])]
    bounded = [importance_weights(*pair, "truncate", level, low, high) for pair in pairs]
    if level != "token":
        bounded = [weights[:1] for weights in bounded]
    mean = float(np.mean(np.concatenate(bounded))) if bounded else 1.0
    return mean if mean > _SMALLEST_MEAN else 1.0


def _check(old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> None:
    chex.assert_rank([old_logprobs, behaviour_logprobs], 1)
    chex.assert_equal_shape([old_logprobs, behaviour_logprobs])
    chex.assert_type([old_logprobs, behaviour_logprobs], float)
