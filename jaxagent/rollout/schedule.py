"""The sampling temperature of every RL step: constant, or going to `final` in a line or half a cosine."""

from __future__ import annotations

import math

import numpy as np

from jaxagent.config import TemperatureConfig


def temperature(cfg: TemperatureConfig | None, start: float, step: int, steps: int) -> float:
    """The temperature that step `step` of `steps` samples with, and that its updates score with.

    `start` in the first step and where there is no schedule, `cfg.final` in the last. Rounded to f32: engine and
    trainer divide by the same number.

      linear  start + (final - start) x,   cosine  final + (start - final) (1 + cos(pi x)) / 2,   x = step / (steps - 1)
    """
    if cfg is None:
        return start  # as it stands in the config
    x = min(step / max(steps - 1, 1), 1.0)
    if cfg.schedule == "linear":
        value = start + (cfg.final - start) * x
    else:
        value = cfg.final + (start - cfg.final) * 0.5 * (1.0 + math.cos(math.pi * x))
    return float(np.float32(value))
