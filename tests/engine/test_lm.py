"""A transformer in the engine: its log-probs are the trainer's, over turns, chunks, groups and meshes."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import EngineConfig, MeshConfig, SamplingConfig
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.models import logprobs, params, sharding, transformer
from jaxagent.models.spec import ModelSpec
from tests.models import tiny

VOCAB, CONTEXT = 61, 96
COOL = SamplingConfig(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0)
SPEC = tiny.spec(logprob_chunk_tokens=64)


def driver_for(
    mesh: jax.sharding.Mesh, spec: ModelSpec = SPEC, truncation: bool = False, slots: int = 8, records: bool = False
) -> Driver:
    cfg = EngineConfig(
        slots=slots,
        steps_per_dispatch=4,
        prefill_tokens=32,
        pages=128,
        page_tokens=8,
        tile_rows=8,
        kv_on_update="keep",
        cache_dtype="float32",
        request_timeout_s=30.0,
    )
    with jax.set_mesh(mesh):
        weights = tiny.init(spec, 0, params.shardings(spec, mesh, sharding.TRAIN))
    stops = automaton.build(["no such"], [b"ab"] * VOCAB, spec.padded_vocab_size)
    model = LanguageModel(spec, cfg.cache_dtype, records=records)
    setup = EngineSetup(cfg=cfg, context=CONTEXT, stops=stops, eos_ids=(), exact=False, truncation=truncation)
    return Driver(model, weights, 0, setup, mesh)


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    if len(jax.devices()) < data * fsdp * tensor:
        pytest.skip("needs 8 (virtual) devices")
    return sharding.make_mesh(MeshConfig(data, fsdp, tensor, 1))


def test_layers_are_laid_out_once_per_update():
    """One tree per layer, so that no program cuts them out of the stack; what lies so already is taken as it is."""
    model, mesh = LanguageModel(SPEC, "float32"), mesh_of()
    with jax.set_mesh(mesh):
        weights = tiny.init(SPEC, 0, params.shardings(SPEC, mesh, sharding.TRAIN))
        placed = model.place(weights)
        assert model.place(placed) is placed
    assert isinstance(placed.layers, tuple) and len(placed.layers) == SPEC.num_layers
    for i, layer in enumerate(placed.layers):
        jax.tree.map(lambda one, stack, i=i: np.testing.assert_array_equal(one, stack[i]), layer, weights.layers)


async def episodes(driver: Driver, count: int, sampling: SamplingConfig = COOL):
    """Episodes of three turns over a prompt shared by pairs: [(sequence, sampled positions, log-probs)]."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n) for n in rng.integers(1, 40, count)]  # up to three chunks
    observations = [[rng.integers(0, VOCAB, n) for n in rng.integers(0, 20, 2)] for _ in range(count)]

    async def episode(i: int):
        session = await driver.open(f"task{i // 2}", i % 2)
        sequence, positions, values = [], [], []
        for turn, new in enumerate([prompts[i // 2], *observations[i]]):
            g = await driver.generate(session, new, 5 + i % 4, sampling, turn, 30)
            sequence += list(new)
            positions += range(len(sequence), len(sequence) + len(g.tokens))
            sequence += list(g.tokens)
            values += list(g.logprobs)
        driver.close(session)
        return np.array(sequence), np.array(positions), np.array(values)

    return await asyncio.gather(*(episode(i) for i in range(count)))


@functools.partial(jax.jit, static_argnums=0)
def forward(spec: ModelSpec, weights: params.Params, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    """f32[B,T]: log-prob of the token after each one."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, *_ = transformer.forward_packed(weights, spec, tokens, positions, jnp.ones_like(tokens), positions)
    targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
    values, *_ = logprobs.token_scores(weights, spec, x.reshape(len(targets), -1), targets, temperature)
    return values.reshape(tokens.shape)


def assert_trainer_agrees(spec: ModelSpec, results: list, temperature: float) -> None:
    """One full forward pass over whole sequences, without cache, against what the engine recorded."""
    tokens = np.zeros((len(results), CONTEXT), np.int32)
    for row, (sequence, _, _) in zip(tokens, results, strict=True):
        row[: len(sequence)] = sequence
    expected = np.roll(np.asarray(forward(spec, tiny.init(spec), tokens, temperature)), 1, axis=1)
    for row, (_, positions, values) in zip(expected, results, strict=True):
        np.testing.assert_allclose(values, row[positions], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_logprob_is_the_trainers_whose_layers_are_rematerialised(family: str) -> None:
    spec = tiny.spec(family=family, logprob_chunk_tokens=64, remat="layer")
    with driver_for(mesh_of(), spec) as driver:
        driver.start(120)
        results = asyncio.run(episodes(driver, 12))
    assert_trainer_agrees(spec, results, 0.7)


def test_every_logprob_is_the_trainers_and_nothing_compiles_after_warm_up() -> None:
    spec = dataclasses.replace(SPEC, rope_theta=5_000.0)  # no other test's programs
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        where = params.shardings(spec, mesh, sharding.TRAIN)
        other = jax.block_until_ready(tiny.init(spec, 1, where))
    events: list[str] = []
    listener = lambda event, *_, **__: events.append(event)  # noqa: E731
    with driver_for(mesh, spec, truncation=True) as driver:
        driver.start(120)
        warm = driver.stats()["compiles"]
        assert warm > 4
        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            results = asyncio.run(episodes(driver, 12))
            asyncio.run(episodes(driver, 5, dataclasses.replace(COOL, top_p=0.8, top_k=9)))
            driver.update_params(other, 1)
            asyncio.run(episodes(driver, 3, dataclasses.replace(COOL, temperature=0.0)))
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        assert "/jax/core/compile/backend_compile_duration" not in events
        assert driver.stats()["compiles"] == warm
    assert all(len(values) >= 15 for _, _, values in results)
    assert_trainer_agrees(spec, results, 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((4, 1, 2), marks=pytest.mark.nightly)])
def test_a_mesh_gives_the_numbers_of_one_device(shape: tuple[int, int, int]) -> None:
    with driver_for(mesh_of(*shape), truncation=True) as driver:
        driver.start(240)
        many = asyncio.run(episodes(driver, 10))
        asyncio.run(episodes(driver, 2, dataclasses.replace(COOL, top_k=9)))
    assert_trainer_agrees(SPEC, many, 0.7)
