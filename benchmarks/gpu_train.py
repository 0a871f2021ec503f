"""A train step on one accelerator: model FLOPs per second against the chip's peak.

    python -m benchmarks.gpu_train [--layers=36] [--tokens=4096] [--rows=4] [--chip=h100] [--repetitions=5] [--profile]

Random weights in the shape of Qwen2.5-3B, bfloat16 compute. One micro-batch of full packed rows, loss on a quarter of
the tokens: gradient accumulation only, which is where a run spends its time; no optimiser (its state would not fit
one chip beside the activations). The last line is JSON: `train_s`, `train_mfu` (the goal is 0.45), `matmul_frac` (what
a 8192^2 product reaches of the same peak).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import device_profile
from jaxagent.algorithms.supervised import sft
from jaxagent.config import parse
from jaxagent.configs import search_r1
from jaxagent.learner import forward
from jaxagent.learner.batching import Packer
from jaxagent.learner.update import make_update, shard
from jaxagent.models import kernels, params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.plan.chips import CHIPS
from jaxagent.plan.costs import train_flops
from jaxagent.types import TokenKind, Trajectory


def matmul_flops(size: int) -> float:
    """FLOP/s of a bfloat16 product of two square matrices, best of five."""
    x = jnp.ones((size, size), jnp.bfloat16)
    dot = jax.jit(jnp.dot)
    jax.block_until_ready(dot(x, x))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(dot(x, x))
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--chip", choices=tuple(CHIPS), default="h100")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--matmul", type=int, default=8192)
    parser.add_argument("--remat", choices=("none", "dots", "layer"), default="dots")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one gradient")
    args = parser.parse_args()
    raw = search_r1.get_config("qwen2.5-3b")
    raw.model.update(num_layers=args.layers, param_dtype="bfloat16", remat=args.remat)
    raw.rl.batch.update(row_tokens=args.tokens, micro_rows=args.rows)
    raw.mesh.fsdp = 1
    cfg = parse(raw)
    spec, mesh = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size), sharding.make_mesh(cfg.mesh)
    packer = Packer(cfg.rl.batch, args.tokens // 4)
    rng = np.random.default_rng(0)
    kinds = np.where(np.arange(args.tokens) % 4 == 1, TokenKind.ACTION, TokenKind.OBSERVATION).astype(np.uint8)
    zeros = np.zeros(args.tokens, np.int32)

    def text() -> Trajectory:
        tokens = rng.integers(0, spec.vocab_size, args.tokens).astype(np.int32)
        return Trajectory(tokens, kinds, zeros.astype(np.float32), zeros, zeros)

    (batch,) = packer.pack(sft([text() for _ in range(args.rows)], observations=False))
    with jax.set_mesh(mesh):
        print(kernels.report(spec, 64, args.tokens), flush=True)
        weights = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.TRAIN))
        policy = make_update(forward.policy_forward(spec), optax.sgd(0.0), mesh).policy
        on_device = shard(batch, mesh)
        one = np.float32(1.0)  # temperature
        grads, tally = policy.zeros(weights, on_device, one)
        times = []
        for _ in range(args.repetitions + 1):
            started = time.perf_counter()
            grads, tally = jax.block_until_ready(policy.accumulate(weights, on_device, one, grads, tally))
            times.append(time.perf_counter() - started)
        if args.profile:
            print(device_profile.table(lambda: policy.accumulate(weights, on_device, one, grads, tally)))
    seconds, peak = statistics.median(times[1:]), CHIPS[args.chip].flops
    flops = train_flops(spec, args.rows, args.tokens, batch.targets.shape[1])
    result = {
        "device": jax.devices()[0].device_kind,
        "train_s": round(seconds, 4),
        "train_mfu": round(flops / seconds / peak, 4),
        "matmul_frac": round(matmul_flops(args.matmul) / peak, 4),
    }
    print(f"{args.rows} x {args.tokens} tokens: {seconds:.3f} s, {flops / seconds / 1e12:.2f} TFLOP/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
