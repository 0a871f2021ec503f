"""ECHO is more targets of the same forward pass: the update has as many matrix products with it as without."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import echo, train_step
from configs import echo as recipe
from jaxagent.config import parse


def count(function, *arguments, vocab_rows=7):
    return echo.matmuls(jax.make_jaxpr(function)(*arguments).jaxpr, vocab_rows)


def test_matrix_products_are_counted_inside_loops_and_calls():
    x = jnp.ones((2, 2))
    loop = lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]  # noqa: E731
    assert count(lambda x: x + 1, x) == 0
    assert count(lambda x: x @ x, x, vocab_rows=2) == 0  # a product with the vocabulary
    assert count(lambda x: jax.jit(lambda y: y @ y)(x) @ x, x) == 2
    assert count(loop, x) == 1
    assert count(jax.checkpoint(lambda x: x @ x), x) == 1
    assert count(jax.grad(lambda x: (x @ x).sum()), x) == 3  # forward, and one for each factor


def learner(preset):
    raw = recipe.get_config(preset)
    raw.model.num_layers, raw.model.embed_dim, raw.model.num_heads, raw.model.num_kv_heads = 2, 32, 2, 1
    raw.model.head_dim, raw.model.mlp_dim, raw.tokenizer.vocab_size = 16, 32, 300
    raw.rl.tasks_per_step, raw.rl.group_size = 2, 4
    return train_step.Learner.of(parse(raw), 0, echo.TERMINAL)


@pytest.mark.slow
def test_echo_runs_no_second_forward_pass():
    grpo, world = learner("laptop-grpo"), learner("laptop")
    ((plain, *_), *_), ((echoed, *_), *_) = grpo.updates(), world.updates()
    assert not plain.ce_weights.any() and echoed.ce_weights.any()  # it does have something to predict
    assert echo.matmuls_of_update(world) == echo.matmuls_of_update(grpo) > 0
    once = world.programs.update.policy.accumulate

    def twice(params, batch, temperature, grads, tally, *rest):
        grads, tally, _ = once(params, batch, temperature, grads, tally, *rest)
        return once(params, batch, temperature, grads, tally, *rest)

    object.__setattr__(world.programs.update.policy, "accumulate", twice)
    assert echo.matmuls_of_update(world) == 2 * echo.matmuls_of_update(grpo)
