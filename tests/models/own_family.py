"""A family from outside the package: every other layer has attention and MLP beside each other, added with a scale."""

from __future__ import annotations

import dataclasses

from jaxagent.models.blocks import LayerBlock
from jaxagent.models.blocks.attention import Attention
from jaxagent.models.blocks.mlp import SwiGLU
from jaxagent.models.families import Family
from jaxagent.models.hf_config import number

ATTENTION, MLP = Attention(qk_norm=True), SwiGLU()


@dataclasses.dataclass(frozen=True)
class Parallel(LayerBlock):
    """scale * (attention(x) + mlp(x))."""

    scale: float = 0.5

    def arrays(self, spec):
        return ATTENTION.arrays(spec) | MLP.arrays(spec)

    def apply(self, layer, spec, x, rows, state):
        attended, state = ATTENTION.apply(layer, spec, x, rows, state)
        fed, _ = MLP.apply(layer, spec, x, rows, None)
        return self.scale * (attended + fed), state

    def init_state(self, spec, pages, page_tokens, dtype):
        return ATTENTION.init_state(spec, pages, page_tokens, dtype)

    def state_values(self, spec, tokens):
        return ATTENTION.state_values(spec, tokens)

    def flops(self, spec, keys):
        return ATTENTION.flops(spec, keys)


class EveryOther(Family):
    def pattern_of(self, hf, source):
        return (self.pattern[0], (Parallel(number(hf, "residual_scale", source)),))

    def settings_of(self, spec):
        return {"residual_scale": spec.pattern[1][0].scale}


FAMILY = EveryOther(
    model_type="every_other",
    architecture="EveryOtherForCausalLM",
    pattern=((Attention(qkv_bias=True), SwiGLU()), (Parallel(),)),
    reads=frozenset({"residual_scale", "partial_rotary_factor"}),
)
