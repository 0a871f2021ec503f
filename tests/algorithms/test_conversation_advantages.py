"""The three published advantages of episodes of several conversations, for two groups of a planner, by hand.

Group 1, rewards 1, 0, 0; conversations 3, 4, 5. Group 2, rewards 1, 0, 1; conversations 3, 3, 4.
"""

import numpy as np
import pytest

from jaxagent.algorithms import compose

LENGTHS = ((3, 4, 5), (3, 3, 4))
REWARDS = ((1.0, 0.0, 0.0), (1.0, 0.0, 1.0))
# slime-agentic: over the three rewards of a group. Mean 1/3, unbiased variance (4/9 + 1/9 + 1/9) / 2 = 1/3.
STD = (1 / 3) ** 0.5
FULL = ((2 / 3 / STD, -1 / 3 / STD, -1 / 3 / STD), (1 / 3 / STD, -2 / 3 / STD, 1 / 3 / STD))
# Flow-GRPO: over 12 conversations with the rewards 1 x 3 and 0 x 9: mean 1/4, variance (3 x 9/16 + 9 x 1/16) / 11;
# and over 10 with 1 x 7 and 0 x 3: mean 7/10, variance (7 x 9/100 + 3 x 49/100) / 9.
STDS = ((36 / 16 / 11) ** 0.5, (210 / 100 / 9) ** 0.5)
TURNS = ((0.75 / STDS[0], -0.25 / STDS[0], -0.25 / STDS[0]), (0.3 / STDS[1], -0.7 / STDS[1], 0.3 / STDS[1]))
RULES = {
    "full": FULL,
    "divide": tuple(tuple(a / n for a, n in zip(*group, strict=True)) for group in zip(FULL, LENGTHS, strict=True)),
    "statistics": TURNS,
}


@pytest.mark.parametrize("rule", list(RULES))
def test_by_hand(rl, make_group, rule):
    groups = [
        make_group(*[(" ".join(["paa"] * n), reward) for n, reward in zip(lengths, rewards, strict=True)])
        for lengths, rewards in zip(LENGTHS, REWARDS, strict=True)
    ]
    config = rl(advantage=dict(name="group_mean_std", multi_trajectory=rule))
    streams = compose.streams(groups, config, 0.0)[0]
    wanted = [a for g, lengths in enumerate(LENGTHS) for s, n in enumerate(lengths) for a in [RULES[rule][g][s]] * n]
    assert len(streams) == len(wanted) == 22
    for stream, advantage in zip(streams, wanted, strict=True):
        np.testing.assert_allclose(stream.advantages, [0, advantage, advantage], rtol=1e-5)


def test_the_hand_has_not_slipped():
    assert abs(FULL[0][0] - 1.154701) < 1e-6 and abs(FULL[1][1] + 1.154701) < 1e-6
    assert abs(TURNS[0][0] - 1.658312) < 1e-6 and abs(TURNS[1][1] + 1.449138) < 1e-6
