"""What the engine says it chose for each token is what it chose: over prefixes, groups, turns, preemptions, shards."""

from __future__ import annotations

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.engine.model import ROWS
from jaxagent.models import attention, choices, transformer
from jaxagent.rollout.conversation import Columns
from jaxagent.types import Generation, TokenKind
from tests.engine import toys
from tests.engine.test_lm import COOL, VOCAB, driver_for, mesh_of
from tests.engine.toy_model import Toy
from tests.models import tiny


def stamp(params):
    """Which weights they are, below 200."""
    return (abs(params[0, 0]) * 100).astype(int) % 200


class RecordingToy(Toy):
    """Its tokens' choices tell their whole beginning, the checksum of a `Toy` up to each in two digits, and weights."""

    choices = 3

    def init_cache(self, pages, page_tokens, memories=0):
        places = jnp.zeros((pages, page_tokens, 3), jnp.uint8, out_sharding=jax.P(*ROWS, None, None))
        return super().init_cache(pages, page_tokens), places

    def extend(self, params, cache, tokens, positions, tables):
        texts, recorded = cache
        logits, texts = super().extend(params, texts, tokens, positions, tables)

        def local(params, texts, recorded, tokens, positions, tables):
            size = texts.shape[1]
            tables = jnp.repeat(tables, len(tokens) // len(tables), axis=0)
            page = jnp.take_along_axis(tables, (positions // size)[:, None], axis=1)[:, 0]
            history = texts[tables].reshape(len(tokens), -1)
            index = jnp.arange(history.shape[1])
            checksum = jnp.where(index <= positions[:, None], history * (index + 1), 0).sum(axis=1)
            digits = jnp.stack([checksum // 200, checksum % 200, jnp.full_like(checksum, stamp(params))], axis=1)
            digits = digits.astype(jnp.uint8)
            return recorded.at[page, positions % size].set(digits)

        matrix, pages = jax.P(*ROWS, None), jax.P(*ROWS, None, None)
        mapped = jax.shard_map(local, in_specs=(jax.P(None, None), matrix, pages, ROWS, ROWS, matrix), out_specs=pages)
        return logits, (texts, mapped(params, texts, recorded, tokens, positions, tables))

    def copy_pages(self, cache, source, target):
        local = lambda cache, source, target: jax.tree.map(lambda x: x.at[target].set(x[source]), cache)  # noqa: E731
        pages = jax.P(*ROWS)
        return jax.shard_map(local, in_specs=(pages, ROWS, ROWS), out_specs=pages)(cache, source, target)

    def read_choices(self, cache, pages):
        local = lambda recorded, pages: recorded[pages]  # noqa: E731
        return jax.shard_map(local, in_specs=(jax.P(*ROWS), ROWS), out_specs=jax.P(*ROWS))(cache[1], pages)


async def talks(driver, count, context, sampling, vocab):
    """Trajectories of three turns each over a prompt that groups of four share."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, n) for n in rng.integers(1, context // 3, count)]
    observations = [[rng.integers(0, vocab, n) for n in rng.integers(0, context // 8, 2)] for _ in range(count)]

    async def talk(i):
        session, columns = await driver.open(f"task{i // 4}", i % 4, 4), Columns()
        for turn, new in enumerate([prompts[i // 4], *observations[i]]):
            generation = await driver.generate(session, new, context // 12 + i % 4, sampling, turn, 60)
            columns.append(turn, new.tolist(), [TokenKind.PROMPT] * len(new))
            columns.append_action(turn, generation)
        driver.close(session)
        return columns.trajectory(len(columns))

    return await asyncio.gather(*(talk(i) for i in range(count)))


@pytest.mark.parametrize(("slots", "pages", "data"), [(12, 96, 1), (8, 13, 1), (8, 48, 2)])
def test_every_token_but_the_last_brings_what_was_chosen_for_it(slots, pages, data):
    """With many pages; with so few that turns are interrupted; and over two shards."""
    model = RecordingToy(toys.VOCAB)
    with toys.running(slots, stops=(), pages=pages, model=model, data=data) as driver:
        warm = driver.stats()["compiles"]
        trajectories = asyncio.run(talks(driver, 24, toys.CONTEXT, toys.SAMPLED, toys.VOCAB))
        stats = driver.stats()
    assert stats["compiles"] == warm and stats["cached_tokens"] > 0
    assert pages > 13 or stats["preemptions"] > 0
    for trajectory in trajectories:
        checksums = np.cumsum(trajectory.tokens * np.arange(1, 1 + len(trajectory)))
        expected = np.stack([checksums // 200, checksums % 200], axis=1).astype(np.uint8)
        np.testing.assert_array_equal(trajectory.experts[:-1, :2], expected[:-1])
        assert (trajectory.experts[-1] == 255).all()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_what_sampled_tokens_were_sampled_behind_stays_when_weights_change(policy):
    """Even where other weights compute it again in the middle of a turn."""
    weights = [toys.weights(0), toys.weights(1)]
    assert stamp(weights[0]) != stamp(weights[1])

    async def scene(driver):
        session, began = await driver.open("t", 0), asyncio.get_running_loop().create_future()
        told = lambda new: began.done() or began.set_result(None)  # noqa: E731
        turn = asyncio.create_task(driver.generate(session, [1, 2, 3], 1000, toys.SAMPLED, 0, 60, on_tokens=told))
        await began
        await asyncio.to_thread(driver.update_params, weights[1], 8)
        return await turn

    sizes = dict(context=1100, pages=300, steps_per_dispatch=3)
    with toys.running(stops=(), model=RecordingToy(toys.VOCAB), kv_on_update=policy, **sizes) as driver:
        got = asyncio.run(scene(driver))
        assert driver.stats().get("preemptions", 0) == (policy == "recompute")
    versions = got.policy_versions.tolist()
    assert len(set(versions)) == 2 and got.experts.shape == (2 + len(versions), 3)
    assert got.experts[2:, 2].tolist() == [stamp(weights[int(version == 8)]) for version in versions]


@functools.partial(jax.jit, static_argnums=0)
def chosen(spec, weights, tokens):
    """[T, W]: where each token of one sequence goes, asked of its router."""
    seen = []

    def note(state, scores, ids):
        seen.append(ids)
        return ids, state

    attend = attention.packed(jnp.ones((1, len(tokens)), jnp.int32))
    transformer.hidden(weights, spec, tokens, jnp.arange(len(tokens)), attend, None, True, choose=note)
    return jnp.concatenate(seen, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_a_mixture_records_its_routers_choices(sizes):
    spec = tiny.spec(family="qwen3_moe", logprob_chunk_tokens=64)
    with driver_for(mesh_of(*sizes), spec, records=True) as driver:
        driver.start(240)
        warm = driver.stats()["compiles"]
        trajectories = asyncio.run(talks(driver, 8, 96, COOL, VOCAB))
        assert driver.stats()["compiles"] == warm and driver.stats()["cached_tokens"] > 0
    for trajectory in trajectories:
        tokens = np.zeros(96, np.int32)
        tokens[: len(trajectory)] = trajectory.tokens
        expected = np.asarray(chosen(spec, tiny.init(spec), tokens))[: len(trajectory)]
        assert (
            trajectory.experts.shape == (len(trajectory), choices.width(spec)) and trajectory.experts.dtype == np.uint8
        )
        np.testing.assert_array_equal(trajectory.experts[:-1], expected[:-1])


def test_what_is_known_of_a_token_stays_and_gaps_are_told():
    """A second sequence begins with the same tokens; of a turn that another program sampled nobody tells."""

    def generation(tokens, experts):
        count = len(tokens)
        return Generation(np.array(tokens), np.zeros(count), np.zeros(count, np.int32), "stop", experts=experts)

    columns = Columns()
    columns.append(0, [1, 2], [TokenKind.PROMPT] * 2)
    columns.append_action(0, generation([3, 4], np.array([[1, 2], [3, 4], [5, 6]], np.uint8)))
    columns.append_action(1, generation([5], None))
    columns.append(2, [6], [TokenKind.PROMPT])
    assert columns.trajectory(6).experts.tolist() == [[1, 2], [3, 4], [5, 6], *[[255, 255]] * 3]
    columns.append_action(2, generation([7], np.arange(20, 32, dtype=np.uint8).reshape(6, 2)))
    expected = [[1, 2], [3, 4], [5, 6], [26, 27], [28, 29], [30, 31], [255, 255]]
    assert columns.trajectory(7).experts.tolist() == expected
    assert columns.trajectory(4).experts.tolist() == expected[:4]
