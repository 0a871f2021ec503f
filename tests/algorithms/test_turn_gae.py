"""Advantages over turns, of two levels, with adaptive lambda, and V-trace: by hand, and by loops in float64."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import compose
from jaxagent.algorithms.estimators import AdaptiveGAE, TokenPath, TurnVTrace, VTrace
from jaxagent.algorithms.gae import gae
from jaxagent.algorithms.streams import ModelScores
from tests.algorithms.entries import TOKEN

# Two turns, of two and one actions, an observation between: nan is never read.
NAN = np.nan
MASK = np.array([0, 1, 1, 0, 1, 0], bool)
TURNS = np.array([0, 0, 0, 0, 1, 1], np.int32)
REWARDS = np.array([NAN, 0, 0.5, NAN, 1, NAN], np.float32)
VALUES = np.array([NAN, 0.2, 0.4, NAN, 0.6, NAN], np.float32)
RHO = np.log(np.array([NAN, 0.5, 2.0, NAN, 0.25, NAN], np.float32))
GAMMA, LAM, TURN_GAMMA, ALPHA, RETURNS_LAM = 0.5, 0.5, 0.9, 0.5, 1.0
CONSTANTS = {
    "gae": dict(gamma=GAMMA, lam=LAM),
    "gae_turns": dict(gamma=TURN_GAMMA, lam=LAM),
    "gae_bilevel": dict(gamma=GAMMA, lam=LAM, turn_gamma=TURN_GAMMA),
    "gae_adaptive": dict(gamma=GAMMA, alpha=ALPHA, returns_lam=RETURNS_LAM),
    "vtrace": dict(gamma=GAMMA, lam=LAM),
    "vtrace_turns": dict(gamma=TURN_GAMMA, lam=LAM),
    "return": dict(gamma=GAMMA),
}
ENTRIES = {name: TOKEN[name](**constants) for name, constants in CONSTANTS.items()}


class ByHand(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        # Turn 2: 1 - .6 = .4; turn 1: .5 + .9 * .6 - .2 + .45 * .4 = 1.02. Returns at first tokens.
        ("gae_turns", [1.02, 1.02, 0.4], [1.22, 0, 1.0], [1, 0, 1]),
        # Last tokens: .4; .5 + .9 * .6 - .4 + .45 * .4 = .82. First token: 0 + .5 * .4 - .2 + .25 * .82 = .205
        ("gae_bilevel", [0.205, 0.82, 0.4], [0.405, 1.22, 1.0], [1, 1, 1]),
        # Three tokens: lambda = 1 - 1 / 1.5 = 1/3. .4; .5 + .3 - .4 + .4 / 6 = .46667; .2 - .2 + .46667 / 6 = .07778.
        # Returns with lambda 1: 1; .5 + .5 = 1; .5.
        ("gae_adaptive", [0.0777778, 0.4666667, 0.4], [0.5, 1.0, 1.0], [1, 1, 1]),
        # rho_bar .5, 1, .25. Errors: .25 * .4 = .1; .4 + .25 * .1 = .425; .5 * (.2 - .2) + .25 * .5 * .425 = .053125.
        # A: .1; .5 + .5 * (.6 + .05) - .4 = .425; .5 * (.5 * (.4 + .2125) - .2) = .053125
        ("vtrace", [0.053125, 0.425, 0.1], [0.253125, 0.825, 0.7], [1, 1, 1]),
        # rho_bar of turns: min(1, .5 * 2) = 1 and .25. Turn 2: .25 * (1 - .6) = .1 is A and error. Turn 1, rho_bar 1:
        # error .5 + .9 * .6 - .2 + .45 * .1 = .885; A = .5 + .9 * (.6 + .05) - .2 = .885. Returns: .2 + .885; .6 + .1.
        ("vtrace_turns", [0.885, 0.885, 0.1], [1.085, 0, 0.7], [1, 0, 1]),
        # Discounted sums of rewards alone: 1; .5 + .5 = 1; .5
        ("return", [0.5, 1.0, 1.0], [0.5, 1.0, 1.0], [1, 1, 1]),
    )
    def test_estimate(self, advantages, returns, learnt):
        name = self._testMethodName.removeprefix("test_estimate_").split("__")[0]
        path = TokenPath(*map(jnp.asarray, (REWARDS, VALUES, MASK, TURNS, RHO)))
        got = self.variant(lambda path: ENTRIES[name](path))(path)
        for found, expected in zip(got, (advantages, returns, learnt), strict=True):
            np.testing.assert_allclose(found[MASK], expected, rtol=1e-5, atol=1e-7)
            assert not np.any(np.asarray(found)[~MASK])


NAMES = ("gae", "gae_turns", "gae_bilevel", "gae_adaptive", "vtrace", "vtrace_turns")
T = 12


@functools.partial(jax.jit, static_argnames="name")
def run(path, name):
    return ENTRIES[name](path)


def by_loops(name, r, v, turns, rho):
    """Advantages and returns of action tokens alone, straight from the equations, in float64. Lists of one length."""
    n, g, lam, turn_g = len(r), GAMMA, LAM, TURN_GAMMA
    if n == 0:
        return [], []
    v_next = [*v[1:], 0.0]
    last = [i for i in range(n) if i == n - 1 or turns[i + 1] != turns[i]]
    first = [i for i in range(n) if i == 0 or turns[i - 1] != turns[i]]

    def sums(deltas, decay):  # sum over l of decay^l delta_{t+l}
        return [sum(decay**k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]

    if name in ("gae", "gae_adaptive"):
        deltas = [r[t] + g * v_next[t] - v[t] for t in range(n)]
        own = lam if name == "gae" else max(1 - 1 / (ALPHA * n), 0)
        other = own if name == "gae" else RETURNS_LAM
        return sums(deltas, g * own), [a + x for a, x in zip(sums(deltas, g * other), v, strict=True)]
    if name == "gae_turns":
        totals = [sum(r[i : j + 1]) for i, j in zip(first, last, strict=True)]
        following = [v[i] for i in first[1:]] + [0.0]
        deltas = [x + turn_g * w - v[i] for x, w, i in zip(totals, following, first, strict=True)]
        over = sums(deltas, turn_g * lam)
        turn_of = np.cumsum([i in first for i in range(n)]) - 1
        advantages = [over[k] for k in turn_of]
        return advantages, [advantages[i] + v[i] if i in first else 0.0 for i in range(n)]
    if name == "gae_bilevel":
        following = [v[i] for i in last[1:]] + [0.0]
        high = sums([r[i] + turn_g * w - v[i] for i, w in zip(last, following, strict=True)], turn_g * lam)
        advantages = [0.0] * n
        for i, j, a in zip(first, last, high, strict=True):
            inside = [r[t] + g * v[t + 1] - v[t] for t in range(i, j)] + [a]
            advantages[i : j + 1] = sums(inside, g * lam)
        return advantages, [a + x for a, x in zip(advantages, v, strict=True)]
    if name == "vtrace_turns":  # the same definition, each turn one step
        pairs = list(zip(first, last, strict=True))
        totals, ratios = [sum(r[i : j + 1]) for i, j in pairs], [math.prod(rho[i : j + 1]) for i, j in pairs]
        over, targets = vtrace_by_definition(totals, [v[i] for i in first], ratios, turn_g, lam)
        turn_of = np.cumsum([i in first for i in range(n)]) - 1
        return [over[k] for k in turn_of], [targets[turn_of[i]] if i in first else 0.0 for i in range(n)]
    return vtrace_by_definition(r, v, rho, g, lam)


def vtrace_by_definition(r, v, rho, g, lam):
    """V_s + sum over t of gamma^(t-s) (prod of c) delta_t, and A with the lambda-mixed bootstrap."""
    n, v_next = len(r), [*v[1:], 0.0]
    bar = [min(1.0, x) for x in rho]
    targets = list(v)
    for t in range(n):
        product = 1.0
        for k in range(t, n):
            targets[t] += g ** (k - t) * product * bar[k] * (r[k] + g * v_next[k] - v[k])
            product *= lam * bar[k]
    mixed = [lam * a + (1 - lam) * b for a, b in zip([*targets[1:], 0.0], v_next, strict=True)]
    return [bar[t] * (r[t] + g * mixed[t] - v[t]) for t in range(n)], targets


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(NAMES), st.sampled_from([0.0, 0.5, 1.0]))
def test_equals_loops_over_action_tokens_alone(seed, name, keep):
    rng = np.random.default_rng(seed)
    mask, turns = rng.random(T) < keep, np.cumsum(rng.random(T) < 0.3).astype(np.int32)
    arrays = [rng.normal(size=T).astype(np.float32) for _ in range(2)] + [rng.normal(0, 2, T).astype(np.float32)]
    for x in arrays:
        x[~mask] = rng.choice([np.nan, np.inf, 1e30])
    got = run(TokenPath(arrays[0], arrays[1], mask, turns, arrays[2]), name=name)
    r, v, log_rho = ([float(x) for x in a[mask]] for a in arrays)
    advantages, returns = by_loops(name, r, v, list(turns[mask]), list(np.exp(log_rho)))
    np.testing.assert_allclose(np.asarray(got.advantages)[mask], advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(got.returns)[mask], returns, rtol=1e-5, atol=1e-5)
    assert not any(np.any(np.asarray(x)[~mask]) for x in got)


def test_adaptive_lambda_is_0_where_its_formula_is_negative():
    """alpha 0.05, as published, and three tokens: 1 - 1 / 0.15 < 0. With lambda 0 an advantage is its own delta."""
    path = TokenPath(
        np.float32([0, 0, 1]), np.float32([0.5, 0.25, 0.5]), np.ones(3, bool), np.zeros(3, np.int32), np.zeros(3)
    )
    got = jax.jit(AdaptiveGAE())(path)
    np.testing.assert_allclose(got.advantages, [-0.25, 0.25, 0.5])
    np.testing.assert_allclose(got.returns, [1, 1, 1])


def test_vtrace_on_policy_is_gae():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, T)).astype(np.float32)
    ones = np.ones(T, bool)
    got = run(TokenPath(rewards, values, ones, np.zeros(T, np.int32), np.zeros(T, np.float32)), name="vtrace")
    expected = gae(jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(ones), GAMMA, LAM)
    np.testing.assert_allclose(got.advantages, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.returns, expected[1], rtol=1e-5, atol=1e-6)


def test_vtrace_over_turns_of_one_token_is_vtrace():
    rng = np.random.default_rng(0)
    rewards, values, log_rho = (jnp.asarray(x) for x in rng.normal(size=(3, T)).astype(np.float32))
    mask = jnp.asarray(rng.random(T) < 0.6)
    path = TokenPath(rewards, values, mask, jnp.arange(T), log_rho)
    *got, learnt = TurnVTrace(0.9, 0.5)(path)
    for found, expected in zip(got, VTrace(0.9, 0.5)(path)[:2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(learnt, mask)


def test_vtrace_reads_the_learners_log_probs_and_turns_train_the_critic_at_first_tokens(rl, make_group):
    group = make_group(("paa", 1.0))  # behaviour log-prob -1
    values, old = [np.zeros(3, np.float32)], [np.array([0, -1, -2], np.float32)]
    config = rl(advantage="vtrace")
    (s,), _ = compose.streams([group], config, 0.0, ModelScores(values=values, old=old))
    np.testing.assert_allclose(s.advantages, [0, np.exp(-1), np.exp(-1)], rtol=1e-6)
    np.testing.assert_array_equal(s.old_logprobs, old[0])
    (s,), _ = compose.streams([group], rl(advantage="gae_turns"), 0.0, ModelScores(values=values))
    np.testing.assert_array_equal(s.value_weights, [0, 1, 0])
    np.testing.assert_array_equal(s.advantages, [0, 1, 1])


def test_good_attempts_are_imitated_also_where_a_group_has_no_signal(rl, make_group):
    groups = [make_group(("paoa", 1.0), ("pa", 1.0)), make_group(("paa", 1.0), ("pa", 0.0))]
    config = rl(positive_nll=dict(coefficient=0.1, min_reward=1.0), updates_per_step=1)
    (update,) = compose.mini_batches(compose.streams(groups, config, 0.0)[0], config, (0, 0))
    weights = {len(s.trajectory): s.nll_weights for s in update if s.nll_weights.any()}
    assert len(update) == 4 and sum(s.policy_weights.any() for s in update) == 2
    np.testing.assert_allclose(weights[4], np.array([0, 0.1, 0, 0.1]) / 5, rtol=1e-6)  # five tokens are positive
    assert sum(s.nll_weights.sum() for s in update) == pytest.approx(0.1)
