"""Models that route as DeepSeek-V3 does: some dense layers, then experts beside one that every row goes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxagent.config import ConfigError
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.blocks.attention import Attention
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.mla import LatentAttention
from jaxagent.models.blocks.mlp import SwiGLU
from jaxagent.models.blocks.routing import Routing
from jaxagent.models.family import Family, Pattern, period_of

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

# Keys of config.json that `layers_of` reads, with first_k_dense_replace or mlp_layer_types; and `latent_attention`.
READS = """n_routed_experts num_experts_per_tok moe_intermediate_size norm_topk_prob n_group topk_group
    routed_scaling_factor n_shared_experts"""
READS_LATENT = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave"
HARMLESS_LATENT = {"pretraining_tp": "how training split its products", "qk_head_dim": "the sum of two others"}
HARMLESS = {
    "num_nextn_predict_layers": "of layers beyond the last, which only speculative decoding runs",
    "num_mtp_layers": "of layers beyond the last, which only speculative decoding runs",
    "output_router_logits": "what transformers' forward pass hands back",
}
# What transformers takes for keys that a config.json leaves out.
DEFAULTS = {
    "glm4_moe": dict(
        num_key_value_heads=8, rms_norm_eps=1e-05, partial_rotary_factor=0.5, moe_intermediate_size=1408,
        num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128, routed_scaling_factor=1.0, n_group=1,
        topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
    ),
    "deepseek_v3": dict(
        num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, num_key_value_heads=128, moe_intermediate_size=2048, num_experts_per_tok=8,
        n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, n_group=8, topk_group=4,
        first_k_dense_replace=3, norm_topk_prob=True,
    ),
    "glm4_moe_lite": dict(
        num_attention_heads=20, num_key_value_heads=20, rms_norm_eps=1e-05, q_lora_rank=768, kv_lora_rank=512,
        qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, moe_intermediate_size=1536,
        num_experts_per_tok=4, n_shared_experts=1, n_routed_experts=64, routed_scaling_factor=1.8, n_group=1,
        topk_group=1, norm_topk_prob=True,
    ),
}  # fmt: skip
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
    layers, dense, types = size("num_hidden_layers"), hf.get("first_k_dense_replace", 1), hf.get("mlp_layer_types")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise ConfigError(f"{source}: first_k_dense_replace must be a whole number from 0 on, not {dense!r}.")
    if types is None:
        types = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    if not isinstance(types, list) or len(types) < layers or any(kind not in ("dense", "sparse") for kind in types):
        raise ConfigError(
            f"{source}: mlp_layer_types must say 'dense' or 'sparse' for each of the {layers} layers, not "
            f"{str(types)[:80]}."
        )
    experts = Experts(routing, size("moe_intermediate_size"), shared=size("n_shared_experts"))
    return [(attention, SwiGLU() if kind == "dense" else experts) for kind in types[:layers]]


def latent_attention(hf: Mapping[str, Any], source: str, usual: Mapping[str, Any]) -> LatentAttention:
    """The attention that a config.json describes; arguments as those of `layers_of`."""
    from jaxagent.models.hf_config import flag, integer, number

    def size(key: str) -> int:
        return integer(hf, key, usual[key], source=source)

    heads = size("num_attention_heads")
    if integer(hf, "num_key_value_heads", heads, source=source) != heads:
        raise ConfigError(f"{source}: num_key_value_heads must be the {heads} num_attention_heads in latent attention.")
    turning = size("qk_rope_head_dim")
    if turning % 2 or hf.get("head_dim") not in (None, turning):
        raise ConfigError(
            f"{source}: qk_rope_head_dim={turning} must be even, and head_dim the same. It is {hf.get('head_dim')!r}."
        )
    section = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    scaled = section.get("rope_type", section.get("type", "default")) != "default" and section.get("mscale_all_dim")
    return LatentAttention(
        query_rank=0 if hf.get("q_lora_rank") is None else size("q_lora_rank"),
        rank=size("kv_lora_rank"),
        plain_dim=size("qk_nope_head_dim"),
        value_dim=size("v_head_dim"),
        interleaved=flag(hf, "rope_interleave", source, True),
        mscale=number(section, "mscale_all_dim", source) if scaled else 0.0,
    )


def latent_settings_of(spec: ModelSpec) -> dict[str, Any]:
    """What `latent_attention` reads, and `layers_of`."""
    attention, _ = spec.pattern[0]
    return settings_of(spec) | {
        "q_lora_rank": attention.query_rank or None,
        "kv_lora_rank": attention.rank,
        "qk_nope_head_dim": attention.plain_dim,
        "qk_rope_head_dim": spec.head_dim,
        "v_head_dim": attention.value_dim,
        "rope_interleave": attention.interleaved,
    }


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
        "mlp_layer_types": ["dense" if isinstance(block, SwiGLU) else "sparse" for block in second],
        "num_nextn_predict_layers": 0,  # none are exported
    }


class LikeDeepSeek(Family):
    """A family that routes as DeepSeek-V3 does."""

    def _own(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings without those for which the family has another key."""
        return {key: value for key, value in settings.items() if key in self.reads or key in self.harmless}


class Glm4Moe(LikeDeepSeek):
    """GLM-4.5 and its successors: a part of each head turns, and experts are routed as in DeepSeek-V3."""

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """The first layers dense, then experts."""
        from jaxagent.models.hf_config import flag

        attention = Attention(flag(hf, "attention_bias", source), flag(hf, "use_qk_norm", source))
        return period_of(layers_of(hf, source, attention, self.defaults))

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """The settings of attention and of the experts, and how many layers come before them."""
        attention, _ = spec.pattern[0]
        return self._own(settings_of(spec)) | {
            "attention_bias": attention.qkv_bias,
            "use_qk_norm": attention.qk_norm,
            "partial_rotary_factor": spec.partial_rotary_factor,
        }


class Latent(LikeDeepSeek):
    """DeepSeek-V3, and GLM-4.7-Flash beside it: latent attention."""

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """The first layers dense, then experts."""
        attention = latent_attention(hf, source, self.defaults)
        return period_of(layers_of(hf, source, attention, self.defaults))

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """The settings of attention and of the experts, and which layers have these."""
        return self._own(latent_settings_of(spec)) | {"num_key_value_heads": spec.num_heads}

    def scaling_of(self, spec: ModelSpec) -> dict[str, Any]:
        """How much it sharpens attention."""
        attention, _ = spec.pattern[0]
        return {"mscale_all_dim": attention.mscale} if attention.mscale else {}
