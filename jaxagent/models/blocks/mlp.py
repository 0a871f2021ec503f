"""The gated feed-forward block of every dense family."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxagent.models import sharding
from jaxagent.models.blocks import FlatRows, LayerBlock, State
from jaxagent.models.layers import contract, contract_each, gain, rms_norm
from jaxagent.models.params import ArraySpec, Layers, block_norm, matrix

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class SwiGLU(LayerBlock):
    """(silu(h w_gate) * (h w_up)) w_down of h = rms_norm(x). See Shazeer (https://arxiv.org/abs/2002.05202)."""

    post_norm: bool = False  # the norm behind the block, of what it adds, instead of before it

    def arrays(self, spec: ModelSpec) -> dict[str, ArraySpec | None]:
        """The norm and the three projections."""
        embed, mlp = {"embed": spec.embed_dim}, {"mlp": spec.mlp_dim}
        return {
            "mlp_norm": block_norm(spec, "post_feedforward" if self.post_norm else "post_attention", self.post_norm),
            "w_gate": matrix("mlp.gate_proj.weight", embed, mlp, spec.embed_dim**-0.5),
            "w_up": matrix("mlp.up_proj.weight", embed, mlp, spec.embed_dim**-0.5),
            "w_down": matrix("mlp.down_proj.weight", mlp, embed, spec.embed_init_std * spec.mlp_dim**-0.5),
        }

    def apply(
        self, layer: Layers, spec: ModelSpec, x: jax.Array, rows: FlatRows, state: State
    ) -> tuple[jax.Array, State]:
        """Row by row."""
        h = x if self.post_norm else rms_norm(x, gain(layer.mlp_norm, spec), spec.norm_eps)
        added = swiglu(h, layer.w_gate, layer.w_up, layer.w_down)
        return (rms_norm(added, gain(layer.mlp_norm, spec), spec.norm_eps) if self.post_norm else added), state


def swiglu(h: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """Rows h[N, E] through [E, F] twice and [F, E], or a `LoraArray` in the place of each."""
    gate, up = contract_each("ne,ef->nf", h, w_gate, w_up)
    hidden = jax.nn.silu(gate) * up
    return contract("nf,fe->ne", hidden, w_down, sharding.out(sharding.row_axes(h), None))
