"""Importance weights: numbers by hand, plain Python as the witness, what they do to streams; sequence masking."""

import dataclasses
import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms import compose
from jaxagent.algorithms.corrections import CORRECTIONS, OPSM, Mask
from jaxagent.algorithms.policy_loss import Tokens
from jaxagent.algorithms.streams import ModelScores, action_mask, sampled_trajectories

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
    got = CORRECTIONS[name](level=level, low=low, high=high)(RHO - 2.0, np.full(3, -2.0))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_veto_by_hand():
    logprobs = RHO - 2.0, np.full(3, -2.0)
    assert Mask(veto=0.3).vetoes(*logprobs) and not Mask(veto=0.2).vetoes(*logprobs)
    assert not Mask(veto=0.0).vetoes(np.array([-99.0]), np.zeros(1))


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
    for i, weight in enumerate(CORRECTIONS[name](level=level, low=0.5, high=2.0)(old, behaviour)):
        log = {"token": logs[i], "sequence": sum(logs), "geometric": sum(logs) / n}[level]
        rho = math.exp(min(max(log, -20.0), 20.0))
        expected = min(max(rho, 0.5), 2.0) if name == "truncate" else rho * (0.5 <= rho <= 2.0)
        assert weight == pytest.approx(expected, rel=1e-9)


def _old(kinds: str, *ratios: float) -> np.ndarray:
    """Log-probs of the learner for a trajectory whose recorded ones are -1: in these ratios at its actions."""
    out = np.full(len(kinds), 7.0, np.float32)  # never read outside actions
    out[[i for i, kind in enumerate(kinds) if kind == "a"]] = -1 + np.log(ratios)
    return out


