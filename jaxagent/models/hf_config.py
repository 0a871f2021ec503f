"""Hugging Face's config.json <-> `ModelSpec`, for the families of families.py.

A setting of config.json that this code does not compute is an error and never ignored, so a model that loads is right:
every key is one that is read here, one whose value leaves a feature off, or one that is known not to change what is
computed, in every family (`HARMLESS`) or in this one (`Family.harmless`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from jaxagent.config import MODEL_SHAPE, ConfigError, ModelConfig
from jaxagent.models.families import FAMILIES, Family, family_of
from jaxagent.models.rope import yarn_attention_factor
from jaxagent.models.spec import Computing, ModelSpec, RopeScaling, round_up

# Config keys whose features are not implemented, with the values that leave them off.
UNSUPPORTED = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None, {}),
    "num_experts": (0, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "clip_qkv": (None,),
    "kv_lora_rank": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
    "auto_map": ({}, None),  # code of its own, which transformers runs only where it is trusted
}
_READ = """model_type vocab_size num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim
    intermediate_size tie_word_embeddings rms_norm_eps max_position_embeddings initializer_range layer_types
    rope_theta rope_scaling rope_parameters original_max_position_embeddings"""
# Keys that change nothing of what any family computes, by the reason.
HARMLESS = {
    "special tokens, which only tokenizers and generation read": """bos_token_id eos_token_id pad_token_id sep_token_id
        cls_token_id decoder_start_token_id prefix tokenizer_class""",
    "read in training by transformers' own trainer only": """attention_dropout hidden_dropout gradient_checkpointing
        id2label label2id num_labels problem_type finetuning_task summary_type chunk_size_feed_forward""",
    "how transformers computes, or what its forward pass hands back": """torch_dtype dtype use_cache output_attentions
        output_hidden_states return_dict torchscript use_bfloat16 tf_legacy_loss attn_implementation
        _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled use_flash_attention use_flash_attn
        liger_kernel kv_cache_dtype""",
    "notes of whoever wrote the file": """_name_or_path _commit_hash architectures transformers_version
        task_specific_params unsloth_version unsloth_fixed unsloth_training is_llama_config transformers.js_config
        max_sequence_length seq_length""",
    "of encoders or decoders beside this one, which a model of these families does not have": """is_decoder
        cross_attention_hidden_size tie_encoder_decoder""",
    "of generation, which older versions kept here": """do_sample temperature top_k top_p typical_p repetition_penalty
        length_penalty max_length min_length num_beams num_beam_groups num_return_sequences no_repeat_ngram_size
        encoder_no_repeat_ngram_size early_stopping diversity_penalty bad_words_ids begin_suppress_tokens
        suppress_tokens exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
        remove_invalid_values output_scores return_dict_in_generate""",
}

# What families that people ask for would need.
MISSING = {
    "attention sinks, sliding windows and biases of experts": "gpt_oss",
    "sliding windows, norms on both sides of a block and scaled embeddings": """gemma2 gemma3 gemma3_text gemma3n
        gemma3n_text gemma4 gemma4_text""",
    "sparse attention": "deepseek_v32 glm_moe_dsa",
    "DeepSeek-V2's routing": "deepseek_v2",
    "state space layers (Mamba)": "nemotron_h mamba mamba2 falcon_h1 falcon_mamba jamba bamba zamba2 granitemoehybrid",
    "sliding windows": "olmo3 cohere2 exaone4 llama4_text afmoe",
    "projections of several matrices in one": "phi3",
    "multipliers of embeddings, residuals and logits": "granite granitemoe",
}

ORIGINAL = "original_max_position_embeddings"
DETAILS = {  # of each kind of RoPE scaling what it reads beside its factor, as config.json and `RopeScaling` name it
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
_ROPE_KEYS = (
    ("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", ORIGINAL, "mscale", "mscale_all_dim"),
    ("finetuned",),  # a note of older files, which no version reads
    *DETAILS.values(),
)


# model_types of models that see, and of the language model in them; and their keys beside its `text_config`.
_SEEING = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
_BESIDE_TEXT = """model_type text_config vision_config image_token_id video_token_id vision_start_token_id
    vision_end_token_id tie_word_embeddings"""


def language_model(hf: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The config.json of the language model in a model that sees; any other as it is."""
    inner = _SEEING.get(str(hf.get("model_type")))
    if inner is None:
        return hf
    text, harmless = hf.get("text_config"), (key for names in HARMLESS.values() for key in names.split())
    if not isinstance(text, Mapping) or text.get("model_type", inner) != inner:
        raise ConfigError(f"{source}: text_config must describe a {inner}.")
    off = {key for key in hf.keys() & UNSUPPORTED.keys() if hf[key] in UNSUPPORTED[key]}
    if unknown := sorted(hf.keys() - {*harmless, *off, *_BESIDE_TEXT.split()}):
        raise ConfigError(f"{source}: nothing is known here of {unknown[0]}={hf[unknown[0]]!r} beside text_config.")
    tied = [section["tie_word_embeddings"] for section in (hf, text) if section.get("tie_word_embeddings") is not None]
    if len(set(map(bool, tied))) > 1:
        raise ConfigError(f"{source}: tie_word_embeddings differs from that of text_config. Say the same.")
    return {**text, "model_type": inner, "tie_word_embeddings": tied[0] if tied else False}


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
    hf = language_model(hf, source)
    name, stated = _need(hf, "model_type", source), getattr(model, "family", "")
    own = family_of(stated) if ":" in stated else None
    family = own or (FAMILIES.get(name) if isinstance(name, str) else None)
    if family is None or family.model_type != name:
        valid = ", ".join([own.model_type] if own else FAMILIES)
        missing = next(
            (f": there is no code for {what}" for what, names in MISSING.items() if name in names.split()), ""
        )
        raise ConfigError(f"{source}: model_type {name!r} is not supported{missing}. Valid: {valid}.")
    absent = family.defaults.keys() - hf.keys()
    hf = {**family.defaults, **hf}
    for key, off in UNSUPPORTED.items():
        if key in hf and hf[key] not in off and key not in family.reads and key not in family.harmless:
            taken = (
                " It is what transformers takes where the key is left out; null turns it off." if key in absent else ""
            )
            raise ConfigError(f"{source}: {key}={hf[key]!r} is not supported.{taken}")
    keys = {key for key, value in hf.items() if value is not None}  # null is as good as no key
    harmless = {key for names in HARMLESS.values() for key in names.split()} | family.harmless.keys()
    if unknown := sorted(keys.difference(_READ.split(), harmless, UNSUPPORTED, family.reads)):
        raise ConfigError(
            f"{source}: nothing is known here of {unknown[0]}={hf[unknown[0]]!r}, which may change what the model "
            "computes. Delete the key if it does not."
        )
    size = functools.partial(integer, hf, source=source)
    layers, heads, embed_dim = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
    turning = size("qk_rope_head_dim") if "qk_rope_head_dim" in family.reads else None  # all that RoPE is about
    rope = _rope(hf, family, source)  # before families read more of it
    types = hf.get("layer_types")
    if types not in (None, ["full_attention"] * layers) and "layer_types" not in family.reads:
        raise ConfigError(
            f"{source}: layer_types {str(types)[:80]} is not supported, only 'full_attention' for each of the {layers} "
            "layers."
        )
    spec = ModelSpec(
        family=stated if own else name,
        vocab_size=size("vocab_size"),
        padded_vocab_size=round_up(size("vocab_size"), model.vocab_multiple),
        num_layers=layers,
        embed_dim=embed_dim,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, embed_dim // heads)) if turning is None else turning,
        mlp_dim=size("intermediate_size"),
        tie_embeddings=flag(hf, "tie_word_embeddings", source),
        norm_eps=number(hf, "rms_norm_eps", source, 1e-6),
        embed_init_std=number(hf, "initializer_range", source, 0.02),
        compute_dtype=model.compute_dtype,
        param_dtype=model.param_dtype,
        remat=model.remat,
        logprob_chunk_tokens=model.logprob_chunk_tokens,
        pattern=family.pattern_of(hf, source),
        **rope,
    )
    if not isinstance(model, ModelConfig):
        return spec
    sizes = {field: getattr(model, field) for field in MODEL_SHAPE if field != "settings"}
    stated = [(field, value, getattr(spec, field)) for field, value in sizes.items() if value not in ("", 0)]
    stated += [(f"settings: {key}", value, hf.get(key)) for key, value in settings_of(model).items()]
    if other := [one for one in stated if one[1] != one[2]]:
        listed = ", ".join(f"{field} is {value!r} ({there!r} there)" for field, value, there in other)
        raise ConfigError(f"config.model is another model than {source}: {listed}. Say the same, or 0 or ''.")
    return spec


