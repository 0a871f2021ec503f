"""ToolOrchestra's reward: what an attempt achieved and spent, compared inside its group, in the user's weights.

Functions of arrays on NumPy; `group_rewards.py` names them. Axis letters: G attempts of one group, K features.
"""

from __future__ import annotations

import chex
import numpy as np


def normalised(features: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Each feature, scaled to [0, 1] between its least and its largest value in the group.

    f64[G, K] features and bool[G] of the attempts that count -> f64[G, K].
    A feature that is the same in all attempts that count is 0: it says nothing. So is an attempt that does not count,
    which changes no minimum and no maximum.
    """
    chex.assert_rank([features, mask], [2, 1])
    chex.assert_equal_shape_prefix([features, mask], 1)
    chex.assert_type([features, mask], [float, bool])
    if not mask.any():
        return np.zeros_like(features)
    low, high = features[mask].min(axis=0), features[mask].max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    return np.where(mask[:, None] & (high > low), (features - low) / span, 0.0)


def preferred(features: np.ndarray, weights: np.ndarray, correct: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """R = normalised features . weights where the attempt is correct, else 0: f64[G].

    "ToolOrchestra" (Su et al., arXiv 2511.21689), the section on rewards: the vector of an attempt is its outcome, its
    cost and its latency (both negative, so that less is more) and how often it used each tool; the weights are the
    user's preferences. Its published code gives cost and latency a plus in the last step, by which more is better;
    this is the paper's.

    Args:
      features: f64[G, K].
      weights: f64[K] of the features.
      correct: bool[G].
      mask: bool[G] attempts that count.
    """
    chex.assert_rank([weights, correct], 1)
    chex.assert_equal_shape([correct, mask])
    chex.assert_equal(features.shape[1:], weights.shape)
    chex.assert_type([weights, correct], [float, bool])
    return np.where(correct & mask, normalised(features, mask) @ weights, 0.0)
