"""The dry run's account of adapters: the base once and frozen, optimiser and gradients for adapters alone."""

import dataclasses

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.models import sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.plan import costs, programs, run


def test_bytes_by_hand():
    cfg = config.parse(get_config("laptop-lora"))
    lora = config.LoraConfig(rank=4, alpha=8.0, rank_stabilised=False, targets="q_proj,down_proj")
    model = dataclasses.replace(cfg.model, lora=lora, compute_dtype="bfloat16")
    kl = config.KLConfig(0.1)
    cfg = dataclasses.replace(
        cfg, model=model, rl=dataclasses.replace(cfg.rl, kl=kl), mesh=config.MeshConfig(1, 2, 2, 1)
    )  # fmt: skip
    spec = ModelSpec.from_config(cfg.model, 3072)
    resident = programs.resident_bytes(cfg, spec, sharding.make_mesh(cfg.mesh))
    e, h, d, f, layers = 128, 4, 32, 384, 3
    # A of q and B of down are split over fsdp, B of q and A of down over tensor: all in two.
    adapters = layers * 4 * (e + h * d + f + e) * 4 // 2
    assert resident["adapters"] == adapters
    assert resident["optimiser"] == pytest.approx(2 * adapters, abs=16)
    assert resident["merged parameters"] == layers * (e * h * d + f * e) * 2 // 4  # bfloat16, over four devices
    assert resident["reference"] == 0
    full = dataclasses.replace(cfg, model=dataclasses.replace(model, lora=None))
    plain = programs.resident_bytes(full, spec, sharding.make_mesh(cfg.mesh))
    assert resident["parameters"] == plain["parameters"] == plain["reference"]
    assert (plain["adapters"], plain["merged parameters"]) == (0, 0)
    gradient = programs.Program("policy: gradient of a micro-batch", 0.0, 0, 0, 0, 7, None)
    assert run.transient_bytes(gradient, resident) == 7 + adapters
    assert run.transient_bytes(gradient, plain) == 7 + plain["parameters"]


def test_flops_by_hand():
    spec = ModelSpec.from_config(config.parse(get_config()).model, 3072)
    lora = config.LoraConfig(rank=4, alpha=8.0, rank_stabilised=False, targets="q_proj")
    tokens = 2 * 64
    frozen = costs.layer_matmul_params(spec)
    own = 3 * 4 * (128 + 128)
    saved = 2 * tokens * (frozen - 3 * own) + 2 * 3072 * 128 * 10
    assert costs.train_flops(spec, 2, 64, 5) - costs.train_flops(spec, 2, 64, 5, lora) == saved
