"""The blind learner's sum: a float64 NumPy reference, mask equals drop, finite gradients, exact metrics."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms.corrections import OPSM, Importance
from jaxagent.algorithms.objectives import GSPO, PPOClip, SoftGate
from jaxagent.algorithms.value_losses import Squared, TwoHot
from jaxagent.learner import loss as losses
from jaxagent.learner.loss import policy_metrics, value_metrics
from jaxagent.learner.state import Batch

CLIPPED = PPOClip(clip_low=0.2, clip_high=0.28)
LOSS = functools.partial(losses.policy_loss, objective=CLIPPED)
WEIGHTS = (
    "policy_weights", "kl_weights", "entropy_weights", "z_weights", "ce_weights", "nll_weights", "distill_weights",
    "value_weights",
)  # fmt: skip


def random_batch(rng: np.random.Generator, b: int, r: int, keep: float) -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch with random streams and masks, and random log-probs and entropies."""
    ints = np.zeros((b, r), np.int32)
    f32 = lambda x: np.asarray(x, np.float32)  # noqa: E731
    weights = {name: f32(np.where(rng.random((b, r)) < keep, rng.uniform(0.1, 1, (b, r)), 0)) for name in WEIGHTS}
    batch = Batch(
        tokens=ints, positions=ints, segments=ints, head_positions=ints, targets=ints, sequence=ints, offset=ints,
        behaviour_logprobs=f32(rng.normal(-2, 0.5, (b, r))),
        old_logprobs=f32(rng.normal(-2, 0.5, (b, r))),
        reference_logprobs=f32(rng.normal(-2, 0.5, (b, r))),
        advantages=f32(rng.normal(size=(b, r))),
        returns=f32(rng.normal(size=(b, r))),
        old_values=f32(rng.normal(size=(b, r))),
        **weights,
    )  # fmt: skip
    return batch, f32(rng.normal(-2, 0.5, (b, r))), f32(rng.uniform(0, 2, (b, r)))


def reference_loss(logprobs, entropy, batch: Batch) -> float:
    """Token by token in float64, only over tokens that have a weight."""
    total = 0.0
    for i in np.ndindex(logprobs.shape):
        lp, ref = float(logprobs[i]), float(batch.reference_logprobs[i])
        if w := float(batch.policy_weights[i]):
            ratio, a = np.exp(lp - float(batch.old_logprobs[i])), float(batch.advantages[i])
            total += w * max(-ratio * a, -np.clip(ratio, 0.8, 1.28) * a)
        if w := float(batch.kl_weights[i]):
            total += w * (np.exp(ref - lp) - 1 + lp - ref)
        if w := float(batch.entropy_weights[i]):
            total -= w * float(entropy[i])
        for name in ("ce_weights", "nll_weights"):
            if w := float(getattr(batch, name)[i]):
                total -= w * lp
    return total


@functools.cache
def graded(objective, delta):
    """Log-probs, entropies, batch -> loss and its gradient; `delta` of OPSM, None without it."""
    masking = None if delta is None else OPSM(delta)
    loss = lambda lp, entropy, batch: LOSS(lp, entropy, batch, objective=objective, opsm=masking)[0]  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0]))
def test_equals_the_sum_written_out(seed, keep):
    batch, logprobs, entropy = random_batch(np.random.default_rng(seed), 3, 5, keep)
    got, _ = graded(CLIPPED, None)(logprobs, entropy, batch)
    np.testing.assert_allclose(got, reference_loss(logprobs, entropy, batch), rtol=1e-5, atol=1e-5)


def test_z_loss_is_the_weighted_square_of_log_z_and_reads_it_nowhere_else():
    batch, logprobs, entropy = random_batch(np.random.default_rng(7), 2, 5, 0.5)
    live = batch.z_weights != 0
    log_z = np.where(live, 3.0, np.nan).astype(np.float32)
    total = lambda z: LOSS(  # noqa: E731
        jnp.asarray(logprobs), entropy, batch, dict(log_z=z)
    )
    (loss, tally), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(log_z))
    expected = 9.0 * batch.z_weights.sum()
    np.testing.assert_allclose(loss, reference_loss(logprobs, entropy, batch) + expected, rtol=1e-5)
    np.testing.assert_allclose(grad, 6.0 * batch.z_weights, rtol=1e-6)
    np.testing.assert_allclose(policy_metrics(jax.device_get(tally))["loss/z"], expected, rtol=1e-6)


def test_the_divergence_to_a_teacher_is_told_from_log_z_by_its_name():
    batch, logprobs, entropy = random_batch(np.random.default_rng(11), 2, 5, 0.5)
    batch = batch.replace(z_weights=np.zeros_like(batch.z_weights))
    far = np.where(batch.distill_weights != 0, 2.0, np.nan).astype(np.float32)
    extras = dict(log_z=jnp.full((2, 5), 50.0), divergence=jnp.asarray(far))
    loss, tally = LOSS(jnp.asarray(logprobs), jnp.asarray(entropy), batch, extras)
    expected = 2.0 * batch.distill_weights.sum()
    np.testing.assert_allclose(loss, reference_loss(logprobs, entropy, batch) + expected, rtol=1e-5)
    metrics = policy_metrics(jax.device_get(tally))
    np.testing.assert_allclose([metrics["loss/distill"], metrics["loss/z"]], [expected, 0.0], rtol=1e-6)


