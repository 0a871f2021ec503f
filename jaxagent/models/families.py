"""The families of models: which blocks their layers have, in which order, and what transformers calls them.

A family of your own is named by its path, `--config.model.family=my_package.my_module:FAMILY`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxagent.config import ConfigError
from jaxagent.config.choice import object_at
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.blocks.attention import Attention
from jaxagent.models.blocks.mlp import SwiGLU

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

Pattern = tuple[tuple[LayerBlock, ...], ...]  # the blocks of each layer of a period; layer i is of kind i % its length


@dataclasses.dataclass(frozen=True)
class Family:
    """All in which a family differs from the others. One whose blocks read keys of config.json extends this class."""

    model_type: str  # as config.json has it
    architecture: str  # transformers' class
    pattern: Pattern
    norm_eps: float = 1e-6  # as released; a Hugging Face folder says its own
    # What transformers takes for sizes that a config.json leaves out; None: what follows from the number of heads.
    kv_heads: int | None = None
    head_dim: int | None = None
    reads: frozenset[str] = frozenset()  # keys of config.json that only this family's `pattern_of` reads

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """The pattern that a parsed config.json describes; `source` is its name, for ConfigErrors."""
        return self.pattern

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """What `pattern_of` reads, for the config.json of an exported model."""
        return {}


FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen2", "Qwen2ForCausalLM", ((Attention(qkv_bias=True), SwiGLU()),), kv_heads=32),
        Family("qwen3", "Qwen3ForCausalLM", ((Attention(qk_norm=True), SwiGLU()),), kv_heads=32, head_dim=128),
        Family("llama", "LlamaForCausalLM", ((Attention(), SwiGLU()),), norm_eps=1e-5),
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
