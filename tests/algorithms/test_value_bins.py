"""The critic in bins: the normal distribution of `statistics` as the witness, gradients and limits."""

import itertools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms.value_losses import HLGauss, TwoHot
from jaxagent.config import ConfigError

WIDE = HLGauss(low=-1.0, high=2.0, bins=30)
HOT = TwoHot(low=-1.0, high=2.0, bins=30)


@jax.jit
def both(logits, returns):
    losses = [entry(logits, returns, returns)[0] for entry in (WIDE, HOT)]
    return WIDE.target(returns), HOT.target(returns), WIDE.values(logits), *losses


@jax.jit
def gradient(logits, returns):
    total = lambda x: sum(entry(x, returns, returns)[0].sum() for entry in (WIDE, HOT))  # noqa: E731
    return jax.grad(total)(logits)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1.0, 30.0]))
def test_equals_plain_python(seed, spread):
    rng = np.random.default_rng(seed)
    returns = rng.uniform(-1.3, 2.3, 6).astype(np.float32)
    logits = rng.normal(0, spread, (6, WIDE.bins)).astype(np.float32)
    got = [np.asarray(x, np.float64) for x in both(logits, returns)]
    edges = [WIDE.low + (WIDE.high - WIDE.low) * i / WIDE.bins for i in range(WIDE.bins + 1)]
    centres = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    for i, (row, g) in enumerate(zip(logits.astype(np.float64), returns, strict=True)):
        y = min(max(float(g), WIDE.low), WIDE.high)
        cdf = statistics.NormalDist(y, 0.75 * 0.1).cdf
        mass = [(cdf(b) - cdf(a)) / (cdf(edges[-1]) - cdf(edges[0])) for a, b in itertools.pairwise(edges)]
        near = min(max(float(g), centres[0]), centres[-1])
        hot = [max(0.0, 1 - abs(near - c) / 0.1) for c in centres]
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
        kl = [sum(t * (np.log(t) - q) for t, q in zip(goal, log_p, strict=True) if t > 0) for goal in (mass, hot)]
        for found, expected in zip(got, (mass, hot, np.dot(p, centres), *kl), strict=True):
            # A cross-entropy is a difference of numbers as large as the logits.
            np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-5 * spread)
        np.testing.assert_allclose(got[1][i] @ centres, near, atol=1e-5)  # the mean of a two-hot target is the return
    # The gradient of cross-entropy: softmax - target, and nothing through the target.
    p = np.exp(logits - logits.max(1, keepdims=True))
    expected = 2 * p / p.sum(1, keepdims=True) - got[0] - got[1]
    np.testing.assert_allclose(gradient(logits, returns), expected, rtol=1e-5, atol=1e-5)


def test_absurd_returns_and_logits_stay_finite():
    logits = jnp.array([[1e30] + [0.0] * 29, [-1e30] * 30])
    assert np.all(np.isfinite(gradient(logits, jnp.array([1e30, -1e30]))))


def test_bins_of_no_width_are_refused_by_name(rl):
    def with_loss(**loss):
        return rl(advantage=dict(name="gae", critic=dict(loss=loss)))

    assert with_loss(name="hl_gauss", bins=2, low=0.0, high=1.0).critic.loss.heads == 2
    for name in ("hl_gauss", "two_hot"):
        with pytest.raises(ConfigError, match=r"rl.advantage.critic.loss: low \(1\) must be less than high"):
            with_loss(name=name, low=1.0, high=1.0)