def test_a_critic_in_bins_has_cross_entropy_and_the_metrics_of_its_mean():
    batch, _, _ = random_batch(np.random.default_rng(8), 2, 6, 0.5)
    live = batch.value_weights > 0
    two_hot = TwoHot(bins=6, low=-3.0, high=3.0)
    logits = np.random.default_rng(9).normal(size=(2, 6, 6)).astype(np.float32)
    poisoned = np.where(live[..., None], logits, np.nan)
    (loss, tally), grad = jax.value_and_grad(lambda x: losses.value_loss(x, batch, two_hot), has_aux=True)(poisoned)
    assert np.all(np.isfinite(grad)) and not np.any(np.asarray(grad)[~live])
    p = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
    centres, total = np.arange(-2.5, 3.0), 0.0
    for i in np.argwhere(live):
        hot = np.maximum(1 - np.abs(np.clip(float(batch.returns[*i]), -2.5, 2.5) - centres), 0)
        total += float(batch.value_weights[*i]) * sum(
            t * np.log(t / q) for t, q in zip(hot, p[*i], strict=True) if t > 0
        )
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    error = np.mean(((p @ centres) - batch.returns)[live] ** 2)
    np.testing.assert_allclose(value_metrics(jax.device_get(tally))["critic/squared_error"], error, rtol=1e-5)


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_poison_where_there_is_no_weight_changes_nothing(self):
        batch, logprobs, entropy = random_batch(np.random.default_rng(1), 2, 6, 0.4)
        silent = np.all([getattr(batch, name) == 0 for name in WEIGHTS[:6]], axis=0)
        assert silent.any()
        value_and_grad = self.variant(
            lambda lp, h: jax.value_and_grad(lambda lp, h: LOSS(lp, h, batch)[0], (0, 1))(lp, h)
        )
        clean, clean_grads = value_and_grad(logprobs, entropy)
        for poison in (np.nan, -np.inf, 1e30):
            dirty, grads = value_and_grad(np.where(silent, poison, logprobs), np.where(silent, poison, entropy))
            assert dirty == clean
            for g, c in zip(grads, clean_grads, strict=True):
                np.testing.assert_array_equal(g, c)
                assert np.all(np.isfinite(g)) and not np.any(np.asarray(g)[silent])

    @chex.variants(with_jit=True, without_jit=True)
    def test_value_loss_and_its_baseline(self):
        batch, _, _ = random_batch(np.random.default_rng(2), 2, 6, 0.5)
        live = batch.value_weights > 0
        values = np.where(live, 0.3, np.nan).astype(np.float32)
        loss, tally = self.variant(lambda v: losses.value_loss(v, batch, Squared(0.5)))(values)
        near = batch.old_values + np.clip(0.3 - batch.old_values, -0.5, 0.5)
        per_token = 0.5 * np.maximum((0.3 - batch.returns) ** 2, (near - batch.returns) ** 2)
        np.testing.assert_allclose(loss, np.sum((batch.value_weights * per_token)[live]), rtol=1e-5)
        metrics = value_metrics(jax.device_get(tally))
        np.testing.assert_allclose(metrics["critic/constant_squared_error"], batch.returns[live].var(), rtol=1e-4)
        np.testing.assert_allclose(
            metrics["critic/explained_variance"],
            1 - np.mean((0.3 - batch.returns[live]) ** 2) / batch.returns[live].var(), rtol=1e-4,
        )  # fmt: skip
        held = ((near - batch.returns) ** 2 > (0.3 - batch.returns) ** 2)[live].mean()
        np.testing.assert_allclose(metrics["critic/clip_frac"], held, rtol=1e-6)
        assert 0 < held < 1


