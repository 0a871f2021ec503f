"""ECHO's targets, denominators and schedules: hand numbers from the published definition."""

import numpy as np
import pytest

from jaxagent.algorithms import echo


@pytest.mark.parametrize(
    "targets, expected",
    [
        ("env_only", "...  oo.  .o"),
        ("full_observation", "...  oow  wo"),
        ("warning_plus_env", "...  oow  wo"),
        ("warning_only", "...  ..w  w."),
    ],
)
def test_targets(make_trajectory, targets, expected):
    kinds = make_trajectory("ppaoowwo").kinds
    wanted = [c != "." for c in expected.replace(" ", "")]
    np.testing.assert_array_equal(echo.target_mask(kinds, targets, 0), wanted)


def test_cap_keeps_the_first_targets_and_the_first_token_is_never_one(make_trajectory):
    kinds = make_trajectory("oaooao").kinds
    np.testing.assert_array_equal(echo.target_mask(kinds, "env_only", 0), [0, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(echo.target_mask(kinds, "env_only", 2), [0, 0, 1, 1, 0, 0])


def test_denominators():
    counts = np.array([3.0, 0, 1]), np.array([4.0, 0, 1])  # targets, and observation tokens
    scales = lambda name, **constants: echo.DENOMINATORS[name](**constants)(*counts)  # noqa: E731
    np.testing.assert_allclose(scales("full_observation"), [1 / (4.001 * 3), 1 / 0.003, 1 / (1.001 * 3)])
    np.testing.assert_allclose(scales("targets"), [1 / (3.001 * 3), 1 / 0.003, 1 / (1.001 * 3)])
    np.testing.assert_allclose(scales("token_mean"), [1 / 4.001] * 3)
    np.testing.assert_allclose(scales("constant", constant=10.0), [1 / 30] * 3)
    np.testing.assert_allclose(scales("constant_sum", constant=10.0), [1 / 10] * 3)


@pytest.mark.parametrize(
    "schedule, values", [("constant", (0.05, 0.05, 0.05)), ("linear_decay", (0.05, 0.025, 0.0)),
                         ("step_decay", (0.05, 0.0, 0.0))]
)  # fmt: skip
def test_schedules(schedule, values):
    got = [echo.coefficient(0.05, schedule, progress) for progress in (0.0, 0.5, 1.0)]
    np.testing.assert_allclose(got, values)


def test_unknown_schedule():
    with pytest.raises(ValueError, match="unknown ECHO schedule"):
        echo.coefficient(0.05, "cosine", 0.0)
