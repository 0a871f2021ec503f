"""Prefill on one accelerator: prompts of whole groups, through the engine's own driver.

    python -m benchmarks.gpu_prefill [--shape=3b] [--prompts=2048,8192] [--group=16] [--groups=2]

Random bfloat16 weights. `groups` prompts of each length are asked for by `group` attempts each, and every attempt
samples one token: the time is from the first request to the last answer, the host's share in it. FLOPs are those of one
prefill per prompt (attention's causal half counted as half), over the product measured in the same run. The last line
is JSON: per length `prefill_<length>_s`, `prefill_<length>_mfu`, and `prefill_<length>_ratio`, the rows computed over
the rows of one prompt per group.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import time

import jax
import numpy as np

from benchmarks import gpu_ceilings, gpu_shapes
from jaxagent.config import SamplingConfig
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.models import params, sharding
from jaxagent.plan.costs import forward_flops

TIMEOUT_S = 600.0


def measure(
    shape: gpu_shapes.Shape, weights: params.Params, length: int, args: argparse.Namespace
) -> tuple[float, float]:
    """Median seconds of all groups' prefill, and rows computed over `groups * length`."""
    page = shape.cfg.engine.page_tokens
    slots = args.groups * args.group
    pages = args.groups * (-(-length // page) + 1) + 2 * slots
    changes = dict(slots=slots, pages=pages * (args.repetitions + 2), tile_rows=args.tile_rows, steps_per_dispatch=1)
    engine = dataclasses.replace(shape.cfg.engine, **changes)
    stops = automaton.build(["no such"], [b"ab"] * shape.spec.padded_vocab_size, shape.spec.padded_vocab_size)
    setup = EngineSetup(cfg=engine, context=length + page, stops=stops, eos_ids=(), exact=False)
    rng, sampling = np.random.default_rng(0), SamplingConfig(temperature=1.0)

    async def ask(driver: Driver, task: str, sample: int, prompt: np.ndarray) -> None:
        session = await driver.open(task, sample, args.group)
        await driver.generate(session, prompt, 1, sampling, 0, TIMEOUT_S)
        driver.close(session)

    async def all_groups(driver: Driver, repetition: int) -> None:
        prompts = rng.integers(1, shape.spec.vocab_size, (args.groups, length)).astype(np.int32)
        asked = [
            ask(driver, f"{repetition}-{g}", sample, prompt)
            for g, prompt in enumerate(prompts)
            for sample in range(args.group)
        ]
        await asyncio.gather(*asked)

    times = []
    with Driver(LanguageModel(shape.spec, engine.cache_dtype), weights, 0, setup, shape.mesh) as driver:
        driver.start(TIMEOUT_S)
        asyncio.run(all_groups(driver, 0))
        before = driver.stats().get("prefill_tokens", 0.0)
        for repetition in range(args.repetitions):
            started = time.perf_counter()
            asyncio.run(all_groups(driver, 1 + repetition))
            times.append(time.perf_counter() - started)
        rows = driver.stats().get("prefill_tokens", 0.0) - before
    return statistics.median(times), rows / (args.repetitions * args.groups * length)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(gpu_shapes.SHAPES), default="3b")
    parser.add_argument("--prompts", default="2048,8192")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--tile_rows", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    gpu_ceilings.add_arguments(parser)
    args = parser.parse_args()
    shape = gpu_shapes.shape(args.shape)
    peak = gpu_ceilings.flops_of(args)
    result = {"device": jax.devices()[0].device_kind, "shape": args.shape, "product_tflops": round(peak / 1e12, 3)}
    with jax.set_mesh(shape.mesh):
        weights = params.init(shape.spec, jax.random.key(0), params.shardings(shape.spec, shape.mesh, sharding.COMPUTE))
    for length in map(int, args.prompts.split(",")):
        seconds, ratio = measure(shape, weights, length, args)
        flops = args.groups * forward_flops(shape.spec, length, length / 2, 0)
        mfu = flops / seconds / peak
        print(
            f"{args.groups} prompts of {length} tokens for {args.group} each: {seconds * 1e3:.1f} ms, {mfu:.3f} of the "
            f"product, {ratio:.3f} rows per token",
            flush=True,
        )
        result |= {
            f"prefill_{length}_s": round(seconds, 4),
            f"prefill_{length}_mfu": round(mfu, 4),
            f"prefill_{length}_ratio": round(ratio, 3),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
