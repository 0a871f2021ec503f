"""Distillation losses: numbers by hand, a float64 NumPy reference, gradients by torch, and their expectations."""

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.search_r1 import get_config
from jaxagent import config as schema
from jaxagent.algorithms import checks, compose, distill, estimate
from jaxagent.algorithms.compose import as_opd
from jaxagent.algorithms.distill import Scores, renormalise, sampled_advantages, support_of
from jaxagent.algorithms.objectives import OBJECTIVES
from jaxagent.algorithms.policy_loss import Tokens
from jaxagent.algorithms.streams import ModelScores, action_mask, sampled_trajectories
from jaxagent.algorithms.teachers import JSD, Folder, ForwardKL, ReverseKL
from jaxagent.config import ConfigError, DistillConfig, OPDConfig
from jaxagent.types import StopReason

BETA, TEMPERATURE = 0.3, 0.7
DIVERGENCES = {"reverse_kl": ReverseKL(), "forward_kl": ForwardKL(), "jsd": JSD(beta=BETA)}


def divergence(name, student, teacher, support, temperature=1.0, beta=BETA):
    p, q = (renormalise(scores, support, temperature) for scores in (student, teacher))
    return (JSD(beta=beta) if name == "jsd" else DIVERGENCES[name])(p, q, support)


def reference(name, student, teacher, support, temperature, beta):
    """One position in float64, over the tokens of the support alone."""
    p, q = (np.asarray(x, np.float64)[support] / temperature for x in (student, teacher))
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (p, q))
    kl = lambda a, b: float(np.sum(a * np.log(a / b)))  # noqa: E731
    m = beta * q + (1 - beta) * p
    return {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[name]


class ByHand(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_sampled(self):
        student, teacher = jnp.array([-1.0, -3.0, jnp.nan]), jnp.array([-2.0, -0.5, -jnp.inf])
        mask = jnp.array([True, True, False])
        np.testing.assert_array_equal(self.variant(sampled_advantages)(student, teacher, mask), [-1.0, 2.5, 0.0])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(DIVERGENCES)))
def test_against_numpy(seed, name):
    rng = np.random.default_rng(seed)
    student, teacher = rng.normal(0, 3, (2, 4, 9)).astype(np.float32)
    support = rng.random((4, 9)) < 0.6
    support[:, 0] = True
    support[3] = False  # a position without weight
    got = divergence(name, jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(support), TEMPERATURE)
    expected = [
        reference(name, s, t, m, TEMPERATURE, BETA) for s, t, m in zip(student[:3], teacher, support, strict=False)
    ]
    np.testing.assert_allclose(got, [*expected, 0.0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("partial", [False, True])
def test_gradients_equal_torch(name, partial):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    student, teacher = rng.normal(0, 2, (2, 5, 7)).astype(np.float32)
    support = np.ones((5, 7), bool)
    if partial:
        support[:, [1, 4]] = False
    ours = jax.grad(lambda z: divergence(name, z, jnp.asarray(teacher), jnp.asarray(support), TEMPERATURE).sum())(
        student
    )
    z = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    columns = np.flatnonzero(support[0])
    p = torch.log_softmax(z[:, columns] / TEMPERATURE, -1)
    q = torch.log_softmax(torch.tensor(teacher, dtype=torch.float64)[:, columns] / TEMPERATURE, -1)
    kl = lambda a, b: torch.nn.functional.kl_div(b, a, log_target=True, reduction="sum")  # noqa: E731 (a against b)
    m = torch.log(BETA * q.exp() + (1 - BETA) * p.exp())
    loss = {"reverse_kl": lambda: kl(p, q), "forward_kl": lambda: kl(q, p),
            "jsd": lambda: BETA * kl(q, m) + (1 - BETA) * kl(p, m)}[name]()  # fmt: skip
    loss.backward()
    np.testing.assert_allclose(ours, z.grad, atol=2e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_masked_positions_have_finite_values_and_no_gradient(name):
    bad = jnp.array([[jnp.nan, jnp.inf, -jnp.inf], [0.0, 1.0, 2.0], [0.3, jnp.nan, 0.7]])
    support = jnp.array([[False, False, False], [True, True, True], [True, False, True]])
    value, grad = jax.value_and_grad(lambda z: divergence(name, z, bad + 1.0, support).sum())(bad)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert not np.asarray(grad)[~np.asarray(support)].any()
    grad = jax.grad(lambda z: divergence(name, z, bad[::-1] * 3, support.at[2].set(False)).sum())(bad)
    assert np.isfinite(grad).all() and not grad[2].any()


@pytest.mark.parametrize("objective", ["importance_sampling", "reinforce", "ppo_clip"])
def test_the_sampled_advantage_has_the_expected_gradient_of_the_reverse_kl(objective):
    """Over a whole vocabulary: sum over y of p(y) grad loss(y), with y's advantage, is grad KL(p || q)."""
    logits = jnp.array([0.3, -1.0, 0.8, 0.0, 2.0])
    teacher = jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.5, 0.1, -2.0]))
    old = jax.nn.log_softmax(logits)

    def expected(z):
        logprobs = jax.nn.log_softmax(z)
        advantages = sampled_advantages(logprobs, teacher, jnp.ones(5, bool))
        losses, _ = OBJECTIVES[objective]()(Tokens(logprobs, old, advantages, lambda x: x))
        return jnp.sum(jnp.exp(old) * losses)

    def true(z):
        return divergence("reverse_kl", z, teacher, jnp.ones(5, bool))

    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(true)(logits), atol=1e-6)
    # Differentiated as it stands the sampled term would have no gradient on average: that is why it is a number.
    naive = jax.grad(lambda z: jnp.sum(jnp.exp(old) * (jax.nn.log_softmax(z) - teacher)))(logits)
    np.testing.assert_allclose(naive, 0, atol=1e-6)


