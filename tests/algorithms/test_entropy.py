"""Entropy at a target: by hand, its bounds, what it reads and that it goes on where it was saved."""

import json

import numpy as np
import pytest

from jaxagent.algorithms import compose
from jaxagent.algorithms.compose import EntropyControl, next_coefficient
from jaxagent.config import EntropyControlConfig

CONFIG = EntropyControlConfig(target=0.5, step=0.25, maximum=0.6)


@pytest.mark.parametrize(
    "coefficient, entropy, expected",
    [
        (0.1, 0.4, (0.35, True)),  # too sure: more
        (0.3, 0.7, (0.05, False)),  # above: less, and none is applied
        (0.3, 0.5, (0.3, True)),
        (0.5, 0.0, (0.6, True)),  # not above the maximum
        (0.1, 0.9, (0.0, False)),  # nor below 0
    ],
)
def test_next_coefficient(coefficient, entropy, expected):
    got, active = next_coefficient(coefficient, entropy, CONFIG)
    assert got == pytest.approx(expected[0]) and active is expected[1]


def measured(entropy, tokens=3.0):
    return {"policy/entropy": entropy, "policy/tokens": tokens}


def test_a_run_and_a_resumed_run_apply_the_same_coefficients(rl):
    config = rl(entropy_coefficient=0.1, entropy_control=dict(target=0.5, step=0.25, maximum=0.6))
    entropies = [0.4, 0.7, 0.6, 0.2, 0.2]
    whole, results, applied = EntropyControl.start(config, {}), {}, []
    for entropy in entropies:
        applied.append(whole.applied)
        whole = whole.after(measured(entropy))
    np.testing.assert_allclose(applied, [0.1, 0.35, 0.0, 0.0, 0.25])
    half = EntropyControl.start(config, results)
    for entropy in entropies[:3]:
        half = half.after(measured(entropy))
    half.save(results)
    resumed = EntropyControl.start(config, json.loads(json.dumps(results)))  # as a bundle keeps it
    assert resumed == half
    for entropy in entropies[3:]:
        resumed = resumed.after(measured(entropy))
    assert resumed == whole


def test_off_or_without_a_measurement_nothing_moves(rl, make_group):
    off = EntropyControl.start(rl(entropy_coefficient=0.1, entropy_control=None), {})
    assert off.after(measured(9.0)) == off and off.applied == 0.1
    results = {}
    off.save(results)
    assert results == {}
    on = EntropyControl.start(rl(entropy_coefficient=0.1, entropy_control=dict(target=0.5)), {})
    assert on.after({}) == on == on.after(measured(0.0, tokens=0.0))  # a critic's warm-up; no policy token


def test_the_coefficient_is_inside_the_weights(rl, make_group):
    config = rl(entropy_coefficient=0.1, entropy_control=dict(target=0.5, step=0.25, maximum=0.6))
    control = EntropyControl.start(config, {}).after(measured(0.2))
    (one, _), _ = compose.streams([make_group(("pa", 1.0), ("pa", 0.0))], control.apply(config), 0.0)
    np.testing.assert_allclose(one.entropy_weights, [0, 0.35], rtol=1e-6)
