"""Is what the engine recorded what the trainer computes, bit for bit; and what does that cost?

    python -m benchmarks.exactness [--model=qwen3] [--dtype=float32] [--episodes=48] [--repetitions=5]

The laptop preset's model shape in any family, random weights. The same multi-turn episodes are sampled by engines that
differ in everything that must not matter (slots, concurrency, order of arrival, tokens per dispatch, prefill chunks,
pages so few that sessions are preempted, prefixes shared or not), at two temperatures; their log-probs are then
computed by the trainer's exact forward over batches packed in several shapes and random orders. The last line is JSON:

  fraction_equal   of sampled tokens: log-prob bit-equal to the trainer's, over all engines and packings
  fraction_same    of episodes: tokens and log-probs equal those of the first engine
  tokens           comparisons made
  cost_ratio       seconds of an RL step (rollout and update, synthetic laptop batch) with exact numerics / with fast
  update_ratio     the same of the update alone
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import time

import jax
import numpy as np

from benchmarks import workloads
from benchmarks.train_step import Learner
from jaxagent.config import EngineConfig, SamplingConfig, parse
from jaxagent.configs import search_r1
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.models import exact, params, sharding
from jaxagent.models.spec import ModelSpec

CONTEXT, PROMPT = 640, 70
ENGINES = {  # changes to the laptop preset's engine, and how many episodes run at once
    "64 slots, all at once": ({"slots": 64}, 64),
    "one at a time": ({"slots": 64}, 1),
    "7 slots, 7 at once": ({"slots": 7}, 7),
    "K = 1, chunks of 64": ({"slots": 64, "steps_per_dispatch": 1, "prefill_tokens": 64}, 64),
    "K = 16, few pages": ({"slots": 33, "steps_per_dispatch": 16, "pages": 60}, 64),
    "128 slots": ({"slots": 128}, 64),
}
PACKINGS = ((4, 640), (1, 1300), (7, 700))  # rows, tokens per row


@dataclasses.dataclass(frozen=True)
class Played:
    """One episode as an engine saw it."""

    tokens: np.ndarray  # i32[T]
    sampled: np.ndarray  # i32[n] where the sampled ones are
    logprobs: np.ndarray  # f32[n]


def play(
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    weights: params.Params,
    cfg: EngineConfig,
    concurrency: int,
    episodes: list[workloads.Episode],
    sampling: SamplingConfig,
    order: np.ndarray,
) -> tuple[list[Played], dict[str, float]]:
    """All episodes through one engine; groups of four share a prompt."""
    stops = automaton.build(["no such"], [b"ab"] * spec.padded_vocab_size, spec.padded_vocab_size)
    out: dict[int, Played] = {}

    async def run(driver: Driver) -> None:
        gate = asyncio.Semaphore(concurrency)

        async def one(i: int) -> None:
            async with gate:
                session = await driver.open(f"task{i // 4}", i % 4)
                tokens, at, logprobs = [], [], []
                for number, turn in enumerate(episodes[i]):
                    given = episodes[i // 4 * 4][0].given if number == 0 else turn.given
                    generation = await driver.generate(session, given, turn.sampled, sampling, number, 600.0)
                    tokens += [given, generation.tokens]
                    end = sum(map(len, tokens))
                    at.append(np.arange(end - len(generation.tokens), end))
                    logprobs.append(generation.logprobs)
                driver.close(session)
                out[i] = Played(*map(np.concatenate, (tokens, at, logprobs)))

        await asyncio.gather(*(one(int(i)) for i in order))

    model = LanguageModel(spec, cfg.cache_dtype)
    setup = EngineSetup(cfg=cfg, context=CONTEXT, stops=stops, eos_ids=(), exact=True)
    with Driver(model, weights, 0, setup, mesh) as driver:
        driver.start(600.0)
        asyncio.run(run(driver))
        stats = driver.stats()
    return [out[i] for i in range(len(episodes))], stats


def score(
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    weights: params.Params,
    cfg: EngineConfig,
    played: list[Played],
    temperature: float,
    shape: tuple[int, int],
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Exact log-probs of the sampled tokens, sequences packed first-fit in a random order: f32[n] each."""
    rows, width = shape
    used: list[list[int]] = []
    place: dict[int, tuple[int, int, int]] = {}
    for i in rng.permutation(len(played)):
        length = len(played[i].tokens)
        fits = ((b, r) for b, batch in enumerate(used) for r, n in enumerate(batch) if n + length <= width)
        b, r = next(fits, (len(used), 0))
        if b == len(used):
            used.append([0] * rows)
        place[int(i)] = (b, r, used[b][r])
        used[b][r] += length
    tokens = np.zeros((len(used), rows, width), np.int32)
    positions, targets = np.zeros_like(tokens), np.zeros_like(tokens)
    for i, (b, r, c) in place.items():
        sequence = played[i].tokens
        tokens[b, r, c : c + len(sequence)] = sequence
        positions[b, r, c : c + len(sequence)] = np.arange(len(sequence))
        targets[b, r, c : c + len(sequence) - 1] = sequence[1:]
    head = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))
    program = jax.jit(exact.packed_logprobs, static_argnums=(1, 2))
    tiling = exact.Tiling(cfg.tile_rows, cfg.page_tokens, cfg.cache_dtype)
    scored = []
    with jax.set_mesh(mesh):
        for b in range(len(used)):
            batch = (tokens[b], positions[b], head, targets[b], np.full(head.shape, temperature, np.float32))
            batch = [jax.device_put(x, sharding.rows(mesh, 2)) for x in batch]
            scored.append(np.asarray(program(weights, spec, tiling, *batch)))
    return [scored[b][r, c + played[i].sampled - 1] for i, (b, r, c) in sorted(place.items())]