def test_what_is_masked_or_vetoed_stays_in_the_denominator(rl, make_group):
    group = make_group(("paoa", 1.0), ("paa", 0.0), ("pa", 0.0))
    old = [_old("paoa", 1.0, 8.0), _old("paa", 0.6, 2.0), _old("pa", 1e-6)]
    changes = dict(name="mask", low=0.5, high=5.0, veto=1e-4)
    held = dict(
        kl=dict(coefficient=0.1), entropy_coefficient=0.01
    )  # of the vetoed attempt nothing but its length counts
    chosen = rl(correction=changes, updates_per_step=1, **held)
    streams, counts = compose.streams([group], chosen, 0.0, ModelScores(old=old, reference=old))
    assert counts["correction/vetoed"] == 1 and counts["correction/zero_frac"] == pytest.approx(2 / 5)
    assert counts["correction/weight_mean"] == pytest.approx((1 + 0 + 0.6 + 2 + 0) / 5)
    (update,) = compose.mini_batches(streams, chosen, (0, 0))
    first, second, vetoed_one = sorted(update, key=lambda s: -len(s.trajectory))
    np.testing.assert_allclose(first.policy_weights, [0, 1 / 5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(second.policy_weights, [0, 0.6 / 5, 2 / 5], rtol=1e-6)
    np.testing.assert_allclose(first.old_logprobs[[1, 3]], [-1, -1 + np.log(8)], rtol=1e-6)
    np.testing.assert_allclose(second.kl_weights, [0, 0.1 / 4, 0.1 / 4], rtol=1e-6)
    assert not vetoed_one.targets.any()
    normalised = rl(correction=changes | dict(normalise=True))
    streams, scaled = compose.streams([group], normalised, 0.0, ModelScores(old=old))
    assert scaled == counts
    mean = (1 + 5 + 0.6 + 2 + 1e-6) / 5  # of all five, bounded by 5, before one is masked and one vetoed
    np.testing.assert_allclose(streams[1].corrections[1:], np.array([0.6, 2.0]) / mean, rtol=1e-6)


def test_the_mean_is_over_whatever_has_a_ratio_of_its_own():
    old, behaviour = [np.log([2.0]), np.log([0.5, 1.0, 1.0]), np.zeros(0)], [np.zeros(1), np.zeros(3), np.zeros(0)]

    def mean(name, level, low, high, old=old, behaviour=behaviour):
        return CORRECTIONS[name](level=level, low=low, high=high, normalise=True).mean(old, behaviour)

    assert mean("truncate", "token", 0.0, 1.5) == pytest.approx((1.5 + 0.5 + 1 + 1) / 4)
    assert mean("truncate", "sequence", 0.0, 9.0) == pytest.approx((2 + 0.5) / 2)
    assert mean("mask", "geometric", 0.9, 9.0) == pytest.approx((2 + 0.5 ** (1 / 3)) / 2)
    assert mean("mask", "token", 0.0, 2.0, [], []) == 1.0
    assert mean("mask", "token", 0.0, 2.0, [np.full(1, -99.0)], [np.zeros(1)]) == 1.0  # not a division by 2e-9


def slime_weights(old: list[np.ndarray], behaviour: list[np.ndarray]) -> list[np.ndarray]:
    """Weights of the policy loss's tokens as slime's mis.py makes them with its mis.yaml, per sequence.

    Ratios truncated at 2 and divided by their mean over every token; then the mask of what lies in 0.5 to 2, which
    holds nothing of a sequence with a ratio below 1e-4. The sum is divided by all tokens.
    """
    ratios = [np.exp(np.clip(a - b, -20, 20)) for a, b in zip(old, behaviour, strict=True)]
    truncated = [np.minimum(r, 2.0) for r in ratios]
    tokens = sum(map(len, ratios))
    mean = sum(t.sum() for t in truncated) / tokens
    inside = [(r >= 0.5) & (r <= 2.0) & (r.min() >= 1e-4) for r in ratios]
    return [t / mean * kept / tokens for t, kept in zip(truncated, inside, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_preset_mis_equals_slimes_masked_importance_sampling(make_group, seed):
    rng = np.random.default_rng(seed)
    cfg = dataclasses.replace(config.parse(get_config("laptop+mis")).rl, updates_per_step=1)
    kinds = ["p" + "".join(rng.choice(list("aao"), rng.integers(2, 12))) + "a" for _ in range(8)]
    group = make_group(*((k, float(i % 2)) for i, k in enumerate(kinds)))
    every = sampled_trajectories([group])
    actions = [action_mask(t) > 0 for t in every]
    old = [(t.logprobs + rng.normal(0, 0.8, len(t))).astype(np.float32) for t in every]
    old[3][np.flatnonzero(actions[3])[-1]] = -1 - 9.5  # a ratio of 7e-5: the whole attempt is vetoed
    streams, counts = compose.streams([group], cfg, 0.0, ModelScores(old=old))
    assert counts["correction/vetoed"] == 1 and len(streams) == 8
    (update,) = compose.mini_batches(streams, cfg, (0, 0))
    place = {id(t): i for i, t in enumerate(every)}
    expected = slime_weights(
        [o[at].astype(np.float64) for o, at in zip(old, actions, strict=True)],
        [t.logprobs[at].astype(np.float64) for t, at in zip(every, actions, strict=True)],
    )
    assert sum((w == 0).sum() for w in expected) > 10
    for s in update:
        i = place[id(s.trajectory)]
        np.testing.assert_allclose(s.policy_weights[actions[i]], expected[i], rtol=1e-5)


def test_on_policy_samples_are_not_changed(rl, make_group):
    group = make_group(("paoa", 1.0), ("paa", 0.0))
    old = [t.logprobs for t in sampled_trajectories([group])]
    corrected = rl(correction=dict(name="truncate", low=0.0, high=2.0))
    plain = compose.streams([group], rl(), 0.0)[0]
    for a, b in zip(plain, compose.streams([group], corrected, 0.0, ModelScores(old=old))[0], strict=True):
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
            return OPSM(delta)(Tokens(logprobs, old, advantages, pairs))

        np.testing.assert_array_equal(self.variant(factor)(old - drift, 0.1), [[0, 0, 1, 1, 1, 1]])
        np.testing.assert_array_equal(self.variant(factor)(old - drift, 0.25), np.ones((1, 6)))
