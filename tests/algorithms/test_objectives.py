"""Policy objectives: numbers by hand, a float64 NumPy reference, gradients by torch, and GSPO over packed rows."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms.objectives import OBJECTIVES
from jaxagent.algorithms.policy_loss import Tokens, sequence_mean

RANGE = {"clip_low": 0.2, "clip_high": 0.28}  # of those that clip, whatever is published


def entry(name):
    known = {field.name for field in dataclasses.fields(OBJECTIVES[name])}
    return OBJECTIVES[name](**(RANGE if "clip_low" in known else {}))


def losses(name, logprobs, old, advantages, mask, sequence):
    """Losses f32[B, R] of a packed row, as the learner calls them."""

    def mean(values):
        return sequence_mean(jax.lax.stop_gradient(values), mask, sequence)

    return entry(name)(Tokens(logprobs, old, advantages, mean))


class ByHand(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        # ratios 1, 1.5, 1.5, 0.5, 0.5, 4 with advantages 2, 1, -1, 1, -1, -1; range 0.8 to 1.28
        ("ppo_clip", [-2.0, -1.28, 1.5, -0.5, 0.8, 4.0], [0, 1, 0, 0, 1, 0], [-2.0, 0, 1.5, -0.5, 0, 4.0]),
        # at most 3 where the advantage is negative
        ("dual_clip", [-2.0, -1.28, 1.5, -0.5, 0.8, 3.0], [0, 1, 0, 0, 1, 1], [-2.0, 0, 1.5, -0.5, 0, 0]),
        # -clip(r) A logp with logp = log r - 1; the gradient is -clip(r) A
        (
            "cispo",
            [2.0, -1.28 * (np.log(1.5) - 1), 1.28 * (np.log(1.5) - 1), -0.8 * (np.log(0.5) - 1),
             0.8 * (np.log(0.5) - 1), 1.28 * (np.log(4) - 1)],
            [0, 1, 1, 1, 1, 1],
            [-2.0, -1.28, 1.28, -0.8, 0.8, 1.28],
        ),
        ("none", [0.0] * 6, [0] * 6, [0.0] * 6),
    )  # fmt: skip
    def test_token(self, expected, clipped, gradient):
        name = self._testMethodName.removeprefix("test_token_").split("__")[0]
        ratio = jnp.array([[1.0, 1.5, 1.5, 0.5, 0.5, 4.0]])
        advantages = jnp.array([[2.0, 1.0, -1.0, 1.0, -1.0, -1.0]])
        ones = jnp.ones((1, 6), bool)

        def run(logprobs):
            loss, flags = losses(name, logprobs, jnp.full((1, 6), -1.0), advantages, ones, jnp.zeros((1, 6), int))
            return loss.sum(), (loss, flags)

        grad, (loss, flags) = self.variant(jax.grad(run, has_aux=True))(jnp.log(ratio) - 1.0)
        np.testing.assert_allclose(loss[0], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(flags[0], clipped)
        np.testing.assert_allclose(grad[0], gradient, rtol=1e-5, atol=1e-6)

    @chex.variants(with_jit=True)  # a scan outside jit compiles operation by operation, for half a minute
    def test_gspo(self):
        # Sequence 7: log ratios 0.3 and -0.1, mean 0.1. Sequence 9: 0.4 (and one token that does not count), over 1.28.
        log_ratio = jnp.array([[0.3, -0.1, 0.4, 50.0, 0.0]])
        mask = jnp.array([[1, 1, 1, 0, 0]], bool)
        sequence, advantages = jnp.array([[7, 7, 9, 9, -1]]), jnp.array([[1.0, 1.0, 2.0, 2.0, 0.0]])

        def run(logprobs):
            loss, flags = losses("gspo", logprobs, jnp.full((1, 5), -2.0), advantages, mask, sequence)
            return jnp.sum(loss * mask), (loss, flags)

        grad, (loss, flags) = self.variant(jax.grad(run, has_aux=True))(log_ratio - 2.0)
        s = np.exp(0.1)
        np.testing.assert_allclose(loss[0, :3], [-s, -s, -2.56], rtol=1e-5)
        np.testing.assert_array_equal(flags[0, :3], [0, 0, 1])
        np.testing.assert_allclose(grad[0], [-s, -s, 0, 0, 0], rtol=1e-5)

    @chex.variants(with_jit=True)
    def test_gmpo(self):
        # Sequence 7, A = 1: log ratios 0.5 (at most 0.28) and -0.6, mean -0.16. Sequence 9, A = -2: -0.6 (-0.2).
        log_ratio = jnp.array([[0.5, -0.6, -0.6, 50.0, 0.0]])
        mask = jnp.array([[1, 1, 1, 0, 0]], bool)
        sequence, advantages = jnp.array([[7, 7, 9, 9, -1]]), jnp.array([[1.0, 1.0, -2.0, -2.0, 0.0]])

        def run(logprobs):
            loss, flags = losses("gmpo", logprobs, jnp.full((1, 5), -2.0), advantages, mask, sequence)
            return jnp.sum(loss * mask), (loss, flags)

        grad, (loss, flags) = self.variant(jax.grad(run, has_aux=True))(log_ratio - 2.0)
        s = np.exp(-0.16)
        np.testing.assert_allclose(loss[0, :3], [-s, -s, 2 * np.exp(-0.2)], rtol=1e-5)
        np.testing.assert_array_equal(flags[0, :3], [1, 0, 1])
        np.testing.assert_allclose(grad[0], [0, -s, 0, 0, 0], rtol=1e-5)

    @chex.variants(with_jit=True)  # a program of its own: the constants differ
    def test_a_probability_that_went_too_far_in_the_advantages_direction_has_no_gradient(self):
        p, old = np.array([[0.5, 0.5, 0.9, 0.9, 1e-5, 0.2]]), np.array([[0.8, 0.8, 0.6, 0.6, 1e-7, 0.2]])
        a = np.array([[1.0, -1.0, 1.0, -1.0, 1.0, 0.0]])
        tokens = lambda lp: Tokens(lp, jnp.log(old), jnp.asarray(a), lambda x: x)  # noqa: E731
        run = lambda lp: (OBJECTIVES["dppo"]()(tokens(lp))[0].sum(), OBJECTIVES["dppo"]()(tokens(lp)))  # noqa: E731
        grad, (loss, flags) = self.variant(jax.grad(run, has_aux=True))(jnp.log(p))
        np.testing.assert_array_equal(flags[0], [0, 1, 1, 0, 0, 0])
        # The ratio as it is, but for the rare token's, which is 100 and capped at 20.
        expected = np.array([-0.625, 0, 0, 1.5, -20.0, 0])
        np.testing.assert_allclose(grad[0], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(loss[0], expected * np.log(p[0]), rtol=1e-4, atol=1e-5)

    @chex.variants(with_jit=True)
    def test_sequence_mean(self):
        values = jnp.array([[1.0, 2.0, 6.0, 5.0, jnp.nan, 9.0], [4.0, jnp.inf, 8.0, 1.0, 1.0, 1.0]])
        mask = jnp.array([[1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0]], bool)
        sequence = jnp.array([[3, 3, 3, 0, 0, 5], [1, 1, 1, -1, -1, -1]])
        expected = [[3, 3, 3, 5, 5, 0], [6, 6, 6, 0, 0, 0]]
        np.testing.assert_allclose(self.variant(sequence_mean)(values, mask, sequence), expected, rtol=1e-6)


NAMES = ("ppo_clip", "dual_clip", "gspo", "gmpo", "dppo", "cispo", "sapo", "importance_sampling", "reinforce")
T = 9  # one shape: a program per objective


@functools.partial(jax.jit, static_argnames="name")
def masked_losses(name, *rows):
    """Losses f32[3, T], and the gradient of their sum over the mask with respect to the log-probs."""
    out = lambda lp: losses(name, lp, *rows[1:])[0]  # noqa: E731
    return out(rows[0]), jax.grad(lambda lp: jnp.where(rows[3], out(lp), 0).sum())(rows[0])


def random_rows(rng, extreme):
    """Three packed rows: logprobs, old, advantages, mask, sequence ids with padding."""
    shape = (3, T)
    old = rng.normal(-2, 0.5, shape)
    logprobs = old + rng.normal(0, 30.0 if extreme else 0.4, shape)
    sequence = np.sort(rng.integers(-1, 4, shape), axis=1)
    mask = (rng.random(shape) < 0.7) & (sequence >= 0)
    f32 = lambda x: x.astype(np.float32)  # noqa: E731
    return f32(logprobs), f32(old), f32(rng.normal(size=shape)), mask, sequence.astype(np.int32)


def numpy_loss(name, logprobs, old, advantages, mask, sequence, row, at):
    """One token in float64, from the papers' equations."""
    lp, a = float(logprobs[row, at]), float(advantages[row, at])
    bound = lambda x: float(np.clip(x, -20, 20))  # noqa: E731
    r = np.exp(bound(lp - float(old[row, at])))
    own = mask[row] & (sequence[row] == sequence[row, at])
    log_ratio = logprobs[row].astype(float) - old[row].astype(float)
    if name == "gspo":
        r = np.exp(bound(np.mean(log_ratio[own])))
    # verl's geo_mean: the smaller of both surrogates, in logarithms, each with its own token's sign
    signs = np.sign(advantages[row].astype(float))
    smaller = signs * np.minimum(signs * log_ratio, signs * np.clip(log_ratio, -0.2, 0.28))
    rise = np.exp(lp) - np.exp(float(old[row, at]))
    clipped = min(max(r, 0.8), 1.28)
    ppo = max(-r * a, -clipped * a)
    tau = 1.0 if a > 0 else 1.05
    return {
        "ppo_clip": ppo,
        "gspo": ppo,
        "dual_clip": min(ppo, -3 * a) if a < 0 else ppo,
        "gmpo": -np.exp(bound(np.mean(smaller[own]))) * a,
        "dppo": 0.0 if (rise > 0.2 if a > 0 else rise < -0.2) else -min(r, 20.0) * a * lp,
        "cispo": -clipped * a * lp,
        "sapo": -4 / tau / (1 + np.exp(-min(tau * (r - 1), 700))) * a,
        "importance_sampling": -r * a,
        "reinforce": -a * lp,
    }[name]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(NAMES), st.booleans())
