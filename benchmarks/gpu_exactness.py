"""Where do the engine's numbers and the trainer's part on a GPU? First whole log-probs, then layer by layer.

    python -m benchmarks.gpu_exactness [--dtype=bfloat16] [--barriers=products] [--episodes=32]

The laptop preset's shape with random weights, on whatever device JAX finds. Part one lets three engines sample the
same episodes and scores them in two packings, as `benchmarks.exactness` does; nothing is added to either program. Part
two feeds the same tokens to one program of decode tiles and one of scoring tiles that also return what each step
computed, from the embedding over every norm, product and attention to the log-prob, and compares those bits (what a
program returns can change how it is compiled, so part one has the last word). `--barriers` keeps XLA from fusing
anything into matrix products: `products` in both programs, `weights` only the scoring program's weights;
`--products=xla` takes XLA's products in place of our kernels. Set XLA_FLAGS for everything else. The last line is JSON:

  equal         of sampled tokens: log-prob bit-equal to the trainer's
  same          of episodes: tokens and log-probs equal those of the first engine
  largest       the largest difference of a log-prob, in nats
  first         the first step of a layer at which part two's programs differ; null if they never do
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import exactness, gpu_ceilings, workloads
from jaxagent.config import Config, parse
from jaxagent.configs import search_r1
from jaxagent.engine import lm
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.model import ROWS
from jaxagent.models import exact, kernels, logprobs, params, sharding, transformer
from jaxagent.models.spec import ModelSpec

ENGINES = ("64 slots, all at once", "7 slots, 7 at once", "K = 16, few pages")
PACKINGS = ((4, 640), (1, 1300))
PRODUCTS = {  # a layer's products by their equations; others are called by theirs
    "ne,ehd->nhd": "q, k or v",
    "nhd,hde->ne": "o",
    "ne,ef->nf": "gate or up",
    "nf,fe->ne": "down",
    "...e,ve->...v": "logits",
}
TOKENS = 96  # of each sequence of part two


@contextlib.contextmanager
def barriers(kind: str) -> Iterator[None]:
    """Optimisation barriers around what XLA may otherwise fuse into a matrix product."""

    def product(plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def contract(equation: str, x: jax.Array, w: jax.Array, *rest: Any, **more: Any) -> jax.Array:
            x, w = jax.lax.optimization_barrier((x, w))
            return jax.lax.optimization_barrier(plain(equation, x, w, *rest, **more))

        return contract

    def weights(plain: Callable[..., params.Params]) -> Callable[..., params.Params]:
        return lambda *arguments: jax.lax.optimization_barrier(plain(*arguments))

    wrappers = {"contract": product} if kind == "products" else {}
    with replaced(wrappers | ({"_as_generation": weights} if kind != "none" else {})):
        yield


def whole(
    cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, weights: params.Params, count: int, engines: int
) -> dict[str, Any]:
    """Part one: equal, same, largest and how many log-probs were compared."""
    rng = np.random.default_rng(0)
    episodes = workloads.ragged(0, count, exactness.PROMPT, spec.vocab_size, max_turns=3)
    first: list[exactness.Played] = []
    differences, same = [], []
    for name in ENGINES[:engines]:
        changes, concurrency = exactness.ENGINES[name]
        engine = dataclasses.replace(cfg.engine, **changes)
        played, _ = exactness.play(
            spec, mesh, weights, engine, concurrency, episodes, cfg.rl.sampling, np.arange(count)
        )
        first = first or played
        same += [
            np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
            for a, b in zip(played, first, strict=True)
        ]
        for shape in PACKINGS:
            scores = exactness.score(spec, mesh, weights, engine, played, cfg.rl.sampling.temperature, shape, rng)
            differences += [p.logprobs - s for p, s in zip(played, scores, strict=True)]
    apart = np.abs(np.concatenate(differences))
    return {
        "tokens": len(apart),
        "equal": float(np.mean(apart == 0)),
        "same": float(np.mean(same)),
        "largest": float(apart.max()),
        "median_of_unequal": float(np.median(apart[apart > 0])) if np.any(apart > 0) else 0.0,
    }


@contextlib.contextmanager
def recording() -> Iterator[dict[str, jax.Array]]:
    """While a program is traced: what every embedding, norm and product of the model returns, numbered in its order."""
    steps: dict[str, jax.Array] = {}

    def recorded(name: str, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def call(*arguments: Any, **more: Any) -> jax.Array:
            out = function(*arguments, **more)
            if jax.sharding.get_abstract_mesh().manual_axes:  # inside attention, which is one step
                return out
            equation = arguments[0] if isinstance(arguments[0], str) else ""
            for value in out if isinstance(out, tuple) else (out,):
                add(steps, PRODUCTS.get(equation, f"{name} {equation}".strip()), value)
            return out

        return call

    with replaced({name: functools.partial(recorded, name) for name in ("embed", "rms_norm", "contract")}):
        yield steps


def add(steps: dict[str, jax.Array], name: str, value: jax.Array) -> None:
    """Behind those that are there."""
    steps[f"{len(steps):03} {name}"] = value


@contextlib.contextmanager
def replaced(wrappers: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Functions of the model's modules, wrapped wherever they were imported to."""
    before = [
        (module, name, vars(module)[name])
        for path, module in sorted(sys.modules.items())
        if path.startswith("jaxagent.models")
        for name in wrappers
        if callable(vars(module).get(name))
    ]
    for module, name, function in before:
        setattr(module, name, wrappers[name](function))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


