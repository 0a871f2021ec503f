"""docs/add_an_algorithm.md is true: its files stand outside the package, and an import path names what is in them."""

import dataclasses
import functools
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
from jaxagent.algorithms.policy_loss import READABLE, Tokens, sequence_sum, tokens_of
from jaxagent.config import ConfigError, overrides
from jaxagent.learner import loss
from jaxagent.learner.batching import Packer
from jaxagent.learner.state import check_batch
from tests.learner.test_loss import WEIGHTS, random_batch

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


def rows_of(rng, lengths, width):
    """Sequences side by side in one row, some of their tokens without weight: (which sequence, mask)."""
    sequence = np.full((1, width), -1, np.int32)
    sequence[0, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return sequence, (sequence >= 0) & (rng.random(sequence.shape) < 0.8)


def test_topr_of_a_users_own_is_that_of_the_paper(mine):
    """Value and gradient of its loss, sequence by sequence in float64 (arXiv 2503.14286), with weights of tokens."""
    from my_topr import TOPR

    def of(logprobs, entropy, batch):
        return loss.policy_loss(logprobs, entropy, batch, objective=TOPR(oldest=2.0))[0]

    rng, function = np.random.default_rng(0), jax.jit(jax.value_and_grad(of))
    for _ in range(3):
        sequence, mask = rows_of(rng, [3, 1, 5, 2, 4], 18)
        batch, logprobs, entropy = random_batch(rng, 1, 18, 1.0)
        of_sequences = np.array([1.5, -2.0, -0.5, 0.5, -1.0, 0.0])
        weights = {name: np.zeros((1, 18), np.float32) for name in WEIGHTS}
        weights["policy_weights"] = np.where(mask, rng.uniform(0.1, 1, (1, 18)), 0).astype(np.float32)
        advantages, ages = of_sequences[sequence].astype(np.float32), rng.integers(0, 3, (1, 18)).astype(np.float32)
        batch = batch.replace(sequence=sequence, advantages=advantages, ages=ages, **weights)
        value, gradient = function(logprobs, entropy, batch)
        total, expected = 0.0, np.zeros((1, 18))
        for s, advantage in enumerate(of_sequences[:-1]):
            own = (sequence == s) & mask
            difference = logprobs.astype(np.float64) - batch.behaviour_logprobs.astype(np.float64)
            factor = 1.0 if advantage > 0 else min(np.exp(difference[own].sum()), 1.0)
            w = np.where(own & (ages < 2), batch.policy_weights.astype(np.float64) * factor * advantage, 0.0)
            total -= (w * logprobs).sum()
            expected -= w
        np.testing.assert_allclose(value, total, rtol=1e-5)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_sums_of_sequences_have_the_gradient_of_the_sum():
    @jax.jit
    def function(x, up, mask, sequence):
        got, pull = jax.vjp(lambda x: sequence_sum(x, mask, sequence), x)
        return got, pull(up)[0], tokens_of(got, got, got, mask, sequence).lengths

    rng = np.random.default_rng(0)
    for _ in range(3):
        sequence, mask = rows_of(rng, [1, 6, 2, 1, 3], 16)
        x, up = rng.normal(size=(2, 1, 16))
        same = (sequence[0][:, None] == sequence[0]) & mask  # [at, from]
        got, gradient, lengths = function(x.astype(np.float32), up.astype(np.float32), mask, sequence)
        np.testing.assert_allclose(got, x @ same.T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient, up @ same, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(lengths[0], same.sum(axis=1))


def test_rewards_and_ages_reach_an_objective_that_reads_them_and_no_other(make_group):
    rl = config.parse(get_config()).rl
    group = make_group(("paoa", 1.0), ("pa", 0.5), ("pa", 0.0))
    episodes = [
        dataclasses.replace(episode, trajectories=tuple(
            dataclasses.replace(t, policy_versions=np.where(t.action_mask, 5 - i, -1)) for t in episode.trajectories))
        for i, episode in enumerate(group.episodes)
    ]  # fmt: skip
    group = dataclasses.replace(group, episodes=tuple(episodes))
    streams, _ = compose.streams([group], rl, 0.0)
    plain, reading = (Packer(rl.batch, 8, reads=reads) for reads in ((), READABLE))
    (without,), (batch,) = plain.pack(streams, 6), reading.pack(streams, 6)
    assert without.rewards is without.ages is None and reading.empty().ages.shape == batch.ages.shape
    check_batch(batch)
    at = batch.policy_weights != 0
    np.testing.assert_array_equal(batch.rewards[at], np.array([1.0, 0.5, 0.0], np.float32)[batch.sequence[at]])
    np.testing.assert_array_equal(batch.ages[at], (1 + batch.sequence[at]).astype(np.float32))
    assert batch.ages.dtype == batch.rewards.dtype == np.float32

    class Reads:
        reads = READABLE

        def __call__(self, tokens):
            return -tokens.logprobs * (tokens.rewards - tokens.ages), tokens.mask

    logprobs, entropy = np.full((2, *batch.targets.shape), -2.0, np.float32)
    value, _ = jax.jit(functools.partial(loss.policy_loss, objective=Reads()))(logprobs, entropy, batch)
    expected = 2.0 * batch.policy_weights * (batch.rewards - batch.ages)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-6)
