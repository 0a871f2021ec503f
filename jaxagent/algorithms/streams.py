"""What the blind learner knows about one trajectory: one number per token and component.

In: a `types.Trajectory`. Out: `Streams`, made by an algorithm (`compose.py`) or by `sft.py`, normalised over one
optimiser update by `aggregate.py`, packed by `learner/batching.py`. NumPy only. Axis letters: T tokens.

The learner's loss is, with nothing hidden,

    sum over sequences and tokens of   policy_weights * objective(logprob, old logprob, advantage)
                                     + kl_weights     * KL estimate(logprob, reference logprob)
                                     - entropy_weights * entropy
                                     + z_weights      * (log Z)^2
                                     + ce_weights     * (-logprob)                      at temperature 1
                                     + nll_weights    * (-logprob)                      at the sampling temperature
                                     + distill_weights * divergence to the teacher      (distill.py)
                                     + value_weights  * value loss(value, old value, return)      (critic)

so every mean, mask, coefficient and denominator is inside the weights.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxagent.algorithms.distill import Support
from jaxagent.types import Trajectory

WEIGHTS = (
    "policy_weights", "kl_weights", "entropy_weights", "z_weights", "ce_weights", "nll_weights", "distill_weights",
    "value_weights",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Streams:
    """Per-token numbers of one trajectory, all f32[T] and 0 where they mean nothing.

    Weights made by an algorithm are relative (1 per token that counts, times a coefficient);
    `aggregate.normalise` turns them into the factors of the sum above.
    """

    trajectory: Trajectory
    episode: int  # which one of the rollout batch it belongs to; -1 = one of its own
    advantages: np.ndarray  # f32[T] of action tokens
    returns: np.ndarray  # f32[T] the critic's regression target
    old_values: np.ndarray  # f32[T] the critic's value when the advantage was estimated
    old_logprobs: np.ndarray  # f32[T] log-prob of the policy that the objective's ratio is taken to
    reference_logprobs: np.ndarray  # f32[T] log-prob under the frozen reference
    corrections: np.ndarray  # f32[T] factors of policy_weights that do not count in any denominator
    policy_weights: np.ndarray  # f32[T]
    kl_weights: np.ndarray  # f32[T]
    entropy_weights: np.ndarray  # f32[T]
    z_weights: np.ndarray  # f32[T]
    ce_weights: np.ndarray  # f32[T]
    nll_weights: np.ndarray  # f32[T]
    distill_weights: np.ndarray  # f32[T]
    value_weights: np.ndarray  # f32[T]
    support: Support | None = None  # where the teacher is compared, unless that is the whole vocabulary

    @classmethod
    def of(
        cls, trajectory: Trajectory, episode: int = -1, support: Support | None = None, **streams: np.ndarray
    ) -> Streams:
        """Streams of a trajectory; those not named are 0, corrections 1, old log-probs those recorded when sampled.

        Raises:
          ValueError: a stream that is not a vector as long as the trajectory.
        """
        length = len(trajectory)
        for name, stream in streams.items():
            if np.shape(stream) != (length,):
                raise ValueError(f"stream '{name}' has shape {np.shape(stream)}, the trajectory has {length} tokens")
        zero = np.zeros(length, np.float32)
        apart = ("trajectory", "episode", "support")
        names = [field.name for field in dataclasses.fields(cls) if field.name not in apart]
        given = {name: np.asarray(stream, np.float32) for name, stream in streams.items()}
        given = dict(old_logprobs=trajectory.logprobs, corrections=zero + 1) | given
        return cls(trajectory, episode, support=support, **({name: zero for name in names} | given))

    @property
    def targets(self) -> np.ndarray:
        """bool[T]: tokens whose log-prob the loss needs."""
        return np.any([getattr(self, name) != 0 for name in WEIGHTS], axis=0)
