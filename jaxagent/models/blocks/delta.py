"""The gated delta net: attention's place in most layers of Qwen3-Next and Qwen3.5, with a memory of fixed size.

Axis letters: N rows, E embed, C channels of the convolution, W its width, H heads of values, K and V dimensions of a
key and a value.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxagent.models import sharding
from jaxagent.models.blocks import FlatRows, LayerBlock
from jaxagent.models.delta_rule import CHUNK, Inputs
from jaxagent.models.layers import KEPT, contract, contract_each, gain, rms_norm
from jaxagent.models.params import ArraySpec, Layers, block_norm, matrix, vector

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec


@flax.struct.dataclass
class Memory:
    """What a layer keeps of each of M sequences."""

    state: jax.Array  # f32[M, H, K, V], see delta_rule.py
    inputs: jax.Array  # compute_dtype[M, W - 1, C], the last of the convolution


@dataclasses.dataclass(frozen=True)
class DeltaNet(LayerBlock):
    """out(rms_norm(o) * silu(z)), o by the gated delta rule from q, k, v = silu(convolution of the last W rows).

    See Yang et al., Gated Delta Networks (https://arxiv.org/abs/2412.06464). Sizes of 0 are attention's: as many heads
    of keys and values as it has of queries, each as wide. Every device of the axis tensor has its weights and memories
    whole.
    """

    key_heads: int = 0
    value_heads: int = 0  # a multiple of `key_heads`: those in a row share a key
    key_dim: int = 0
    value_dim: int = 0
    kernel: int = 4  # W
    grouped: bool = False  # weights are stored as Qwen3-Next has them: what belongs to a key head side by side

    def sizes(self, spec: ModelSpec) -> tuple[int, int, int, int]:
        """Heads of keys, of values; K, V."""
        key_heads, dim = self.key_heads or spec.num_heads, spec.head_dim
        return key_heads, self.value_heads or key_heads, self.key_dim or dim, self.value_dim or dim

    def channels(self, spec: ModelSpec) -> int:
        """C: of all q, k and v."""
        key_heads, heads, key, value = self.sizes(spec)
        return 2 * key_heads * key + heads * value

    def arrays(self, spec: ModelSpec) -> dict[str, ArraySpec | None]:
        """The norm, the projections in, the convolution, what the decay is made of, the inner norm, the way out.

        Decays begin as Mamba-2 has them: rates exp(A_log) up to 16, times steps between 0.001 and 0.1.
        """
        _, heads, _, value = self.sizes(spec)
        embed, channels, inner = {"embed": spec.embed_dim}, self.channels(spec), heads * value
        branch = spec.embed_init_std * inner**-0.5  # see `LayerBlock.arrays`
        ones = (channels, 1, self.kernel)  # stored with an axis for the channels that one output sums over

        def projection(name: str, outputs: int, axis: str = "channel") -> ArraySpec:
            return matrix(f"linear_attn.in_proj_{name}.weight", embed, {axis: outputs}, spec.embed_dim**-0.5)

        def per_head(name: str, mean: float, std: float) -> ArraySpec:
            return dataclasses.replace(vector(f"linear_attn.{name}", {"gate": heads}, mean), std=std)

        if self.grouped:
            projections = {"w_qkvz": projection("qkvz", channels + inner), "w_ba": projection("ba", 2 * heads, "gate")}
        else:
            projections = {
                "w_qkv": projection("qkv", channels),
                "w_z": projection("z", inner),
                "w_b": projection("b", heads, "gate"),
                "w_a": projection("a", heads, "gate"),
            }
        return {
            "delta_norm": block_norm(spec, "input", behind=False),
            **projections,
            "conv": ArraySpec(
                ones, "", ("channel",) * 3, 0.0, (3 * self.kernel) ** -0.5, "linear_attn.conv1d.weight",
                ((0,), (1,), (2,)), ones,
            ),
            "dt_bias": per_head("dt_bias", -4.6, 1.3),
            "a_log": per_head("A_log", 1.8, 0.8),
            "out_norm": vector("linear_attn.norm.weight", {"channel": value}, mean=1.0),
            "w_out": matrix("linear_attn.out_proj.weight", {"channel": inner}, embed, branch),
        }  # fmt: skip

    def apply(
        self, layer: Layers, spec: ModelSpec, x: jax.Array, rows: FlatRows, state: Memory | None
    ) -> tuple[jax.Array, Memory | None]:
        """By `rows.recur`, which knows which rows follow which and where memories are kept."""
        key_heads, heads, key, value = self.sizes(spec)
        n, shared = len(x), heads // key_heads
        h = rms_norm(x, gain(layer.delta_norm, spec), spec.norm_eps)
        qkv, z, b, a = self._project(layer, spec, h)
        window, inputs = rows.recur.window(None if state is None else state.inputs, qkv, self.kernel)
        # Where a memory is read, bits count: what XLA fuses with what must not depend on the program around.
        alone = jax.lax.optimization_barrier if state is not None else lambda x: x
        window = alone(window)
        taps = layer.conv[:, 0].astype(jnp.float32)
        mixed = alone(jax.nn.silu(sum(row.astype(jnp.float32) * taps[:, -1 - by] for by, row in enumerate(window))))
        q, k, v = jnp.split(mixed, [key_heads * key, 2 * key_heads * key], axis=1)
        q, k = (jnp.repeat(_unit(x.reshape(n, key_heads, key)), shared, axis=1) for x in (q, k))
        rate, step = jnp.exp(layer.a_log.astype(jnp.float32)), a.astype(jnp.float32) + layer.dt_bias.astype(jnp.float32)
        inner = Inputs(
            q * key**-0.5,
            k,
            v.reshape(n, heads, value),
            -rate * jax.nn.softplus(step),
            jax.nn.sigmoid(b.astype(jnp.float32)),
        )
        out, memory = rows.recur.fold(None if state is None else state.state, alone(inner))
        out = checkpoint_name(alone(out), KEPT)
        out = rms_norm(out, layer.out_norm, spec.norm_eps) * jax.nn.silu(z.astype(jnp.float32))
        out = out.reshape(n, heads * value).astype(x.dtype)
        added = contract("nc,ce->ne", out, layer.w_out, sharding.out(sharding.row_axes(x), None))
        return added, None if state is None else Memory(memory, inputs)

    def _project(self, layer: Layers, spec: ModelSpec, h: jax.Array) -> tuple[jax.Array, ...]:
        """q, k and v side by side [N, C]; z[N, H, V]; b and a [N, H]."""
        key_heads, heads, key, value = self.sizes(spec)
        n, shared = len(h), heads // key_heads
        if not self.grouped:
            qkv, z, b, a = contract_each("ne,ec->nc", h, layer.w_qkv, layer.w_z, layer.w_b, layer.w_a)
            return qkv, z.reshape(n, heads, value), b, a
        qkvz, ba = contract_each("ne,ec->nc", h, layer.w_qkvz, layer.w_ba)
        ends = [key, 2 * key, 2 * key + shared * value]
        *qkv, z = jnp.split(qkvz.reshape(n, key_heads, -1), ends, axis=2)
        b, a = jnp.split(ba.reshape(n, key_heads, 2 * shared), 2, axis=2)
        qkv = jnp.concatenate([x.reshape(n, -1) for x in qkv], axis=1)
        return qkv, z.reshape(n, heads, value), b.reshape(n, heads), a.reshape(n, heads)

    def init_memory(self, spec: ModelSpec, memories: int, dtype: str) -> Memory:
        """Zeros for one layer, memories sharded over `sharding.FLAT`; `dtype`, of what lies in pages, is not asked."""
        _, heads, key, value = self.sizes(spec)
        state, inputs = (memories, heads, key, value), (memories, self.kernel - 1, self.channels(spec))
        where = jax.P(sharding.FLAT, None, None, None), jax.P(sharding.FLAT, None, None)
        return Memory(
            jnp.zeros(state, jnp.float32, out_sharding=where[0]),
            jnp.zeros(inputs, spec.compute_dtype, out_sharding=where[1]),
        )

    def state_values(self, spec: ModelSpec, tokens: float) -> float:
        """Its memory, which is read and written whole."""
        _, heads, key, value = self.sizes(spec)
        return 2 * (heads * key * value + (self.kernel - 1) * self.channels(spec))

    def flops(self, spec: ModelSpec, keys: float) -> float:
        """The convolution, and the rule by chunks: products of a token with its chunk's and with the memory."""
        _, heads, key, value = self.sizes(spec)
        return 2 * self.kernel * self.channels(spec) + heads * (CHUNK * (3 * key + 2 * value) + 6 * key * value)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
