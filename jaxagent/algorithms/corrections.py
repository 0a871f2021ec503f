"""Corrections for samples that the learner's policy did not quite draw: importance weights of the policy loss.

In: per token of ONE trajectory, rho = p_old / p_behaviour: the learner's own policy before the step's first update over
what the sampler recorded (another numerics, or older weights). NOT the ratio of the objective, p / p_old. Out: factors
of the per-token policy loss, applied after aggregation, so that a token with factor 0 still counts in the denominator;
a rejected trajectory does not. NumPy. Axis letter: T action tokens.

  truncate  w = clip(rho, low, high)                TIS: "Your Efficient RL Framework Secretly Brings You Off-Policy RL
                                                    Training" (Yao et al., 2025), low 0, high 2
  mask      w = rho inside [low, high], 0 outside   IcePop: "Every Step Evolves" (Ling team, arXiv 2510.18855)
"""

from __future__ import annotations

import numpy as np

NAMES = ("none", "truncate", "mask", "opsm")  # OPSM looks at the moving policy: `policy_loss.opsm_factor`
LEVELS = ("token", "sequence", "geometric")

_MAX_LOG_RATIO = 20.0  # of a ratio, before exp


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
    log_rho = old_logprobs.astype(np.float64) - behaviour_logprobs.astype(np.float64)
    return bool(veto > 0 and np.any(log_rho < np.log(veto)))
