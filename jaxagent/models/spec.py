"""`ModelSpec`: everything that is static about a model, hashable, so that it can be a static argument of jit.

Made from the config for a randomly initialised model (`ModelSpec.from_config`) or from a Hugging Face config.json
(`hf_config.spec_from_hf`). Holds no arrays.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxagent.config import ConfigError, ModelConfig
from jaxagent.config.model import Remat
from jaxagent.models.families import family_of
from jaxagent.models.family import Pattern, before_repetition


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length of pre-training. See `rope.frequencies`.

    Fields that a kind does not read are 0. `dynamic` equals no scaling up to `original_max_position` and is not
    defined beyond it (there, the frequencies of a token would depend on tokens still to come).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_max_position: int
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 0.0  # yarn
    beta_slow: float = 0.0  # yarn
    attention_factor: float = 1.0  # yarn: scale of cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclasses.dataclass(frozen=True)
class Computing:
    """How a model is computed: what a Hugging Face folder, which has its shape, does not say. See `ModelConfig`."""

    vocab_multiple: int
    compute_dtype: Literal["float32", "bfloat16"]
    param_dtype: Literal["float32", "bfloat16"]
    remat: Remat
    logprob_chunk_tokens: int


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model: its sizes, and the blocks of its layers."""

    family: str  # see `families.family_of`
    vocab_size: int  # rows that stand for tokens
    padded_vocab_size: int  # rows of the embedding array; rows past vocab_size are never predicted
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    tie_embeddings: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    max_position: int  # tokens of context, at most; 0 = not bounded by the model
    embed_init_std: float
    compute_dtype: Literal["float32", "bfloat16"]
    param_dtype: Literal["float32", "bfloat16"]
    remat: Remat
    logprob_chunk_tokens: int
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that RoPE turns, the first ones
    pattern: Pattern = ()  # of the layers, as a config.json describes it; (): the family's own

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", self.pattern or family_of(self.family).pattern)
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        for name in (*sizes, "logprob_chunk_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.{name} must be positive, got {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}."
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"model.head_dim={self.head_dim} must be even, and so must the {self.rotary_dim} dimensions of it that "
                "RoPE turns in pairs."
            )
        if self.num_layers % len(self.pattern):
            raise ConfigError(
                f"model.num_layers={self.num_layers} is not a multiple of the {len(self.pattern)} kinds of layers of "
                f"{self.family}."
            )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def stacks(self) -> tuple[range, ...]:
        """The numbers of the layers of each stack of equal ones: those before the pattern repeats have one each."""
        written_out = len(self.pattern) == self.num_layers
        alone, period = before_repetition(self.pattern) if written_out else (0, len(self.pattern))
        repeated = (range(kind, self.num_layers, period) for kind in range(alone, alone + period))
        return (*(range(layer, layer + 1) for layer in range(alone)), *repeated)

    @property
    def zero_centred_norms(self) -> bool:
        """Whether the gain of an RMSNorm, but for those inside a block, is 1 + what is stored."""
        return family_of(self.family).zero_centred_norms

    @property
    def has_memory(self) -> bool:
        """Whether a block of it keeps a memory of fixed size (`LayerBlock.init_memory`)."""
        return any(block.has_memory for blocks in self.pattern for block in blocks)

    @classmethod
    def from_config(cls, model: ModelConfig, vocab_size: int) -> ModelSpec:
        """The spec of a randomly initialised model with `vocab_size` tokens.

        Raises:
          ConfigError: `model.family` is none, a size is impossible, or `model.settings` say what this code does not
            compute.
        """
        from jaxagent.models import hf_config  # it knows specs

        same = {field.name for field in dataclasses.fields(cls)} & set(vars(model))
        family = family_of(model.family)
        spec = cls(
            vocab_size=vocab_size,
            padded_vocab_size=round_up(vocab_size, model.vocab_multiple),
            rope_scaling=None,
            norm_eps=family.norm_eps,
            max_position=0,
            partial_rotary_factor=family.defaults.get("partial_rotary_factor", 1.0),
            **{name: getattr(model, name) for name in same},
        )
        return hf_config.with_settings(spec, model) if model.settings else spec

    def check_context(self, tokens: int) -> None:
        """Raises ConfigError when sequences of `tokens` tokens are longer than the model can position."""
        if self.max_position and tokens > self.max_position:
            raise ConfigError(f"A context of {tokens} tokens exceeds the model's {self.max_position} positions.")


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
