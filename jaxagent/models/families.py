"""The families of models: which blocks their layers have, in which order, and what transformers calls them.

A family of your own is named by its path, `--config.model.family=my_package.my_module:FAMILY`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxagent.config import ConfigError
from jaxagent.config.choice import object_at
from jaxagent.models import deepseek
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.blocks.attention import Attention
from jaxagent.models.blocks.delta import DeltaNet
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.mla import LatentAttention
from jaxagent.models.blocks.mlp import SwiGLU
from jaxagent.models.blocks.routing import Routing
from jaxagent.models.family import Family, Pattern, period_of

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec


# Keys of config.json that `mixers_of` reads, and the share of a head that turns.
READS = """layer_types full_attention_interval linear_num_key_heads linear_num_value_heads linear_key_head_dim
    linear_value_head_dim linear_conv_kernel_dim attn_output_gate partial_rotary_factor"""
HARMLESS = {
    "mtp_num_hidden_layers": "of layers beyond the last, which only speculative decoding runs",
    "mtp_use_dedicated_embeddings": "of layers beyond the last, which only speculative decoding runs",
    "mamba_ssm_dtype": "how other programs keep memories; here they are float32",
    "mrope_section": "of the positions of images; those of text are the same in all sections",
    "mrope_interleaved": "of the positions of images; those of text are the same in all sections",
}
# Beginnings of the names of weights that no log-prob of text needs.
SKIPS = ("model.visual.", "mtp.")
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25}
ATTENTION = Attention(qk_norm=True, gated=True)
_KINDS = ("linear_attention", "full_attention")


def every_fourth(delta: DeltaNet, feed_forward: LayerBlock) -> tuple[tuple[LayerBlock, ...], ...]:
    """The blocks of four layers as released: attention in the last of them."""
    return (*[(delta, feed_forward)] * 3, (ATTENTION, feed_forward))


def mixers_of(hf: Mapping[str, Any], source: str, grouped: bool) -> list[LayerBlock]:
    """The first block of each layer, by `layer_types`, or else by `full_attention_interval`.

    Args:
      hf, source: a parsed config.json, and its name for ConfigErrors.
      grouped: see `DeltaNet`.
    """
    from jaxagent.models.hf_config import integer  # it knows the families

    def size(key: str, default: int) -> int:
        return integer(hf, key, default, source=source)

    heads, groups = size("linear_num_value_heads", 32), size("linear_num_key_heads", 16)
    if heads % groups:
        raise ConfigError(f"{source}: linear_num_value_heads={heads} is no multiple of linear_num_key_heads={groups}.")
    if hf.get("attn_output_gate") not in (True, None):
        raise ConfigError(f"{source}: attn_output_gate={hf['attn_output_gate']!r} is not supported, only true.")
    if size("linear_conv_kernel_dim", 4) < 2:
        raise ConfigError(f"{source}: linear_conv_kernel_dim=1, a convolution of one token, is not supported.")
    dims = size("linear_key_head_dim", 128), size("linear_value_head_dim", 128)
    delta = DeltaNet(groups, heads, *dims, size("linear_conv_kernel_dim", 4), grouped)
    layers, every, types = size("num_hidden_layers", 1), size("full_attention_interval", 4), hf.get("layer_types")
    if types is None:
        types = [_KINDS[(i + 1) % every == 0] for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in _KINDS for kind in types):
        raise ConfigError(f"{source}: layer_types must say {' or '.join(_KINDS)} for each of the {layers} layers.")
    return [(delta, ATTENTION)[_KINDS.index(kind)] for kind in types]


def settings_of(spec: ModelSpec) -> dict[str, Any]:
    """What `mixers_of` reads, and the share of a head that RoPE turns, which is not 1 where it is left out."""
    mixers = [spec.pattern[i % len(spec.pattern)][0] for i in range(spec.num_layers)]
    delta = next((mixer for mixer in mixers if isinstance(mixer, DeltaNet)), DeltaNet())
    key_heads, heads, key, value = delta.sizes(spec)
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
        "linear_conv_kernel_dim": delta.kernel,
        "layer_types": [_KINDS[isinstance(mixer, Attention)] for mixer in mixers],
        "partial_rotary_factor": spec.partial_rotary_factor,
    }


class EveryFewPositions(Family):
    """SmolLM3: some layers, every fourth as released, have no RoPE."""

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """A layer has RoPE where `no_rope_layers` has a 1."""
        layers, every = hf["num_hidden_layers"], hf.get("no_rope_layer_interval")
        if (rotary := hf.get("no_rope_layers")) is None and isinstance(every, int) and every > 0:
            rotary = [int((layer + 1) % every > 0) for layer in range(layers)]
        if not isinstance(rotary, list) or len(rotary) < layers or any(one not in (0, 1) for one in rotary):
            raise ConfigError(
                f"{source}: no_rope_layers must say 1 or 0 for each of the {layers} layers, or no_rope_layer_interval "
                f"be a whole number from 1 on. They are {str(rotary)[:80]} and {every!r}."
            )
        return period_of([(Attention(rotary=bool(one)), SwiGLU()) for one in rotary[:layers]])

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """`no_rope_layers`, which goes before an interval."""
        rotary = [int(blocks[0].rotary) for blocks in spec.pattern]
        return {"no_rope_layers": rotary * (spec.num_layers // len(rotary))}


@dataclasses.dataclass(frozen=True)
class Mixture(Family):
    """Qwen3-MoE: layers with experts, and with one feed-forward block where config.json says so."""

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """The shortest that the layers repeat."""
        attention, _ = self.pattern[0]
        return period_of([(attention, block) for block in self.feed_forwards(hf, source)])

    def feed_forwards(self, hf: Mapping[str, Any], source: str) -> list[LayerBlock]:
        """The second block of each layer."""
        from jaxagent.models.hf_config import flag, integer  # it knows the families

        def size(key: str, default: int) -> int:
            return integer(hf, key, default, source=source)

        layers, step, dense = size("num_hidden_layers", 1), size("decoder_sparse_step", 1), hf.get("mlp_only_layers")
        if dense is not None and not (isinstance(dense, list) and all(layer in range(layers) for layer in dense)):
            raise ConfigError(
                f"{source}: mlp_only_layers must be a list of the {layers} layers' numbers, not {dense!r}."
            )
        count = size("num_experts", size("num_local_experts", 128))
        if "num_local_experts" in hf and size("num_local_experts", count) != count:
            raise ConfigError(f"{source}: num_experts and num_local_experts differ. Keep one of them.")
        active = size("num_experts_per_tok", 8)
        if active > count:
            raise ConfigError(f"{source}: num_experts_per_tok={active} of {count} experts.")
        renormalise = flag(hf, "norm_topk_prob", source)
        experts = Experts(Routing(count, active, renormalise), size("moe_intermediate_size", 768))
        return [SwiGLU() if i in (dense or ()) or (i + 1) % step else experts for i in range(layers)]

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """The experts' settings, and the layers without any."""
        second = [blocks[1] for blocks in spec.pattern]
        dense = [i for i in range(spec.num_layers) if isinstance(second[i % len(second)], SwiGLU)]
        experts = next((block for block in second if isinstance(block, Experts)), Experts())
        return {
            "num_experts": experts.routing.count,
            "num_experts_per_tok": experts.routing.active,
            "moe_intermediate_size": experts.width(spec),
            "norm_topk_prob": experts.routing.renormalise,
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
        }


