"""Importance weights: numbers by hand, plain Python as the witness, what they do to streams; sequence masking."""

import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import presets
from jaxagent.algorithms.corrections import importance_weights, vetoed
from jaxagent.algorithms.policy_loss import Tokens, opsm_factor

RHO = np.log(np.array([1.0, 3.0, 0.25]))  # product 0.75


@pytest.mark.parametrize(
    ("name", "level", "low", "high", "expected"),
    [
        ("truncate", "token", 0.0, 2.0, [1.0, 2.0, 0.25]),
        ("truncate", "token", 0.5, 2.0, [1.0, 2.0, 0.5]),
        ("mask", "token", 0.5, 5.0, [1.0, 3.0, 0.0]),
        ("mask", "token", 1.0, 5.0, [1.0, 3.0, 0.0]),  # the bounds themselves are inside
        ("mask", "token", 0.5, 1.0, [1.0, 0.0, 0.0]),
        ("truncate", "sequence", 0.0, 2.0, [0.75] * 3),
        ("mask", "sequence", 0.8, 2.0, [0.0] * 3),
        ("truncate", "geometric", 0.0, 2.0, [0.75 ** (1 / 3)] * 3),
    ],
)
def test_by_hand(name, level, low, high, expected):
    got = importance_weights(RHO - 2.0, np.full(3, -2.0), name, level, low, high)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_veto_by_hand():
    assert vetoed(RHO - 2.0, np.full(3, -2.0), 0.3) and not vetoed(RHO - 2.0, np.full(3, -2.0), 0.2)
    assert not vetoed(np.array([-99.0]), np.zeros(1), 0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from(["truncate", "mask"]), st.sampled_from(["token", "sequence", "geometric"])
)
def test_equals_plain_python(seed, name, level):
    rng = np.random.default_rng(seed)
    n, spread = int(rng.integers(0, 9)), rng.choice([0.1, 50.0])
    behaviour = rng.normal(-2, 0.5, n).astype(np.float32)
    old = (behaviour + rng.normal(0, spread, n)).astype(np.float32)
    logs = [float(a) - float(b) for a, b in zip(old, behaviour, strict=True)]
    for i, weight in enumerate(importance_weights(old, behaviour, name, level, 0.5, 2.0)):
        log = {"token": logs[i], "sequence": sum(logs), "geometric": sum(logs) / n}[level]
        rho = math.exp(min(max(log, -20.0), 20.0))
        expected = min(max(rho, 0.5), 2.0) if name == "truncate" else rho * (0.5 <= rho <= 2.0)
        assert weight == pytest.approx(expected, rel=1e-9)


def test_unknown_names():
    for name, level in (("clip", "token"), ("mask", "turn")):
        with pytest.raises(ValueError, match="unknown correction"):
            importance_weights(np.zeros(1), np.zeros(1), name, level, 0.0, 1.0)


def _old(kinds: str, *ratios: float) -> np.ndarray:
    """Log-probs of the learner for a trajectory whose recorded ones are -1: in these ratios at its actions."""
    out = np.full(len(kinds), 7.0, np.float32)  # never read outside actions
    out[[i for i, kind in enumerate(kinds) if kind == "a"]] = -1 + np.log(ratios)
    return out


def test_a_masked_token_stays_in_the_denominator_and_a_vetoed_trajectory_does_not(rl, make_group):
    group = make_group(("paoa", 1.0), ("paa", 0.0), ("pa", 0.0))
    old = [_old("paoa", 1.0, 8.0), _old("paa", 0.6, 2.0), _old("pa", 1e-6)]
    changes = dict(name="mask", low=0.5, high=5.0, veto=1e-4)
    config = rl(correction=changes, updates_per_step=1)
    streams, counts = presets.streams([group], config, 0.0, old=old)
    assert len(streams) == 2 and counts["correction/vetoed"] == 1
    assert counts["correction/zero_frac"] == pytest.approx(1 / 4)
    assert counts["correction/weight_mean"] == pytest.approx((1 + 0 + 0.6 + 2) / 4)
    (update,) = presets.mini_batches(streams, config, (0, 0))
    first, second = sorted(update, key=lambda s: -len(s.trajectory))
    np.testing.assert_allclose(first.policy_weights, [0, 1 / 4, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(second.policy_weights, [0, 0.6 / 4, 2 / 4], rtol=1e-6)
    np.testing.assert_allclose(first.old_logprobs[[1, 3]], [-1, -1 + np.log(8)], rtol=1e-6)
    _, scaled = presets.streams([group], rl(correction=changes | dict(normalise=True)), 0.0, old=old)
    assert scaled == counts
    streams, _ = presets.streams([group], rl(correction=changes | dict(normalise=True)), 0.0, old=old)
    np.testing.assert_allclose(streams[1].corrections[1:], np.array([0.6, 2.0]) / (3.6 / 4), rtol=1e-6)


def test_on_policy_samples_are_not_changed(rl, make_group):
    group = make_group(("paoa", 1.0), ("paa", 0.0))
    old = [t.logprobs for t in presets.trajectories([group])]
    corrected = rl(correction=dict(name="truncate", low=0.0, high=2.0))
    assert presets.needs_old(corrected) and not presets.needs_old(rl()) and not presets.needs_old(
        rl(correction=dict(name="opsm"))
    )  # fmt: skip
    plain = presets.streams([group], rl(), 0.0)[0]
    for a, b in zip(plain, presets.streams([group], corrected, 0.0, old=old)[0], strict=True):
        for field in ("advantages", "policy_weights", "old_logprobs", "corrections"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


class Opsm(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_bad_sequences_that_the_policy_has_left_are_masked(self):
        # Two tokens each; mean of log p_old - log p: 0.2, 0.2, -0.3; the second sequence has a positive advantage.
        old, drift = jnp.full((1, 6), -1.0), jnp.array([[0.5, -0.1, 0.1, 0.3, -0.2, -0.4]])
        advantages = jnp.array([[-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]])

        def factor(logprobs, delta):
            pairs = lambda x: jnp.repeat(x.reshape(1, 3, 2).mean(-1), 2, axis=1)  # noqa: E731
            return opsm_factor(Tokens(logprobs, old, advantages, pairs), delta)

        np.testing.assert_array_equal(self.variant(factor)(old - drift, 0.1), [[0, 0, 1, 1, 1, 1]])
        np.testing.assert_array_equal(self.variant(factor)(old - drift, 0.25), np.ones((1, 6)))
