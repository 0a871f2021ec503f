"""docs/add_an_algorithm.md is true: its code runs, its test passes, and its function trains like the built-in ones."""

import pathlib
import re

import numpy as np

from jaxagent.algorithms import checks, compose
from jaxagent.algorithms.advantages import GROUP_ADVANTAGES

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/add_an_algorithm.md"


def test_the_page_runs(make_group, rl, monkeypatch):
    monkeypatch.setitem(GROUP_ADVANTAGES, "group_median", None)  # undone after the test
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    names["check_group_median"]()

    config = rl(advantage="group_median", updates_per_step=1)
    checks.check(config)
    group = make_group(("paoa", 1.0), ("pa", 0.0), ("pa", 0.0))
    streams, _ = compose.streams([group], config, 0.0)
    np.testing.assert_allclose(streams[0].advantages, [0, 1, 0, 1])
    (update,) = compose.mini_batches(streams, config, (0, 0))
    np.testing.assert_allclose(sum(s.policy_weights.sum() for s in update), 1.0)
