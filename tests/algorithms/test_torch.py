"""GAE, V-trace and truncated importance sampling re-derived in float64 torch: values, and gradients by autograd.

Those of the objectives (PPO's clip, dual clip, GSPO, CISPO, ...) are in test_objectives.py, of the KL in
test_token_losses.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.algorithms.corrections import Importance
from jaxagent.algorithms.gae import TokenPath, VTrace, gae
from jaxagent.algorithms.objectives import PPOClip
from jaxagent.algorithms.policy_loss import Tokens

torch = pytest.importorskip("torch", reason="the other witness of the algorithms' gradients needs torch")

T, GAMMA, LAM = 12, 0.9, 0.7


def draw(seed: int, n: int) -> tuple[np.ndarray, ...]:
    """A mask and n vectors f32[T] that hold nan where it is False."""
    rng = np.random.default_rng(seed)
    mask = rng.random(T) < (0.6, 1.0, 0.0)[seed % 3]
    return mask, *(np.where(mask, rng.normal(size=T), np.nan).astype(np.float32) for _ in range(n))


def f64(x: np.ndarray, mask: np.ndarray):
    """The kept elements alone."""
    return torch.from_numpy(x[mask].astype(np.float64)).requires_grad_()


def torch_gae(r, v):
    out, following, advantage = [], torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for reward, value in zip(reversed(r), reversed(v), strict=True):
        advantage = reward + GAMMA * following - value + GAMMA * LAM * advantage
        following = value
        out.append(advantage)
    advantages = torch.stack(out[::-1]) if out else r * 0
    return advantages, advantages + v


def torch_vtrace(r, v, log_rho):
    """Equation 1 of IMPALA as its sum of products, and A with the lambda-mixed bootstrap value."""
    rho = torch.minimum(torch.exp(log_rho), torch.ones_like(log_rho))
    after = torch.cat([v[1:], v.new_zeros(1)])[: len(v)]
    deltas, errors = rho * (r + GAMMA * after - v), []
    for s in range(len(v)):
        decay = torch.cumprod(torch.cat([v.new_ones(1), GAMMA * LAM * rho[s:-1]]), 0)
        errors.append((decay * deltas[s:]).sum())
    errors = torch.stack(errors) if errors else v * 0
    following = torch.cat([errors[1:], v.new_zeros(1)])[: len(v)]
    return rho * (r + GAMMA * (after + LAM * following) - v), v + errors


CASES = {
    "gae": (2, lambda mask, r, v: gae(r, v, mask, GAMMA, LAM), torch_gae),
    "vtrace": (3, lambda mask, r, v, rho: VTrace(GAMMA, LAM)(TokenPath(r, v, mask, mask, rho))[:2], torch_vtrace),
}


@pytest.mark.parametrize("name", CASES)
def test_recursions(name):
    n, ours, theirs = CASES[name]
    weights = np.random.default_rng(9).normal(size=(2, T)).astype(np.float32)

    @jax.jit
    def run(mask, *inputs):
        def total(*inputs):
            out = ours(mask, *inputs)
            return sum(jnp.sum(w * x) for w, x in zip(weights, out, strict=True)), out

        return jax.grad(total, tuple(range(n)), has_aux=True)(*inputs)

    for seed in range(6):
        mask, *inputs = draw(seed, n)
        gradients, outputs = run(mask, *inputs)
        leaves = [f64(x, mask) for x in inputs]
        expected = theirs(*leaves)
        sum(
            (torch.from_numpy(w[mask].astype(np.float64)) * x).sum() for w, x in zip(weights, expected, strict=True)
        ).backward()
        for got, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(np.asarray(got)[mask], wanted.detach(), rtol=1e-5, atol=1e-5)
        for got, leaf in zip(gradients, leaves, strict=True):
            np.testing.assert_allclose(np.asarray(got)[mask], leaf.grad, rtol=1e-5, atol=1e-5)
            assert not np.any(np.asarray(got)[~mask])  # nan stands there


@jax.jit
@jax.value_and_grad
def corrected(logprobs, old, advantages, weights):
    return jnp.sum(weights * PPOClip(0.2, 0.28)(Tokens(logprobs, old, advantages, lambda x: x))[0])


def test_truncated_importance_sampling():
    """clip(p_old / p_behaviour, 0, 2) times the clipped loss, the factor a constant of the gradient."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        behaviour = rng.normal(-2, 0.5, T).astype(np.float32)
        old = (behaviour + np.append(rng.normal(0, 0.8, T - 2), [1.0, -1.0])).astype(np.float32)  # e: cut to 2; 1 / e
        logprobs, a = (old + rng.normal(0, 0.3, T)).astype(np.float32), rng.normal(size=T).astype(np.float32)
        weights = Importance()(old, behaviour)
        assert (weights == 2.0).any() and (weights < 2.0).any()
        value, gradient = corrected(jnp.asarray(logprobs), old, a, weights.astype(np.float32))
        lp, before, sampled, adv = (torch.from_numpy(x.astype(np.float64)) for x in (logprobs, old, behaviour, a))
        lp.requires_grad_()
        ratio = torch.exp(lp - before)
        surrogate = torch.maximum(-ratio * adv, -torch.clamp(ratio, 0.8, 1.28) * adv)
        total = (torch.clamp(torch.exp(before - sampled), 0.0, 2.0).detach() * surrogate).sum()
        total.backward()
        np.testing.assert_allclose(value, total.item(), rtol=1e-5)
        np.testing.assert_allclose(gradient, lp.grad, rtol=1e-5, atol=1e-5)
