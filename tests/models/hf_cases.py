"""Random tiny Hugging Face models: the cases of the parity tests and of the golden vectors. Imports transformers."""

from __future__ import annotations

import zlib

import torch
import transformers

CONFIGS = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "glm4_moe": transformers.Glm4MoeConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
    "olmoe": transformers.OlmoeConfig,
    "mistral": transformers.MistralConfig,
    "smollm3": transformers.SmolLM3Config,
    "olmo2": transformers.Olmo2Config,
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
}

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10_000.0, factor=2.5)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10_000.0, factor=2.0)
PLAIN = dict(rope_type="default", rope_theta=1_000_000.0)

SMOLLM3 = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True)

# name -> (family, changes of its config)
CASES = {
    "qwen2-untied": ("qwen2", dict(rope_parameters=PLAIN)),
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True, vocab_size=53)),
    "qwen2-yarn": ("qwen2", dict(rope_parameters=YARN, num_attention_heads=2, num_key_value_heads=2)),
    "qwen2-linear": ("qwen2", dict(rope_parameters=LINEAR, tie_word_embeddings=True)),
    "qwen2-one-kv-head": ("qwen2", dict(num_key_value_heads=1, num_hidden_layers=1)),
    "qwen3-untied": ("qwen3", dict(head_dim=16)),
    "qwen3-tied": ("qwen3", dict(tie_word_embeddings=True, rope_parameters=PLAIN)),
    "qwen3-yarn": ("qwen3", dict(rope_parameters=YARN | dict(beta_fast=16, beta_slow=2, attention_factor=1.1))),
    "qwen3-yarn-smooth": ("qwen3", dict(rope_parameters=YARN | dict(truncate=False, mscale=0.7, mscale_all_dim=1.3))),
    "qwen3-dynamic": ("qwen3", dict(rope_parameters=DYNAMIC, rms_norm_eps=1e-5, num_hidden_layers=3)),
    "llama-untied": ("llama", dict(vocab_size=49, intermediate_size=40)),
    "llama-tied": ("llama", dict(tie_word_embeddings=True, num_attention_heads=6, hidden_size=24, head_dim=4)),
    "llama-llama3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-linear": ("llama", dict(rope_parameters=LINEAR, num_key_value_heads=4)),
    "llama-dynamic": ("llama", dict(rope_parameters=DYNAMIC, tie_word_embeddings=True)),
    "wide-heads": ("qwen3", dict(head_dim=128)),
    "mistral": ("mistral", dict(sliding_window=None, rope_parameters=PLAIN)),
    "mistral-yarn": ("mistral", dict(sliding_window=None, rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.3))),
    "smollm3": ("smollm3", dict(SMOLLM3, num_hidden_layers=4)),
    "smollm3-untied": (
        "smollm3",
        dict(SMOLLM3, tie_word_embeddings=False, no_rope_layers=[0, 1], rope_parameters=YARN),
    ),
    "olmo2": ("olmo2", dict(pad_token_id=None, eos_token_id=None, head_dim=6)),
    "olmo2-llama3": ("olmo2", dict(pad_token_id=None, eos_token_id=None, rope_parameters=LLAMA3)),
}

_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
MIXTURES = {
    "moe": ("qwen3_moe", _MOE),
    "moe-as-weighed": ("qwen3_moe", _MOE | dict(norm_topk_prob=False, num_experts=5, num_experts_per_tok=3)),
    "moe-every-second": ("qwen3_moe", _MOE | dict(decoder_sparse_step=2, num_hidden_layers=4, rope_parameters=YARN)),
    "moe-not-at-the-ends": ("qwen3_moe", _MOE | dict(mlp_only_layers=[0, 2], num_hidden_layers=3)),
}
_GLM = dict(
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1, routed_scaling_factor=1.7,
    first_k_dense_replace=1,
)  # fmt: skip
MIXTURES |= {
    "glm": ("glm4_moe", _GLM | dict(num_hidden_layers=5, first_k_dense_replace=2)),
    "glm-groups": (
        "glm4_moe",
        _GLM
        | dict(attention_bias=True, use_qk_norm=True, n_group=4, topk_group=2, n_shared_experts=2, norm_topk_prob=False)
        | dict(rope_parameters=YARN | dict(partial_rotary_factor=0.25)),
    ),
}
_LATENT = _GLM | dict(
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=12, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=8, n_group=2, topk_group=1, head_dim=4,
)  # fmt: skip
MIXTURES |= {
    "deepseek": ("deepseek_v3", _LATENT),
    "deepseek-yarn": (
        "deepseek_v3",
        _LATENT
        | dict(q_lora_rank=None, v_head_dim=14, rope_interleave=False)
        | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.8)),
    ),
}
_LITE = {key: value for key, value in _LATENT.items() if key not in ("first_k_dense_replace", "head_dim")}
MIXTURES |= {
    "glm-lite": (
        "glm4_moe_lite",
        _LITE | dict(v_head_dim=10, mlp_layer_types=["dense", "sparse", "dense"], num_hidden_layers=3),
    ),
}
MIXTURES |= {"olmoe": ("olmoe", _MOE | dict(head_dim=4, pad_token_id=None, eos_token_id=None, num_experts_per_tok=3))}
del MIXTURES["olmoe"][1]["moe_intermediate_size"]
_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    rope_parameters=dict(PLAIN),
)
_SHARED = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
_BOTH = dict(layer_types=["linear_attention", "full_attention"])
HYBRIDS = {
    "qwen3_5": ("qwen3_5_text", _DELTA | dict(num_hidden_layers=4)),
    "qwen3_5-tied": (
        "qwen3_5_text",
        _DELTA | dict(_BOTH, tie_word_embeddings=True, linear_conv_kernel_dim=3),
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA | _SHARED | _BOTH),
    "qwen3_next": ("qwen3_next", _DELTA | _SHARED | _BOTH | dict(mlp_only_layers=[1])),
    "qwen3_next-dense": ("qwen3_next", _DELTA | dict(num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3])),
}


def build(name: str) -> transformers.PreTrainedModel:
    """The random model of a case, with norms and biases that are not their trivial initial values."""
    family, changes = (CASES | MIXTURES | HYBRIDS)[name]
    config = CONFIGS[family](
        **dict(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **({} if family == "glm4_moe_lite" else {"head_dim": 8}),  # there it is another name of qk_rope_head_dim
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
        | changes
    )
    torch.manual_seed(sorted(CASES).index(name) if name in CASES else zlib.crc32(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            slow = key.endswith(("A_log", "dt_bias"))  # decays that leave something, or rounding is all one sees
            # A norm of small values, which a delta net takes, enlarges roundings.
            std = 1.0 if "conv1d" in key else 0.2 if name in HYBRIDS else 0.3
            parameter.copy_(torch.randn_like(parameter) * std + (1.0 if parameter.ndim == 1 and not slow else 0.0))
            if slow:
                parameter -= 1.0
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model.eval()


def logits(model: transformers.PreTrainedModel, tokens) -> torch.Tensor:
    """float32 logits [B, T, V] of whole rows of tokens."""
    with torch.no_grad():
        return model(input_ids=torch.as_tensor(tokens, dtype=torch.long)).logits.float()
