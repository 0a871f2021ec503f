"""The same work by torch and transformers on the same card: their generate, and their compiled gradient.

    python -m benchmarks.gpu_torch [--shape=3b] [--batches=8,64] [--context=2048] [--tokens=4096] [--rows=4]

Random bfloat16 weights of the shape. Decode: `generate` with a dynamic and a static cache, the slope between two
lengths, so that the prompt's cost is not in it. Train: one gradient with every layer compiled, layers recomputed, loss
on a quarter of the tokens, as in `gpu_train`. A way that fails is named with its reason and left out. The last line is
JSON: `torch_decode_<batch>_ms_per_token` (the faster cache), `torch_train_s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from benchmarks import gpu_shapes

NEW_TOKENS = 64


def build(name: str, device: str) -> transformers.PreTrainedModel:
    """The shape with random weights, from transformers' own Qwen2."""
    layers, embed, heads, kv_heads, _, mlp, vocabulary, tied = gpu_shapes.SHAPES[name]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=embed,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        return transformers.Qwen2ForCausalLM(config)


def seconds(call: Callable[[], object]) -> float:
    """Of one call, on the device's own clock where it has one."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def decode_ms(model: transformers.PreTrainedModel, batch: int, context: int, new_tokens: int) -> dict[str, float]:
    """Milliseconds per token of each kind of cache that works."""
    model.eval()
    prompt = torch.randint(0, model.config.vocab_size, (batch, context), device=model.device)
    fixed = dict(do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, attention_mask=torch.ones_like(prompt))
    times = {}
    for cache in ("dynamic", "static"):

        def generate(count: int, cache: str = cache) -> None:
            with torch.inference_mode():
                model.generate(prompt, min_new_tokens=count, max_new_tokens=count, cache_implementation=cache, **fixed)

        try:
            for count in (2, 2 + new_tokens):
                generate(count)
            short, long = (seconds(lambda count=count: generate(count)) for count in (2, 2 + new_tokens))
        except Exception as error:  # whatever a package of another version raises: said, and the rest goes on
            print(f"generate with a {cache} cache, {batch} rows: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        times[cache] = (long - short) / new_tokens * 1e3
        print(f"generate, {cache} cache, {batch} rows: {times[cache]:.2f} ms per token", flush=True)
    return times


def train_s(model: transformers.PreTrainedModel, rows: int, tokens: int, compiled: bool) -> float:
    """Median seconds of one gradient."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    text = torch.randint(0, model.config.vocab_size, (rows, tokens), device=model.device)
    targets = torch.arange(1, tokens, 4, device=model.device)

    def gradient() -> None:
        hidden = model.model(text).last_hidden_state[:, targets - 1]
        scores = model.lm_head(hidden).float().flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, text[:, targets].flatten()).backward()
        model.zero_grad(set_to_none=True)

    times = [seconds(gradient) for _ in range(6)]
    return statistics.median(times[2:])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(gpu_shapes.SHAPES), default="3b")
    parser.add_argument("--batches", default="8,64")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--new_tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = build(args.shape, "cuda" if cuda else "cpu")
    result: dict[str, object] = {"device": torch.cuda.get_device_name() if cuda else "cpu", "shape": args.shape}
    for batch in map(int, filter(None, args.batches.split(","))):
        if times := decode_ms(model, batch, args.context, args.new_tokens):
            result[f"torch_decode_{batch}_ms_per_token"] = round(min(times.values()), 3)
    if args.rows:
        result["torch_train_s"] = round(train_s(model, args.rows, args.tokens, compiled=cuda), 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
