"""Updates of adapters: only they move, only they have optimiser state and gradients, and what is served follows."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxagent.config import KLConfig, LoraConfig
from jaxagent.learner import checkpoint, programs
from jaxagent.learner.forward import policy_forward
from jaxagent.learner.state import Frozen, init_state
from jaxagent.learner.update import make_update, shard
from jaxagent.models import exact, lora, params, sharding
from tests.learner.test_update import LOSS
from tests.models import tiny

CONFIG = LoraConfig(rank=2, alpha=4.0, rank_stabilised=False, targets="q_proj,o_proj,down_proj")
RATE = 0.1


@pytest.fixture(scope="module")
def lora_cfg(cfg):
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, lora=CONFIG))


def build(cfg, spec, mesh, base):
    """A state with adapters, and plain SGD, whose step is the gradient itself."""
    optimizer = optax.sgd(RATE)
    adapters, merge = programs.adapters(cfg, spec, mesh), programs.merger(cfg)
    with jax.set_mesh(mesh):
        state = init_state(adapters, optimizer).replace(frozen=Frozen(base, None))
    update = make_update(policy_forward(spec, None, CONFIG), optimizer, mesh, LOSS, merge=merge)
    return update.merged(state), update


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("shapes", [((1, 1, 1),), pytest.param(((1, 1, 1), (2, 2, 2)), marks=pytest.mark.slow)])
def test_two_updates_on_one_device_and_on_eight(
    lora_cfg, spec, make_params, make_packer, make_streams, make_mesh, shapes
):
    """Witness of the first: the gradient of all weights by the ordinary path, times the other factor."""
    batches = make_packer(micro_rows=8, longest_targets=20, row_shards=4).pack(make_streams(12))
    results = []
    for mesh in (make_mesh(*shape) for shape in shapes):
        base = make_params(mesh)
        state, update = build(lora_cfg, spec, mesh, base)
        before, start = jax.device_get(base), jax.device_get(state.params)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.policy), before)  # B is 0
        first, _ = update(state, batches)
        second, _ = update(first, batches)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(second.frozen.base), before)
        assert second.frozen.base is base and int(second.step) == 2
        results.append(jax.device_get((first.params, second.params, second.policy)))
        where = params.shardings(spec, mesh, sharding.TRAIN)  # merged weights lie where the base does
        assert all(
            jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), second.policy, where))
        )
        if mesh.size == 1:
            # Untouched arrays are shared with the base, not copied.
            assert pointers(second.policy.embed) == pointers(base.embed)
            assert pointers(second.policy.layers.wk) == pointers(base.layers.wk)

            on_mesh = [shard(batch, mesh) for batch in batches]
            forward = policy_forward(spec)

            def total(weights, on_mesh=on_mesh, forward=forward):
                return sum(LOSS(*forward(weights, b, 1.0), b)[0] for b in on_mesh)

            with jax.set_mesh(mesh):
                full = jax.jit(jax.grad(total))(base).layers
            for name, inputs in (("wq", 16), ("wo", 32), ("w_down", 32)):
                a = np.asarray(start[name].a, np.float64).reshape(2, inputs, 2)
                g = np.asarray(getattr(full, name), np.float64).reshape(2, inputs, -1)
                step = np.asarray(first.params[name].b, np.float64).reshape(2, 2, -1)
                expected = -RATE * 4.0 / 2 * np.einsum("lir,lio->lro", a, g)  # from B = 0
                assert np.linalg.norm(step - expected) < 1e-4 * np.linalg.norm(expected)
                np.testing.assert_array_equal(first.params[name].a, start[name].a)  # its gradient has a factor B
    assert tiny.worst_relative(results[0], results[-1]) < 1e-4


@pytest.mark.slow
def test_values_are_those_of_the_merged_weights_bit_for_bit(
    lora_cfg, spec, make_params, make_packer, make_streams, make_mesh
):
    """With a tiling the trainer's log-probs do not know that there are adapters; without one they nearly do not."""
    mesh, tiling = make_mesh(), exact.Tiling(64, 16, "float32")
    (batch,) = make_packer(row_tokens=40, micro_rows=4, longest_targets=40).pack(make_streams(5))
    base = make_params(mesh)
    state, update = build(lora_cfg, spec, mesh, base)
    moved = jax.tree.map(lambda x: x + 0.05, state.params)
    state = update.merged(state.replace(params=moved))
    with jax.set_mesh(mesh):
        run = {t: jax.jit(policy_forward(spec, t, CONFIG), static_argnums=2) for t in (None, tiling)}
        batch = shard(batch, mesh)
        beside, _ = run[tiling](state.params, batch, 1.0, state.frozen)
        merged, _ = run[tiling](state.policy, batch, 1.0)
        plain, _ = run[None](state.params, batch, 1.0, state.frozen)
        unmoved, _ = run[tiling](base, batch, 1.0)
    np.testing.assert_array_equal(beside, merged)
    np.testing.assert_allclose(plain, merged, atol=1e-4)
    assert np.abs(np.asarray(unmoved) - np.asarray(plain)).max() > 0.01


def test_the_base_is_in_no_optimiser_and_no_checkpoint(lora_cfg, spec, make_params, make_mesh, tmp_path):
    mesh = make_mesh()
    base = make_params(mesh)
    adapters, merge = programs.adapters(lora_cfg, spec, mesh), programs.merger(lora_cfg)
    with jax.set_mesh(mesh):
        state = init_state(adapters, optax.adamw(1e-3)).replace(frozen=Frozen(base, merge(base, adapters)))
    size = sum(x.size for x in jax.tree.leaves(adapters))
    assert size == 2 * 2 * (16 + 32 + 32 + 16 + 32 + 16)  # 2 layers, rank 2, inputs and outputs of q, o, down
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * size + 1  # two moments, a counter
    with checkpoint.Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(state)
        names = checkpoint._shapes(checkpoints._checkpointer.checkpointables_metadata(1).metadata["state"])
    assert "params.wq.a" in names and not any(name.startswith("frozen") for name in names)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
    assert restored.frozen is state.frozen


def test_the_reference_is_the_base_itself(lora_cfg):
    rl = lora_cfg.rl
    kl = KLConfig(0.1)
    cfg = dataclasses.replace(lora_cfg, rl=dataclasses.replace(rl, kl=kl))
    assert not programs.keeps_reference(lora_cfg) and not programs.keeps_reference(cfg)
    follows = dataclasses.replace(cfg, rl=dataclasses.replace(rl, kl=dataclasses.replace(kl, refresh_every=2)))
    assert programs.keeps_reference(follows)
    frozen = Frozen("base", "merged")
    state = init_state({}, optax.sgd(0.1)).replace(frozen=frozen)
    made = programs.Programs(cfg.rl, None, None)
    assert made.reference_weights(state) == "base"


def test_adapters_lie_where_their_projections_do(lora_cfg, spec, make_mesh):
    where = params.shardings_of(lora.adapter_specs(spec, CONFIG), make_mesh(2, 2, 2), sharding.TRAIN)
    partition = {name: (adapter.a.spec, adapter.b.spec) for name, adapter in where.items()}
    p, split = jax.P, ("fsdp", "expert", "context")
    assert partition["wq"] == (p(None, split, None), p(None, None, "tensor", None))
    assert partition["wo"] == (p(None, "tensor", None, None), p(None, None, split))
    assert partition["w_down"] == (p(None, "tensor", None), p(None, None, split))
