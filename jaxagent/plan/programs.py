"""The run's own programs, lowered and compiled from abstract arrays: what each holds on one device.

Config and model spec in -> `Plan` parts: bytes of the arrays that stay (parameters, optimiser, cache, ...) and the
compiler's account of each program. The mesh may be of virtual CPU devices or of a GPU topology without a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.algorithms import presets
from jaxagent.config import Config
from jaxagent.engine import functions
from jaxagent.engine.executor import Sizes
from jaxagent.engine.lm import LanguageModel
from jaxagent.learner import forward, state
from jaxagent.learner.batch import Batch
from jaxagent.learner.loss import Objective, value_bins
from jaxagent.learner.optimizer import make_optimizer
from jaxagent.learner.programs import keeps_reference, merger, tiling
from jaxagent.learner.update import make_update
from jaxagent.models import critic as critic_model
from jaxagent.models import lora, sharding
from jaxagent.models import params as model_params
from jaxagent.models.spec import ModelSpec

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
        model = LanguageModel(spec, cfg.engine.cache_dtype)
        rollout = jax.eval_shape(model.place, train.policy)
        decode = _decode_state(cfg, model)
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
            "kv cache": device_bytes(decode.cache),
        }


def abstract_state(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh) -> state.TrainState:
    """The learner's state as abstract arrays. Call under `jax.set_mesh(mesh)`."""
    params = trained = model_params.abstract(spec, mesh, sharding.TRAIN)
    frozen = None
    if cfg.model.lora.rank:
        trained = model_params.abstract_of(lora.adapter_specs(spec, cfg.model.lora), mesh, sharding.TRAIN)
        frozen = state.Frozen(params, jax.eval_shape(merger(cfg), params, trained))
    optimizer = make_optimizer(cfg.rl.optimizer, cfg.rl.steps)
    critic = critic_optimizer = None
    if presets.needs_critic(cfg.rl):
        bins = value_bins(cfg.rl)
        critic = jax.eval_shape(lambda params: critic_model.from_policy(params, bins.bins if bins else 0), params)
        critic_optimizer = make_optimizer(cfg.rl.critic.optimizer, cfg.rl.steps)
    made = jax.eval_shape(
        lambda trained, critic: state.init_state(trained, optimizer, critic, critic_optimizer, keeps_reference(cfg)),
        trained,
        critic,
    )
    return made.replace(frozen=frozen)


def compile_all(
    cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, empty: Batch, report: Callable[[Program], None]
) -> list[Program]:
    """Compiles the large programs of a run: update, scoring, prefill, decode. `report` hears of each as it is done.

    `empty` is a micro-batch of padding: it says the shapes.
    """
    done: list[Program] = []

    def add(name: str, function: Any, *arguments: Any) -> None:
        done.append(_compile(name, function, *arguments))
        report(done[-1])

    with jax.set_mesh(mesh):
        train = abstract_state(cfg, spec, mesh)
        batch = jax.tree.map(lambda x: _abstract(x.shape, x.dtype, mesh, jax.P(sharding.ROWS)), empty)
        temperature = _abstract((), jnp.float32, mesh, jax.P())
        ppo = train.critic is not None
        update = make_update(
            forward.policy_forward(spec, tiling(cfg), cfg.model.lora, log_z=cfg.rl.z_coefficient != 0),
            Objective.of(cfg.rl),
            make_optimizer(cfg.rl.optimizer, cfg.rl.steps),
            mesh,
            forward.value_forward(spec) if ppo else None,
            make_optimizer(cfg.rl.critic.optimizer, cfg.rl.steps) if ppo else None,
            merge=merger(cfg) if train.frozen is not None else None,
        )
        trained = [("policy", update.policy, train.params, train.opt_state, train.frozen)]
        if ppo:
            trained.append(("critic", update.critic, train.critic, train.critic_opt_state, None))
        for name, trainable, params, opt_state, frozen in trained:
            grads, tally = jax.eval_shape(trainable.zeros, params, batch, temperature, frozen)
            gradient = (params, batch, temperature, grads, tally, frozen)
            add(f"{name}: gradient of a micro-batch", trainable.accumulate, *gradient)
            add(f"{name}: optimiser update", trainable.apply, params, opt_state, train.step, grads, tally)
        if train.frozen is not None:
            carried = lora.carried(train.frozen.base, train.params, cfg.model.lora)
            add("policy: adapters into weights", lora.products, carried, cfg.model.compute_dtype)
        if presets.needs_reference(cfg.rl):
            score = jax.jit(forward.policy_forward(spec, tiling(cfg)))
            weights = train.reference if train.frozen is None else train.frozen.base
            add("reference: log-probs", score, weights, batch, temperature)
        _compile_engine(cfg, spec, mesh, train.policy, add)
    return done