def test_equals_numpy_where_masked_and_is_finite_everywhere(seed, name, extreme):
    rows = random_rows(np.random.default_rng(seed), extreme)
    mask = rows[3]
    got, grad = masked_losses(name, *rows)
    assert np.all(np.isfinite(grad)) and np.all(np.isfinite(got)) and not np.any(np.asarray(grad)[~mask])
    for row, at in np.argwhere(mask):
        np.testing.assert_allclose(got[row, at], numpy_loss(name, *rows, row, at), rtol=1e-5, atol=1e-5)


def torch_loss(torch, name, lp, old, a, mask, sequence):
    """The published formulas in float64 torch; for GSPO the sequence form, of equation 5."""
    r = torch.exp(torch.clamp(lp - old, -20, 20))
    clip = torch.clamp(r, 0.8, 1.28)
    ppo = torch.maximum(-r * a, -clip * a)
    if name in ("gspo", "gmpo"):
        total = lp.new_zeros(())
        for row in range(len(lp)):
            for i in set(sequence[row][mask[row]].tolist()):
                own = torch.from_numpy(mask[row] & (sequence[row] == i))
                if name == "gmpo":
                    log_ratio, sign = (lp - old)[row][own], torch.sign(a[row][own][0])
                    smaller = sign * torch.minimum(sign * log_ratio, sign * torch.clamp(log_ratio, -0.2, 0.28))
                    total = total - own.sum() * torch.exp(smaller.mean()) * a[row][own][0]
                    continue
                s = torch.exp(torch.clamp((lp - old)[row][own].mean(), -20, 20))
                total = total + own.sum() * torch.maximum(
                    -s * a[row][own][0], -torch.clamp(s, 0.8, 1.28) * a[row][own][0]
                )
        return total
    tau = torch.where(a > 0, 1.0, 1.05).double()
    loss = {
        "sapo": -4 / tau * torch.sigmoid(tau * (r - 1)) * a,
        "ppo_clip": ppo,
        "dual_clip": torch.where(a < 0, torch.minimum(ppo, -3 * a), ppo),
        "cispo": -clip.detach() * a * lp,
        "dppo": -torch.clamp(r, max=20).detach()
        * a
        * lp
        * torch.where(a > 0, lp.exp() - old.exp() <= 0.2, lp.exp() - old.exp() >= -0.2),
        "importance_sampling": -r * a,
        "reinforce": -a * lp,
    }[name]
    return (loss * torch.from_numpy(mask)).sum()


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_torch_autograd(name):
    torch = pytest.importorskip("torch")
    for seed in range(5):
        logprobs, old, advantages, mask, sequence = random_rows(np.random.default_rng(seed), False)
        if name in ("gspo", "gmpo"):  # one advantage per sequence: where token form and sequence form agree
            advantages = np.take_along_axis(advantages, sequence.clip(0) % advantages.shape[1], 1)
        rest = old, advantages, mask, sequence
        _, grad = masked_losses(name, logprobs, *rest)
        lp = torch.from_numpy(logprobs.astype(np.float64)).requires_grad_()
        given = (torch.from_numpy(x.astype(np.float64)) for x in (old, advantages))
        (torch_loss(torch, name, lp, *given, mask, sequence) + 0 * lp.sum()).backward()
        np.testing.assert_allclose(grad, lp.grad, rtol=1e-5, atol=1e-5)


def test_gspos_token_form_keeps_each_tokens_own_advantage():
    """Where the sequence form would give every token the same: the reason for the token form."""
    rng = np.random.default_rng(0)
    old, advantages = np.full((3, T), -1.0, np.float32), rng.normal(size=(3, T)).astype(np.float32)
    mask, sequence = np.ones((3, T), bool), np.zeros((3, T), np.int32)
    _, grad = masked_losses("gspo", old + np.float32(0.05), old, advantages, mask, sequence)
    np.testing.assert_allclose(grad, -np.exp(0.05) * advantages, rtol=1e-5)
