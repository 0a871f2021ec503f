"""Updates of a model of one number, whose gradients are sums that NumPy writes out; each takes a moment to compile."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxagent.algorithms.value_losses import Squared
from jaxagent.learner.state import init_state
from jaxagent.learner.update import Critic, make_update

RATE, START = 0.1, 0.3


def feature(batch):
    """What both models multiply their one number by, at each target: f32[B, R]."""
    return batch.targets.astype(np.float32) / 61


@pytest.fixture(scope="module")
def update(make_mesh):
    """SGD on cross-entropy, with decaying weights, and on values, three times in their warm-up."""

    def forward(params, batch, temperature, frozen, teacher):
        logprobs = params["w"] * feature(batch)
        return logprobs, jnp.zeros_like(logprobs)

    optimizer = optax.sgd(RATE)
    values = Critic(lambda critic, batch: critic["w"] * feature(batch), optimizer, Squared(0.0), warmup_epochs=3)
    decaying = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(RATE, momentum=0.5))  # which has a state
    return make_update(forward, decaying, make_mesh(), critic=values), decaying, optimizer


@pytest.fixture
def state(update):
    made, decaying, optimizer = update
    with jax.set_mesh(made.mesh):
        return init_state({"w": jnp.float32(START)}, decaying, {"w": jnp.float32(START)}, optimizer)


@pytest.fixture(scope="module")
def batches(make_packer, make_streams):
    """Micro-batches of cross-entropy and values, each with another gradient."""
    other = ("policy_weights", "kl_weights", "entropy_weights", "z_weights", "nll_weights", "distill_weights")
    found = make_packer(micro_rows=2, longest_targets=20).pack(make_streams(9))
    found = [batch.replace(**{name: 0 * getattr(batch, name) for name in other}) for batch in found]
    assert len(found) >= 3 and len({float(gradient([batch])) for batch in found}) == len(found)
    return found


def gradient(batches) -> float:
    """Of the cross-entropy: it is linear in the number."""
    return -sum(float((batch.ce_weights * feature(batch)).sum()) for batch in batches)


def value_gradient(number: float, batches) -> float:
    each = (batch.value_weights * (number * feature(batch) - batch.returns) * feature(batch) for batch in batches)
    return sum(float(one.sum()) for one in each)


def test_one_step_on_the_sum_of_all_micro_batches(update, state, batches):
    before = state.params
    new, metrics = update[0](state, batches)
    np.testing.assert_allclose(new.params["w"], START - RATE * (gradient(batches) + 0.5 * START), rtol=1e-5)
    np.testing.assert_allclose(new.critic["w"], START - RATE * value_gradient(START, batches), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/grad_norm"], abs(gradient(batches)), rtol=1e-5)
    tokens = sum(np.count_nonzero(batch.ce_weights) for batch in batches)
    assert int(new.step) == 1 and metrics["policy/update_applied"] == 1 and metrics["ce/tokens"] == tokens
    assert float(before["w"]) == np.float32(START)  # not donated: an engine may hold it


@pytest.mark.parametrize("wrong", ["no target", "not finite"])
def test_such_an_update_leaves_the_policy_as_it_was(update, state, batches, wrong):
    """Without targets the gradient is 0, and weight decay alone would move the weights."""
    broken = np.float32(0 if wrong == "no target" else np.nan)
    before = jax.device_get(state.opt_state)
    new, metrics = update[0](state, [batches[0].replace(ce_weights=broken * batches[0].ce_weights)])
    assert float(new.params["w"]) == np.float32(START) and int(new.step) == 0
    jax.tree.map(np.testing.assert_array_equal, new.opt_state, before)
    assert metrics["policy/update_applied"] == 0 and metrics["critic/update_applied"] == 1


def test_a_critics_warm_up_goes_over_the_data_so_often_and_measures_before_it(update, state, batches):
    number = START
    for _ in range(3):
        number -= RATE * value_gradient(number, batches)
    new, metrics = update[0](state, batches, train_policy=False)
    np.testing.assert_allclose(new.critic["w"], number, rtol=1e-5)
    assert float(new.params["w"]) == np.float32(START) and int(new.step) == 0 and "loss/policy" not in metrics
    live = [batch.value_weights != 0 for batch in batches]
    errors = [START * feature(batch) - batch.returns for batch in batches]
    mean = np.concatenate([error[at] for error, at in zip(errors, live, strict=True)])
    np.testing.assert_allclose(metrics["critic/squared_error"], np.square(mean).mean(), rtol=1e-5)


def test_weights_left_on_the_host_are_refused_and_not_moved_at_every_update(update, state, batches):
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        update[0](state.replace(params=jax.device_get(state.params)), batches)
