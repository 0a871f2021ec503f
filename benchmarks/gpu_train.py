"""A train step on one accelerator: model FLOPs per second against what a product of random matrices reaches.

    python -m benchmarks.gpu_train [--shape=3b] [--tokens=4096] [--rows=4] [--remat=dots] [--repetitions=5] [--profile]

Random weights, bfloat16 compute. One micro-batch of full packed rows, loss on a quarter of the tokens: gradient
accumulation only, which is where a run spends its time; no optimiser (its state would not fit one chip beside the
activations). Attention's whole square is counted. The last line is JSON: `train_s`, `train_tflops`, `train_frac` of
the product measured in the same run (`gpu_ceilings`), `train_mfu` of the data sheet's peak (`--chip`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import numpy as np
import optax

from benchmarks import device_profile, gpu_ceilings, gpu_shapes
from jaxagent.algorithms.supervised import sft
from jaxagent.learner import forward
from jaxagent.learner.batching import Packer
from jaxagent.learner.update import make_update, shard
from jaxagent.models import kernels, params, sharding
from jaxagent.plan.chips import CHIPS
from jaxagent.plan.costs import train_flops
from jaxagent.types import TokenKind, Trajectory


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(gpu_shapes.SHAPES), default="3b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--chip", choices=tuple(CHIPS), default="h100")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--remat", choices=gpu_shapes.REMAT, default="dots")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one gradient")
    gpu_ceilings.add_arguments(parser)
    args = parser.parse_args()
    shape = gpu_shapes.shape(args.shape, remat=args.remat, row_tokens=args.tokens, micro_rows=args.rows)
    spec, mesh = shape.spec, shape.mesh
    packer = Packer(shape.cfg.rl.batch, args.tokens // 4)
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
    seconds, product = statistics.median(times[1:]), gpu_ceilings.flops_of(args)
    flops = train_flops(spec, args.rows, args.tokens, batch.targets.shape[1])
    result = {
        "device": jax.devices()[0].device_kind,
        "shape": args.shape,
        "train_s": round(seconds, 4),
        "train_tflops": round(flops / seconds / 1e12, 2),
        "train_frac": round(flops / seconds / product, 4),
        "train_mfu": round(flops / seconds / CHIPS[args.chip].flops, 4),
    }
    print(f"{args.rows} x {args.tokens} tokens: {seconds:.3f} s, {flops / seconds / 1e12:.2f} TFLOP/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
