"""Exact numerics: what the engine recorded is what the trainer computes, bit for bit, whoever else was in the batch."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.algorithms.streams import Streams
from jaxagent.config import BatchConfig, EngineConfig, MeshConfig, SamplingConfig
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.learner.batching import Packer, Sharing, unpack
from jaxagent.models import exact, params, sharding
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.mla import LatentAttention
from jaxagent.models.blocks.routing import Routing
from jaxagent.models.families import FAMILIES
from jaxagent.models.spec import ModelSpec
from jaxagent.types import Trajectory
from tests.engine.test_lm import COOL, SPEC, VOCAB, mesh_of
from tests.models import tiny

CONTEXT = 150
# Wide enough that XLA has kernels to choose from; 64 rows, as in the laptop preset.
WIDE = dataclasses.replace(
    SPEC, embed_init_std=0.1, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=192
)
SOFTMAX = Experts(Routing(16, 4), 64, shared=1, shared_gate=True)  # as Qwen3-Next has it
GROUPS = Experts(Routing(16, 4, True, "sigmoid", True, 4, 2, 1.7), 64, shared=2)  # as DeepSeek-V3
LATENT = LatentAttention(query_rank=24, rank=32, plain_dim=16, value_dim=24)
MIXTURE = dataclasses.replace(WIDE, family="qwen3_moe", pattern=((SPEC.pattern[0][0], SOFTMAX), (LATENT, GROUPS)))
HYBRID = dataclasses.replace(
    WIDE,
    family="qwen3_5_text",
    pattern=FAMILIES["qwen3_5_text"].pattern[2:],
    partial_rotary_factor=0.5,
)
CONFIG = EngineConfig(
    slots=64,
    steps_per_dispatch=4,
    prefill_tokens=256,
    pages=512,
    page_tokens=16,
    tile_rows=64,
    cache_dtype="float32",
    kv_on_update="keep",
    request_timeout_s=60.0,
)


def weights_of(spec, mesh):
    with jax.set_mesh(mesh):
        return tiny.init(spec, 0, params.shardings(spec, mesh, sharding.TRAIN))


def play(spec, mesh, cfg: EngineConfig, order: list[int], concurrency: int, sampling: SamplingConfig = COOL) -> dict:
    """Episodes of three turns; three to a task, prompts with one head: {episode: (tokens, at, logprobs)}."""
    stops = automaton.build(["no such"], [b"ab"] * VOCAB, spec.padded_vocab_size)
    model = LanguageModel(spec, cfg.cache_dtype)
    out = {}

    async def run(driver: Driver) -> None:
        gate = asyncio.Semaphore(concurrency)

        async def episode(i: int) -> None:
            rng = np.random.default_rng(i // 3)
            head = np.random.default_rng(99).integers(0, VOCAB, 21)
            prompt = np.concatenate([head, rng.integers(0, VOCAB, rng.integers(2, 50))])
            async with gate:
                session = await driver.open(f"task{i // 3}", i % 3)
                sequence, at, values = [], [], []
                for turn in range(3):
                    new = prompt if turn == 0 else np.random.default_rng((i, turn)).integers(0, VOCAB, 3 + 5 * turn)
                    g = await driver.generate(session, new, 4 + (i + turn) % 9, sampling, turn, 60)
                    sequence += list(new)
                    at += range(len(sequence), len(sequence) + len(g.tokens))
                    sequence += list(g.tokens)
                    values += list(g.logprobs)
                driver.close(session)
            out[i] = np.array(sequence), np.array(at), np.array(values, np.float32)

        await asyncio.gather(*(episode(i) for i in order))

    setup = EngineSetup(cfg=cfg, context=CONTEXT, stops=stops, eos_ids=(), exact=True)
    with Driver(model, weights_of(spec, mesh), 0, setup, mesh) as driver:
        driver.start(300)
        asyncio.run(run(driver))
    return out


def scores(spec, mesh, cfg: EngineConfig, episodes: dict, temperature: float, rows: int, width: int, seed: int) -> dict:
    """Exact log-probs of every token after the first, packed into rows in a random order: {episode: f32[len - 1]}."""
    tiling = exact.Tiling(cfg.tile_rows, cfg.page_tokens, cfg.cache_dtype)
    rng = np.random.default_rng(seed)
    places: dict[int, tuple[int, int, int]] = {}  # episode -> batch, row, column
    filled: list[list[int]] = []
    for i in rng.permutation(list(episodes)):
        length = len(episodes[i][0])
        spot = next(((b, r) for b, row in enumerate(filled) for r in range(rows) if row[r] + length <= width), None)
        if spot is None:
            filled.append([0] * rows)
            spot = (len(filled) - 1, int(rng.integers(rows)))
        b, r = spot
        places[int(i)] = (b, r, filled[b][r])
        filled[b][r] += length + int(rng.integers(0, 3)) * (filled[b][r] + length + 2 < width)
    tokens = np.zeros((len(filled), rows, width), np.int32)
    positions, targets = np.zeros_like(tokens), np.zeros_like(tokens)
    for i, (b, r, c) in places.items():
        sequence = episodes[i][0]
        span = slice(c, c + len(sequence))
        tokens[b, r, span], positions[b, r, span] = sequence, np.arange(len(sequence))
        targets[b, r, c : c + len(sequence) - 1] = sequence[1:]
    head = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))
    program = jax.jit(exact.packed_logprobs, static_argnums=(1, 2))
    got = []
    with jax.set_mesh(mesh):
        weights = weights_of(spec, mesh)
        for b in range(len(filled)):
            batch = [tokens[b], positions[b], head, targets[b], np.full((rows, width), temperature, np.float32)]
            batch = [jax.device_put(x, sharding.rows(mesh, 2)) for x in batch]
            got.append(np.asarray(program(weights, spec, tiling, *batch)))
    return {i: got[b][r, c : c + len(episodes[i][0]) - 1] for i, (b, r, c) in places.items()}


def assert_bits_equal(episodes: dict, scored: dict) -> None:
    count = 0
    for i, (_, at, values) in episodes.items():
        np.testing.assert_array_equal(values.view(np.int32), scored[i][at - 1].view(np.int32))
        count += len(at)
    assert count > 300


MODELS = {"dense": WIDE, "mixture": MIXTURE, "hybrid": HYBRID}
every = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
slow = [pytest.param(model, marks=pytest.mark.slow) for model in (MIXTURE, HYBRID)]


@pytest.fixture(scope="module", params=[WIDE, *slow], ids=MODELS)
def model(request) -> ModelSpec:
    """What is played and scored."""
    return request.param


@pytest.fixture(scope="module")
def crowd(model) -> dict:
    """Episodes that were played all at once."""
    return play(model, mesh_of(), CONFIG, list(reversed(range(24))), 24)


@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_recorded_logprobs_are_the_trainers_to_the_bit(model, crowd, remat: str) -> None:
    spec, mesh = dataclasses.replace(model, remat=remat), mesh_of()
    episodes = crowd if remat == "none" else play(spec, mesh, CONFIG, list(range(24)), 24)
    assert_bits_equal(episodes, scores(spec, mesh, CONFIG, episodes, 0.7, 4, 256, 1))
    assert_bits_equal(episodes, scores(spec, mesh, CONFIG, episodes, 0.7, 3, 200, 2))


def test_rows_that_share_pages_of_their_beginnings_score_the_same_bits(model, crowd) -> None:
    if model.has_memory:
        pytest.skip("rows hold whole sequences, see `kernels.prefixes`")
    mesh, episodes = mesh_of(), crowd
    streams = []
    for tokens, at, _ in episodes.values():
        zeros, mask = np.zeros(len(tokens), np.int32), np.isin(np.arange(len(tokens)), at)
        trajectory = Trajectory(tokens.astype(np.int32), mask.astype(np.uint8), zeros.astype(np.float32), zeros, zeros)
        streams.append(Streams.of(trajectory, policy_weights=mask))
    batch = BatchConfig(row_tokens=400, micro_rows=2, targets_multiple=16, share_prefix=True)
    batches = Packer(batch, 60, sharing=Sharing(CONFIG.page_tokens, CONTEXT)).pack(streams)
    assert sum(np.count_nonzero(b.segments) for b in batches) < 0.8 * sum(len(s.trajectory) for s in streams)
    tiling = exact.Tiling(CONFIG.tile_rows, CONFIG.page_tokens, CONFIG.cache_dtype)
    program, got = jax.jit(exact.packed_logprobs, static_argnums=(1, 2), static_argnames="shared"), []
    with jax.set_mesh(mesh):
        for b in batches:
            arrays = b.tokens, b.positions, b.head_positions, b.targets, np.full(b.targets.shape, 0.7, np.float32)
            placed = [jax.device_put(x, sharding.rows(mesh, 2)) for x in arrays]
            got.append(np.asarray(program(weights_of(model, mesh), model, tiling, *placed, shared=True)))
    scored = unpack(batches, got, streams)
    assert_bits_equal(episodes, {i: found[1:] for i, found in zip(episodes, scored, strict=True)})


def test_an_episode_does_not_know_who_else_is_there(model, crowd) -> None:
    mesh = mesh_of()
    alone = play(model, mesh, CONFIG, list(range(24)), 1)
    few_pages = dataclasses.replace(CONFIG, slots=7, steps_per_dispatch=3, prefill_tokens=64, pages=22)
    tight = play(model, mesh, few_pages, list(np.random.default_rng(0).permutation(24)), 24)
    for i in alone:
        for other in (crowd, tight):
            for a, b in zip(alone[i], other[i], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@every
def test_bfloat16_is_exact_too(model) -> None:
    spec = dataclasses.replace(model, compute_dtype="bfloat16")
    cfg, mesh = dataclasses.replace(CONFIG, cache_dtype="bfloat16"), mesh_of()
    episodes = play(spec, mesh, cfg, list(range(24)), 24)
    assert_bits_equal(episodes, scores(spec, mesh, cfg, episodes, 0.7, 4, 256, 1))


def test_a_gradient_is_that_of_the_plain_value() -> None:
    plain, exact_value = jnp.array([1.0, 2.0]), jnp.array([1.5, 2.5])
    value, pull = jax.vjp(lambda p: exact.with_value(p * 3, exact_value), plain)
    assert value.tolist() == [1.5, 2.5]
    assert pull(jnp.array([1.0, 10.0]))[0].tolist() == [3.0, 30.0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param((2, 1, 1), marks=pytest.mark.nightly), (2, 2, 2)])
@every
def test_on_a_mesh(model, shape: tuple[int, int, int]) -> None:
    mesh = mesh_of(*shape)
    cfg = dataclasses.replace(CONFIG, slots=128)
    episodes = play(model, mesh, cfg, list(range(24)), 24)
    assert_bits_equal(episodes, scores(model, mesh, cfg, episodes, 0.7, 4, 256, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [MeshConfig(1, 1, 1, 1, 8), *(pytest.param(MeshConfig(1, 2, 2, 1, n), marks=pytest.mark.nightly) for n in (1, 2))],
    ids=lambda sizes: f"x{sizes.expert}",
)
def test_experts_on_several_devices_give_the_bits_of_one(sizes) -> None:
    one = play(MIXTURE, mesh_of(), CONFIG, list(range(24)), 24)
    mesh, cfg = sharding.make_mesh(sizes), dataclasses.replace(CONFIG, slots=128)
    episodes = play(MIXTURE, mesh, cfg, list(range(24)), 24)
    assert_bits_equal(episodes, scores(MIXTURE, mesh, cfg, episodes, 0.7, 8, 256, 1))
    if sizes.tensor == 1:  # which splits sums
        for i, (tokens, _, values) in episodes.items():
            np.testing.assert_array_equal(tokens, one[i][0])
            np.testing.assert_array_equal(values.view(np.int32), one[i][2].view(np.int32))
