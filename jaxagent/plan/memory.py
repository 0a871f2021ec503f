"""`model.remat = "auto"`: the setting that computes least again and fits a device's memory, from shapes alone.

jax says what its backward pass keeps under each setting, as shapes: no program is compiled and nothing allocated.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.config import Config
from jaxagent.learner import forward, peers
from jaxagent.learner.programs import describe
from jaxagent.models import sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.plan import programs
from jaxagent.runs.checks import check, model_spec

SETTINGS = ("none", "products", "dots", "attention", "layer")  # in the order of what is computed again
USABLE = 0.85  # of the memory; the rest is for logits, one layer's work and what the allocator cannot use


def for_devices(cfg: Config) -> Config:
    """The config of a run with a setting for "auto", the same in all processes. Raises ConfigError as `check`."""
    if cfg.model.remat == "auto":
        check(cfg)
        mesh = sharding.make_mesh(cfg.mesh)
        cfg = resolved(cfg, model_spec(cfg), mesh, device_bytes(mesh))
        if peers.count() > 1:
            peers.agree("what model.remat=auto is", cfg.model.remat)
    return cfg


def resolved(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, device_bytes: float) -> Config:
    """The config with a setting in place of "auto"; where none fits, with that which keeps least."""
    if cfg.model.remat != "auto":
        return cfg
    free = USABLE * device_bytes - sum(programs.resident_bytes(cfg, spec, mesh).values())
    fitting = (r for r in SETTINGS if gradient_bytes(cfg, dataclasses.replace(spec, remat=r), mesh) <= free)
    choice = next(fitting, SETTINGS[-1])
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, remat=choice))


def gradient_bytes(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh) -> int:
    """Bytes on one device that a micro-batch's gradient needs beside what stays: kept values, and gradients twice.

    Gradients are there once in float32, where they add up, and once as backward makes them.
    """
    with jax.set_mesh(mesh):
        train = programs.abstract_state(cfg, spec, mesh)
        rows, empty = jax.NamedSharding(mesh, jax.P(sharding.ROWS)), describe(cfg, spec, mesh).packer.empty()
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), empty)
        logprobs = forward.policy_forward(spec, adapters=cfg.model.lora)

        def backward(params: Any, batch: Any, frozen: Any) -> Any:
            return jax.vjp(lambda p: logprobs(p, batch, jnp.float32(1), frozen)[0], params)[1]

        kept = programs.device_bytes(jax.eval_shape(backward, train.params, batch, train.frozen))
        gradients = train.params, jax.tree.map(lambda x: x.update(dtype=jnp.float32), train.params)
        stays = train.params if train.frozen is None else (train.params, train.frozen.base)
        # Weights are among what backward reads.
        return max(kept - programs.device_bytes(stays), 0) + programs.device_bytes(gradients)


def device_bytes(mesh: jax.sharding.Mesh) -> float:
    """Memory of one device of the mesh that this process may use; of virtual CPU devices the machine's, in parts."""
    limit = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(mesh.local_devices)
