"""Sampling against NumPy: which tokens can be drawn, how often, and with what log-prob."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.engine import sampling


def settings_of(slots: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> sampling.SamplingParams:
    full = lambda x, dtype: jnp.full((slots,), x, dtype)  # noqa: E731
    return sampling.SamplingParams(
        full(temperature, jnp.float32), full(top_p, jnp.float32), full(top_k, jnp.int32), full(min_p, jnp.float32)
    )


def reference(logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """The distribution of one slot, by sorting, in float64."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1, 1, 0, 0),
        (0.7, 1, 0, 0),
        (1.3, 0.8, 0, 0),
        (0.7, 1, 5, 0),
        (1, 1, 0, 0.1),
        (0.9, 0.9, 40, 0.02),
        (1, 1e-6, 0, 0),
    ],
)
def test_distribution(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    vocab, draws = 150, 20_000  # three blocks of the inverse CDF, the last one padded
    logits = np.random.default_rng(0).normal(0, 2, vocab).astype(np.float32)
    expected = reference(logits.astype(np.float64), temperature, top_p, top_k, min_p)
    # An even grid instead of random numbers: frequencies are then within two grid steps of the probabilities.
    uniform = (jnp.arange(draws) + 0.5) / draws
    truncated = top_p < 1 or top_k > 0 or min_p > 0
    tokens, logprobs = jax.jit(sampling.sample, static_argnums=3)(
        jnp.broadcast_to(logits, (draws, vocab)),
        uniform,
        settings_of(draws, temperature, top_p, top_k, min_p),
        truncated,
    )
    frequency = np.bincount(np.asarray(tokens), minlength=vocab) / draws
    assert np.all(frequency[expected == 0] == 0)
    np.testing.assert_allclose(frequency, expected, atol=3 / draws)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=2e-6, rtol=2e-6)


def test_truncation_off_changes_nothing() -> None:
    logits = jax.random.normal(jax.random.key(0), (64, 200)) * 3
    uniform = jax.random.uniform(jax.random.key(1), (64,))
    plain = sampling.sample(logits, uniform, settings_of(64, 0.7), truncated=False)
    through = sampling.sample(logits, uniform, settings_of(64, 0.7), truncated=True)
    np.testing.assert_array_equal(plain[0], through[0])
    np.testing.assert_array_equal(plain[1], through[1])


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_small_temperatures_have_true_logprobs(temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(0).normal(0, 20, (64, 1000)).astype(np.float32)
    uniform = jax.random.uniform(jax.random.key(1), (64,))
    settings = settings_of(64, temperature, top_p)
    tokens, logprobs = jax.jit(sampling.sample, static_argnums=3)(logits, uniform, settings, top_p < 1)
    expected = [reference(row.astype(np.float64), float(np.float32(temperature)), top_p, 0, 0) for row in logits]
    expected = np.array(expected)[np.arange(64), tokens]
    assert np.all(expected > 0) and np.max(logprobs) <= 0
    np.testing.assert_allclose(logprobs, np.log(expected), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("temperature", [9e-7, 1e-8, 3e-9, 1e-12, 0.0])
@pytest.mark.parametrize("truncated", [False, True])
def test_below_the_least_temperature_the_largest_logit_is_taken(temperature: float, truncated: bool) -> None:
    logits = np.random.default_rng(0).normal(0, 20, (64, 1000)).astype(np.float32)
    uniform = jax.random.uniform(jax.random.key(1), (64,))
    settings = settings_of(64, temperature, top_p=0.9 if truncated else 1.0)
    tokens, logprobs = jax.jit(sampling.sample, static_argnums=3)(logits, uniform, settings, truncated)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    at_one = jax.nn.log_softmax(logits)[np.arange(64), tokens]
    np.testing.assert_allclose(logprobs, at_one, atol=2e-6)


def test_a_slot_that_does_not_truncate_is_the_same_beside_one_that_does() -> None:
    logits = jax.random.normal(jax.random.key(0), (64, 1000)) * 5
    uniform, one = jax.random.uniform(jax.random.key(1), (64,)), jax.jit(sampling.sample, static_argnums=3)
    for temperature in (1.0, 0.7):
        mixed = settings_of(64, temperature).replace(top_p=jnp.where(jnp.arange(64) < 32, 1.0, 0.5))
        plain, beside = one(logits, uniform, settings_of(64, temperature), False), one(logits, uniform, mixed, True)
        np.testing.assert_array_equal(plain[1][:32], beside[1][:32])
        np.testing.assert_array_equal(plain[0][:32], beside[0][:32])


def test_greedy_takes_the_first_of_the_largest_and_scores_at_temperature_one() -> None:
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0]])
    for truncated in (False, True):
        token, logprob = sampling.sample(logits, jnp.array([0.9]), settings_of(1, 0.0, 0.5, 1), truncated)
        assert token.tolist() == [1]
        np.testing.assert_allclose(logprob, 2 - np.log(np.exp([0, 2, 1, 2]).sum()), rtol=1e-6)


def test_never_an_excluded_token_at_the_edges() -> None:
    # Probability only in the middle; u = 0 and u just below 1 are where rounding would step outside.
    logits = np.full((2, 256), -np.inf, np.float32)
    logits[:, 70:75] = 0
    edge = np.nextafter(np.float32(1), np.float32(0))
    drawn = sampling.inverse_cdf(jnp.exp(logits), jnp.array([0.0, 1.0]))  # a target that rounding pushed too far
    assert drawn.tolist() == [70, 74]
    tokens, logprobs = sampling.sample(jnp.array(logits), jnp.array([0.0, edge]), settings_of(2), truncated=False)
    assert tokens.tolist() == [70, 74]
    np.testing.assert_allclose(logprobs, np.log(1 / 5), rtol=1e-6)


def test_uniforms_depend_on_key_and_position_only() -> None:
    keys = np.stack([sampling.request_key(0, f"task{i}", 0, 0) for i in range(6)])
    positions = np.arange(6, dtype=np.int32)
    whole = np.asarray(sampling.uniforms(keys, positions))
    order = np.array([3, 1, 5])
    np.testing.assert_array_equal(whole[order], sampling.uniforms(keys[order], positions[order]))
    many = np.asarray(sampling.uniforms(np.repeat(keys[:1], 4000, axis=0), np.arange(4000, dtype=np.int32)))
    assert many.min() >= 0 and many.max() < 1 and len(np.unique(many)) > 3990
    np.testing.assert_allclose(np.histogram(many, 10, (0, 1))[0] / 4000, 0.1, atol=0.02)


def test_keys_differ_in_every_part() -> None:
    parts = itertools.product((0, 1), ("a", "b", "1"), (0, 1, 11), (0, 1, 11), (0, 1, 11))
    keys = {sampling.request_key(*part).tobytes() for part in parts}
    assert len(keys) == 2 * 3 * 3 * 3 * 3


def test_the_first_conversation_has_the_keys_of_runs_before_conversations_were_numbered() -> None:
    before = {(0, "a", 0, 0): "ae7c2bfd6294189a", (17, "task 3", 5, 2): "15d498dd2851ba22"}
    assert {part: sampling.request_key(*part, conversation=0).tobytes().hex() for part in before} == before
