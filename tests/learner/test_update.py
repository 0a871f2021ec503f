"""Updates of the real model: micro-batched, packed, padded and sharded all equal the plain full batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxagent.algorithms.objectives import GSPO, PPOClip
from jaxagent.algorithms.value_losses import HLGauss, Squared
from jaxagent.learner import loss as losses
from jaxagent.learner.forward import policy_forward, value_forward
from jaxagent.learner.loss import value_metrics
from jaxagent.learner.score import value_scorer
from jaxagent.learner.state import init_state
from jaxagent.learner.update import Critic, make_trainable, make_update, shard
from jaxagent.models import critic as critic_model

CLIPPED = PPOClip(clip_low=0.2, clip_high=0.28)
LOSS = functools.partial(losses.policy_loss, objective=CLIPPED)
SIDES = {"policy": policy_forward, "critic": value_forward, "gspo": policy_forward}


def side_loss(spec, side):
    """params, batch -> loss of the policy or of the critic."""
    forward = SIDES[side](spec)
    if side != "critic":
        objective = CLIPPED if side == "policy" else GSPO(0.2, 0.28)
        return lambda params, batch: LOSS(*forward(params, batch, 1.0), batch, objective=objective)[0]
    return lambda critic, batch: losses.value_loss(forward(critic, batch), batch, Squared(0.5))[0]


def critic_of(params):
    """A critic whose head is not 0, so that its gradient reaches the trunk."""
    critic = critic_model.from_policy(params)
    return critic.replace(value_head=jnp.full_like(critic.value_head, 0.1))


def total_loss_and_gradient(spec, side, params, batches, mesh):
    with jax.set_mesh(mesh):
        value_and_grad = jax.jit(jax.value_and_grad(side_loss(spec, side)))
        parts = [value_and_grad(params, shard(batch, mesh)) for batch in batches]
    return jax.tree.map(lambda *x: np.sum([np.asarray(a, np.float64) for a in x], axis=0), *parts)


def assert_trees_close(got, expected, tolerance):
    """Relative to the size of each array: the norm of the difference over the norm."""
    for path, a in jax.tree_util.tree_flatten_with_path(got)[0]:
        b = np.asarray(dict(jax.tree_util.tree_flatten_with_path(expected)[0])[path], np.float64)
        error = np.linalg.norm(np.asarray(a, np.float64) - b)
        assert error <= tolerance * max(np.linalg.norm(b), 1e-6), (jax.tree_util.keystr(path), error)


@pytest.fixture(scope="module")
def one(make_mesh):
    return make_mesh()


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_packed_and_micro_batched_equal_one_padded_sequence_per_row(
    spec, make_params, make_packer, make_streams, one, side
):
    params = make_params(one)
    params = critic_of(params) if side == "critic" else params
    streams = make_streams(9)
    plain = [batch for s in streams for batch in make_packer(micro_rows=1, longest_targets=20).pack([s])]
    (full,) = make_packer(row_tokens=60, micro_rows=8, longest_targets=60).pack(streams)
    assert len(plain) == 9 and full.segments.max() > 1
    loss, grads = total_loss_and_gradient(spec, side, params, plain, one)
    packed_loss, packed_grads = total_loss_and_gradient(spec, side, params, [full], one)
    np.testing.assert_allclose(packed_loss, loss, rtol=2e-6)
    assert_trees_close(packed_grads, grads, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "side, remat", [("policy", "none"), ("policy", "layer"), ("critic", "layer"), ("gspo", "none")]
)
def test_a_mesh_of_eight_gives_the_single_devices_loss_and_gradient(
    spec, make_params, make_packer, make_streams, make_mesh, one, side, remat
):
    spec = dataclasses.replace(spec, remat=remat)
    batches = make_packer(micro_rows=8, longest_targets=20, row_shards=4).pack(make_streams(12))
    results = []
    for mesh in (one, make_mesh(2, 2, 2)):
        params = make_params(mesh)
        params = critic_of(params) if side == "critic" else params
        results.append(total_loss_and_gradient(spec, side, params, batches, mesh))
    (loss, grads), (sharded_loss, sharded_grads) = results
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    assert_trees_close(sharded_grads, grads, 1e-5)


def build(spec, mesh, params, critic=False, optimizer=None):
    """A state and its update with plain SGD, whose step is the gradient itself."""
    optimizer = optimizer or optax.sgd(0.1)
    head = critic_of(params) if critic else None
    with jax.set_mesh(mesh):
        state = init_state(params, optimizer, head, optimizer if critic else None)
    values = Critic(value_forward(spec), optimizer, Squared(0.5)) if critic else None
    return state, make_update(policy_forward(spec), optimizer, mesh, LOSS, critic=values)


@pytest.mark.slow
def test_an_update_at_a_temperature_of_its_own(spec, make_params, make_packer, make_streams, one):
    """Log-probs and gradients are those of that temperature, cross-entropy stays at 1, and nothing compiles."""
    params = make_params(one)
    batches = make_packer(longest_targets=20).pack(make_streams(4))
    assert any((batch.ce_weights != 0).any() for batch in batches)
    state, update = build(spec, one, params)
    update.warm_up(state, make_packer(longest_targets=20).empty())
    forward = policy_forward(spec)
    state, _ = build(spec, one, params)
    new, _ = update(state, batches, temperature=0.5)

    def loss(params, batch):
        x, _ = forward(params, batch, 1.0)  # cross-entropy by itself, at temperature 1
        ce = -np.float32(1) * (batch.ce_weights * x).sum()
        rest = batch.replace(ce_weights=0 * batch.ce_weights)
        return ce + LOSS(*forward(params, rest, 0.5), rest)[0]

    with jax.set_mesh(one):
        parts = [jax.jit(jax.grad(loss))(params, shard(batch, one)) for batch in batches]
    grads = jax.tree.map(lambda *x: np.sum([np.asarray(a, np.float64) for a in x], axis=0), *parts)
    expected = jax.tree.map(lambda p, g: np.asarray(p, np.float64) - 0.1 * g, params, grads)
    assert_trees_close(new.params, expected, 1e-6)
    update(new, batches, temperature=1.7)
    assert update.policy.accumulate._cache_size() == 1


@pytest.mark.slow
def test_an_update_tells_the_log_probs_that_it_started_from(spec, make_params, make_packer, make_streams, one):
    params, streams = make_params(one), make_streams(5)
    batches = make_packer(micro_rows=1).pack(streams)
    forward, optimizer = policy_forward(spec), optax.sgd(0.1)
    update = make_update(forward, optimizer, one, functools.partial(LOSS, keeps_logprobs=True))
    logprobs: list[np.ndarray] = []
    with jax.set_mesh(one):
        state = init_state(params, optimizer)
        expected = [np.asarray(jax.jit(forward)(params, shard(batch, one), 1.0)[0]) for batch in batches]
    update(state, batches, logprobs=logprobs)
    assert len(logprobs) == len(batches) > 1
    for batch, got, want in zip(batches, logprobs, expected, strict=True):
        np.testing.assert_allclose(got, np.where(batch.policy_weights != 0, want, 0), atol=1e-5)


@pytest.mark.slow
def test_a_critic_in_bins_learns_its_returns_on_eight_devices(spec, make_params, make_packer, make_streams, make_mesh):
    mesh, gauss = make_mesh(2, 2, 2), HLGauss(bins=8, low=-0.5, high=1.5, sigma=0.75)
    optimizer, forward = optax.adam(3e-3), value_forward(spec)
    train = make_trainable(
        lambda critic, batch, *_: losses.value_loss(forward(critic, batch), batch, gauss), optimizer,
        value_metrics,
    )  # fmt: skip
    packer, streams = make_packer(micro_rows=4, longest_targets=20, row_shards=4), make_streams(4)
    actions = [s.value_weights > 0 for s in streams]
    count = sum(mask.sum() for mask in actions)
    streams = [
        dataclasses.replace(s, value_weights=mask.astype(np.float32) / count)
        for s, mask in zip(streams, actions, strict=True)
    ]
    with jax.set_mesh(mesh):
        critic = critic_model.from_policy(make_params(mesh), gauss.heads)
        scorer = value_scorer(forward, packer, mesh, gauss)
        (before,) = scorer(critic, [s.trajectory for s in streams])
        opt_state, batches = jax.jit(optimizer.init)(critic), [shard(b, mesh) for b in packer.pack(streams)]
        for _ in range(60):
            step = jnp.zeros((), jnp.int32)
            critic, opt_state, _, pending = train.step(critic, opt_state, step, batches, np.float32(1))
        (after,) = scorer(critic, [s.trajectory for s in streams])
    np.testing.assert_allclose(np.concatenate(before)[np.concatenate(actions)], 0.5, atol=1e-6)  # every bin alike
    error = lambda values: np.mean(  # noqa: E731
        np.concatenate([v[m] - s.returns[m] for v, s, m in zip(values, streams, actions, strict=True)]) ** 2
    )
    assert error(after) < 0.2 * error(before)
    assert train.metrics(pending, "critic")["critic/squared_error"] < 0.3 * error(before)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_warm_up_changes_nothing_and_compiles_everything(
    spec, make_params, make_packer, make_streams, make_mesh, shape
):
    mesh = make_mesh(*shape)
    packer = make_packer(longest_targets=20, row_shards=4)
    state, update = build(spec, mesh, make_params(mesh), critic=True, optimizer=optax.adamw(1e-2))
    before = jax.device_get(state)
    state = update.warm_up(state, packer.empty())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    programs = [p for t in (update.policy, update.critic) for p in (t.zeros, t.accumulate, t.apply)]
    sizes = [program._cache_size() for program in programs]
    for n in (1, 6, 9):
        state, _ = update(state, packer.pack(make_streams(n, seed=n)))
    assert [program._cache_size() for program in programs] == sizes
    assert int(state.step) == 3


def test_echo_and_policy_targets_share_one_forward_pass(spec, make_params, make_packer, make_streams, one, monkeypatch):
    """ECHO adds targets, not a pass: the forward is traced once per program, with and without observation targets."""
    from jaxagent.learner import forward

    calls = []
    real = forward.forward_packed
    monkeypatch.setattr(forward, "forward_packed", lambda *args: calls.append(1) or real(*args))
    batches = make_packer(longest_targets=20).pack(make_streams(3))
    assert any((b.ce_weights > 0).any() for b in batches) and any((b.policy_weights > 0).any() for b in batches)
    with jax.set_mesh(one):
        jax.make_jaxpr(jax.grad(side_loss(spec, "policy")))(make_params(one), shard(batches[0], one))
    assert len(calls) == 1


def test_temperature_scores_actions_and_leaves_cross_entropy_at_one(spec, make_params, make_packer, make_streams, one):
    params, forward = make_params(one), policy_forward(spec)
    (batch, *_) = make_packer(longest_targets=20).pack(make_streams(3))
    with jax.set_mesh(one):
        score = jax.jit(forward, static_argnums=2)
        warm, _ = score(params, shard(batch, one), 1.0)
        cool, _ = score(params, shard(batch, one), 0.7)
    ce, action = batch.ce_weights > 0, batch.policy_weights > 0
    np.testing.assert_allclose(np.asarray(cool)[ce], np.asarray(warm)[ce], atol=2e-6)
    assert np.abs(np.asarray(cool - warm)[action]).min() > 1e-4


def test_a_profile_reads_like_the_code(spec, make_params, make_packer, make_streams, one):
    (batch, *_) = make_packer(micro_rows=2, longest_targets=20).pack(make_streams(2))
    with jax.set_mesh(one):
        lowered = jax.jit(side_loss(spec, "policy")).lower(make_params(one), shard(batch, one))
    text = lowered.as_text(debug_info=True)
    scopes = ("embed", "attention/norm", "attention/rope", "attention/attend_dense", "swiglu", "token_scores", "head")
    for scope in (*scopes, "policy_loss/PPOClip"):
        assert f"/{scope}/" in text or f'"{scope}/' in text, scope  # the second in the body of a loop
