"""prefill / insert / begin / generate / free as pure functions, on the toy model by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.engine import automaton, functions
from jaxagent.engine.executor import decode_windows
from jaxagent.engine.toy import Toy
from tests.engine import toys

SLOTS, MODEL = 4, Toy(toys.VOCAB)
STEPS, WINDOW = 5, 16


def tables() -> functions.StopTables:
    letters = [bytes([ord("a") + i]) for i in range(toys.VOCAB)]
    built = automaton.build(["no such thing"], letters, toys.VOCAB)
    return functions.StopTables(jnp.asarray(built.table), jnp.zeros(toys.VOCAB, bool))


@pytest.mark.parametrize("data", [1, 2, 4])
def test_one_prompt_into_a_group_of_slots(data: int) -> None:
    if len(jax.devices()) < data:
        pytest.skip("needs virtual devices")
    params, prompt = toys.weights(), [3, 1, 4, 1, 5]
    with jax.set_mesh(toys.mesh_of(data)):
        state = jax.jit(functions.init_state, static_argnums=(0, 1, 2))(MODEL, SLOTS, WINDOW)
        zeros = np.zeros(4, np.int32)
        tokens = np.zeros((4, 8), np.int32)
        tokens[2, :4] = prompt[:-1]  # the prompt is row 2; the others are padding
        prefix = jax.jit(functions.prefill, static_argnums=(0, 6))(MODEL, params, state, tokens, zeros, zeros, True)
        row, slot = np.array([2, 2, 2, 0], np.int32), np.array([0, 2, 3, SLOTS], np.int32)
        state = jax.jit(functions.insert, static_argnums=0)(MODEL, state, prefix, row, slot, zeros)
        requests = functions.Requests.blank(SLOTS)
        group = [0, 2, 3]
        requests.mask[group] = True
        requests.token[group], requests.position[group], requests.budget[group] = prompt[-1], 4, [2, 3, 99]
        state = jax.jit(functions.begin)(state, requests)
        generate = jax.jit(functions.generate, static_argnums=(0, 4, 5, 6))
        state, packed = generate(MODEL, params, tables(), state, STEPS, WINDOW, False)
        result = functions.StepResult.unpack(np.asarray(packed))
        assert result.count.tolist() == [2, 0, 3, 5]
        assert result.finish.tolist() == [functions.LENGTH, functions.RUNNING, functions.LENGTH, functions.RUNNING]
        expected = toys.greedy(params, prompt, 5)
        for s in group:
            count = result.count[s]
            assert result.tokens[s, :count].tolist() == expected[:count]
            want = [toys.logprob(params, prompt + expected[:i], expected[i], 1) for i in range(count)]
            np.testing.assert_allclose(result.logprobs[s, :count], want, atol=1e-5)
        # Only slot 3 is still at it; freed, nothing is.
        state = jax.jit(functions.free)(state, np.array([False, False, False, True]))
        _, packed = generate(MODEL, params, tables(), state, STEPS, WINDOW, False)
        assert functions.StepResult.unpack(np.asarray(packed)).count.tolist() == [0] * SLOTS


def test_decode_windows_end_with_the_whole_context() -> None:
    assert decode_windows(256) == (64, 256)
    assert decode_windows(40) == (40,)
    assert decode_windows(4096) == (256, 1024, 4096)
