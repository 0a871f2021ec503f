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

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxagent import contract
from jaxagent.config.ranges import NonNegativeFloat, ZeroToOne, at_least

if TYPE_CHECKING:
    import jax

    from jaxagent.algorithms.policy_loss import Tokens
    from jaxagent.algorithms.streams import Sample

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
    import chex  # loads jax, which the entries below do without

    chex.assert_rank([old_logprobs, behaviour_logprobs], 1)
    chex.assert_equal_shape([old_logprobs, behaviour_logprobs])
    chex.assert_type([old_logprobs, behaviour_logprobs], float)


@dataclasses.dataclass(frozen=True)
class Importance:
    """Weights that are known before the update."""

    reads_old: ClassVar[bool] = True
    name: ClassVar[str]  # of `importance_weights`
    level: Literal["token", "sequence", "geometric"] = "token"  # whose ratio: a token's, its sequence's product or mean
    low: ZeroToOne = 0.0  # a ratio of 1, on-policy, always counts in full
    high: Annotated[float, at_least(1)] = 2.0
    veto: ZeroToOne = 0.0  # a trajectory with a token whose ratio is below counts 0; 0 = none
    normalise: bool = False  # divide the weights by their mean over the rollout batch

    def __call__(self, old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> np.ndarray:
        """`importance_weights`, before the veto and the mean."""
        return importance_weights(old_logprobs, behaviour_logprobs, self.name, self.level, self.low, self.high)

    def vetoes(self, old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> bool:
        """`vetoed`."""
        return vetoed(old_logprobs, behaviour_logprobs, self.veto)

    def mean(self, old_logprobs: Sequence[np.ndarray], behaviour_logprobs: Sequence[np.ndarray]) -> float:
        """What the weights of a batch are divided by: `batch_mean` where they are normalised, else 1."""
        bounds = (self.name, self.level, self.low, self.high)
        return batch_mean(old_logprobs, behaviour_logprobs, *bounds) if self.normalise else 1.0


def factors_of(correction: Importance, old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> np.ndarray | None:
    """What a correction gives for one trajectory, finite f64[T] of 0 or more; None where that is vetoed."""
    given = old_logprobs, behaviour_logprobs
    vetoed = contract.call(correction, *given, method="vetoes")
    return None if contract.number(correction, vetoed, "a veto", "vetoes") else contract.factors(correction, *given)


def mean_of(correction: Importance, old: Sequence[np.ndarray], behaviour: Sequence[np.ndarray]) -> float:
    """What the weights of a correction are divided by, more than 0."""
    return contract.number(correction, contract.call(correction, old, behaviour, method="mean"), "a mean", "mean", 0.0)


class Factor(NamedTuple):
    """What a sample's policy weights are multiplied with, and whether `rl.correction.veto` takes it out altogether."""

    weights: np.ndarray  # f64[T], all 0 where vetoed
    vetoed: bool


def factors_of_samples(learnt: Sequence[Sample], choice: Any) -> tuple[list[Factor], dict[str, float | None]]:
    """The factor of each sample that takes part, and counts for the metrics."""
    if not isinstance(choice, Importance):
        return [Factor(np.ones(len(sample.mask)), False) for sample in learnt], {}
    old = [np.asarray(sample.old)[sample.mask > 0] for sample in learnt]
    behaviour = [np.asarray(sample.trajectory.logprobs)[sample.mask > 0] for sample in learnt]
    pairs = list(zip(old, behaviour, strict=True))
    given = [factors_of(choice, *pair) for pair in pairs]
    vetoed = [factors is None for factors in given]
    weights = [np.zeros(len(at)) if factors is None else factors for factors, at in zip(given, old, strict=True)]
    used = np.concatenate(weights) if weights else np.zeros(0)
    counts = {
        "correction/weight_mean": float(np.mean(used)) if len(used) else None,
        "correction/zero_frac": float(np.mean(used == 0)) if len(used) else None,
        "correction/vetoed": float(sum(vetoed)),
    }
    mean = mean_of(choice, old, behaviour)
    factors = [np.ones(len(sample.mask)) for sample in learnt]
    for factor, sample, of_actions in zip(factors, learnt, weights, strict=True):
        factor[sample.mask > 0] = of_actions
    return [Factor(factor / mean, veto) for factor, veto in zip(factors, vetoed, strict=True)], counts


class Truncate(Importance):
    """TIS (Yao et al., 2025): the ratio, bounded. Defaults: token, 0 to 2."""

    name: ClassVar[str] = "truncate"


@dataclasses.dataclass(frozen=True)
class Mask(Importance):
    """IcePop (arXiv 2510.18855): the ratio inside its bounds, 0 outside."""

    name: ClassVar[str] = "mask"
    low: ZeroToOne = 0.5
    high: Annotated[float, at_least(1)] = 5.0


@dataclasses.dataclass(frozen=True)
class OPSM:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): looks at the policy as it moves."""

    delta: NonNegativeFloat = 1e-4  # drift of a sequence, nats per token, from which bad ones are masked; slime's

    def __call__(self, tokens: Tokens) -> jax.Array:
        """The factors of the per-token loss, f32[...]."""
        from jaxagent.algorithms.policy_loss import opsm_factor

        return opsm_factor(tokens, self.delta)


CORRECTIONS: dict[str, type] = {"truncate": Truncate, "mask": Mask, "opsm": OPSM}
