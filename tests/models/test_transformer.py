"""The forward's switches change speed and memory, never numbers; causality; the critic."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.models import attention, critic, kernels, params, transformer
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.blocks.attention import Attention
from jaxagent.models.blocks.mlp import SwiGLU
from jaxagent.models.spec import ModelSpec
from tests.models import tiny


@functools.partial(jax.jit, static_argnames=("spec", "unroll", "attend"))
def hidden(weights, spec, tokens, unroll=False, cache=None, attend=None):
    """One sequence through the model; packed attention unless the test brings its own."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    attend = attend or attention.packed(jnp.ones((1, len(tokens)), jnp.int32))
    return transformer.hidden(weights, spec, tokens, positions, attend, cache, unroll)


forward_packed = jax.jit(transformer.forward_packed, static_argnames="spec")


def test_scan_unrolled_and_unstacked_layers_agree():
    spec = tiny.spec(num_layers=3)
    weights = tiny.init(spec)
    tokens = np.arange(10, dtype=np.int32)
    scanned, _ = hidden(weights, spec, tokens)
    for variant in (weights, weights.replace(layers=params.unstack(weights.layers))):
        np.testing.assert_allclose(hidden(variant, spec, tokens, unroll=True)[0], scanned, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["products", "dots", "attention", "layer"])
@pytest.mark.parametrize("unroll", [False, True])
def test_rematerialisation_changes_no_number(remat, unroll):
    tokens = np.arange(10, dtype=np.int32)
    weights = tiny.init(tiny.spec())

    def loss(weights, spec):
        return jnp.square(hidden(weights, spec, tokens, unroll)[0]).sum()

    plain, changed = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(weights, tiny.spec(remat=r)) for r in ("none", remat)
    )
    assert tiny.worst_relative(plain, changed) < 1e-5


def _gradient(remat: str, row_tokens: int, unroll: bool = False):
    """Of a tiny model on one packed row, and the shapes that it takes."""
    spec = tiny.spec(remat=remat)
    row = np.zeros((1, row_tokens), np.int32)

    def loss(weights):
        if not unroll:
            return transformer.forward_packed(weights, spec, row, row, row, row)[0].sum()
        attend = attention.packed(jnp.asarray(row))
        return transformer.hidden(weights, spec, jnp.asarray(row[0]), jnp.asarray(row[0]), attend, unroll=True)[0].sum()

    return jax.grad(loss), tiny.shapes(spec)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("remat", "loops"), [("products", 2), ("dots", 3), ("attention", 2), ("layer", 3)])
def test_attention_of_long_rows_is_not_computed_again_where_it_is_kept(monkeypatch, remat, loops, own):
    if not own:  # a kernel of another package names nothing
        monkeypatch.setattr(attention, "_in_blocks", None)
    gradient, weights = _gradient(remat, kernels.LONG_ROW)
    assert str(jax.make_jaxpr(gradient)(weights)).count("while[") == loops


def test_a_kernel_with_named_residuals_has_its_own_gradients():
    kernel = attention._PACKED["blocks"]
    segments = jnp.asarray(np.repeat([[1, 2]], 8, axis=1))
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 16, heads, 4)) for i, heads in enumerate((4, 2, 2)))
    own, named = (
        jax.value_and_grad(lambda *qkv, f=f: jnp.square(f(segments, *qkv)).sum(), argnums=(0, 1, 2))(q, k, v)
        for f in (kernel, attention.with_named_residuals(kernel))
    )
    jax.tree.map(np.testing.assert_array_equal, own, named)


@pytest.mark.parametrize("unroll", [False, True])
def test_only_layers_that_are_written_out_need_a_barrier_to_be_computed_again(unroll):
    gradient, weights = _gradient("dots", 64, unroll)
    text = str(jax.make_jaxpr(gradient)(weights))
    assert f"prevent_cse={unroll}" in text and f"prevent_cse={not unroll}" not in text


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_a_deep_models_program_does_not_grow_with_depth(remat):
    def operations(layers):
        spec = tiny.spec(num_layers=layers, remat=remat)
        weights = tiny.shapes(spec)
        row = np.zeros((1, 8), np.int32)
        traced = jax.make_jaxpr(lambda w: transformer.forward_packed(w, spec, row, row, row, row))(weights)
        return str(traced).count(" = ")

    deep = transformer.MOST_WRITTEN_OUT + 1
    assert operations(deep) == operations(deep + 5)
    assert remat == "layer" or operations(2) < operations(3)  # few layers are written out


@dataclasses.dataclass(frozen=True)
class Noted(LayerBlock):
    """Adds nothing, and keeps a number of its own."""

    def arrays(self, spec):
        return {}

    def apply(self, layer, spec, x, rows, state):
        return jnp.zeros_like(x), None if state is None else state + 100