@kernels.pinned()
def _decoded(spec: ModelSpec, cfg: Config, weights: params.Params, tokens: jax.Array) -> dict[str, jax.Array]:
    """What each step computes when tokens i32[N, T + 1] are fed one column after the other, as `generate` does it."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    model = LanguageModel(spec, cfg.engine.cache_dtype)
    page = cfg.engine.page_tokens
    each = -(-length // page)
    tables = jax.reshard(jnp.arange(1, 1 + rows * each, dtype=jnp.int32).reshape(rows, each), jax.P(*ROWS, None))
    tokens = jax.reshard(tokens, jax.P(*ROWS, None))

    def step(cache: Any, t: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        at = jax.reshard(jnp.full((rows,), t, jnp.int32), ROWS)
        with recording() as steps:

            def attend(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                out, new = lm.attend_cached(layer, q, k, v, tables, at)
                for name, value in (("rotated q", q), ("rotated k", k), ("attention", out)):
                    add(steps, name, value)
                return out, new

            x, cache = transformer.hidden(weights, spec, tokens[:, t], at, attend, cache, unroll=True)
            scores = model.logits(weights, x)
        add(steps, "log-prob", _logprobs(scores, tokens[:, t + 1]))
        return cache, steps

    _, steps = jax.lax.scan(step, model.init_cache(1 + rows * each, page), jnp.arange(length))
    return {name: jnp.swapaxes(a, 0, 1) for name, a in steps.items()}


@kernels.pinned()
def _scored(spec: ModelSpec, cfg: Config, weights: params.Params, tokens: jax.Array) -> dict[str, jax.Array]:
    """The same for rows [N, T + 1] that are scored tile after tile, as `models.exact` does it."""
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    b, t = tokens.shape
    tiling = exact.Tiling(cfg.engine.tile_rows, cfg.engine.page_tokens, cfg.engine.cache_dtype)
    weights = exact._as_generation(weights, spec)
    batch = jax.P(sharding.ROWS, None)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    tiles, places, goals = (
        exact._to_tiles(jax.reshard(a, batch), tiling.tile_rows) for a in (tokens, positions, targets)
    )

    def step(cache: Any, i: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        at = sharding.tile_at(places, i)
        with recording() as steps:

            def attend(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                out, new = exact._attend(layer, q, k, v, at, None, i, t, tiling.page_tokens)
                for name, value in (("rotated q", q), ("rotated k", k), ("attention", out)):
                    add(steps, name, value)
                return out, new

            x, cache = transformer.hidden(weights, spec, sharding.tile_at(tiles, i), at, attend, cache, unroll=True)
            scores = logprobs.logits(weights, spec, x)
        add(steps, "log-prob", _logprobs(scores, sharding.tile_at(goals, i)))
        return cache, steps

    _, steps = jax.lax.scan(step, exact._init_cache(spec, tiling, b, t), jnp.arange(len(tiles)))
    return steps  # [tiles, N, ...]


def _logprobs(scores: jax.Array, targets: jax.Array) -> jax.Array:
    rows = jax.P(sharding.ROWS)
    scores = jax.reshard(scores, jax.P(sharding.ROWS, None))
    targets = jax.reshard(targets, rows)
    ones = jnp.ones_like(targets, jnp.float32)
    of = jax.shard_map(logprobs.row_logprobs, in_specs=(jax.P(sharding.ROWS, None), rows, rows), out_specs=rows)
    return of(*jax.lax.optimization_barrier((scores, targets)), ones)


def by_layer(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, weights: params.Params) -> str | None:
    """Part two: prints a line for each step, from the embedding to the log-prob; the first that differs."""
    rows = cfg.engine.tile_rows
    tokens = np.random.default_rng(1).integers(1, spec.vocab_size, (rows, TOKENS + 1)).astype(np.int32)
    with jax.set_mesh(mesh):
        placed = LanguageModel(spec, cfg.engine.cache_dtype).place(weights)
        decoded = jax.jit(lambda w, t: _decoded(spec, cfg, w, t))(placed, tokens)
        scored = jax.jit(lambda w, t: _scored(spec, cfg, w, t))(weights, tokens)
    if list(decoded) != list(scored):
        raise RuntimeError(f"The two programs have other steps: {list(decoded)} and {list(scored)}.")
    first = None
    for name in sorted(decoded):
        a, b = (np.asarray(steps[name].astype(jnp.float32)) for steps in (decoded, scored))
        b = b.reshape(-1, *b.shape[2:])[: rows * TOKENS].reshape(a.shape)
        unequal = a != b
        first = first or (name if unequal.any() else None)
        print(f"{name:<20} {unequal.mean():9.6f} unequal, largest difference {np.abs(a - b).max():.3g}", flush=True)
    return first


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--barriers", choices=("none", "weights", "products"), default="none")
    gpu_ceilings.add_products(parser)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--engines", type=int, default=len(ENGINES), help="how many of the engines sample")
    args = parser.parse_args()
    gpu_ceilings.choose_products(args)
    raw = search_r1.get_config()
    raw.model.compute_dtype = raw.engine.cache_dtype = args.dtype
    cfg = parse(raw)
    spec = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size)
    mesh = sharding.make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        weights = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.TRAIN))
    result = {
        "device": jax.devices()[0].device_kind,
        "dtype": args.dtype,
        "barriers": args.barriers,
        "products": args.products,
    }
    with barriers(args.barriers):
        result["first"] = by_layer(cfg, spec, mesh, weights)
        result |= whole(cfg, spec, mesh, weights, args.episodes, args.engines)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
