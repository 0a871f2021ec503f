"""Corrections for samples that the learner's policy did not quite draw: importance weights of the policy loss.

In: per token of ONE trajectory, rho = p_old / p_behaviour: the learner's own policy before the step's first update over
what the sampler recorded (another numerics, or older weights). NOT the ratio of the objective, p / p_old. Out: factors
of the per-token policy loss, applied after aggregation, so that what has factor 0, a token or a whole rejected
trajectory, still counts in the denominator. NumPy. Axis letter: T action tokens.

  truncate  w = clip(rho, low, high)                TIS: "Your Efficient RL Framework Secretly Brings You Off-Policy RL
                                                    Training" (Yao et al., 2025), low 0, high 2
  mask      w = rho inside [low, high], 0 outside   IcePop: "Every Step Evolves" (Ling team, arXiv 2510.18855)

Masked importance sampling (MIS) as slime has it is `mask` with a veto and with normalised weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np

from jaxagent import contract
from jaxagent.algorithms.late import jax, jnp
from jaxagent.config.ranges import NonNegativeFloat, ZeroToOne, at_least

if TYPE_CHECKING:
    from jaxagent.algorithms.policy_loss import Tokens
    from jaxagent.algorithms.streams import Sample

_MAX_LOG_RATIO = 20.0  # of a ratio, before exp
_SMALLEST_MEAN = 1e-8  # slime's: nothing is divided by less


@dataclasses.dataclass(frozen=True)
class Importance:
    """Weights that are known before the update, of log-probs float[T] of the action tokens of one trajectory.

    As it stands this is TIS (Yao et al., 2025): the ratio, bounded.
    """

    reads_old: ClassVar[bool] = True
    level: Literal["token", "sequence", "geometric"] = "token"  # whose ratio: a token's, its sequence's product or mean
    low: ZeroToOne = 0.0  # a ratio of 1, on-policy, always counts in full
    high: Annotated[float, at_least(1)] = 2.0
    veto: ZeroToOne = 0.0  # a trajectory with a token whose ratio is below counts 0; 0 = none
    normalise: bool = False  # divide the weights by their mean over the rollout batch

    def __call__(self, old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> np.ndarray:
        """The factor of each action token, f64[T], before the veto and the mean."""
        return self.weigh(self._ratios(old_logprobs, behaviour_logprobs))

    def weigh(self, rho: np.ndarray) -> np.ndarray:
        """The weights of ratios, f64[T] both."""
        return np.clip(rho, self.low, self.high)

    def averaged(self, rho: np.ndarray) -> np.ndarray:
        """The bounded ratios of which `mean` is the mean, f64[T]."""
        return self.weigh(rho)

    def vetoes(self, old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> bool:
        """Whether the trajectory is rejected: the learner could hardly have sampled a token whose rho is below `veto`.

        The veto of masked importance sampling (MIS); published threshold 1e-4.
        """
        log_rho = _log_ratio(old_logprobs, behaviour_logprobs)
        return bool(self.veto > 0 and np.any(log_rho < np.log(self.veto)))

    def mean(self, old_logprobs: Sequence[np.ndarray], behaviour_logprobs: Sequence[np.ndarray]) -> float:
        """What the weights are divided by: the mean of the batch's bounded ratios before anything is masked or vetoed.

        Over tokens where each has its own ratio, over trajectories where each has one, as slime and verl average.
        1 where nothing is normalised, and where there is nothing to average, or nothing but 0.
        """
        if not self.normalise:
            return 1.0
        pairs = [pair for pair in zip(old_logprobs, behaviour_logprobs, strict=True) if len(pair[0])]
        ratios = [self.averaged(self._ratios(*pair)) for pair in pairs]
        if self.level != "token":
            ratios = [of_one[:1] for of_one in ratios]
        mean = float(np.mean(np.concatenate(ratios))) if ratios else 1.0
        return mean if mean > _SMALLEST_MEAN else 1.0

    def _ratios(self, old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> np.ndarray:
        log_rho = _log_ratio(old_logprobs, behaviour_logprobs)
        if self.level != "token":
            total = np.sum(log_rho)
            log_rho = np.full_like(log_rho, total if self.level == "sequence" else total / max(len(log_rho), 1))
        return np.exp(np.clip(log_rho, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


@dataclasses.dataclass(frozen=True)
class Mask(Importance):
    """IcePop (arXiv 2510.18855): the ratio inside its bounds, 0 outside. The mean is of those bounded by high alone."""

    low: ZeroToOne = 0.5
    high: Annotated[float, at_least(1)] = 5.0

    def weigh(self, rho: np.ndarray) -> np.ndarray:
        return np.where((rho >= self.low) & (rho <= self.high), rho, 0.0)

    def averaged(self, rho: np.ndarray) -> np.ndarray:
        return np.minimum(rho, self.high)


def _log_ratio(old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> np.ndarray:
    contract.check_arrays(old_logprobs, behaviour_logprobs, types=float, rank=1)
    return old_logprobs.astype(np.float64) - behaviour_logprobs.astype(np.float64)


def factors_of(correction: Importance, old_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> np.ndarray | None:
    """What a correction gives for one trajectory, finite f64[T] of 0 or more; None where that is vetoed."""
    logprobs = old_logprobs, behaviour_logprobs
    vetoed = contract.call(correction, *logprobs, method="vetoes")
    return None if contract.number(correction, vetoed, "a veto", "vetoes") else contract.factors(correction, *logprobs)


def mean_of(correction: Importance, old: Sequence[np.ndarray], behaviour: Sequence[np.ndarray]) -> float:
    """What the weights of a correction are divided by, more than 0."""
    return contract.number(correction, contract.call(correction, old, behaviour, method="mean"), "a mean", "mean", 0.0)


def factors_of_samples(
    learnt: Sequence[Sample], choice: Importance
) -> tuple[list[np.ndarray | None], dict[str, float | None]]:
    """What the policy weights of each sample that takes part are multiplied with, and counts for the metrics.

    f64[T] each, None for a sample that `rl.correction.veto` takes out altogether.
    """
    old = [np.asarray(sample.old)[sample.mask > 0] for sample in learnt]
    behaviour = [np.asarray(sample.trajectory.logprobs)[sample.mask > 0] for sample in learnt]
    pairs = list(zip(old, behaviour, strict=True))
    of_actions = [factors_of(choice, *pair) for pair in pairs]
    weights = [np.zeros(len(x)) if factors is None else factors for factors, x in zip(of_actions, old, strict=True)]
    all_weights = np.concatenate(weights) if weights else np.zeros(0)
    counts = {
        "correction/weight_mean": float(np.mean(all_weights)) if len(all_weights) else None,
        "correction/zero_frac": float(np.mean(all_weights == 0)) if len(all_weights) else None,
        "correction/vetoed": float(sum(factors is None for factors in of_actions)),
    }
    mean = mean_of(choice, old, behaviour)
    of_samples: list[np.ndarray | None] = []
    for sample, factors in zip(learnt, of_actions, strict=True):
        of_tokens = np.ones(len(sample.mask))
        of_tokens[sample.mask > 0] = 0.0 if factors is None else factors
        of_samples.append(None if factors is None else of_tokens / mean)
    return of_samples, counts


@dataclasses.dataclass(frozen=True)
class OPSM:
    """Off-policy sequence masking: 0 where A < 0 and the sequence's mean of log p_old - log p exceeds delta, else 1.

    What the policy, looked at as it moves, has already left behind is not pushed down further. "DeepSeek-V3.2" (arXiv
    2512.02556), section 3.1. The denominator of the loss is not changed.
    """

    delta: NonNegativeFloat = 1e-4  # nats per token; slime's

    def __call__(self, tokens: Tokens) -> jax.Array:
        """The factors of the per-token loss, f32[...]."""
        drift = tokens.sequence_mean(tokens.old_logprobs - tokens.logprobs)
        return jnp.where((tokens.advantages < 0) & (drift > self.delta), 0.0, 1.0)


CORRECTIONS: dict[str, type] = {"truncate": Importance, "mask": Mask, "opsm": OPSM}