def test_each_block_of_each_layer_gets_its_own_state_and_returns_a_new_one():
    kinds = (Noted(), Attention(qk_norm=True), SwiGLU()), (Attention(qk_norm=True), SwiGLU(), Noted())
    spec = tiny.spec(num_layers=4, pattern=kinds)
    weights = tiny.init(spec)

    def attend(state, q, k, v):
        return q, None if state is None else state + 1

    number = lambda i: jnp.full((2,), float(i))  # noqa: E731
    cache = ((number(10), number(20), None), (number(30), None, number(40))) * 2
    tokens = np.arange(4, dtype=np.int32)
    x, new = hidden(weights, spec, tokens, True, cache, attend)
    first = [[110, 110], [21, 21], None], [[31, 31], None, [140, 140]]
    for states, expected in zip(new, first * 2, strict=True):
        for state, values in zip(states, expected, strict=True):
            assert (state is None) == (values is None)
            assert state is None or state.tolist() == values
    for unroll in (True, False):
        np.testing.assert_allclose(hidden(weights, spec, tokens, unroll, None, attend)[0], x, atol=1e-6)


def test_later_tokens_do_not_change_earlier_states():
    spec = tiny.spec()
    weights = tiny.init(spec)
    a, b = np.arange(12, dtype=np.int32), np.arange(12, dtype=np.int32)
    b[7:] = 50
    xa, xb = hidden(weights, spec, a)[0], hidden(weights, spec, b)[0]
    np.testing.assert_array_equal(xa[:7], xb[:7])
    assert np.abs(np.asarray(xa[7:] - xb[7:])).max() > 1e-3


def test_head_positions_pick_states():
    spec = tiny.spec()
    weights = tiny.init(spec)
    batch = tiny.batch(b=3, t=12, r=4, vocab=61)
    inputs = batch["tokens"], batch["positions"], batch["segments"]
    everywhere = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    full = np.asarray(forward_packed(weights, spec, *inputs, everywhere)[0])
    picked = np.asarray(forward_packed(weights, spec, *inputs, batch["head_positions"])[0])
    for row, place in np.ndindex(3, 4):
        np.testing.assert_allclose(picked[row, place], full[row, batch["head_positions"][row, place]], atol=1e-6)


def test_bfloat16_compute_keeps_float32_masters():
    spec = tiny.spec(compute_dtype="bfloat16")
    weights = tiny.init(spec)
    tokens = np.arange(10, dtype=np.int32)
    grads = jax.grad(lambda w: jnp.square(hidden(w, spec, tokens)[0].astype(jnp.float32)).mean())(weights)
    assert hidden(weights, spec, tokens)[0].dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves((weights, grads))} == {jnp.dtype("float32")}
    exact = hidden(weights, tiny.spec(), tokens)[0]
    np.testing.assert_allclose(hidden(weights, spec, tokens)[0].astype(jnp.float32), exact, atol=0.1)


def test_first_logits_are_small():
    """Tied embeddings of scale 0.1: the first distribution is close to uniform."""
    spec = tiny.spec(vocab_size=512, padded_vocab_size=512, embed_dim=64, embed_init_std=0.1)
    weights = params.init(spec, jax.random.key(0))
    x, _ = hidden(weights, spec, np.arange(100, dtype=np.int32))
    assert 0.3 < np.std(x @ weights.embed.T) < 1.2


def test_critic_starts_at_zero_and_owns_its_arrays():
    spec = tiny.spec(tie_embeddings=False)
    weights = tiny.init(spec)
    made = critic.from_policy(weights)
    x, _ = hidden(made.backbone, spec, np.arange(6, dtype=np.int32))
    np.testing.assert_array_equal(critic.values(made, x), np.zeros(6))
    assert made.backbone.head is None
    assert made.backbone.embed.unsafe_buffer_pointer() != weights.embed.unsafe_buffer_pointer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_heads=3), "num_heads=3 is not a multiple of model.num_kv_heads=2"),
        (dict(head_dim=7), "head_dim=7 must be even"),
        (dict(num_layers=0), "model.num_layers must be positive"),
        (dict(logprob_chunk_tokens=0), "logprob_chunk_tokens"),
    ],
)
def test_impossible_sizes(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny.spec(**changes)


def test_spec_from_config():
    config = tiny.model_config(
        family="qwen2", num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32, rope_theta=1e4
    )
    spec = ModelSpec.from_config(config, vocab_size=61)
    assert (spec.vocab_size, spec.padded_vocab_size, spec.pattern) == (61, 64, ((Attention(qkv_bias=True), SwiGLU()),))
    assert spec == ModelSpec.from_config(config, vocab_size=61) and hash(spec) == hash(spec)
    with pytest.raises(ConfigError, match=r"config.model.family must be one of qwen2, qwen3, llama"):
        ModelSpec.from_config(tiny.model_config(), vocab_size=61)
    with pytest.raises(ConfigError, match="exceeds the model's 64 positions"):
        tiny.spec(max_position=64).check_context(65)
