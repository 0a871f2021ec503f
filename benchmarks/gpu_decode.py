"""Decode on one accelerator: how much of its memory bandwidth the engine uses.

    python -m benchmarks.gpu_decode [--shape=3b] [--batches=1,8,64,256] [--context=2048] [--repetitions=5] [--profile]

Random bfloat16 weights. Every slot stands at `context` cached tokens and samples; a dispatch is timed whole, as the
driver sees it. The ceiling is a copy measured in the same run (`gpu_ceilings`). What a decode step must read: all
weights once, and the cached keys and values of every slot. The last line is JSON: per batch
`decode_<batch>_ms_per_token` and `decode_<batch>_bandwidth_frac`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import device_profile, gpu_ceilings, gpu_shapes
from jaxagent.engine import automaton, functions
from jaxagent.engine.executor import Executor
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.models import kernels, params, sharding

STEPS = 16  # tokens per dispatch
PAGE = 64


def measure(shape: gpu_shapes.Shape, weights: params.Params, batch: int, args: argparse.Namespace) -> tuple[float, int]:
    """Median seconds of one token of `batch` slots at `context` cached tokens, and the bytes it must read."""
    spec = shape.spec
    dispatches = args.repetitions + 1 + args.profile
    table = -(-(args.context + STEPS * dispatches) // PAGE)
    changes = dict(
        slots=batch,
        steps_per_dispatch=STEPS,
        pages=batch * table,
        page_tokens=PAGE,
        tile_rows=batch if args.tile_rows == 0 else args.tile_rows,
        prefill_tokens=batch,
    )
    cfg = dataclasses.replace(shape.cfg.engine, **changes)
    stops = automaton.build(["no such"], [b"ab"] * spec.padded_vocab_size, spec.padded_vocab_size)
    model = LanguageModel(spec, cfg.cache_dtype)
    executor = Executor(
        model, EngineSetup(cfg=cfg, context=table * PAGE, stops=stops, eos_ids=(), exact=args.numerics == "exact")
    )
    executor.set_params(weights)
    slots = executor.sizes.all_slots
    tables = np.zeros((slots, table), np.int32)
    tables[:batch] = 1 + np.arange(batch * table).reshape(batch, table)
    turns = functions.Slots.blank(slots)
    turns.active[:batch], turns.token[:batch] = True, 5
    turns.position[:batch], turns.budget[:batch] = args.context, STEPS * dispatches
    turns.sampling.temperature[:batch] = 1.0
    executor.begin(turns)

    def dispatch() -> functions.StepResult:
        return executor.generate(tables, turns.active, turns.position, truncated=False)

    times = []
    for _ in range(args.repetitions + 1):
        started = time.perf_counter()
        dispatch()
        times.append((time.perf_counter() - started) / STEPS)
    if args.profile:
        print(device_profile.table(dispatch))
    size = np.dtype(jnp.bfloat16).itemsize
    cached = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size * args.context * batch
    head = 0 if spec.tie_embeddings else spec.padded_vocab_size * spec.embed_dim * size
    read = sum(w.nbytes for w in jax.tree.leaves(executor.params)) - head + cached
    return statistics.median(times[1:]), read


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(gpu_shapes.SHAPES), default="3b")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--numerics", choices=("fast", "exact"), default="fast")
    gpu_ceilings.add_products(parser)
    parser.add_argument("--tile_rows", type=int, default=0, help="0 = as many as there are slots")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one dispatch")
    gpu_ceilings.add_arguments(parser)
    args = parser.parse_args()
    gpu_ceilings.choose_products(args)
    shape = gpu_shapes.shape(args.shape)
    bandwidth = gpu_ceilings.bandwidth_of(args)
    print(f"copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    result = {"device": jax.devices()[0].device_kind, "shape": args.shape, "copy_gb_per_s": round(bandwidth / 1e9, 1)}
    with jax.set_mesh(shape.mesh):
        print(kernels.report(shape.spec, PAGE, 4096), flush=True)
        weights = params.init(shape.spec, jax.random.key(0), params.shardings(shape.spec, shape.mesh, sharding.COMPUTE))
        for batch in map(int, args.batches.split(",")):
            seconds, read = measure(shape, weights, batch, args)
            fraction = read / seconds / bandwidth
            rate = f"{seconds * 1e3:8.2f} ms per token, {batch / seconds:9.0f} tokens/s"
            print(f"batch {batch:4d}: {rate}, {fraction:.2f} of the copy", flush=True)
            result |= {
                f"decode_{batch}_ms_per_token": round(seconds * 1e3, 3),
                f"decode_{batch}_bandwidth_frac": round(fraction, 3),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
