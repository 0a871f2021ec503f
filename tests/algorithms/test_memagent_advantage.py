"""What each of MemAgent's two published variants pays: episodes of three chunks and an answer, by hand."""

import numpy as np

from configs import memagent
from jaxagent import config
from jaxagent.algorithms import compose


def paid(group, preset):
    """(advantage, weight of its tokens) of every trajectory in a group."""
    streams, _ = compose.streams([group], config.parse(memagent.get_config(preset)).rl, 0.0)
    return [(float(s.advantages[-1]), float(s.policy_weights[-1])) for s in streams]


def test_the_original_pays_all_of_the_advantage_to_every_conversation(make_group):
    group = make_group(("pa pa pa pa", 1.0), ("pa pa pa pa", 0.0), ("pa pa pa pa", 0.0), ("pa pa pa pa", 0.0))
    np.testing.assert_allclose(paid(group, "laptop"), [(0.75, 1.0)] * 4 + [(-0.25, 1.0)] * 12, rtol=1e-6)


def test_the_reproduction_pays_every_memory_its_share_and_the_answer_nothing(make_group):
    # The answer's conversation is no trajectory: `train_answer` is False, and the rollout shows it alone.
    group = make_group(("pa pa pa", 1.0), ("pa pa pa", 0.0), ("pa pa pa", 0.0), ("pa pa pa", 0.0))
    expected = [(0.25, 1.0)] * 3 + [(-0.25 / 3, 1.0)] * 9
    np.testing.assert_allclose(paid(group, "laptop-reproduction"), expected, rtol=1e-6)


def test_statistics_come_before_the_shares(make_group):
    """A group whose members read different numbers of chunks: the mean is over attempts, and not over conversations."""
    group = make_group(("pa pa", 1.0), ("pa pa pa pa", 0.0))
    assert [a for a, _ in paid(group, "laptop")] == [0.5] * 2 + [-0.5] * 4
    np.testing.assert_allclose([a for a, _ in paid(group, "laptop-reproduction")], [0.25] * 2 + [-0.125] * 4, rtol=1e-6)
