"""prefill / copy / begin / generate / free as pure functions, on the toy model by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.engine import automaton, functions
from tests.engine import toys
from tests.engine.toy_model import Toy

MODEL = Toy(toys.VOCAB)
STEPS, PAGE = 5, 4


def stops() -> functions.StopTables:
    letters = [bytes([ord("a") + i]) for i in range(toys.VOCAB)]
    built = automaton.build(["no such thing"], letters, toys.VOCAB)
    return functions.StopTables(jnp.asarray(built.table), jnp.zeros(toys.VOCAB, bool))


@pytest.mark.parametrize("data", [1, 2, 4])
def test_one_prompt_in_a_group_of_slots(data: int) -> None:
    """The prompt's first page is shared, its second copied; slots of every shard get them by prefill or by copy."""
    if len(jax.devices()) < data:
        pytest.skip("needs virtual devices")
    params, prompt = toys.weights(), [3, 1, 4, 1, 5, 9]
    per_shard = 4 // data
    with jax.set_mesh(toys.mesh_of(data)):
        state = jax.jit(functions.init_state, static_argnums=(0, 1, 2, 3))(MODEL, 4, 12 * data, PAGE)
        tables = np.zeros((4, 4), np.int32)
        tokens, positions = np.zeros((2, data * 4), np.int32), np.zeros((2, data * 4), np.int32)
        slot = np.full((2, data * 4), -1, np.int32)
        source, target = np.zeros(data, np.int32), np.zeros(data, np.int32)
        for shard in range(data):
            first = shard * per_shard
            tables[first] = [3, 1, 5, 7]
            rows = slice(shard * 4, shard * 4 + 4)
            tokens[0, rows], positions[0, rows], slot[0, rows] = prompt[:4], range(4), 0
            tokens[1, shard * 4], positions[1, shard * 4], slot[1, shard * 4] = prompt[4], 4, 0
            if per_shard > 1:
                tables[first + 1] = [3, 2, 6, 8]
                source[shard], target[shard] = 1, 2
        prefill = jax.jit(functions.prefill, static_argnums=0)
        state = prefill(MODEL, params, state, tables, tokens, positions, slot, 2)
        state = jax.jit(functions.copy_pages, static_argnums=0)(MODEL, state, source, target)
        group = [s for s in range(4) if tables[s].any()]
        requests = functions.Slots.blank(4)
        requests.active[group] = True
        requests.token[group], requests.position[group] = prompt[-1], 5
        requests.budget[group] = [2, 3, 99, 99][: len(group)]
        state = jax.jit(functions.begin)(state, requests)
        generate = jax.jit(functions.generate, static_argnums=(0, 7, 8))
        lanes = np.repeat(np.arange(per_shard, dtype=np.int32)[::-1, None], data, axis=1)  # tiles of one slot each
        state, packed = generate(MODEL, params, stops(), state, tables, lanes, per_shard, STEPS, False)
        result = functions.StepResult.unpack(np.asarray(packed))
        expected = toys.greedy(params, prompt, 5)
        for s, budget in zip(group, requests.budget[group], strict=True):
            count = min(budget, STEPS)
            assert result.count[s] == count
            assert result.finish[s] == (functions.LENGTH if budget <= STEPS else functions.RUNNING)
            assert result.tokens[s, :count].tolist() == expected[:count]
            want = [toys.logprob(params, prompt + expected[:i], expected[i], 1) for i in range(count)]
            np.testing.assert_allclose(result.logprobs[s, :count], want, atol=1e-5)
        assert all(result.count[s] == 0 for s in range(4) if s not in group)
        # Freed, nobody generates.
        state = jax.jit(functions.free)(state, np.ones(4, bool))
        _, packed = generate(MODEL, params, stops(), state, tables, lanes, per_shard, STEPS, False)
        assert functions.StepResult.unpack(np.asarray(packed)).count.tolist() == [0] * 4
