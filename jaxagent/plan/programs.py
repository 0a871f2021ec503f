"""The run's own programs, lowered and compiled from abstract arrays: what each holds on one device.

Config and model spec in -> `Plan` parts: bytes of the arrays that stay (parameters, optimiser, cache, ...) and the
compiler's account of each program. The mesh may be of virtual CPU devices or of a GPU topology without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.config import Config, EngineConfig
from jaxagent.engine import executor as engine
from jaxagent.engine import functions
from jaxagent.engine.executor import Sizes
from jaxagent.engine.lm import LanguageModel
from jaxagent.learner import state
from jaxagent.learner.programs import Programs, first_state, replays_routing
from jaxagent.models import hf, lora, sharding
from jaxagent.models import params as model_params
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.roles import frozen_engines

Tree = Any  # a pytree of jax.ShapeDtypeStructs with shardings


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of one program, bytes on one device."""

    name: str
    compile_s: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs that reuse a donated argument
    temp_bytes: int  # alive only while it runs: activations
    flops: float | None  # all devices, by the compiler's own count of unoptimised operations; None where it has none

    @property
    def extra_bytes(self) -> int:
        """What running it needs beyond its arguments."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes


def resident_bytes(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Bytes per device of everything that stays between programs, by name."""
    with jax.set_mesh(mesh):
        train = abstract_state(cfg, spec, mesh)
        model = LanguageModel(spec, cfg.engine.cache_dtype, records=replays_routing(cfg, spec))
        rollout = jax.eval_shape(model.place, train.policy)
        decode = _decode_state(cfg.engine, cfg.env.context_tokens, cfg.numerics == "exact", model)
        adapted = train.frozen is not None
        return {
            "parameters": device_bytes(train.frozen.base if adapted else train.params),
            "adapters": device_bytes(train.params if adapted else None),
            # Only what is adapted is there twice.
            "merged parameters": device_bytes(
                [getattr(train.policy.layers, n) for n in train.params] if adapted else None
            ),
            "optimiser": device_bytes(train.opt_state),
            "critic and its optimiser": device_bytes((train.critic, train.critic_opt_state)),
            "reference": device_bytes(train.reference),
            "rollout parameters": device_bytes(rollout),
            **_cache_bytes(model, decode.cache),
            **_frozen_bytes(cfg, spec, mesh),
        }