def test_supports():
    teacher = Scores(
        logprobs=np.zeros(2, np.float32),
        top_ids=np.array([[4, 7], [1, 2]], np.int32),
        top_logprobs=np.array([[-0.1, -2.0], [-0.5, -0.6]], np.float32),
        candidate_logprobs=np.array([[-2.0, -5.0], [-3.0, -4.0]], np.float32),
    )
    student = np.array([[7, 3], [5, 6]], np.int32)
    np.testing.assert_array_equal(support_of("student", teacher, student).ids, student)
    np.testing.assert_array_equal(support_of("student", teacher, student).teacher_logprobs, teacher.candidate_logprobs)
    own = support_of("teacher", teacher, student)
    assert own.ids is teacher.top_ids and own.teacher_logprobs is teacher.top_logprobs
    union = support_of("union", teacher, student)
    np.testing.assert_array_equal(union.ids, [[7, 3, 4, 7], [5, 6, 1, 2]])
    expected = np.array([[-2, -5, -0.1, -np.inf], [-3, -4, -0.5, -0.6]], np.float32)
    np.testing.assert_array_equal(union.teacher_logprobs, expected)  # 7 counts once
    assert union.teacher_logprobs.dtype == np.float32


def test_metrics_by_hand(make_trajectory):
    trajectory = make_trajectory("apaao", logprob=-1.0)  # nothing predicts the first token: it does not count
    scores = Scores(
        logprobs=np.array([0, 0, -1.5, -2.5, 0], np.float32),
        top_ids=np.array([[0], [1], [2], [9], [4]], np.int32),  # tokens are 0, 1, 2, 3, 4
        top_logprobs=np.zeros((5, 1), np.float32),
        candidate_logprobs=np.zeros((5, 0), np.float32),
    )
    assert distill.metrics([trajectory], [scores]) == {"distill/reverse_kl": 1.0, "distill/agreement": 0.5}


# ---------------------------------------------------------------- in the algorithm


def told(trajectory, seed, k=2):
    """Random scores of a trajectory."""
    rng = np.random.default_rng(seed)
    n = len(trajectory)
    f32 = lambda *shape: rng.normal(-2, 1, shape).astype(np.float32)  # noqa: E731
    return Scores(f32(n), rng.integers(0, 13, (n, k)).astype(np.int32), f32(n, k), f32(n, 0))


@pytest.fixture(scope="module")
def groups(make_group):
    """Equal rewards, so that only a teacher can say anything; one attempt failed."""
    return [make_group(("ppaaoa", 1.0), ("pa", 1.0), ("paa", 1.0, StopReason.TIMEOUT))]


def test_sampled_is_an_advantage_and_comes_on_top_of_the_rewards(groups, rl):
    teacher = [told(t, i) for i, t in enumerate(sampled_trajectories(groups))]
    one = dict(coefficient=0.5, teacher="./x", loss="sampled")
    alone = rl(advantage="no_reward", distill=one)
    checks.check(alone)
    streams, metrics = compose.streams(groups, alone, 0.0, ModelScores(teacher=teacher))
    assert len(streams) == 2  # not the failed one
    for stream, scores in zip(streams, teacher, strict=False):
        mask = stream.trajectory.action_mask
        np.testing.assert_allclose(stream.advantages, np.where(mask, 0.5 * (scores.logprobs + 1.0), 0), rtol=1e-6)
        np.testing.assert_array_equal(stream.policy_weights, mask)
        assert not stream.distill_weights.any() and stream.support is None
    assert metrics["distill/reverse_kl"] == distill.metrics(sampled_trajectories(groups), teacher)["distill/reverse_kl"]
    both, _ = compose.streams(groups, rl(advantage="no_baseline", distill=one), 0.0, ModelScores(teacher=teacher))
    for stream, with_reward in zip(streams, both, strict=True):
        np.testing.assert_allclose(with_reward.advantages, stream.advantages + stream.trajectory.action_mask, rtol=1e-6)


