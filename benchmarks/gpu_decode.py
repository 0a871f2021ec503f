"""Decode on one accelerator: how much of its memory bandwidth the engine uses.

    python -m benchmarks.gpu_decode [--layers=36] [--batches=64,256] [--context=2048] [--repetitions=5] [--profile]

Random weights in the shape of Qwen2.5-3B, bfloat16. Every slot stands at `context` cached tokens and samples; a
dispatch is timed whole, as the driver sees it. The bandwidth is measured in the same run by copying one GiB. What a
decode step must read: all weights once, and the cached keys and values of every slot. The last line is JSON:
`copy_gb_per_s`, and per batch `decode_<batch>_ms_per_token` and `decode_<batch>_bandwidth_frac` (the goal is 0.8).
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

from benchmarks import device_profile
from jaxagent.config import parse
from jaxagent.configs import search_r1
from jaxagent.engine import automaton, functions
from jaxagent.engine.executor import Executor
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.models import kernels, params, sharding
from jaxagent.models.spec import ModelSpec

STEPS = 16  # tokens per dispatch


def copy_bandwidth(gib: float) -> float:
    """Bytes per second read and written by a copy, best of five."""
    x = jnp.zeros(int(gib * 2**30) // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(x))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(copy(x))
        best = min(best, time.perf_counter() - started)
    return 2 * x.nbytes / best


def measure(
    spec: ModelSpec, weights: params.Params, batch: int, context: int, repetitions: int, profile: bool
) -> tuple[float, int]:
    """Median seconds of one token of `batch` slots at `context` cached tokens, and the bytes it must read."""
    page_tokens = 64
    table = -(-(context + STEPS * (repetitions + 3)) // page_tokens)
    raw = search_r1.get_config("qwen2.5-3b")
    raw.engine.update(slots=batch, steps_per_dispatch=STEPS, pages=batch * table, tile_rows=min(batch, 128))
    cfg = dataclasses.replace(parse(raw).engine, prefill_tokens=128)
    stops = automaton.build(["no such"], [b"ab"] * spec.padded_vocab_size, spec.padded_vocab_size)
    model = LanguageModel(spec, cfg.cache_dtype)
    setup = EngineSetup(cfg=cfg, context=table * page_tokens, stops=stops, eos_ids=(), exact=False)
    executor = Executor(model, setup)
    executor.set_params(weights)
    slots = executor.sizes.all_slots
    tables = np.zeros((slots, table), np.int32)
    tables[:batch] = 1 + np.arange(batch * table).reshape(batch, table)
    requests = functions.Slots.blank(slots)
    requests.active[:batch], requests.token[:batch] = True, 5
    requests.position[:batch], requests.budget[:batch] = context, STEPS * (repetitions + 3)
    requests.sampling.temperature[:batch] = 1.0
    executor.begin(requests)
    times = []
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        executor.generate(tables, requests.active, requests.position, truncated=False)
        times.append((time.perf_counter() - started) / STEPS)
    if profile:
        print(
            device_profile.table(lambda: executor.generate(tables, requests.active, requests.position, truncated=False))
        )
    size = np.dtype(jnp.bfloat16).itemsize
    cached = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size * context * batch
    head = 0 if spec.tie_embeddings else spec.padded_vocab_size * spec.embed_dim * size
    read = sum(w.nbytes for w in jax.tree.leaves(executor.params)) - head + cached
    return statistics.median(times[1:]), read


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--copy_gib", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one dispatch")
    args = parser.parse_args()
    raw = search_r1.get_config("qwen2.5-3b")
    raw.model.update(num_layers=args.layers, param_dtype="bfloat16")
    raw.mesh.fsdp = 1
    cfg = parse(raw)
    spec, mesh = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size), sharding.make_mesh(cfg.mesh)
    bandwidth = copy_bandwidth(args.copy_gib)
    print(f"copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    result = {"device": jax.devices()[0].device_kind, "copy_gb_per_s": round(bandwidth / 1e9, 1)}
    with jax.set_mesh(mesh):
        print(kernels.report(spec, 64, 4096), flush=True)
        weights = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.COMPUTE))
        for batch in map(int, args.batches.split(",")):
            seconds, read = measure(spec, weights, batch, args.context, args.repetitions, args.profile)
            frac = read / seconds / bandwidth
            rate = f"{seconds * 1e3:8.2f} ms per token, {batch / seconds:9.0f} tokens/s"
            print(f"batch {batch:4d}: {rate}, {frac:.2f}", flush=True)
            result |= {
                f"decode_{batch}_ms_per_token": round(seconds * 1e3, 3),
                f"decode_{batch}_bandwidth_frac": round(frac, 3),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