def test_metrics_are_exact_over_tokens_and_add_up_over_micro_batches():
    rng = np.random.default_rng(3)
    parts = [random_batch(rng, 2, 5, 0.5) for _ in range(3)]
    tallies = [LOSS(jnp.asarray(lp), jnp.asarray(h), b)[1] for b, lp, h in parts]
    metrics = policy_metrics(jax.device_get(tallies[0].add(tallies[1]).add(tallies[2])))
    join = lambda get: np.concatenate([get(*part).ravel() for part in parts])  # noqa: E731
    policy = join(lambda b, lp, h: b.policy_weights) > 0
    gap = join(lambda b, lp, h: lp - b.behaviour_logprobs)[policy]
    assert metrics["policy/tokens"] == policy.sum()
    np.testing.assert_allclose(metrics["policy/entropy"], join(lambda b, lp, h: h)[policy].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/logprob_gap_max"], np.abs(gap).max(), rtol=1e-6)
    np.testing.assert_allclose(metrics["policy/logprob_gap_mean"], np.abs(gap).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/ratio_max"], np.exp(gap.max()), rtol=1e-5)
    ce = join(lambda b, lp, h: b.ce_weights) > 0
    np.testing.assert_allclose(metrics["ce/nll"], -join(lambda b, lp, h: lp)[ce].mean(), rtol=1e-5)
    assert metrics["ce/tokens"] == ce.sum()
    # What clipping stopped, and the two divergences, each a mean over its own tokens.
    advantages, old = (join(lambda b, lp, h, n=n: getattr(b, n))[policy] for n in ("advantages", "old_logprobs"))
    ratio = np.exp(join(lambda b, lp, h: lp)[policy] - old)
    stopped = np.where(advantages > 0, ratio > 1.28, ratio < 0.8)
    assert 0 < stopped.mean() < 1
    np.testing.assert_allclose(metrics["policy/clip_frac"], stopped.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["policy/kl_behaviour"], np.mean(np.exp(gap) - 1 - gap), rtol=1e-5)
    kl = join(lambda b, lp, h: b.kl_weights) > 0
    d = join(lambda b, lp, h: lp - b.reference_logprobs)[kl]
    np.testing.assert_allclose(metrics["policy/kl_reference"], np.mean(np.exp(-d) - 1 + d), rtol=1e-5)
    total = sum(reference_loss(lp, h, b) for b, lp, h in parts)
    np.testing.assert_allclose(metrics["loss/total"], total, rtol=1e-5)


@pytest.mark.parametrize("spread", [1e-6, 0.01, 0.3])
def test_ratio_p99_is_the_quantile_to_a_bin(spread):
    batch, _, entropy = random_batch(np.random.default_rng(4), 20, 50, 1.0)
    gap = np.random.default_rng(5).normal(0, spread, (20, 50)).astype(np.float32)
    _, tally = LOSS(jnp.asarray(batch.behaviour_logprobs + gap), jnp.asarray(entropy), batch)
    exact = np.exp(np.quantile(gap, 0.99))
    got = policy_metrics(jax.device_get(tally))["policy/ratio_p99"]
    assert exact * 0.999 <= got <= exact * 1.05


@pytest.mark.parametrize("objective", [CLIPPED, GSPO(0.2, 0.28)])
def test_a_sequences_mean_is_over_its_policy_targets_and_not_over_those_of_echo(objective):
    """OPSM and GSPO, beside targets of cross-entropy whose log-probs are far from anything."""
    batch, _, entropy = random_batch(np.random.default_rng(6), 1, 5, 1.0)
    ours, zero = np.array([[1, 0, 1, 1, 0]], np.float32), np.zeros((1, 5), np.float32)
    batch = batch.replace(
        sequence=np.array([[0, 0, 0, 1, 1]], np.int32), advantages=np.full((1, 5), -1, np.float32), kl_weights=zero,
        nll_weights=zero, entropy_weights=zero, policy_weights=ours, ce_weights=1 - ours,
    )  # fmt: skip
    drift = np.array([[-0.3, 4.0, -0.1, 0.1, -4.0]], np.float32)  # of the policy's targets: -0.2 and 0.1 per sequence
    loss, _ = graded(objective, 0.15)(batch.old_logprobs + drift, entropy, batch)  # OPSM masks the first sequence
    ce = -(batch.old_logprobs + drift)[ours == 0].sum()
    np.testing.assert_allclose(loss - ce, np.exp(0.1), rtol=1e-4)
    loss, _ = graded(objective, 0.25)(batch.old_logprobs + drift, entropy, batch)  # and now none
    whole = np.exp([-0.2, -0.2] if isinstance(objective, GSPO) else [-0.3, -0.1]).clip(0.8)
    np.testing.assert_allclose(loss - ce, whole.sum() + np.exp(0.1), rtol=1e-4)


def test_the_loss_has_the_choices_of_the_stage():
    base = config.parse(get_config()).rl
    kl = config.KLConfig(0.1, "k2")
    changed = dataclasses.replace(
        base, objective=SoftGate(1.5, 2.5), kl=kl, correction=OPSM(0.5), routing=config.RoutingConfig(balance_loss=0.01)
    )
    chosen = losses.policy_loss_of(changed).keywords
    ours = dict(objective=SoftGate(1.5, 2.5), kl_estimator="k2", kl_coefficient=0.1, opsm=OPSM(0.5))
    assert chosen == ours | dict(balance_coefficient=0.01)
    plain = losses.policy_loss_of(dataclasses.replace(base, correction=Importance())).keywords
    off = dict(kl_estimator="k3", kl_coefficient=1.0, opsm=None, balance_coefficient=0.0)
    assert plain == off | dict(objective=CLIPPED)
