"""docs/add_an_algorithm.md is true: its code runs, its test passes, and its function trains like the built-in ones."""

import pathlib
import re

import numpy as np

from jaxagent.algorithms import presets

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/add_an_algorithm.md"


def test_the_page_runs(make_group, rl, monkeypatch):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    names["check_rloo"](make_group, rl)

    monkeypatch.setitem(presets.ALGORITHMS, "rloo", names["rloo"])
    config = rl(algorithm="rloo", updates_per_step=1)
    streams, _ = presets.streams([make_group(("paoa", 1.0), ("pa", 0.0))], config, 0.0)
    (update,) = presets.mini_batches(streams, config, (0, 0))
    np.testing.assert_allclose(sum(s.policy_weights.sum() for s in update), 1.0)
