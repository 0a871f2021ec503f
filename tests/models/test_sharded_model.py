"""Loss and gradients on 8 virtual devices equal those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import ConfigError, MeshConfig
from jaxagent.models import critic, logprobs, params, sharding, transformer
from jaxagent.models.families import FAMILIES
from tests.models import tiny


def loss(weights, head, spec, batch):
    """Uses everything: log-probs at a temperature, entropies and values, each weighted differently per target."""
    x, *_ = transformer.forward_packed(
        weights, spec, *(batch[name] for name in ("tokens", "positions", "segments", "head_positions"))
    )
    flat, targets = sharding.merge_places(x), sharding.merge_places(batch["targets"])
    found = logprobs.token_scores(weights, spec, flat, targets, 0.7)[:2]
    scores, entropy = (sharding.whole_rows(sharding.split_places(a, x)) for a in found)
    values = sharding.whole_rows(critic.values(critic.Critic(backbone=weights, value_head=head), x))
    ramp = jnp.linspace(0.1, 1.0, values.size).reshape(values.shape)
    total = (scores * ramp).sum() + 0.3 * entropy.sum() + (values * ramp[::-1]).sum()
    return total, (scores, entropy, values)


step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnames="spec")


PATTERN = FAMILIES["qwen3_5_text"].pattern[2:]
HYBRID = dict(family="qwen3_5_text", pattern=PATTERN, partial_rotary_factor=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, changes",  # data, fsdp, tensor, context
    [
        ((1, 1, 1, 1), dict()),
        ((2, 2, 2, 1), dict()),
        ((1, 4, 2, 1), dict(remat="layer", logprob_chunk_tokens=16, tie_embeddings=False)),
        ((2, 2, 2, 1), dict(remat="dots", family="qwen2", logprob_chunk_tokens=24)),
        ((2, 2, 2, 1), dict(family="olmo2")),  # one norm over the heads of several devices
        ((2, 2, 2, 1), HYBRID),
        ((1, 1, 1, 8), dict()),
        ((2, 1, 1, 4), HYBRID),
        ((1, 2, 2, 2), dict(remat="layer", logprob_chunk_tokens=16, tie_embeddings=False)),
        ((2, 1, 1, 4), dict(remat="dots", family="qwen2", logprob_chunk_tokens=24)),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(sizes, changes):
    spec = tiny.spec(**changes)
    weights = tiny.init(spec)
    head = jax.random.normal(jax.random.key(1), (spec.embed_dim,))
    batch = tiny.batch(b=4, t=48, r=16, vocab=spec.vocab_size)
    (total, outputs), grads = step(weights, head, spec, batch)

    mesh = sharding.make_mesh(MeshConfig(*sizes))
    with jax.set_mesh(mesh):
        where = params.shardings(spec, mesh, sharding.TRAIN)
        split_batch = jax.tree.map(sharding.over_context, jax.device_put(batch, sharding.rows(mesh, 2)))
        (split_total, split_outputs), split_grads = step(jax.device_put(weights, where), head, spec, split_batch)

    np.testing.assert_allclose(split_total, total, rtol=1e-5)
    assert tiny.worst_relative(outputs, split_outputs) < 1e-5
    assert tiny.worst_relative(grads, split_grads) < 1e-5
    # Gradients come back in the layout of the parameters, split over fsdp and context, ready for the optimiser.
    jax.tree.map(
        lambda g, s: None if g.sharding.is_equivalent_to(s, g.ndim) else pytest.fail(str(g)), split_grads[0], where
    )


def test_compute_layout_equals_training_layout():
    """The generation engine's layout (nothing split over fsdp) gives the same hidden states."""
    spec = tiny.spec()
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=1))
    batch = tiny.batch(b=8, t=12, r=3, vocab=spec.vocab_size)
    run = jax.jit(transformer.forward_packed, static_argnames="spec")
    with jax.set_mesh(mesh):
        names = ("tokens", "positions", "segments", "head_positions")
        args = jax.device_put([batch[name] for name in names], sharding.rows(mesh, 2))
        train = jax.device_put(tiny.random_params(spec), params.shardings(spec, mesh, sharding.TRAIN))
        compute = jax.device_put(train, params.shardings(spec, mesh, sharding.COMPUTE))
        np.testing.assert_allclose(run(train, spec, *args)[0], run(compute, spec, *args)[0], rtol=1e-5, atol=1e-6)


def test_init_does_not_depend_on_the_mesh():
    spec = tiny.spec(tie_embeddings=False)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=1))
    one = params.init(spec, jax.random.key(3))
    split = params.init(spec, jax.random.key(3), params.shardings(spec, mesh, sharding.TRAIN))
    assert tiny.worst_relative(one, split) < 1e-6


def test_another_seed_has_other_weights_and_no_other_program():
    spec = tiny.spec()
    one = params.init(spec, jax.random.key(0))
    made = params._initialiser.cache_info().misses
    other = params.init(spec, jax.random.key(1))
    assert params._initialiser.cache_info().misses == made
    assert not np.array_equal(one.embed, other.embed) and not np.array_equal(one.layers.wk, one.layers.wv)


def test_weights_made_inside_a_program_are_the_same():
    spec = tiny.spec()
    inside = jax.jit(lambda key: params.init(spec, key))(jax.random.key(0))
    assert tiny.worst_relative(params.init(spec, jax.random.key(0)), inside) < 1e-6


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((1, 1, 4), "config.mesh.tensor=4 does not divide the 2 kv_heads of 'layers.wk'"),
        ((1, 3, 1), "config.mesh.fsdp=3 does not divide the 16 embed of 'embed'"),
        ((64, 1, 1), "config.mesh needs 64 devices, this machine has 8"),
        ((0, 1, 1), "must be positive"),
    ],
)
def test_impossible_mesh(mesh, message):
    with pytest.raises(ConfigError, match=message):
        params.shardings(tiny.spec(), sharding.make_mesh(MeshConfig(*mesh, 1)), sharding.TRAIN)


def test_abstract_parameters_are_those_of_init():
    spec = tiny.spec()
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=1))
    abstract = params.abstract(spec, mesh, sharding.TRAIN)
    real = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.TRAIN))
    jax.tree.map(
        lambda a, r: None if (a.shape, a.dtype, a.sharding) == (r.shape, r.dtype, r.sharding) else pytest.fail(),
        abstract,
        real,
    )
    assert params.count(spec) == sum(x.size for x in jax.tree.leaves(real))
