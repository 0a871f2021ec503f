"""Grouped-query attention with rotary positions: the block of every dense family."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxagent.models import rope, sharding
from jaxagent.models.attention import LayerCache
from jaxagent.models.blocks import FlatRows, LayerBlock
from jaxagent.models.layers import contract, contract_each, gain, rms_norm
from jaxagent.models.params import ArraySpec, Layers, block_norm, matrix, vector

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

PAGES = jax.P(sharding.FLAT, "tensor", None, None)  # how keys and values are split


@dataclasses.dataclass(frozen=True)
class Attention(LayerBlock):
    """attention(rms_norm(x)), or rms_norm(attention(x)).

    See Ainslie et al., grouped-query attention (https://arxiv.org/abs/2305.13245).
    Its state is a `LayerCache`: rotated keys [P, K, D, page_tokens], the layout in which a CPU multiplies them fastest,
    and values [P, K, page_tokens, D]. Nothing is ever cleared: a position is always written before it is attended.
    """

    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head of q and k
    wide_qk_norm: bool = False  # RMSNorm on all heads of q together, and on those of k
    rotary: bool = True  # RoPE; without it only the mask says where a token stands
    gated: bool = False  # what a head gives is multiplied by a sigmoid, which q's projection computes beside q
    post_norm: bool = False  # the norm behind the block instead of before it

    def arrays(self, spec: ModelSpec) -> dict[str, ArraySpec | None]:
        """The norm, the projections, and what the settings add."""
        embed, head = {"embed": spec.embed_dim}, {"head_dim": spec.head_dim}
        branch = spec.embed_init_std * (spec.num_heads * spec.head_dim) ** -0.5  # see `LayerBlock.arrays`
        q, kv = {"heads": spec.num_heads} | head, {"kv_heads": spec.num_kv_heads} | head

        def projection(name: str, outputs: dict[str, int]) -> ArraySpec:
            return matrix(f"self_attn.{name}_proj.weight", embed, outputs, spec.embed_dim**-0.5)

        def bias(name: str, outputs: dict[str, int]) -> ArraySpec | None:
            return vector(f"self_attn.{name}_proj.bias", outputs) if self.qkv_bias else None

        def head_norm(name: str) -> ArraySpec | None:
            sizes = {"q": q, "k": kv}[name] if self.wide_qk_norm else head
            normed = self.qk_norm or self.wide_qk_norm
            return (
                vector(f"self_attn.{name}_norm.weight", sizes, mean=1.0 - spec.zero_centred_norms) if normed else None
            )

        return {
            "attn_norm": block_norm(spec, "post_attention" if self.post_norm else "input", self.post_norm),
            "wq": projection("q", q | {"head_dim": spec.head_dim * (1 + self.gated)}),
            "wk": projection("k", kv),
            "wv": projection("v", kv),
            "bq": bias("q", q),
            "bk": bias("k", kv),
            "bv": bias("v", kv),
            "q_norm": head_norm("q"),
            "k_norm": head_norm("k"),
            "wo": matrix("self_attn.o_proj.weight", q, embed, branch),
        }

    def apply(
        self, layer: Layers, spec: ModelSpec, x: jax.Array, rows: FlatRows, state: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attention by `rows.attend`, which knows which keys a row sees and where they are kept."""
        h = x if self.post_norm else rms_norm(x, gain(layer.attn_norm, spec), spec.norm_eps)
        q, k, v = contract_each("ne,ehd->nhd", h, layer.wq, layer.wk, layer.wv)
        if self.gated:
            q, gate = jnp.split(q, 2, axis=-1)
        if self.qkv_bias:
            q, k, v = q + layer.bq, k + layer.bk, v + layer.bv
        if self.qk_norm or self.wide_qk_norm:
            gains = gain(layer.q_norm, spec), gain(layer.k_norm, spec)
            q, k = (rms_norm(x, scale, spec.norm_eps) for x, scale in zip((q, k), gains, strict=True))
        if self.rotary:
            q, k = rope.rotate(q, *rows.angles), rope.rotate(k, *rows.angles)
        attended, state = rows.attend(state, q, k, v)
        if self.gated:
            attended = attended * jax.nn.sigmoid(gate)
        added = contract("nhd,hde->ne", attended, layer.wo, sharding.out(sharding.row_axes(x), None))
        return (rms_norm(added, gain(layer.attn_norm, spec), spec.norm_eps) if self.post_norm else added), state

    def init_state(self, spec: ModelSpec, pages: int, page_tokens: int, dtype: str) -> LayerCache:
        """Empty pages of keys and values."""
        keys = (pages, spec.num_kv_heads, spec.head_dim, page_tokens)
        values = (pages, spec.num_kv_heads, page_tokens, spec.head_dim)
        return LayerCache(*(jnp.zeros(shape, dtype, out_sharding=PAGES) for shape in (keys, values)))

    def state_values(self, spec: ModelSpec, tokens: float) -> float:
        """A key and a value of every token before it."""
        return 2 * spec.num_kv_heads * spec.head_dim * tokens

    def flops(self, spec: ModelSpec, keys: float) -> float:
        """Scores, and the sum of values that they weigh."""
        return 4 * spec.num_heads * spec.head_dim * keys
