"""Hugging Face's config.json <-> `ModelSpec`, for Qwen2 / Qwen2.5, Qwen3 (dense) and Llama 3.

A setting of config.json that this code does not compute is an error and never ignored, so a model that loads is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxagent.config import MODEL_SHAPE, ConfigError, ModelConfig
from jaxagent.models.rope import yarn_attention_factor
from jaxagent.models.spec import FAMILY_FEATURES, Computing, ModelSpec, RopeScaling, round_up

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

# Config keys whose features are not implemented, with the values that leave them off.
UNSUPPORTED = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "num_experts": (0, None),
    "partial_rotary_factor": (1, None),
}

ORIGINAL = "original_max_position_embeddings"

# What transformers takes for keys that a config.json leaves out.
NORM_EPS = 1e-6
KV_HEADS = {"qwen2": 32, "qwen3": 32}  # elsewhere as many as there are heads
HEAD_DIM = {"qwen3": 128}  # elsewhere hidden_size / num_attention_heads


def spec_from_hf(hf: Mapping[str, Any], model: ModelConfig | Computing, source: str) -> ModelSpec:
    """The spec of a Hugging Face model.

    Args:
      hf: its parsed config.json.
      model: what config.json does not say (dtypes, remat, chunks, vocabulary padding). A `ModelConfig` may state the
        shape too, so that a dry run needs no folder; it must be the same.
      source: the file's name, for error messages.

    Raises:
      ConfigError: another architecture, an unsupported feature, or a missing key, named with its file.
    """

    def need(key: str) -> Any:
        if hf.get(key) is None:
            raise ConfigError(f"{source} has no '{key}'.")
        return hf[key]

    family = need("model_type")
    if family not in FAMILY_FEATURES:
        raise ConfigError(f"{source}: model_type '{family}' is not supported. Valid: {', '.join(FAMILY_FEATURES)}.")
    for key, off in UNSUPPORTED.items():
        if key in hf and hf[key] not in off:
            raise ConfigError(f"{source}: {key}={hf[key]!r} is not supported.")
    if "sliding_attention" in (hf.get("layer_types") or ()):
        raise ConfigError(f"{source}: layer_types with sliding_attention is not supported.")

    features = FAMILY_FEATURES[family]
    heads = need("num_attention_heads")
    theta, scaling, positions = _rope(hf, source)
    spec = ModelSpec(
        family=family,
        vocab_size=need("vocab_size"),
        padded_vocab_size=round_up(need("vocab_size"), model.vocab_multiple),
        num_layers=need("num_hidden_layers"),
        embed_dim=need("hidden_size"),
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads", KV_HEADS.get(family)) or heads,
        head_dim=hf.get("head_dim") or HEAD_DIM.get(family) or need("hidden_size") // heads,
        mlp_dim=need("intermediate_size"),
        qkv_bias=features.qkv_bias,
        qk_norm=features.qk_norm,
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=NORM_EPS if hf.get("rms_norm_eps") is None else float(hf["rms_norm_eps"]),
        max_position=positions,
        embed_init_std=float(hf.get("initializer_range", 0.02)),
        compute_dtype=model.compute_dtype,
        param_dtype=model.param_dtype,
        remat=model.remat,
        logprob_chunk_tokens=model.logprob_chunk_tokens,
    )
    stated = {field: getattr(model, field) for field in MODEL_SHAPE} if isinstance(model, ModelConfig) else {}
    other = {field: value for field, value in stated.items() if value not in ("", 0, getattr(spec, field))}
    if other:
        listed = ", ".join(f"{field} is {value!r} ({getattr(spec, field)!r} there)" for field, value in other.items())
        raise ConfigError(f"config.model is another model than {source}: {listed}. Say the same, or 0 or ''.")
    return spec


def spec_to_hf(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of an exported model, in the form that transformers 4 and 5 both read."""
    scaling = spec.rope_scaling
    # An own, randomly initialised model has no bound; transformers wants a number.
    positions = spec.max_position or 32768
    rope: dict[str, Any] | None = None
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind in ("llama3", "yarn"):
            rope[ORIGINAL] = scaling.original_max_position
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            rope |= {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
        if scaling.kind in ("linear", "dynamic"):  # these two read their original length from here
            positions = scaling.original_max_position
    return {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.embed_dim,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.mlp_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": spec.tie_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": rope,
        "max_position_embeddings": positions,
        "initializer_range": spec.embed_init_std,
        "use_sliding_window": False,
        "torch_dtype": dtype,
    }


def _rope(hf: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None, int]:
    """(theta, scaling, usable positions). transformers 5 keeps all of it in `rope_parameters`."""
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    found = _one_rope(hf, new or old, source)
    # transformers takes the old key, and then forgets the theta of the new one: rarely what was meant.
    if new and old and _one_rope(hf, old, source) != found:
        raise ConfigError(
            f"{source}: 'rope_parameters' and 'rope_scaling' say different things. Keep one of them, with the "
            "'rope_theta' of the model."
        )
    return found


def _one_rope(hf: Mapping[str, Any], rope: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None, int]:
    """As `_rope`, from one of the two keys that may hold it."""
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"{source}: RoPE of its own for layers of type '{nested[0]}' is not supported.")
    if rope.get("partial_rotary_factor") not in UNSUPPORTED["partial_rotary_factor"]:
        raise ConfigError(f"{source}: partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported.")
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    positions = int(hf.get("max_position_embeddings") or 0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None, positions
    original = positions
    if kind in ("llama3", "yarn"):  # as transformers: only these read it, and a length beside the section goes first
        original = int(hf.get(ORIGINAL) or rope.get(ORIGINAL) or positions)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ConfigError(f"{source}: rope_type '{kind}' is not supported. Valid: linear, dynamic, llama3, yarn.")
    if not original:
        raise ConfigError(f"{source}: rope_type '{kind}' needs max_position_embeddings.")
    factor = rope.get("factor") or (positions / original if kind == "yarn" else 0.0)
    if not factor:
        raise ConfigError(f"{source}: rope_type '{kind}' has no 'factor'.")
    base = RopeScaling(kind=kind, factor=float(factor), original_max_position=original)
    return theta, _details(base, rope, source), _usable(base, positions)


def _details(base: RopeScaling, rope: Mapping[str, Any], source: str) -> RopeScaling:
    """Adds what only one kind of scaling reads."""
    fields = dict(kind=base.kind, factor=base.factor, original_max_position=base.original_max_position)
    if base.kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            if rope.get(key) is None:
                raise ConfigError(f"{source}: rope_type 'llama3' has no '{key}'.")
            fields[key] = float(rope[key])
    if base.kind == "yarn":
        fields["beta_fast"] = float(rope.get("beta_fast") or 32)
        fields["beta_slow"] = float(rope.get("beta_slow") or 1)
        fields["attention_factor"] = yarn_attention_factor(base.factor, rope)
        fields["truncate"] = bool(rope.get("truncate", True))
    return RopeScaling(**fields)


def _usable(scaling: RopeScaling, positions: int) -> int:
    """Tokens of context the scaled model was made for."""
    if scaling.kind == "dynamic":
        return scaling.original_max_position
    if scaling.kind in ("linear", "yarn"):
        return max(positions, int(scaling.factor * scaling.original_max_position))
    return positions
