"""Layers of attention and of gated delta nets in turn, as Qwen3-Next and Qwen3.5 have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxagent.config import ConfigError
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.blocks.attention import Attention
from jaxagent.models.blocks.delta import DeltaNet

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