def settings_of(model: ModelConfig) -> dict[str, Any]:
    """What `model.settings` says, by config.json's keys. Raises ConfigError where that is no JSON object."""
    try:
        settings = json.loads(model.settings or "{}")
    except (ValueError, RecursionError):  # no JSON, or brackets without end
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(
            f"""config.model.settings must be a JSON object such as '{{"num_experts": 8}}', not """
            f"{model.settings[:80]!r}."
        )
    return settings


def with_settings(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """A randomly initialised model's spec with what `model.settings` says, read as config.json is."""
    hf = spec_to_hf(spec, spec.param_dtype) | {"max_position_embeddings": None} | settings_of(model)
    return spec_from_hf(hf, model, "config.model.settings")


def _need(hf: Mapping[str, Any], key: str, source: str) -> Any:
    if hf.get(key) is None:
        raise ConfigError(f"{source} has no '{key}'.")
    return hf[key]


def integer(hf: Mapping[str, Any], key: str, default: int | None = None, *, source: str) -> int:
    """A size: a whole number from 1 on. Without a default the key must be there."""
    value = _need(hf, key, source) if default is None else hf.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ConfigError(f"{source}: {key} must be a whole number from 1 on, not {value!r}.")
    return value


def number(section: Mapping[str, Any], key: str, source: str, default: float | None = None) -> float:
    """A positive number. Without a default the key must be there."""
    value = _need(section, key, source) if default is None else section.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ConfigError(f"{source}: {key} must be a positive number, not {value!r}.")
    return float(value)


def flag(section: Mapping[str, Any], key: str, source: str, default: bool = False) -> bool:
    """True or false; null as if the key were not there."""
    value = section.get(key)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{source}: {key} must be true or false, not {value!r}.")
    return default if value is None else value


def spec_to_hf(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of an exported model, in the form that transformers 4 and 5 both read."""
    scaling = spec.rope_scaling
    # An own, randomly initialised model has no bound; transformers wants a number.
    positions = spec.max_position or 32768
    family = family_of(spec.family)
    rope: dict[str, Any] | None = None
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor} | family.scaling_of(spec)
        if keys := DETAILS[scaling.kind]:
            rope |= {ORIGINAL: scaling.original_max_position} | {key: getattr(scaling, key) for key in keys}
        else:  # linear and dynamic read their original length from here
            positions = scaling.original_max_position
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
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
        **({"partial_rotary_factor": spec.partial_rotary_factor} if spec.partial_rotary_factor != 1 else {}),
        **{key: UNSUPPORTED[key][0] for key in family.defaults if key in UNSUPPORTED},
        **family.settings_of(spec),
    }


def _rope(hf: Mapping[str, Any], family: Family, source: str) -> dict[str, Any]:
    """The spec's fields about positions. transformers 5 keeps all of it in `rope_parameters`."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(key), Mapping | None):
            raise ConfigError(f"{source}: {key} must be an object, not {hf[key]!r}.")
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    rope = _one_rope(hf, family, new or old, source)
    # transformers takes the old key, and then forgets the theta of the new one: rarely what was meant.
    if new and old and _one_rope(hf, family, old, source) != rope:
        raise ConfigError(
            f"{source}: 'rope_parameters' and 'rope_scaling' say different things. Keep one of them, with the "
            "'rope_theta' of the model."
        )
    return rope


def _one_rope(hf: Mapping[str, Any], family: Family, rope: Mapping[str, Any], source: str) -> dict[str, Any]:
    """As `_rope`, from one of the two keys that may hold it."""
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"{source}: RoPE of its own for layers of type '{nested[0]}' is not supported.")
    if unknown := sorted(
        {key for key, value in rope.items() if value is not None}.difference(*_ROPE_KEYS, family.harmless)
    ):
        raise ConfigError(f"{source}: {unknown[0]}={rope[unknown[0]]!r} of its RoPE is not supported.")
    share = number(rope, "partial_rotary_factor", source, number(hf, "partial_rotary_factor", source, 1.0))
    if share != 1 and ("partial_rotary_factor" not in family.reads or share > 1):
        raise ConfigError(f"{source}: partial_rotary_factor={share!r} is not supported.")
    theta = number(rope, "rope_theta", source, number(hf, "rope_theta", source, 10_000.0))
    positions = (
        0 if hf.get("max_position_embeddings") is None else integer(hf, "max_position_embeddings", source=source)
    )
    fields = {"rope_theta": theta, "rope_scaling": None, "max_position": positions, "partial_rotary_factor": share}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return fields
    if not isinstance(kind, str) or kind not in DETAILS:
        raise ConfigError(f"{source}: rope_type '{kind}' is not supported. Valid: {', '.join(DETAILS)}.")
    original = positions
    if DETAILS[kind]:  # as transformers: only these read it, and a length beside the section goes first
        where = hf if hf.get(ORIGINAL) else rope
        original = integer(where, ORIGINAL, positions or None, source=source)
    if not original:
        raise ConfigError(f"{source}: rope_type '{kind}' needs max_position_embeddings.")
    # YaRN's factor may follow from the two lengths, but only where both are given.
    implied = positions / original if kind == "yarn" and (hf.get(ORIGINAL) or rope.get(ORIGINAL)) else None
    if rope.get("factor") is None and not implied:
        raise ConfigError(f"{source}: rope_type '{kind}' has no 'factor'.")
    base = RopeScaling(kind=kind, factor=number(rope, "factor", source, implied), original_max_position=original)
    return fields | {"rope_scaling": _details(base, rope, source), "max_position": _usable(base, positions)}


def _details(base: RopeScaling, rope: Mapping[str, Any], source: str) -> RopeScaling:
    """Adds what only one kind of scaling reads."""
    if base.kind == "llama3":
        factors = {key: number(rope, key, source) for key in ("low_freq_factor", "high_freq_factor")}
        return dataclasses.replace(base, **factors)
    if base.kind != "yarn":
        return base
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key) not in (None, 0):
            number(rope, key, source)
    betas = {
        key: number(rope, key, source, usual) if rope.get(key) else usual
        for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    return dataclasses.replace(
        base,
        **betas,
        attention_factor=yarn_attention_factor(base.factor, rope),
        truncate=flag(rope, "truncate", source, "truncate" not in rope),
    )


def _usable(scaling: RopeScaling, positions: int) -> int:
    """Tokens of context the scaled model was made for."""
    if scaling.kind == "dynamic":
        return scaling.original_max_position
    if scaling.kind in ("linear", "yarn"):
        return max(positions, int(scaling.factor * scaling.original_max_position))
    return positions
