"""One RL step on one accelerator, split into what it is made of: prefill, decode, the host's share, the update.

    python -m benchmarks.gpu_step [--shape=0.5b] [--groups=16] [--group=16] [--turns=3] [--prompt=500] [--sampled=300]

Random bfloat16 weights. Every episode has a prompt, `turns` turns of `sampled` tokens and, between them, `observation`
tokens that cost nothing to get; no stop string ever matches, so that the work is known. Rollout through the driver in
fast numerics, then GRPO's update on what was sampled, with AdamW. The last line is JSON: `step_s` and of it
`prefill_s`, `decode_s`, `host_s` (the rollout's rest) and `learn_s`; `sampled_per_s` over the rollout; `compiles`, the
programs that were compiled after the step that warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import time

import jax
import numpy as np

from benchmarks import gpu_shapes
from jaxagent.algorithms import compose
from jaxagent.algorithms.streams import sampled_trajectories
from jaxagent.config import SamplingConfig
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.executor import count_compiles
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.learner.programs import make_programs
from jaxagent.models import params, sharding
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

TIMEOUT_S = 600.0
PHASES = ("prefill_s", "decode_s")


def trajectory(pieces: list[tuple[TokenKind, np.ndarray, np.ndarray]]) -> Trajectory:
    """Of (kind, tokens, log-probs) in their order."""
    tokens = np.concatenate([tokens for _, tokens, _ in pieces]).astype(np.int32)
    kinds = np.concatenate([np.full(len(tokens), kind, np.uint8) for kind, tokens, _ in pieces])
    logprobs = np.concatenate([logprobs for _, _, logprobs in pieces]).astype(np.float32)
    return Trajectory(tokens, kinds, logprobs, np.zeros_like(tokens), np.zeros_like(tokens))


async def rollout(driver: Driver, args: argparse.Namespace, vocab_size: int, seed: int) -> list[Group]:
    """All episodes at once; attempts at a task share its prompt. Rewards alternate, so that every group trains."""
    rng, sampling = np.random.default_rng(seed), SamplingConfig(temperature=1.0)

    def text(length: int) -> np.ndarray:
        return rng.integers(1, vocab_size, length).astype(np.int32)

    prompts = [text(args.prompt) for _ in range(args.groups)]
    observations = text(args.observation)

    async def episode(g: int, sample: int) -> Episode:
        session = await driver.open(f"{seed}-{g}", sample, args.group)
        pieces = []
        for turn in range(args.turns):
            new = observations if turn else prompts[g]
            pieces.append((TokenKind.OBSERVATION if turn else TokenKind.PROMPT, new, np.zeros(len(new))))
            generation = await driver.generate(session, new, args.sampled, sampling, turn, TIMEOUT_S)
            pieces.append((TokenKind.ACTION, generation.tokens, generation.logprobs))
        driver.close(session)
        reward, task = float(sample % 2), Task(id=str(g), prompt="", answers=("",))
        return Episode(task, sample, (trajectory(pieces),), reward, {"em": reward}, StopReason.ANSWER, args.turns)

    played = await asyncio.gather(*(episode(g, s) for g in range(args.groups) for s in range(args.group)))
    return [Group(part[0].task, tuple(part)) for part in np.reshape(played, (args.groups, args.group)).tolist()]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(gpu_shapes.SHAPES), default="0.5b")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--sampled", type=int, default=300)
    parser.add_argument("--observation", type=int, default=500)
    parser.add_argument("--row_tokens", type=int, default=4096)
    parser.add_argument("--micro_rows", type=int, default=4)
    parser.add_argument("--remat", choices=gpu_shapes.REMAT, default="dots")
    args = parser.parse_args()
    slots = args.groups * args.group
    longest = args.prompt + args.turns * args.sampled + (args.turns - 1) * args.observation
    shape = gpu_shapes.shape(
        args.shape,
        remat=args.remat,
        engine=dict(slots=slots, tile_rows=min(slots, 256), pages=slots * (-(-longest // 64) + 1), page_tokens=64),
        row_tokens=args.row_tokens,
        micro_rows=args.micro_rows,
    )
    cfg, spec, mesh = shape.cfg, shape.spec, shape.mesh
    stops = automaton.build(["no such"], [b"ab"] * spec.padded_vocab_size, spec.padded_vocab_size)
    setup = EngineSetup(cfg=cfg.engine, context=longest + 1, stops=stops, eos_ids=(), exact=False)
    with jax.set_mesh(mesh):
        policy = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.TRAIN))
    rl = dataclasses.replace(cfg.rl, tasks_per_step=args.groups, group_size=args.group)
    programs, state = make_programs(dataclasses.replace(cfg, rl=rl), spec, mesh, policy)
    compiled: collections.Counter[str] = collections.Counter()
    with Driver(LanguageModel(spec, cfg.engine.cache_dtype), policy, 0, setup, mesh) as driver:
        driver.start(TIMEOUT_S)
        count_compiles(compiled)
        result: dict[str, float] = {}
        for repetition in range(2):  # the first compiles what the update needs
            before = driver.stats()
            compiles = compiled["compiles"] + before.get("compiles", 0)
            started = time.perf_counter()
            groups = asyncio.run(rollout(driver, args, spec.vocab_size, repetition))
            rolled = time.perf_counter()
            scores = programs.score(state, sampled_trajectories(groups), rl.sampling.temperature)
            streams, _ = compose.streams(groups, rl, 0.0, scores)
            for part in compose.mini_batches(streams, rl, (0, repetition)):
                state, _ = programs.update(state, programs.packer.pack(part))
            jax.block_until_ready(state.params)
            ended, after = time.perf_counter(), driver.stats()
            spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in PHASES}
            sampled = slots * args.turns * args.sampled
            result = {
                "step_s": ended - started,
                **spent,
                "host_s": rolled - started - sum(spent.values()),
                "learn_s": ended - rolled,
                "sampled_per_s": sampled / (rolled - started),
                "compiles": compiled["compiles"] + after.get("compiles", 0) - compiles,
            }
            driver.update_params(state.params, repetition + 1)
            print(", ".join(f"{name} {value:.3f}" for name, value in result.items()), flush=True)
    rounded = {name: round(value, 3) for name, value in result.items()}
    print(json.dumps({"device": jax.devices()[0].device_kind, "shape": args.shape} | rounded))


if __name__ == "__main__":
    main()