def _frozen_bytes(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Weights and caches of the engines that play roles."""
    sizes = {}
    for path, (names, config, context) in frozen_engines(cfg).items():
        frozen = hf.read_spec(path, cfg.model) if path else spec
        frozen.check_context(context)
        model = LanguageModel(frozen, config.cache_dtype)
        weights = jax.eval_shape(model.place, model_params.abstract(frozen, mesh, sharding.TRAIN))
        called = f"roles {', '.join(names)}"
        sizes[f"{called}: parameters"] = device_bytes(weights)
        decode = _decode_state(config, context, cfg.numerics == "exact", model)
        sizes |= {f"{called}: {what}": size for what, size in _cache_bytes(model, decode.cache).items()}
    return sizes


def _cache_bytes(model: LanguageModel, cache: Tree) -> dict[str, int]:
    """Pages and, of recurrent blocks, memories."""

    def bytes_of(memories: bool) -> int:
        return device_bytes(jax.tree.map(lambda own, x: x if own == memories else None, model.in_memories, cache))

    return {"kv cache": bytes_of(False), "memories": bytes_of(True)}


def abstract_state(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh) -> state.TrainState:
    """The learner's state as abstract arrays. Call under `jax.set_mesh(mesh)`."""
    policy = model_params.abstract(spec, mesh, sharding.TRAIN)
    adapters = None
    if cfg.model.lora:
        adapters = model_params.abstract_of(lora.adapter_specs(spec, cfg.model.lora), mesh, sharding.TRAIN)
    shapes = jax.eval_shape(functools.partial(first_state, cfg), policy, adapters)
    return jax.tree.map(lambda x: _abstract(x.shape, x.dtype, mesh, x.sharding.spec if x.sharding else jax.P()), shapes)


def compile_all(
    cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, learner: Programs, report: Callable[[Program], None]
) -> list[Program]:
    """Compiles the large programs of a run: update, scoring, prefill, decode. `report` hears of each as it is done.

    `learner` is what `learner.programs.describe` gave for the same config.
    """
    programs: list[Program] = []

    def add(name: str, function: Any, *arguments: Any) -> None:
        programs.append(_compile(name, function, *arguments))
        report(programs[-1])

    with jax.set_mesh(mesh):
        train, update = abstract_state(cfg, spec, mesh), learner.update
        rows = jax.P(sharding.ROWS)
        batch = jax.tree.map(lambda x: _abstract(x.shape, x.dtype, mesh, rows), learner.packer.empty())
        temperature = _abstract((), jnp.float32, mesh, jax.P())
        trained = [("policy", update.policy, train.params, train.opt_state, train.frozen)]
        if update.critic is not None:
            trained.append(("critic", update.critic, train.critic, train.critic_opt_state, None))
        for name, trainable, params, opt_state, frozen in trained:
            grads, tally = jax.eval_shape(trainable.zeros, params, batch, temperature, frozen)
            gradient = (params, batch, temperature, grads, tally, frozen)
            add(f"{name}: gradient of a micro-batch", trainable.accumulate, *gradient)
            add(f"{name}: optimiser update", trainable.apply, params, opt_state, train.step, grads, tally)
        if train.frozen is not None:
            carried = lora.carried(train.frozen.base, train.params, cfg.model.lora)
            add("policy: adapters into weights", lora.products, carried, cfg.model.compute_dtype)
        if cfg.rl.kl is not None:
            weights = train.reference if train.frozen is None else train.frozen.base
            add("reference: log-probs", learner.logprobs.program, weights, batch, temperature)
        _compile_engine(cfg, spec, mesh, train.policy, add)
    return programs


def _compile_engine(
    cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, params: Tree, add: Callable[..., None]
) -> None:
    is_exact, records = cfg.numerics == "exact", replays_routing(cfg, spec)
    model = LanguageModel(spec, cfg.engine.cache_dtype, exact=is_exact, records=records)
    add("engine: take new weights", jax.jit(model.place), params)
    rollout = jax.eval_shape(model.place, params)
    decode = _decode_state(cfg.engine, cfg.env.context_tokens, cfg.numerics == "exact", model)
    sizes = Sizes.of(cfg.engine, cfg.env.context_tokens, cfg.numerics == "exact", model)
    tables = _abstract((sizes.all_slots, sizes.table), jnp.int32, mesh, jax.P())
    rows = _abstract((sizes.prefill_tiles, sizes.tile_rows * sizes.shards), jnp.int32, mesh, jax.P())
    count = _abstract((), jnp.int32, mesh, jax.P())
    own = _abstract((rows.shape[0], rows.shape[1] // sizes.share), jnp.int32, mesh, jax.P())
    name = f"engine: prefill {sizes.prefill_rows * sizes.shards} tokens"
    add(name, engine.prefill, model, rollout, decode, tables, rows, rows, own, count)
    stops = functions.StopTables(
        _abstract((cfg.engine.stop_states, spec.padded_vocab_size), jnp.int16, mesh, jax.P()),
        _abstract((spec.padded_vocab_size,), jnp.bool_, mesh, jax.P()),
    )
    static = (cfg.engine.steps_per_dispatch, False)  # training samples from the whole vocabulary
    lanes = _abstract((sizes.slots // sizes.tile_rows, sizes.tile_rows * sizes.shards), jnp.int32, mesh, jax.P())
    add(
        f"engine: decode {cfg.engine.slots} slots",
        engine.generate,
        model,
        rollout,
        stops,
        decode,
        tables,
        lanes,
        count,
        *static,
    )


def device_bytes(tree: Tree) -> int:
    """Bytes that the arrays of a tree take on one device."""

    def leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
        # A scalar made without an input has no sharding: it is on every device.
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _decode_state(cfg: EngineConfig, context: int, exact: bool, model: LanguageModel) -> functions.DecodeState:
    s = Sizes.of(cfg, context, exact, model)
    counts = s.all_slots, s.pages * s.shards, s.page_tokens, s.memories * s.shards
    return jax.eval_shape(lambda: functions.init_state(model, *counts))


def _abstract(shape: tuple[int, ...], dtype: Any, mesh: jax.sharding.Mesh, spec: jax.P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def _compile(name: str, function: Any, *arguments: Any) -> Program:
    started = time.monotonic()
    lowered = function.lower(*arguments)
    try:
        flops = (lowered.cost_analysis() or {}).get("flops")
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        flops = None  # from jax 0.11 on, a compiler without its chip counts none
    memory = lowered.compile().memory_analysis()
    return Program(
        name,
        time.monotonic() - started,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        None if flops is None else float(flops),
    )
