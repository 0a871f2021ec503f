"""Advantages over turns, of two levels, with adaptive lambda, and V-trace: by loops in float64."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import compose
from jaxagent.algorithms.estimators import AdaptiveGAE, TokenPath
from jaxagent.algorithms.streams import ModelScores
from tests.algorithms.entries import TOKEN

GAMMA, LAM, TURN_GAMMA, ALPHA, RETURNS_LAM = 0.5, 0.5, 0.9, 0.5, 1.0
CONSTANTS = {
    "gae": dict(gamma=GAMMA, lam=LAM),
    "gae_turns": dict(gamma=TURN_GAMMA, lam=LAM),
    "gae_bilevel": dict(gamma=GAMMA, lam=LAM, turn_gamma=TURN_GAMMA),
    "gae_adaptive": dict(gamma=GAMMA, alpha=ALPHA, returns_lam=RETURNS_LAM),
    "vtrace": dict(gamma=GAMMA, lam=LAM),
    "vtrace_turns": dict(gamma=TURN_GAMMA, lam=LAM),
    "mixed_turns": dict(mix=0.25),
    "return": dict(gamma=GAMMA),
}
ENTRIES = {name: TOKEN[name](**constants) for name, constants in CONSTANTS.items()}


NAMES = ("gae", "gae_turns", "gae_bilevel", "gae_adaptive", "vtrace", "vtrace_turns", "mixed_turns")
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
    if name == "mixed_turns":  # the published formula, turn by turn
        totals = [sum(r[i : j + 1]) for i, j in zip(first, last, strict=True)]
        following = [v[i] for i in first[1:]] + [0.0]
        turn_of, left = np.cumsum([i in first for i in range(n)]) - 1, [sum(totals[k:]) for k in range(len(totals))]
        both = zip(totals, following, left, first, strict=True)
        mixed = [0.25 * (x + w - v[i]) + 0.75 * (rest - v[i]) for x, w, rest, i in both]
        return [mixed[k] for k in turn_of], [left[turn_of[i]] if i in first else 0.0 for i in range(n)]
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
    # A critic of turns learns at their first tokens, any other at all of them.
    first = np.diff(turns[mask], prepend=-1) != 0 if name in ("gae_turns", "vtrace_turns", "mixed_turns") else True
    np.testing.assert_array_equal(np.asarray(got.learnt)[mask], np.broadcast_to(first, mask.sum()))


def test_adaptive_lambda_is_0_where_its_formula_is_negative():
    """alpha 0.05, as published, and three tokens: 1 - 1 / 0.15 < 0. With lambda 0 an advantage is its own delta."""
    path = TokenPath(
        np.float32([0, 0, 1]), np.float32([0.5, 0.25, 0.5]), np.ones(3, bool), np.zeros(3, np.int32), np.zeros(3)
    )
    got = jax.jit(AdaptiveGAE())(path)
    np.testing.assert_allclose(got.advantages, [-0.25, 0.25, 0.5])
    np.testing.assert_allclose(got.returns, [1, 1, 1])


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
