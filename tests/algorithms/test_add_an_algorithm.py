"""docs/add_an_algorithm.md is true: its files stand outside the package, and an import path names what is in them."""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms import checks, compose
from jaxagent.algorithms.policy_loss import Tokens
from jaxagent.config import ConfigError, overrides
from jaxagent.learner import loss

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/add_an_algorithm.md"
MINE = [("rl.advantage", "my_advantage:GroupQuantile"), ("rl.objective", "my_objective:Quadratic")]


def write_files(folder, monkeypatch):
    """The page's files in a folder of the user's, which Python finds."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / block.split("\n", 1)[0].removeprefix("# ")).write_text(block)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def parsed(*changes):
    return config.parse(overrides.apply(get_config().to_dict(), [*MINE, *changes]))


def test_choices_of_a_users_own_go_through_the_whole_algorithm(mine, make_group):
    exec((mine / "check_mine.py").read_text(), {})  # the page's own numbers
    cfg = parsed(("rl.advantage.quantile", "0.25"), ("rl.objective.epsilon", "0.5"), ("rl.updates_per_step", "1"))
    checks.check(cfg.rl)
    group = make_group(("paoa", 1.0), ("pa", 0.5), ("pa", 0.0))  # a quarter of the way from 0 to 1: 0.25
    streams, _ = compose.streams([group], cfg.rl, 0.0)
    np.testing.assert_allclose([s.advantages.max() + s.advantages.min() for s in streams], [0.75, 0.25, -0.25])
    (update,) = compose.mini_batches(streams, cfg.rl, (0, 0))
    np.testing.assert_allclose(sum(s.policy_weights.sum() for s in update), 1.0)

    chosen = loss.policy_loss_of(cfg.rl).keywords["objective"]
    jitted = jax.jit(lambda logprobs: chosen(Tokens(logprobs, jnp.zeros(1), jnp.array([-1.0]), lambda x: x))[0])
    np.testing.assert_allclose(jitted(jnp.log(jnp.array([2.0]))), [2.0 + 1.0 / (2 * 0.5)], rtol=1e-6)  # a ratio of 2
    assert isinstance(hash(cfg.rl), int)  # static under jit


def test_the_stored_config_holds_their_constants_and_comes_back(mine):
    cfg = parsed()
    stored = json.loads(json.dumps(config.to_dict(cfg)))
    assert stored["rl"]["advantage"]["name"] == "my_advantage:GroupQuantile"
    assert (stored["rl"]["advantage"]["quantile"], stored["rl"]["objective"]["epsilon"]) == (0.5, 0.2)
    assert config.parse(stored) == cfg


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rl.advantage.quantile", "1.5", "config.rl.advantage.quantile must be at least 0 and at most 1, got 1.5."),
        ("rl.advantage.quantil", "0.5", "Did you mean 'quantile'?"),
        ("rl.advantage", "my_objective:Quadratic", "must extend GroupAdvantage, TurnAdvantage or TokenAdvantage"),
    ],
)
def test_a_mistake_in_them_is_one_line(mine, field, value, message):
    with pytest.raises(ConfigError) as error:
        checks.check(parsed((field, value)).rl)
    assert message in str(error.value) and "\n" not in str(error.value)
