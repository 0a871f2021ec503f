"""FLOPs and times by formula: against numbers worked out by hand, and against the compiler's own count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import search_r1
from jaxagent.config import parse
from jaxagent.models import params, transformer
from jaxagent.models.attention import packed
from jaxagent.models.logprobs import logits
from jaxagent.models.spec import ModelSpec
from jaxagent.plan import costs
from jaxagent.plan.chips import CHIPS, Chip
from tests.models import tiny


def _config(**model):
    raw = search_r1.get_config()
    raw.model.update(dict(num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32) | model)
    return parse(raw)


def _spec(vocab: int = 64, **model) -> ModelSpec:
    return ModelSpec.from_config(_config(**model).model, vocab)


def test_forward_by_hand():
    spec = _spec()
    # One layer: q 16x32, k and v 16x16 each, o 32x16, three of 16x32 = 512 + 256 + 256 + 512 + 1536 = 3072.
    assert costs.layer_matmul_params(spec) == 2 * 3072
    # 10 tokens x (2 x 6144 + 4 x 2 layers x 4 heads x 8 x 5 keys) + 2 x 64 x 16 at 3 targets
    assert costs.forward_flops(spec, tokens=10, keys=5, targets=3) == 10 * (12288 + 1280) + 6144


def test_training_is_three_forwards_and_four_where_layers_are_recomputed():
    kept, recomputed = _spec(remat="none"), _spec(remat="layer")
    layers = costs.forward_flops(kept, 4 * 8, 8, 0)
    assert costs.train_flops(kept, 4, 8, 0) == 3 * layers
    assert costs.train_flops(recomputed, 4, 8, 0) == 4 * layers


def test_forward_agrees_with_the_compiler():
    spec, rows, row_tokens = _spec(vocab=128), 4, 32

    def forward(weights, tokens):
        flat = tokens.reshape(-1)
        x, _ = transformer.hidden(weights, spec, flat, flat, packed(tokens), unroll=True)
        return logits(weights, spec, x)

    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params.param_specs(spec))
    tokens = jax.ShapeDtypeStruct((rows, row_tokens), jnp.int32)
    compiler = jax.jit(forward).lower(abstract, tokens).cost_analysis()["flops"]
    n = rows * row_tokens
    # The compiler also counts what the formula leaves out: norms, RoPE, softmax, SwiGLU. At this size they show.
    assert costs.forward_flops(spec, n, row_tokens, n) == pytest.approx(compiler, rel=0.15)
    assert costs.forward_flops(spec, n, row_tokens, n) < compiler


def test_the_work_of_a_step():
    cfg = _config()
    cfg = dataclasses.replace(
        cfg,
        env=dataclasses.replace(cfg.env, max_turns=3, final_turn=True, turn_tokens=10, context_tokens=100),
        engine=dataclasses.replace(cfg.engine, slots=8),
        rl=dataclasses.replace(
            cfg.rl,
            tasks_per_step=5,
            group_size=4,
            batch=dataclasses.replace(cfg.rl.batch, row_tokens=200, micro_rows=4),
        ),
    )
    work = costs.count(cfg, _spec(), row_targets=50)
    assert work.episodes == 20
    assert (work.sampled_tokens, work.prefill_tokens) == (40, 60)
    assert (work.rows, work.micro_batches) == (10, 3)
    assert work.decode_steps == 3 * 40, "20 episodes take three waves of 8 slots"
    assert work.score_flops == 0


def test_a_step_twice_as_fast_on_twice_the_chip():
    cfg, spec = _config(), _spec()
    work = costs.count(cfg, spec, row_targets=64)
    slow = Chip(1e12, 1e9, 1e9, 0.5, 0.5, 0.5, dispatch_s=0.0)
    fast = dataclasses.replace(slow, flops=2e12, bandwidth=2e9)
    one, two = costs.estimate(cfg, spec, work, slow), costs.estimate(cfg, spec, work, fast)
    assert one.total_s == pytest.approx(2 * two.total_s)
    assert one.train_s == pytest.approx(work.train_flops / 0.5e12)


def test_every_chip_has_sane_numbers():
    for name, chip in CHIPS.items():
        assert 1e10 < chip.flops < 1e16 and 1e9 < chip.bandwidth < 1e13, name
        assert chip.memory_bytes >= 16e9 and 0 < chip.train_mfu < 1, name


def test_a_decode_step_reads_the_experts_that_its_tokens_choose():
    spec = tiny.spec(family="qwen3_moe")
    experts, arrays = spec.pattern[0][1], spec.pattern[0][1].arrays(spec)
    whole, each = arrays["router"].size, sum(arrays[name].size for name in ("w_gate", "w_up", "w_down")) / 8
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(5) for e in rng.choice(8, 2, replace=False)}) for _ in range(4000)]
    assert experts.params_read(spec, 5) == pytest.approx(whole + each * np.mean(drawn), rel=0.01)
    assert experts.params_read(spec, 1) == pytest.approx(experts.matmul_params(spec))