class Olmoe(Mixture):
    """OLMoE: all layers have experts, as wide as config.json's `intermediate_size`."""

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """One layer's."""
        plain = hf["hidden_size"] // hf["num_attention_heads"]
        if hf.get("head_dim") not in (None, plain):  # its norms of all heads have the other size
            raise ConfigError(f"{source}: head_dim must be hidden_size / num_attention_heads, {plain}.")
        return super().pattern_of(dict(hf) | {"moe_intermediate_size": hf.get("intermediate_size")}, source)

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """The experts' settings."""
        settings = super().settings_of(spec)
        return {key: settings[key] for key in settings if key in self.reads} | {
            "intermediate_size": settings["moe_intermediate_size"]
        }


class Hybrid(Family):
    """Qwen3.5: attention in some layers, every fourth as released, gated delta nets in the others."""

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """The shortest that the layers repeat."""
        mixers = mixers_of(hf, source, self.pattern[0][0].grouped)
        return period_of(list(zip(mixers, self.feed_forwards(hf, source), strict=True)))

    def feed_forwards(self, hf: Mapping[str, Any], source: str) -> list[LayerBlock]:
        """The second block of each layer."""
        return [SwiGLU()] * hf["num_hidden_layers"]

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """What `pattern_of` reads."""
        return settings_of(spec)


class HybridMixture(Hybrid, Mixture):
    """Qwen3-Next and Qwen3.5-MoE: with experts, beside which stands one that every token goes to, weighed by a gate."""

    def feed_forwards(self, hf: Mapping[str, Any], source: str) -> list[LayerBlock]:
        """The second block of each layer."""
        from jaxagent.models.hf_config import integer

        read = {key: value for key, value in hf.items() if key in self.reads or key not in _MIXTURE.split()}
        blocks = Mixture.feed_forwards(self, {"norm_topk_prob": True, "moe_intermediate_size": 512} | read, source)
        shared = integer(hf, "shared_expert_intermediate_size", 512, source=source)
        beside = {"shared": 1, "shared_dim": shared, "shared_gate": True}
        return [dataclasses.replace(block, **beside) if isinstance(block, Experts) else block for block in blocks]

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """What `pattern_of` reads."""
        experts = next((block for _, block in spec.pattern if isinstance(block, Experts)), _SHARED)
        settings = settings_of(spec) | Mixture.settings_of(self, spec)
        settings["shared_expert_intermediate_size"] = experts.shared_width(spec)
        return {key: value for key, value in settings.items() if key in self.reads}


_SHARED = Experts(shared=1, shared_gate=True)
_MIXTURE = """num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob mlp_only_layers
    decoder_sparse_step"""