def equality(family: str, dtype: str, count: int) -> dict[str, float]:
    """fraction_equal, fraction_same and tokens."""
    raw = search_r1.get_config()
    raw.model.family = family or raw.model.family
    raw.model.compute_dtype = raw.engine.cache_dtype = dtype
    cfg = parse(raw)
    spec = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size)
    mesh, rng = sharding.make_mesh(cfg.mesh), np.random.default_rng(0)
    with jax.set_mesh(mesh):
        weights = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.TRAIN))
    episodes = workloads.ragged(0, count, PROMPT, spec.vocab_size, max_turns=3)
    equal = tokens = same = of = 0
    for temperature in (1.0, 0.7):
        sampling = dataclasses.replace(cfg.rl.sampling, temperature=temperature)
        first: list[Played] = []
        for name, (changes, concurrency) in ENGINES.items():
            engine = dataclasses.replace(cfg.engine, **changes)
            order = rng.permutation(count) if first else np.arange(count)
            played, stats = play(spec, mesh, weights, engine, concurrency, episodes, sampling, order)
            first = first or played
            agree = [
                np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
                for a, b in zip(played, first, strict=True)
            ]
            same, of = same + sum(agree), of + count
            for shape in PACKINGS:
                scores = score(spec, mesh, weights, engine, played, temperature, shape, rng)
                for p, s in zip(played, scores, strict=True):
                    equal += int(np.sum(p.logprobs.view(np.int32) == s.view(np.int32)))
                    tokens += len(s)
            print(
                f"temperature {temperature}  {name:<22} {equal}/{tokens} log-probs equal so far, {sum(agree)}/{count} "
                f"episodes as the first engine's, {stats.get('preemptions', 0):.0f} preemptions",
                flush=True,
            )
    return {"fraction_equal": equal / tokens, "fraction_same": same / of, "tokens": tokens}


def cost(family: str, repetitions: int) -> dict[str, float]:
    """Seconds of an RL step, rollout and update, in both numerics, interleaved."""
    learners = {name: Learner("laptop", 0, name, family) for name in ("exact", "fast")}
    cfg = learners["exact"].cfg
    spec = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size)
    mesh = learners["exact"].mesh
    weights = learners["exact"].state.params
    rng = np.random.default_rng(0)

    def turn(given: int, sampled: int) -> workloads.Turn:
        return workloads.Turn(rng.integers(1, spec.vocab_size, given).astype(np.int32), sampled)

    stops = automaton.build(["no such"], [b"ab"] * spec.padded_vocab_size, spec.padded_vocab_size)
    model = LanguageModel(spec, cfg.engine.cache_dtype)
    updates: dict[str, list[float]] = {name: [] for name in learners}
    rollouts: dict[str, list[float]] = {name: [] for name in learners}
    context = cfg.env.context_tokens
    with contextlib.ExitStack() as stack:
        drivers = {}
        for name in learners:
            setup = EngineSetup(cfg=cfg.engine, context=context, stops=stops, eos_ids=(), exact=name == "exact")
            drivers[name] = driver = stack.enter_context(Driver(model, weights, 0, setup, mesh))
            driver.start(600.0)

        async def rollout(driver: Driver) -> None:
            async def episode(i: int, turns: list[workloads.Turn]) -> None:
                session = await driver.open(f"{i // 8}", i % 8)
                for number, t in enumerate(turns):
                    await driver.generate(session, t.given, t.sampled, cfg.rl.sampling, number, 600.0)
                driver.close(session)

            jobs = []
            for i in range(cfg.rl.tasks_per_step * cfg.rl.group_size):
                prompt = prompts[i // 8]
                jobs.append(episode(i, [prompt, *(turn(75, 6) for _ in range(i % 2)), turn(75, 4)]))
            await asyncio.gather(*jobs)

        for repetition in range(repetitions + 1):
            prompts = [turn(15, 6) for _ in range(cfg.rl.tasks_per_step)]
            for name, learner in learners.items():
                started = time.perf_counter()
                asyncio.run(rollout(drivers[name]))
                rolled = time.perf_counter() - started
                seconds = learner.step()
                if repetition:
                    rollouts[name].append(rolled)
                    updates[name].append(seconds)
    rollout_s = {name: statistics.median(seconds) for name, seconds in rollouts.items()}
    update = {name: statistics.median(seconds) for name, seconds in updates.items()}
    for name in learners:
        print(f"{name}: rollout {rollout_s[name]:.3f} s, update {update[name]:.3f} s")
    return {
        "cost_ratio": (rollout_s["exact"] + update["exact"]) / (rollout_s["fast"] + update["fast"]),
        "update_ratio": update["exact"] / update["fast"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a family, as config.model.family; left out: the preset's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    result = equality(args.model, args.dtype, args.episodes) | cost(args.model, args.repetitions)
    print(json.dumps({name: round(value, 6) for name, value in result.items()}))


if __name__ == "__main__":
    main()
