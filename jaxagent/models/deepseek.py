"""Models that route as DeepSeek-V3 does: some dense layers, then experts beside one that every row goes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxagent.config import ConfigError
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.mlp import SwiGLU
from jaxagent.models.blocks.routing import Routing

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

# Keys of config.json that `layers_of` reads.
READS = """n_routed_experts num_experts_per_tok moe_intermediate_size norm_topk_prob n_group topk_group
    routed_scaling_factor n_shared_experts first_k_dense_replace"""
HARMLESS = {
    "num_nextn_predict_layers": "of layers beyond the last, which only speculative decoding runs",
    "num_mtp_layers": "of layers beyond the last, which only speculative decoding runs",
    "output_router_logits": "what transformers' forward pass hands back",
}
ROUTING = Routing(scores="sigmoid", bias=True, epsilon=1e-20)


def layers_of(
    hf: Mapping[str, Any], source: str, attention: LayerBlock, usual: Mapping[str, Any]
) -> list[tuple[LayerBlock, ...]]:
    """The blocks of each layer.

    Args:
      hf, source: a parsed config.json, and its name for ConfigErrors.
      attention: the first block of every layer.
      usual: what transformers takes for keys that are left out.
    """
    from jaxagent.models.hf_config import flag, integer, number  # it knows the families

    hf = {**usual, **{key: value for key, value in hf.items() if value is not None}}

    def size(key: str) -> int:
        return integer(hf, key, source=source)

    count = size("n_routed_experts")
    groups, active, best = size("n_group"), size("num_experts_per_tok"), size("topk_group")
    if count % groups or count // groups < 2 or best > groups or active > count // groups * best:
        raise ConfigError(
            f"{source}: num_experts_per_tok={active} of topk_group={best} of n_group={groups} groups of two or more of "
            f"n_routed_experts={count} is not possible."
        )
    routing = dataclasses.replace(
        ROUTING,
        count=count,
        active=active,
        renormalise=flag(hf, "norm_topk_prob", source),
        groups=groups,
        active_groups=best,
        scale=number(hf, "routed_scaling_factor", source),
    )
    dense = hf["first_k_dense_replace"]
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise ConfigError(f"{source}: first_k_dense_replace must be a whole number from 0 on, not {dense!r}.")
    experts = Experts(routing, size("moe_intermediate_size"), shared=size("n_shared_experts"))
    return [(attention, SwiGLU() if layer < dense else experts) for layer in range(size("num_hidden_layers"))]


def settings_of(spec: ModelSpec) -> dict[str, Any]:
    """What `layers_of` reads."""
    second = [spec.pattern[i % len(spec.pattern)][1] for i in range(spec.num_layers)]
    experts = next((block for block in second if isinstance(block, Experts)), Experts(ROUTING, shared=1))
    routing = experts.routing
    return {
        "n_routed_experts": routing.count,
        "num_experts_per_tok": routing.active,
        "moe_intermediate_size": experts.width(spec),
        "norm_topk_prob": routing.renormalise,
        "n_group": routing.groups,
        "topk_group": routing.active_groups,
        "routed_scaling_factor": routing.scale,
        "n_shared_experts": experts.shared,
        "first_k_dense_replace": sum(isinstance(block, SwiGLU) for block in second),
        "num_nextn_predict_layers": 0,  # none are exported
    }