_ROUTERS = {
    "output_router_logits": "what transformers' forward pass hands back",
    "router_aux_loss_coef": "of a loss that only transformers' own trainer adds",
}
_NO_WINDOW = "read only where use_sliding_window is true, which is refused"
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            ((Attention(qkv_bias=True), SwiGLU()),),
            defaults={"num_key_value_heads": 32},
            harmless={"sliding_window": _NO_WINDOW, "max_window_layers": _NO_WINDOW},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            ((Attention(qk_norm=True), SwiGLU()),),
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            harmless={"sliding_window": _NO_WINDOW, "max_window_layers": _NO_WINDOW},
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            ((Attention(), SwiGLU()),),
            norm_eps=1e-5,
            harmless={"pretraining_tp": "how Llama 2's training split its products, which are the same"},
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            ((Attention(), SwiGLU()),),
            norm_eps=1e-5,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
        EveryFewPositions(
            "smollm3",
            "SmolLM3ForCausalLM",
            (*[(Attention(), SwiGLU())] * 3, (Attention(rotary=False), SwiGLU())),
            defaults={
                "num_key_value_heads": 4,
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
                "no_rope_layer_interval": 4,
            },
            reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
            harmless={"sliding_window": _NO_WINDOW, "max_window_layers": _NO_WINDOW},
        ),
        Family(
            "olmo2",
            "Olmo2ForCausalLM",
            ((Attention(wide_qk_norm=True, post_norm=True), SwiGLU(post_norm=True)),),
            defaults={"rms_norm_eps": 1e-5},
        ),
        Mixture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            ((Attention(qk_norm=True), Experts()),),
            defaults={"num_key_value_heads": 4},
            reads=frozenset(_MIXTURE.split()),
            harmless={"sliding_window": _NO_WINDOW, "max_window_layers": _NO_WINDOW} | _ROUTERS,
        ),
        HybridMixture(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            every_fourth(DeltaNet(grouped=True), _SHARED),
            zero_centred_norms=True,
            defaults=DEFAULTS | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
            reads=frozenset(f"{READS} {_MIXTURE} shared_expert_intermediate_size".split()),
            harmless=_ROUTERS | HARMLESS,
            skips=SKIPS,
        ),
        Hybrid(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            every_fourth(DeltaNet(), SwiGLU()),
            zero_centred_norms=True,
            defaults=DEFAULTS | {"num_key_value_heads": 4},
            reads=frozenset(READS.split()),
            harmless=HARMLESS,
            skips=SKIPS,
        ),
        HybridMixture(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            every_fourth(DeltaNet(), _SHARED),
            zero_centred_norms=True,
            defaults=DEFAULTS | {"num_experts": 256, "intermediate_size": 512},
            reads=frozenset(
                f"{READS} num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size".split()
            ),
            harmless=_ROUTERS | HARMLESS,
            skips=SKIPS,
        ),
        Olmoe(
            "olmoe",
            "OlmoeForCausalLM",
            ((Attention(wide_qk_norm=True), Experts(Routing(renormalise=False))),),
            norm_eps=1e-5,
            defaults={"rms_norm_eps": 1e-5, "num_experts": 64},
            reads=frozenset(["num_experts", "num_experts_per_tok", "norm_topk_prob"]),
            harmless=_ROUTERS,
        ),
        deepseek.Glm4Moe(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            ((Attention(), Experts(deepseek.ROUTING, shared=1)),),
            norm_eps=1e-5,
            defaults=deepseek.DEFAULTS["glm4_moe"],
            reads=frozenset(
                f"{deepseek.READS} first_k_dense_replace attention_bias use_qk_norm partial_rotary_factor".split()
            ),
            harmless=deepseek.HARMLESS,
        ),
        deepseek.Latent(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            ((LatentAttention(), Experts(deepseek.ROUTING, shared=1)),),
            defaults=deepseek.DEFAULTS["deepseek_v3"],
            reads=frozenset(f"{deepseek.READS} {deepseek.READS_LATENT} first_k_dense_replace".split()),
            harmless=deepseek.HARMLESS | deepseek.HARMLESS_LATENT,
        ),
        deepseek.Latent(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            ((LatentAttention(), Experts(deepseek.ROUTING, shared=1)),),
            norm_eps=1e-5,
            defaults=deepseek.DEFAULTS["glm4_moe_lite"],
            reads=frozenset(f"{deepseek.READS} {deepseek.READS_LATENT} mlp_layer_types".split()),
            harmless=deepseek.HARMLESS | deepseek.HARMLESS_LATENT,
        ),
    )
}


def family_of(name: str) -> Family:
    """One of `FAMILIES`, or yours as "package.module:FAMILY".

    Raises:
      ConfigError: there is none.
    """
    family = object_at(name, "config.model.family") if ":" in name else FAMILIES.get(name)
    if not isinstance(family, Family):
        raise ConfigError(
            f"config.model.family must be one of {', '.join(FAMILIES)}, or a Family of yours as package.module:NAME; "
            f"without a model.path it cannot be left out. It is {name!r}."
        )
    return family
