"""Is what the engine recorded what the trainer computes, bit for bit; and what does that cost?

    python -m benchmarks.exactness [--model=qwen3] [--dtype=float32] [--episodes=48] [--repetitions=5]

The laptop preset's model shape in any family, random weights. The same multi-turn episodes are sampled by engines that
differ in everything that must not matter (slots, concurrency, order of arrival, tokens per dispatch, prefill chunks,
pages so few that sessions are preempted, prefixes shared or not), at two temperatures; their log-probs are then
computed by the trainer's exact forward over batches packed in several shapes and random orders. Of a mixture of experts
the same episodes are sampled and scored once more, by programs that say which experts each token went to in each layer
(routing.py). The last line is JSON:

  fraction_equal   of sampled tokens: log-prob bit-equal to the trainer's, over all engines and packings
  fraction_same    of episodes: tokens and log-probs equal those of the first engine
  tokens           comparisons made
  routing_tokens, routing_differences  tokens whose experts were compared, and in how many layers of them they differ
  cost_ratio       seconds of an RL step (rollout and update, synthetic laptop batch) with exact numerics / with fast
  update_ratio     the same of the update alone
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json

import jax
import numpy as np

from benchmarks import routing, workloads
from benchmarks.rl_step import step_seconds
from benchmarks.train_step import Learner
from jaxagent.config import EngineConfig, SamplingConfig, parse
from jaxagent.configs import search_r1
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.models import exact, params, sharding
from jaxagent.models.families import family_of
from jaxagent.models.spec import ModelSpec, round_up

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
WHOLE_TILES = ((4, 640), (1, 1344), (7, 704))  # without rows that only fill the last tile


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of random weights and what it plays."""

    spec: ModelSpec
    mesh: jax.sharding.Mesh
    weights: params.Params
    engine: EngineConfig
    sampling: SamplingConfig
    episodes: list[workloads.Episode]

    @classmethod
    def of(cls, family: str, dtype: str, count: int) -> Case:
        """`count` episodes of the laptop's shape in a family; where its layers have a longer period, one period."""
        raw = search_r1.get_config()
        raw.model.family = family or raw.model.family
        raw.model.num_layers = round_up(raw.model.num_layers, len(family_of(raw.model.family).pattern))
        raw.model.compute_dtype = raw.engine.cache_dtype = dtype
        cfg = parse(raw)
        spec = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size)
        mesh = sharding.make_mesh(cfg.mesh)
        with jax.set_mesh(mesh):
            weights = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.TRAIN))
        episodes = workloads.ragged(0, count, PROMPT, spec.vocab_size, max_turns=3)
        return cls(spec, mesh, weights, cfg.engine, cfg.rl.sampling, episodes)

    def play(self, name: str, temperature: float, order: np.ndarray) -> tuple[list[Played], dict[str, float]]:
        """The episodes as one of `ENGINES` samples them, and its counters."""
        changes, concurrency = ENGINES[name]
        engine = dataclasses.replace(self.engine, **changes)
        sampling = dataclasses.replace(self.sampling, temperature=temperature)
        return play(self.spec, self.mesh, self.weights, engine, concurrency, self.episodes, sampling, order)

    def score(
        self, played: list[Played], temperature: float, shape: tuple[int, int], rng: np.random.Generator
    ) -> list[np.ndarray]:
        """See `score`."""
        return score(self.spec, self.mesh, self.weights, self.engine, played, temperature, shape, rng)


def equality(case: Case) -> dict[str, float]:
    """fraction_equal, fraction_same and tokens."""
    count, rng = len(case.episodes), np.random.default_rng(0)
    equal = tokens = same = of = 0
    for temperature in (1.0, 0.7):
        first: list[Played] = []
        for name in ENGINES:
            played, stats = case.play(name, temperature, rng.permutation(count) if first else np.arange(count))
            first = first or played
            agree = [
                np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
                for a, b in zip(played, first, strict=True)
            ]
            same, of = same + sum(agree), of + count
            for shape in PACKINGS:
                scores = case.score(played, temperature, shape, rng)
                for p, s in zip(played, scores, strict=True):
                    equal += int(np.sum(p.logprobs.view(np.int32) == s.view(np.int32)))
                    tokens += len(s)
            print(
                f"temperature {temperature}  {name:<22} {equal}/{tokens} log-probs equal so far, {sum(agree)}/{count} "
                f"episodes as the first engine's, {stats.get('preemptions', 0):.0f} preemptions",
                flush=True,
            )
    return {"fraction_equal": equal / tokens, "fraction_same": same / of, "tokens": tokens}


def routed(case: Case) -> dict[str, int]:
    """routing_tokens and routing_differences; {} for a model without experts."""
    if not (layers := routing.layers(case.spec)):
        return {}
    tokens = differences = 0
    rng = np.random.default_rng(1)
    for number, name in enumerate(ENGINES):
        with routing.recorded() as engine:
            played, _ = case.play(name, 1.0, rng.permutation(len(case.episodes)))
        # What an engine has read: all but the last token of each episode.
        read = [Played(p.tokens[:-1], p.sampled[:-1], p.logprobs[:-1]) for p in played]
        beginnings = {p.tokens[: i + 1].tobytes() for p in read for i in range(len(p.tokens))}
        with routing.recorded() as padding:
            case.score(
                [Played(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))], 1.0, (1, 64), rng
            )
        with routing.recorded() as trainer:
            case.score(read, 1.0, WHOLE_TILES[number % len(WHOLE_TILES)], rng)
        for key in padding:
            trainer.pop(key, None)
        tokens += len(beginnings)
        # Two beginnings of one and the same bits would be a token that was not compared.
        differences += routing.differences(engine, trainer) + abs(len(beginnings) * layers - len(trainer))
        print(f"{name:<22} {differences} differences so far in {layers} layers of {tokens} tokens", flush=True)
    return {"routing_tokens": tokens, "routing_differences": differences}


def cost(family: str, repetitions: int) -> dict[str, float]:
    """Seconds of an RL step, rollout and update, in both numerics, interleaved."""
    rollout, update = step_seconds(
        {name: Learner("laptop", 0, name, family) for name in ("exact", "fast")}, repetitions
    )
    for name, seconds in update.items():
        print(f"{name}: rollout {rollout[name]:.3f} s, update {seconds:.3f} s")
    return {
        "cost_ratio": (rollout["exact"] + update["exact"]) / (rollout["fast"] + update["fast"]),
        "update_ratio": update["exact"] / update["fast"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a family, as config.model.family; left out: the preset's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=5, help="of an RL step; 0: its cost is not measured")
    args = parser.parse_args()
    case = Case.of(args.model, args.dtype, args.episodes)
    result = equality(case) | routed(case) | (cost(args.model, args.repetitions) if args.repetitions else {})
    print(json.dumps({name: round(value, 6) for name, value in result.items()}))


if __name__ == "__main__":
    main()