def _compile_engine(
    cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, params: Tree, add: Callable[..., None]
) -> None:
    model = LanguageModel(spec, cfg.engine.cache_dtype)
    add("engine: take new weights", jax.jit(model.place), params)
    rollout = jax.eval_shape(model.place, params)
    decode = _decode_state(cfg, model)
    sizes = Sizes.of(cfg.engine, cfg.env.context_tokens, cfg.numerics == "exact")
    tables = _abstract((sizes.all_slots, sizes.table), jnp.int32, mesh, jax.P())
    rows = _abstract((sizes.prefill_tiles, sizes.tile_rows * sizes.shards), jnp.int32, mesh, jax.P())
    count = _abstract((), jnp.int32, mesh, jax.P())
    own = _abstract((rows.shape[0], rows.shape[1] // sizes.share), jnp.int32, mesh, jax.P())
    prefill = jax.jit(functions.prefill, static_argnums=0, donate_argnums=2)
    name = f"engine: prefill {sizes.prefill_rows * sizes.shards} tokens"
    add(name, prefill, model, rollout, decode, tables, rows, rows, own, count)
    states = 2 * sum(len(stop) for stop in ("</search>", "</answer>"))  # of the automaton, generously
    stops = functions.StopTables(
        _abstract((states, spec.padded_vocab_size), jnp.int16, mesh, jax.P()),
        _abstract((spec.padded_vocab_size,), jnp.bool_, mesh, jax.P()),
    )
    generate = jax.jit(functions.generate, static_argnums=(0, 7, 8), donate_argnums=3)
    static = (cfg.engine.steps_per_dispatch, sampling_is_truncated(cfg))
    lanes = _abstract((sizes.slots // sizes.tile_rows, sizes.tile_rows * sizes.shards), jnp.int32, mesh, jax.P())
    add(
        f"engine: decode {cfg.engine.slots} slots",
        generate,
        model,
        rollout,
        stops,
        decode,
        tables,
        lanes,
        count,
        *static,
    )


def sampling_is_truncated(cfg: Config) -> bool:
    """Whether training samples with top-p, top-k or min-p: the decode program then sorts."""
    sampling_config = cfg.rl.sampling
    return sampling_config.top_p < 1 or sampling_config.top_k > 0 or sampling_config.min_p > 0


def device_bytes(tree: Tree) -> int:
    """Bytes that the arrays of a tree take on one device."""

    def one(leaf: jax.ShapeDtypeStruct) -> int:
        # A scalar made without an input has no sharding: it is on every device.
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(one(leaf) for leaf in jax.tree.leaves(tree))


def _decode_state(cfg: Config, model: LanguageModel) -> functions.DecodeState:
    s = Sizes.of(cfg.engine, cfg.env.context_tokens, cfg.numerics == "exact")
    return jax.eval_shape(lambda: functions.init_state(model, s.all_slots, s.pages * s.shards, s.page_tokens))


def _abstract(shape: tuple[int, ...], dtype: Any, mesh: jax.sharding.Mesh, spec: jax.P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def _compile(name: str, function: Any, *arguments: Any) -> Program:
    started = time.monotonic()
    lowered = function.lower(*arguments)
    flops = None
    if jax.default_backend() == "cpu":
        analysis = lowered.cost_analysis() or {}
        flops = float(analysis["flops"]) if "flops" in analysis else None
    memory = lowered.compile().memory_analysis()
    return Program(
        name,
        time.monotonic() - started,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        flops,
    )
