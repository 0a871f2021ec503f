"""SFT streams: which tokens, and a mean of one."""

import numpy as np

from jaxagent.algorithms.supervised import sft


def test_loss_on_demonstrated_tokens_and_in_the_curriculum_on_observations(make_trajectory):
    demonstrations = [make_trajectory("ppaoaw"), make_trajectory("pa")]
    one, two = sft(demonstrations, observations=False)
    np.testing.assert_allclose(one.ce_weights, np.array([0, 0, 1, 0, 1, 0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(two.ce_weights, [0, 1 / 3], rtol=1e-6)
    one, two = sft(demonstrations, observations=True, mode="sequence_mean")
    np.testing.assert_allclose(one.ce_weights, np.array([0, 0, 1, 1, 1, 1]) / 8, rtol=1e-6)
    np.testing.assert_allclose(two.ce_weights, [0, 1 / 2], rtol=1e-6)
    assert not one.policy_weights.any() and one.targets.sum() == 4
