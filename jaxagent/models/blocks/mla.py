"""Multi-head latent attention: queries, keys and values come out of projections through few dimensions."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxagent.models import rope, sharding
from jaxagent.models.attention import LayerCache
from jaxagent.models.blocks import FlatRows, LayerBlock
from jaxagent.models.blocks.attention import PAGES
from jaxagent.models.layers import contract, rms_norm
from jaxagent.models.params import ArraySpec, Layers, block_norm, matrix, vector

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

_EPS = 1e-6  # of the norms inside, whatever the model's others have


@dataclasses.dataclass(frozen=True)
class LatentAttention(LayerBlock):
    """attention(rms_norm(x)) as DeepSeek-V3 has it (https://arxiv.org/abs/2412.19437, section 2.1.1).

    A head's query and key have a part that turns, `ModelSpec.rotary_dim` dimensions, of the key one for all heads, and
    one that does not. Its state is a `LayerCache` as that of `Attention`, of keys and values multiplied out, values
    with zeros behind them (or queries and keys) so that all have D dimensions.
    """

    query_rank: int = 0  # dimensions that queries come through; 0: they are projected at once
    rank: int = 512  # dimensions that keys and values come through
    plain_dim: int = 128  # of a head's query and key, the part that does not turn
    value_dim: int = 128
    interleaved: bool = True  # dimensions 2i and 2i + 1 turn as a pair, instead of i and i + R/2
    mscale: float = 0.0  # by how much scaled RoPE sharpens attention: `mscale_all_dim` of YaRN

    def dim(self, spec: ModelSpec) -> int:
        """D."""
        return max(self.plain_dim + spec.rotary_dim, self.value_dim)

    def arrays(self, spec: ModelSpec) -> dict[str, ArraySpec | None]:
        """The norm, the projections into few dimensions and out of them, and the norms between."""
        embed, heads = {"embed": spec.embed_dim}, {"heads": spec.num_heads}
        query = heads | {"head_dim": self.plain_dim + spec.rotary_dim}
        key_value = heads | {"head_dim": self.plain_dim + self.value_dim}
        low, query_low = {"latent": self.rank}, {"latent": self.query_rank}
        out = spec.embed_init_std * (spec.num_heads * self.value_dim) ** -0.5  # see `LayerBlock.arrays`

        def projection(name: str, inputs: dict[str, int], outputs: dict[str, int], std: float = 0.0) -> ArraySpec:
            return matrix(f"self_attn.{name}.weight", inputs, outputs, std or math.prod(inputs.values()) ** -0.5)

        def norm(name: str, sizes: dict[str, int]) -> ArraySpec:
            return vector(f"self_attn.{name}_layernorm.weight", sizes, mean=1.0)

        few = self.query_rank > 0
        return {
            "attn_norm": block_norm(spec, "input", behind=False),
            "wq": None if few else projection("q_proj", embed, query),
            "wq_down": projection("q_a_proj", embed, query_low) if few else None,
            "q_norm": norm("q_a", query_low) if few else None,
            "wq_up": projection("q_b_proj", query_low, query) if few else None,
            "wkv_down": projection("kv_a_proj_with_mqa", embed, {"latent": self.rank + spec.rotary_dim}),
            "kv_norm": norm("kv_a", low),
            "wkv_up": projection("kv_b_proj", low, key_value),
            "wo": projection("o_proj", heads | {"head_dim": self.value_dim}, embed, out),
        }

    def apply(
        self, layer: Layers, spec: ModelSpec, x: jax.Array, rows: FlatRows, state: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attention by `rows.attend`, which knows which keys a row sees and where they are kept."""
        h = rms_norm(x, layer.attn_norm, spec.norm_eps)
        if self.query_rank:
            low = rms_norm(contract("ne,ec->nc", h, layer.wq_down), layer.q_norm, _EPS)
            q = contract("nc,chd->nhd", low, layer.wq_up)
        else:
            q = contract("ne,ehd->nhd", h, layer.wq)
        low, turning = jnp.split(contract("ne,ec->nc", h, layer.wkv_down), (self.rank,), axis=1)
        kv = contract("nc,chd->nhd", rms_norm(low, layer.kv_norm, _EPS), layer.wkv_up)
        plain, v = jnp.split(kv, (self.plain_dim,), axis=2)
        turned = jnp.broadcast_to(self._turn(turning[:, None], rows), (*plain.shape[:2], spec.rotary_dim))
        k = jnp.concatenate([plain, sharding.constrain(turned, jax.typeof(plain).sharding.spec)], axis=2)
        plain, turning = jnp.split(q, (self.plain_dim,), axis=2)
        q = jnp.concatenate([plain, self._turn(turning, rows)], axis=2) * self._sharpness(spec)
        attended, state = rows.attend(state, *(self._padded(a, spec) for a in (q.astype(x.dtype), k, v)))
        attended = attended[:, :, : self.value_dim]
        return contract("nhd,hde->ne", attended, layer.wo, sharding.out(sharding.row_axes(x), None)), state

    def _turn(self, x: jax.Array, rows: FlatRows) -> jax.Array:
        """RoPE on x[N, H, R]; pairs are laid apart first, in queries and keys alike: their products are equal."""
        if self.interleaved:
            x = jnp.concatenate([x[:, :, 0::2], x[:, :, 1::2]], axis=2)
        return rope.rotate(x, *rows.angles)

    def _sharpness(self, spec: ModelSpec) -> float:
        """What queries are multiplied with, beside the 1 / sqrt(D) of attention."""
        dim, scaling = self.plain_dim + spec.rotary_dim, spec.rope_scaling
        m = 0.1 * self.mscale * math.log(scaling.factor) + 1 if scaling and scaling.factor > 1 else 1.0
        return m**2 * math.sqrt(self.dim(spec) / dim)

    def _padded(self, x: jax.Array, spec: ModelSpec) -> jax.Array:
        """x[N, H, D], with zeros behind."""
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.dim(spec) - x.shape[2])))

    def init_state(self, spec: ModelSpec, pages: int, page_tokens: int, dtype: str) -> LayerCache:
        """Empty pages of keys and values."""
        shapes = (
            (pages, spec.num_heads, self.dim(spec), page_tokens),
            (pages, spec.num_heads, page_tokens, self.dim(spec)),
        )
        return LayerCache(*(jnp.zeros(shape, dtype, out_sharding=PAGES) for shape in shapes))

    def state_values(self, spec: ModelSpec, tokens: float) -> float:
        """A key and a value of every token before it."""
        return 2 * spec.num_heads * self.dim(spec) * tokens

    def flops(self, spec: ModelSpec, keys: float) -> float:
        """Scores, and the sum of values that they weigh."""
        return 4 * spec.num_heads * self.dim(spec) * keys
