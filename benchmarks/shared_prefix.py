"""One update of a group whose prompt is two thirds of its tokens: the prompt once per row, against once per attempt.

    python -m benchmarks.shared_prefix [--smollm2] [--repetitions=5]

The last line is JSON: seconds of an update with and without sharing (the least of interleaved repetitions in one
process), their ratio, and the tokens that stand in rows. `--smollm2` takes the shape of SmolLM2-135M, with random
weights; without it a tenth of that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxagent import config as schema
from jaxagent.algorithms.streams import Streams
from jaxagent.config import BatchConfig, MeshConfig
from jaxagent.configs import search_r1
from jaxagent.learner.batching import Packer, Sharing
from jaxagent.learner.forward import policy_forward
from jaxagent.learner.loss import policy_loss_of
from jaxagent.learner.state import TrainState, init_state
from jaxagent.learner.update import Update, make_optimizer, make_update
from jaxagent.models import params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.runs import devices
from jaxagent.types import TokenKind, Trajectory

SMOLLM2 = ModelSpec(
    family="llama",
    vocab_size=49_152,
    padded_vocab_size=49_152,
    num_layers=30,
    embed_dim=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_dim=1536,
    tie_embeddings=True,
    rope_theta=100_000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    max_position=8192,
    embed_init_std=0.04,
    compute_dtype="float32",
    param_dtype="float32",
    remat="layer",
    logprob_chunk_tokens=512,
)
SMALL = dataclasses.replace(SMOLLM2, vocab_size=8192, padded_vocab_size=8192, num_layers=6)
GROUP, CONTEXT, PROMPT = 8, 288, 192  # attempts; tokens of each, and of the prompt they share
TURN, OBSERVATION = 40, 16  # two turns of sampled tokens with an observation between them


def group_streams(vocab: int, seed: int = 0) -> list[Streams]:
    """The attempts of one task, all of them trained."""
    rng = np.random.default_rng(seed)
    kinds = [TokenKind.PROMPT] * PROMPT + [TokenKind.ACTION] * TURN + [TokenKind.OBSERVATION] * OBSERVATION
    kinds = np.array([*kinds, *[TokenKind.ACTION] * TURN], np.uint8)
    prompt = rng.integers(0, vocab, PROMPT)
    sampled = kinds == TokenKind.ACTION
    made = []
    for attempt in range(GROUP):
        tokens = np.concatenate([prompt, rng.integers(0, vocab, CONTEXT - PROMPT)]).astype(np.int32)
        logprobs = np.where(sampled, -np.log(vocab), 0.0).astype(np.float32)
        trajectory = Trajectory(
            tokens, kinds, logprobs, np.where(sampled, 0, -1).astype(np.int32), np.zeros_like(tokens)
        )
        weights = sampled / (GROUP * sampled.sum())
        made.append(Streams.of(trajectory, advantages=(1.0 if attempt % 2 else -1.0) * sampled, policy_weights=weights))
    return made


def packers(row_tokens: int) -> dict[str, Packer]:
    """One micro-batch each: a row per attempt, and one row for all."""
    whole = BatchConfig(row_tokens=CONTEXT, micro_rows=GROUP, targets_multiple=32, share_prefix=False)
    shared = BatchConfig(row_tokens=row_tokens, micro_rows=1, targets_multiple=32, share_prefix=True)
    return {"unshared": Packer(whole, 2 * TURN), "shared": Packer(shared, 2 * TURN, sharing=Sharing(1, CONTEXT - 1))}


def measure(spec: ModelSpec, policy: Any = None, repetitions: int = 5, row_tokens: int = 960) -> dict[str, float]:
    """Seconds of an update either way, and their ratio.

    Args:
      spec: of the model.
      policy: its parameters; None = random ones.
      repetitions: the two take turns; the least of each counts.
      row_tokens: of the shared row, 960 or more.
    """
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1))
    rl = schema.parse(search_r1.get_config("laptop")).rl
    optimizer = make_optimizer(rl.optimizer, 1000)
    with jax.set_mesh(mesh):
        policy = policy or params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.TRAIN))
        state = init_state(policy, optimizer)
        update = make_update(policy_forward(spec), optimizer, mesh, policy_loss_of(rl), rl.sampling.temperature)
    streams = group_streams(spec.vocab_size)
    found: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):
        for name, packer in packers(row_tokens).items():
            state, spent, tokens, loss = _step(update, packer, state, streams)
            if repetition:  # the first compiles
                seconds.setdefault(name, []).append(spent)
            found |= {f"{name}_tokens": tokens}
            print(f"{name:<9} {spent:8.3f} s  {tokens} tokens  loss {loss:.6f}", flush=True)
    found |= {f"{name}_s": round(min(spent), 4) for name, spent in seconds.items()}
    return found | {"shared_prefix_ratio": round(found["shared_s"] / found["unshared_s"], 3)}


def _step(
    update: Update, packer: Packer, state: TrainState, streams: Sequence[Streams]
) -> tuple[TrainState, float, int, float]:
    """The next state, seconds, tokens in rows, and the loss."""
    started = time.perf_counter()
    batches = packer.pack(streams)
    state, metrics = update(state, batches)
    jax.block_until_ready(state.params)
    spent = time.perf_counter() - started
    return state, spent, sum(int(np.count_nonzero(batch.segments)) for batch in batches), metrics["loss/total"]


def main() -> None:
    """The command line."""
    devices.use_huge_pages()  # as a run does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="30 layers and 49,152 tokens instead of 6 and 8,192")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(measure(SMOLLM2 if args.smollm2 else SMALL, repetitions=args.repetitions)))


if __name__ == "__main__":
    main()