@pytest.mark.parametrize("support", ["vocabulary", "teacher", "student"])
def test_divergences_are_weights_of_the_loss(groups, rl, support):
    every = sampled_trajectories(groups)
    students = [np.full((len(t), 2), 5, np.int32) for t in every]
    teacher = [told(t, i)._replace(candidate_logprobs=np.zeros((len(t), 2), np.float32)) for i, t in enumerate(every)]
    tokens = support if support == "vocabulary" else dict(name=support, top_k=2)
    given = dict(coefficient=0.5, teacher="./x", loss=dict(name="jsd", support=tokens))
    config = rl(advantage="no_reward", updates_per_step=1, distill=given)
    assert config.distill.top_k == (0 if support == "vocabulary" else 2) and not config.distill.in_advantage
    streams, _ = compose.streams(groups, config, 0.0, ModelScores(teacher=teacher, students=students))
    for stream, scores in zip(streams, teacher, strict=False):
        np.testing.assert_array_equal(stream.distill_weights, 0.5 * stream.trajectory.action_mask)
        assert not stream.advantages.any()
        ids = {"vocabulary": None, "teacher": scores.top_ids, "student": students[0][: len(stream.trajectory)]}[support]
        assert (stream.support is None) if ids is None else np.array_equal(stream.support.ids, ids)
    (update,) = compose.mini_batches(streams, config, (0, 0))
    np.testing.assert_allclose(sum(s.distill_weights.sum() for s in update), 0.5, rtol=1e-6)  # a token mean
    assert all((s.support is None) == (support == "vocabulary") for s in update)


REFUSED = [  # changes of rl and of rl.distill, and what is said of them
    ({"advantage": {"name": "group_mean_std", "drop_zero_signal": True}}, {}, "drop_zero_signal=False"),
    ({"advantage": {"name": "pass_at_k", "drop_zero_signal": True}}, {}, "drop_zero_signal=False"),
    ({}, {"teacher": "http://x"}, "distill.teacher=http with distill.teacher.url=http://x"),
    ({}, {"loss": "reverse_kl", "teacher": {"name": "http", "url": "http://x"}}, "needs the teacher's weights"),
]


@pytest.mark.parametrize(("changes", "distillation", "message"), REFUSED)
def test_what_cannot_be_distilled_is_refused(rl, changes, distillation, message):
    given = {"teacher": "./x"} | distillation
    with pytest.raises(ConfigError, match=message):
        checks.check(rl(**({"advantage": "group_mean_std"} | changes), distill=given))


def test_the_stage_leaves_nothing_but_the_teacher(rl):
    mixed = rl(
        advantage="gae", echo=dict(coefficient=0.1), positive_nll=dict(coefficient=0.1),
        replay=dict(per_step=2), refill=dict(max_rounds=3), keep_groups_frac=0.5, shaping={}, oversample={},
    )  # fmt: skip
    teacher = DistillConfig(Folder("./x"), coefficient=2.0)
    cfg = dataclasses.replace(schema.parse(get_config()), rl=mixed, opd=OPDConfig(7, 1e-3, teacher))
    alone = as_opd(cfg).rl
    checks.check(alone)
    assert (alone.steps, alone.distill) == (7, teacher)
    assert alone.optimizer.learning_rate == 1e-3
    assert alone.critic is alone.echo is alone.positive_nll is alone.replay is None
    assert alone.shaping is alone.group_reward is alone.oversample is None
    assert alone.refill is None and alone.keep_groups_frac == 1  # every attempt, whatever its reward


def test_teacher_advantages_by_hand(make_group):
    """Coefficient 0.5; log q - log p = -1 - (-2) = 1 on the action, nothing on prompt and observation."""
    (episode,) = make_group(("pao", 1.0)).episodes
    trajectory = dataclasses.replace(episode.trajectories[0], logprobs=np.float32([0, -2, 0]))
    teacher = types.SimpleNamespace(logprobs=np.array([7.0, -1.0, 7.0]))
    sample = types.SimpleNamespace(trajectory=trajectory, teacher=teacher, mask=action_mask(trajectory))
    rl = types.SimpleNamespace(distill=types.SimpleNamespace(coefficient=0.5))
    found = estimate.teacher_advantages(sample, rl)
    np.testing.assert_array_equal(found, [0.0, 0.5, 0.0])
