"""WebRL's objective against its released formula, in float64 and by torch's gradients; its critic of two classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.algorithms import checks, trial
from jaxagent.algorithms.estimators import MixedTurns
from jaxagent.algorithms.objectives import WebRL
from jaxagent.algorithms.policy_loss import tokens_of
from jaxagent.config import ConfigError

LENGTHS = ((3, 1, 4), (2, 2))  # tokens of the turns of the two sequences of a row
ADVANTAGES = ((0.7, -0.5, 0.0), (2.5, 0.1))


def row(seed):
    """One packed row with an observation token before each turn: columns, and the turn of each token or -1."""
    rng = np.random.default_rng(seed)
    turn_of, number, sequence, advantage = [], [], [], []
    for s, lengths in enumerate(LENGTHS):
        for k, length in enumerate(lengths):
            turn_of += [-1] + [len(set(turn_of) - {-1})] * length
            number += [k] * (1 + length)
            sequence += [s] * (1 + length)
            advantage += [ADVANTAGES[s][k]] * (1 + length)
    n = len(turn_of)
    reference = np.log(rng.uniform(0.3, 1.0, n))
    reference[:5] = np.log(0.97)  # the first turn is sure
    return {
        "logprobs": reference + rng.normal(0, 0.4, n), "reference": reference, "advantages": np.array(advantage),
        "turns": np.array(number), "sequence": np.array(sequence), "turn_of": np.array(turn_of),
    }  # fmt: skip


def of_ours(columns, objective, beta):
    """Losses f32[T] and the gradient of their sum with respect to the log-probs."""
    f32 = {name: jnp.asarray(x, jnp.float32)[None] for name, x in columns.items()}
    mask, sequence = jnp.asarray(columns["turn_of"] >= 0)[None], jnp.asarray(columns["sequence"], jnp.int32)[None]

    @jax.jit
    def losses(logprobs):
        tokens = tokens_of(
            logprobs, logprobs, f32["advantages"], mask, sequence, turns=f32["turns"], kl_coefficient=beta,
            reference_logprobs=f32["reference"],
        )  # fmt: skip
        return jnp.where(mask, objective(tokens)[0], 0.0)

    return np.asarray(losses(f32["logprobs"]))[0], np.asarray(jax.grad(lambda x: losses(x).sum())(f32["logprobs"]))[0]


def published(log_prob_ratio, ref_prob, advantage, beta):
    """What its trainer computes of one turn, with A in place of its 1: `actor_loss` of WebRL's trainer.py."""
    torch = pytest.importorskip("torch")
    beta = torch.tensor(beta).double() * (5.0 if advantage >= 0 and ref_prob >= 0.8 else 1.0)
    beta = torch.minimum(beta, torch.abs(advantage / log_prob_ratio)).detach()
    loss = torch.nn.SmoothL1Loss()(beta * log_prob_ratio, torch.as_tensor(advantage).double())
    return torch.reciprocal(beta) * loss * (advantage > 0)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_gradients_are_those_of_the_released_code(beta):
    """Where A <= 1. It bounds beta instead of the distance: another value, and the same gradient."""
    torch = pytest.importorskip("torch")
    for seed in range(6):
        columns = row(seed)
        columns["advantages"] = np.clip(columns["advantages"], -1, 1)
        _, gradient = of_ours(columns, WebRL(), beta)
        lp = torch.from_numpy(columns["logprobs"]).requires_grad_()
        total = lp.sum() * 0
        for turn in range(columns["turn_of"].max() + 1):
            own = torch.from_numpy(columns["turn_of"] == turn)
            ratio = (lp - torch.from_numpy(columns["reference"]))[own].mean()
            reference = np.exp(columns["reference"][own.numpy()].mean())
            advantage = float(columns["advantages"][own.numpy()][0])
            if advantage < 1.0 and abs(float(ratio.detach())) * beta > advantage:
                continue  # it then stops at the bound, which an A of 1 alone never does on the way up
            total = total + own.sum() * published(ratio, reference, advantage, beta)
        total.backward()
        at = lp.grad.numpy() != 0
        np.testing.assert_allclose(gradient[at], lp.grad.numpy()[at], rtol=1e-5, atol=1e-6)
        assert not gradient[(columns["advantages"] <= 0) | (columns["turn_of"] < 0)].any()


@pytest.mark.parametrize("objective", [WebRL(), WebRL(negative=True), WebRL(sure=1.0)])
def test_it_is_the_formula_turn_by_turn_in_float64(objective):
    for seed in range(6):
        columns = row(seed)
        losses, gradient = of_ours(columns, objective, 0.5)
        for turn in range(columns["turn_of"].max() + 1):
            own = columns["turn_of"] == turn
            d, a = (columns["logprobs"] - columns["reference"])[own].mean(), columns["advantages"][own][0]
            b = 0.5 * (5.0 if np.exp(columns["reference"][own].mean()) >= objective.sure else 1.0)
            x = (b * d - a) if a > 0 else (a - b * d) if a < 0 and objective.negative else 0.0
            x = min(x, 0.0)  # below the goal in the advantage's direction
            wanted = (x * x / 2 if abs(x) < 1 else abs(x) - 0.5) / b
            np.testing.assert_allclose(losses[own], wanted, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(gradient[own], np.sign(a) * max(x, -1.0), rtol=1e-4, atol=1e-6)


def test_the_first_gradient_is_reinforce_with_the_pull_in_the_advantage():
    columns = row(0)
    _, gradient = of_ours(columns, WebRL(negative=True, sure=1.0), 1.0)
    for turn in range(columns["turn_of"].max() + 1):
        own = columns["turn_of"] == turn
        d, a = (columns["logprobs"] - columns["reference"])[own].mean(), columns["advantages"][own][0]
        if 0 < np.sign(a) * (a - d) < 1:
            np.testing.assert_allclose(gradient[own], -(a - d), rtol=1e-4)


def test_the_critic_is_a_classifier_of_success():
    loss = MixedTurns().critic.loss
    logits = jnp.array([[0.3, 1.1], [2.0, -1.0]])
    cross_entropy, _ = loss(logits, jnp.zeros(2), jnp.array([1.0, 0.0]))
    p = np.asarray(jax.nn.softmax(logits))
    np.testing.assert_allclose(loss.values(logits), p[:, 1], rtol=1e-6)
    np.testing.assert_allclose(cross_entropy, [-np.log(p[0, 1]), -np.log(p[1, 0])], rtol=1e-5)


def test_it_needs_a_reference_and_the_reference_needs_it(rl):
    trial.check_answers(rl(objective="webrl", kl=dict(coefficient=1.0, where="objective")))
    for choices in (dict(objective="webrl"), dict(kl=dict(coefficient=1.0, where="objective"))):
        with pytest.raises(ConfigError, match=r"rl\.kl\.where='objective' and an rl\.objective"):
            checks.check(rl(**choices))
