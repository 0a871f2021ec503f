"""Temperatures by hand."""

import types

import numpy as np
import pytest

from jaxagent.config import TemperatureConfig
from jaxagent.runs import attempts


def temperature(cfg, start, step, steps):
    rl = types.SimpleNamespace(temperature=cfg, sampling=types.SimpleNamespace(temperature=start), steps=steps)
    return attempts.temperature(rl, step)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("constant", [1.2, 1.2, 1.2, 1.2, 1.2]),
        ("linear", [1.2, 1.0, 0.8, 0.6, 0.4]),
        # .4 + .8 (1 + cos) / 2 at cos = 1, .7071, 0, -.7071, -1
        ("cosine", [1.2, 1.0828427, 0.8, 0.5171573, 0.4]),
    ],
)
def test_values(name, expected):
    cfg = None if name == "constant" else TemperatureConfig(0.4, name)
    found = [temperature(cfg, 1.2, step, 5) for step in range(5)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if name != "constant":
        assert all(float(np.float32(t)) == t for t in found)  # engine and trainer see the same bits
        assert temperature(cfg, 1.2, 9, 5) == found[-1]  # and it stays there


def test_a_run_of_one_step():
    assert temperature(TemperatureConfig(0.5, "linear"), 1.0, 0, 1) == 1.0
