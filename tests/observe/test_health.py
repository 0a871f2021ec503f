"""What is not a number is never taken for a good one."""

import math

import pytest

from jaxagent.observe import health

NAN = math.nan


def test_a_healthy_step_has_no_complaint():
    metrics = {"policy/grad_norm": 0.5, "policy/update_applied": 1.0, "loss/total": -1.0, "time/step_s": None}
    assert health.complaints(metrics) == {}


@pytest.mark.parametrize(
    ("cut", "turns", "told"),
    [(1.0, 1.0, True), (0.97, 1.03, True), (1.0, 3.0, False), (0.5, 1.0, False), (1.0, None, False)],
)
def test_a_step_whose_turns_were_all_cut_off_is_told(cut, turns, told):
    found = health.complaints({"stop/token_limit": cut, "episode/turns": turns})
    assert list(found) == ["stop/token_limit"] * told
    assert not told or found["stop/token_limit"].startswith(f"{cut:.0%} of episodes ended in their first turn")


def test_a_skipped_update_says_why():
    found = health.complaints({"policy/grad_norm": NAN, "policy/update_applied": 0.5, "logprob_gap/max": NAN})
    assert found == {
        "policy/grad_norm": "policy/grad_norm is nan: an update with such a gradient is left out, the weights stay as "
        "they were",
        "logprob_gap/max": "logprob_gap/max is nan",
    }
    found = health.complaints({"policy/grad_norm": 0.0, "policy/update_applied": 0.0})
    assert found == {"policy/update_applied": "policy/update_applied is 0: an update found no token to learn from"}
