"""Updates and scores with rows split over the context axis: one device's numbers, in a part of its memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxagent.algorithms.objectives import GSPO
from jaxagent.algorithms.streams import Streams
from jaxagent.algorithms.value_losses import HLGauss, Squared
from jaxagent.config import relations
from jaxagent.config.model import completed
from jaxagent.learner import loss as losses
from jaxagent.learner.forward import policy_forward, top_forward, value_forward
from jaxagent.learner.score import policy_scorer, value_scorer
from jaxagent.learner.state import init_state
from jaxagent.learner.update import Critic, make_update, shard
from jaxagent.models import critic as critic_model
from jaxagent.models import params as model_params
from jaxagent.models import sharding
from jaxagent.models.exact import Tiling
from jaxagent.types import TokenKind, Trajectory
from tests.learner.test_update import LOSS, assert_trees_close, critic_of
from tests.models import tiny

LONG = 4096  # tokens of the long sequence
BUDGET = 48 * 2**20  # bytes of a device for what is alive only while a program runs


@pytest.fixture(scope="module")
def packed(make_packer, make_streams):
    """Two sequences a row and padding; more sequences than one micro-batch holds."""
    return make_packer(row_tokens=48, longest_targets=40, micro_rows=2, context=8).pack(
        make_streams(9, low=12, high=40)
    )


def after_an_update(spec, mesh, params, batches, policy_loss, bins):
    optimizer = optax.sgd(0.1)
    kind = HLGauss(bins=bins, low=-0.5, high=1.5) if bins else Squared(0.5)
    head = critic_of(params)
    if bins:
        head = critic_model.from_policy(params, bins)
        head = head.replace(value_head=head.value_head + 0.1 * jnp.arange(bins))
    with jax.set_mesh(mesh):
        state = init_state(params, optimizer, head, optimizer)
    critic = Critic(value_forward(spec), optimizer, kind)
    update = make_update(policy_forward(spec), optimizer, mesh, policy_loss, critic=critic)
    return update(state, batches)


@pytest.mark.slow
@pytest.mark.parametrize(  # data, fsdp, tensor, context
    "sizes, remat",
    [
        ((1, 2, 2, 2), "layer"),
        pytest.param((1, 1, 1, 8), "none", marks=pytest.mark.nightly),  # gradients: models/test_context_axis.py
    ],
    ids=str,
)
def test_an_update_is_that_of_one_device(spec, make_params, make_mesh, packed, sizes, remat):
    spec, bins = dataclasses.replace(spec, remat=remat), 8 if remat == "layer" else 0

    def policy_loss(logprobs, entropy, batch, *extras):  # GSPO's ratio is of a whole sequence
        return LOSS(logprobs, entropy, batch, *extras, objective=GSPO(0.2, 0.28))

    (one, metrics), (split, split_metrics) = (
        after_an_update(spec, mesh, make_params(mesh), packed, policy_loss, bins)
        for mesh in (make_mesh(), make_mesh(*sizes))
    )
    assert len(packed) > 1
    assert_trees_close(split.params, one.params, 1e-5)
    assert_trees_close(split.critic, one.critic, 1e-5)
    assert split_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        if name == "critic/clip_frac":  # asks whether two losses differ that are equal but for rounding
            continue
        np.testing.assert_allclose(split_metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_scores_are_those_of_one_device(spec, make_params, make_mesh, make_packer, make_streams, packed):
    trajectories = [s.trajectory for s in make_streams(5, low=12, high=40)]
    packer = make_packer(row_tokens=48, longest_targets=40, micro_rows=2, context=4)
    found = []
    for mesh in (make_mesh(), make_mesh(2, 1, 1, 4)):
        params = make_params(mesh)
        score = policy_scorer(policy_forward(spec), 0.8, packer, mesh)
        value = value_scorer(value_forward(spec), packer, mesh, Squared(0.5))
        with jax.set_mesh(mesh):
            top = jax.jit(top_forward(spec, 3))(params, shard(packed[0], mesh), jnp.float32(1.0))
        found.append((score(params, trajectories), value(critic_of(params), trajectories), tuple(top)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


@pytest.mark.slow
def test_exact_logprobs_are_the_same_bits(spec, make_params, make_mesh, packed):
    """Exact scoring takes whole rows on every device of the axis; the gradient is of the pass that is split."""
    found = []
    for mesh in (make_mesh(), make_mesh(1, 2, 1, 4)):
        forward = jax.jit(policy_forward(spec, Tiling(64, 16, "float32")))
        with jax.set_mesh(mesh):
            found.append(np.asarray(forward(make_params(mesh), shard(packed[0], mesh), jnp.float32(0.7))[0]))
    live = packed[0].sequence >= 0
    np.testing.assert_array_equal(found[0][live], found[1][live])


def long_update(spec, mesh, row_shards, context, make_packer):
    """The update's state and program, and one sequence that fills a row of LONG tokens."""
    packer = make_packer(LONG, row_shards, LONG // 8, row_shards, context=context)
    where = model_params.shardings(spec, mesh, sharding.TRAIN)
    with jax.set_mesh(mesh):
        state = init_state(tiny.init(spec, 0, where), optax.sgd(0.1))
    update = make_update(policy_forward(spec), optax.sgd(0.1), mesh, losses.policy_loss)
    return state, update, packer


def temporary_bytes(spec, mesh, row_shards, context, make_packer):
    """Of the gradient of a micro-batch, on one device."""
    state, update, packer = long_update(spec, mesh, row_shards, context, make_packer)
    with jax.set_mesh(mesh):
        batch, temperature = shard(packer.empty(), mesh), jnp.float32(1.0)
        grads, tally = update.policy.zeros(state.params, batch, temperature)
        compiled = update.policy.accumulate.lower(state.params, batch, temperature, grads, tally).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_a_sequence_that_fits_no_single_devices_share(spec, make_mesh, make_packer):
    """Eight ways to use eight devices for rows leave a row's activations whole on one; only context divides them."""
    spec = dataclasses.replace(spec, remat="layer", num_layers=2, embed_dim=256, head_dim=32, mlp_dim=1024)
    alone = temporary_bytes(spec, make_mesh(1, 8, 1, 1), 8, 1, make_packer)
    halves = temporary_bytes(spec, make_mesh(1, 4, 1, 2), 4, 2, make_packer)
    eighths = temporary_bytes(spec, make_mesh(1, 1, 1, 8), 1, 8, make_packer)
    assert eighths < BUDGET < min(halves, alone), (alone, halves, eighths)
    assert eighths < halves / 2

    state, update, packer = long_update(spec, make_mesh(1, 1, 1, 8), 1, 8, make_packer)
    rng = np.random.default_rng(0)
    kinds = np.full(LONG + 1, TokenKind.OBSERVATION, np.uint8)
    kinds[0], kinds[-450:] = TokenKind.PROMPT, TokenKind.ACTION
    actions = kinds == TokenKind.ACTION
    sequence = Trajectory(
        tokens=rng.integers(0, spec.vocab_size, LONG + 1).astype(np.int32),
        kinds=kinds,
        logprobs=np.where(actions, -3.0, 0.0).astype(np.float32),
        policy_versions=np.where(actions, 0, -1).astype(np.int32),
        turns=np.zeros(LONG + 1, np.int32),
    )
    weights = np.where(actions, 1 / 450, 0.0)
    batches = packer.pack([Streams.of(sequence, ce_weights=weights)])
    assert [batch.tokens.shape for batch in batches] == [(1, LONG)] and (batches[0].segments == 1).all()
    first = None
    for _ in range(2):
        state, metrics = update(state, batches)
        first = first or metrics
    assert metrics["ce/tokens"] == 450 and metrics["policy/update_applied"] == 1
    assert metrics["ce/nll"] < first["ce/nll"]


def test_rows_must_divide_over_the_axis(cfg, make_packer):
    split = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context=80))
    assert [line for line in relations.broken_relations(split) if "mesh.context" in line] == [
        f"{section}.batch.row_tokens ({batch.row_tokens}) must be a multiple of 2 * mesh.context (160)."
        for section, batch in (("rl", cfg.rl.batch), ("warm_start", completed(cfg.warm_start.batch, cfg.rl.batch)))
    ]
    assert not list(relations.broken_relations(cfg))
    # Whatever a recipe rounds its targets to, they divide too.
    assert make_packer(row_tokens=48, longest_targets=10, context=8).row_targets == 16
