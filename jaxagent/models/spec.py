"""`ModelSpec`: everything that is static about a model, hashable, so that it can be a static argument of jit.

Made from the config for a randomly initialised model (`ModelSpec.from_config`) or from a Hugging Face config.json
(`families.spec_from_hf`). Holds no arrays and imports no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxagent.config import ConfigError, ModelConfig


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
    remat: Literal["none", "layer", "dots"]
    logprob_chunk_tokens: int


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer: RMSNorm, grouped-query attention with RoPE, SwiGLU."""

    family: Literal["qwen2", "qwen3", "llama"]
    vocab_size: int  # rows that stand for tokens
    padded_vocab_size: int  # rows of the embedding array; rows past vocab_size are never predicted
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    max_position: int  # tokens of context, at most; 0 = not bounded by the model
    embed_init_std: float
    compute_dtype: Literal["float32", "bfloat16"]
    param_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "layer", "dots"]
    logprob_chunk_tokens: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.{name} must be positive, got {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim} must be even: RoPE turns pairs of dimensions.")
        if self.logprob_chunk_tokens <= 0:
            raise ConfigError(f"model.logprob_chunk_tokens must be positive, got {self.logprob_chunk_tokens}.")

    @classmethod
    def from_config(cls, model: ModelConfig, vocab_size: int) -> ModelSpec:
        """The spec of a randomly initialised model with `vocab_size` tokens.

        Raises:
          ConfigError: `model.family` is empty, or a size is impossible.
        """
        if model.family not in FAMILIES:
            raise ConfigError(f"config.model.family must be one of {', '.join(FAMILIES)} without a model.path.")
        family = FAMILIES[model.family]
        return cls(
            family=model.family,
            vocab_size=vocab_size,
            padded_vocab_size=round_up(vocab_size, model.vocab_multiple),
            num_layers=model.num_layers,
            embed_dim=model.embed_dim,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            mlp_dim=model.mlp_dim,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            tie_embeddings=model.tie_embeddings,
            rope_theta=model.rope_theta,
            rope_scaling=None,
            norm_eps=family.norm_eps,
            max_position=0,
            embed_init_std=model.embed_init_std,
            compute_dtype=model.compute_dtype,
            param_dtype=model.param_dtype,
            remat=model.remat,
            logprob_chunk_tokens=model.logprob_chunk_tokens,
        )

    def check_context(self, tokens: int) -> None:
        """Raises ConfigError when sequences of `tokens` tokens are longer than the model can position."""
        if self.max_position and tokens > self.max_position:
            raise ConfigError(f"A context of {tokens} tokens exceeds the model's {self.max_position} positions.")


@dataclasses.dataclass(frozen=True)
class Family:
    """All in which a family differs from the others."""

    architecture: str  # transformers' class
    qkv_bias: bool  # bias on the q, k and v projections
    qk_norm: bool  # RMSNorm on each head of q and k
    norm_eps: float  # as released; a Hugging Face folder says its own
    # What transformers takes for sizes that a config.json leaves out; None: what follows from the number of heads.
    kv_heads: int | None
    head_dim: int | None


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, norm_eps=1e-6, kv_heads=32, head_dim=None),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, norm_eps=1e-6, kv_heads=32, head_dim=128),
    "llama": Family("LlamaForCausalLM", qkv_bias=False, qk_norm=False, norm_eps=1e-5, kv_heads=None, head_dim=None),
}


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    if multiple <= 0:
        raise ConfigError(f"config.model.vocab_multiple must be positive, got {multiple}.")
    return -(-n // multiple) * multiple
