"""FLOPs and seconds of one RL step, counted by formula from the config and the model's shape.

Upper bounds where the policy decides: every episode is taken to use all its turns, tokens and observations.
A multiply-add is two FLOPs; backward is twice forward; norms, RoPE, softmax and sampling are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxagent.config import Config, LoraConfig
from jaxagent.learner.programs import action_tokens
from jaxagent.models import lora
from jaxagent.models import params as model_params
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.spec import ModelSpec
from jaxagent.plan.chips import Chip


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one RL step does, over all devices."""

    episodes: int
    sampled_tokens: int  # per episode, at most
    prefill_tokens: int  # per episode, at most: prompt and observations
    rows: int  # packed training rows, with no two episodes sharing one
    micro_batches: int  # of one pass over the rows
    passes: int  # epochs over the batch
    train_flops: float
    score_flops: float  # forward passes for the frozen reference and, with PPO, values
    prefill_flops: float
    decode_flops: float
    decode_steps: int  # forward passes over all slots


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Estimated seconds of one RL step on a named chip."""

    train_s: float
    score_s: float
    prefill_s: float
    decode_s: float
    decode_step_s: float  # one token in every slot

    @property
    def total_s(self) -> float:
        """One step, its phases one after another."""
        return self.train_s + self.score_s + self.prefill_s + self.decode_s


def layer_matmul_params(spec: ModelSpec) -> float:
    """Weights of all layers that a token is multiplied with (norms, biases and experts it does not go to left out)."""
    return _over_layers(spec, lambda block: block.matmul_params(spec))


def _over_layers(spec: ModelSpec, of_block: Callable[[LayerBlock], float]) -> float:
    return spec.num_layers // len(spec.pattern) * sum(of_block(block) for kind in spec.pattern for block in kind)


def forward_flops(spec: ModelSpec, tokens: int, keys: float, targets: int) -> float:
    """A forward pass over `tokens` tokens that each attend to `keys` keys, with logits at `targets` of them."""
    attention = _over_layers(spec, lambda block: block.flops(spec, keys))
    head = 2 * spec.padded_vocab_size * spec.embed_dim * targets
    return tokens * (2.0 * layer_matmul_params(spec) + attention) + head


def train_flops(
    spec: ModelSpec, rows: int, row_tokens: int, row_targets: int, adapters: LoraConfig | None = None
) -> float:
    """Forward and backward over packed rows. Packed attention computes the whole T x T square.

    Recomputation counts where it is a whole pass: "layer" repeats the layers' forward, and the head's is always
    repeated. With adapters the products that would make the gradients of frozen weights are left out, and those of the
    adapters come in.
    """
    tokens = rows * row_tokens
    layers = forward_flops(spec, tokens, row_tokens, 0)
    head = forward_flops(spec, 0, 0, rows * row_targets)
    passes = 4 if spec.remat == "layer" else 3
    if adapters is None:
        return layers * passes + head * 4
    own = 0.0
    for stack, kind in zip(spec.stacks, model_params.stacks_of(lora.adapter_specs(spec, adapters)), strict=True):
        blocks = spec.pattern[stack[0]]
        used = {name: block.used(array) for block in blocks for name, array in block.arrays(spec).items() if array}
        own += sum(used[name] * (adapter.a.size + adapter.b.size) for name, adapter in kind.items())
    return layers * passes + 2.0 * tokens * (own * passes - layer_matmul_params(spec)) + head * 3


def count(cfg: Config, spec: ModelSpec, row_targets: int) -> StepWork:
    """The work of one RL step. `row_targets` is R, the log-prob positions of a packed row."""
    env, rl = cfg.env, cfg.rl
    episodes = rl.tasks_per_step * rl.group_size
    sampled = action_tokens(cfg)
    prefill = env.context_tokens - sampled
    rows = math.ceil(episodes * env.context_tokens / rl.batch.row_tokens)
    micro = math.ceil(rows / rl.batch.micro_rows)
    padded_rows = micro * rl.batch.micro_rows
    forwards = (rl.kl is not None) + (rl.critic is not None) + rl.reads_old
    one_forward = forward_flops(spec, padded_rows * rl.batch.row_tokens, rl.batch.row_tokens, padded_rows * row_targets)
    one_train = train_flops(spec, padded_rows, rl.batch.row_tokens, row_targets, cfg.model.lora)
    critic_train = train_flops(spec, padded_rows, rl.batch.row_tokens, row_targets) if rl.critic else 0.0
    mean_keys = env.context_tokens / 2
    waves = math.ceil(episodes / cfg.engine.slots)
    return StepWork(
        episodes=episodes,
        sampled_tokens=sampled,
        prefill_tokens=prefill,
        rows=rows,
        micro_batches=micro,
        passes=rl.epochs,
        train_flops=rl.epochs * (one_train + critic_train),
        score_flops=forwards * one_forward,
        prefill_flops=episodes * forward_flops(spec, prefill, mean_keys, 0),
        decode_flops=episodes * forward_flops(spec, sampled, mean_keys, sampled),
        decode_steps=waves * sampled,
    )


def estimate(cfg: Config, spec: ModelSpec, work: StepWork, chip: Chip) -> StepTimes:
    """Seconds on `chip`: compute-bound phases by MFU, decode by what each chip must read per token."""
    devices = cfg.mesh.devices
    # A decode step reads the weights this chip holds and the cached keys and values of its slots, half full.
    shards = devices // cfg.mesh.tensor  # of the engine's slots
    bytes_per_value = {"float32": 4, "bfloat16": 2}
    head = spec.padded_vocab_size * spec.embed_dim
    rows = cfg.engine.slots / shards * cfg.mesh.expert  # that a device's experts see
    matrices = _over_layers(spec, lambda block: block.params_read(spec, rows, cfg.mesh.expert))
    weights = (matrices + head) * bytes_per_value[spec.compute_dtype] / cfg.mesh.tensor
    values = _over_layers(spec, lambda block: block.state_values(spec, cfg.env.context_tokens / 2))
    cached = values * bytes_per_value[cfg.engine.cache_dtype] / cfg.mesh.tensor / shards
    read_s = (weights + cfg.engine.slots * cached) / (chip.bandwidth * chip.decode_bandwidth_frac)
    compute_s = work.decode_flops / max(work.decode_steps, 1) / devices / (chip.flops * chip.prefill_mfu)
    step_s = max(read_s, compute_s) + chip.dispatch_s / cfg.engine.steps_per_dispatch
    return StepTimes(
        train_s=work.train_flops / devices / (chip.flops * chip.train_mfu),
        score_s=work.score_flops / devices / (chip.flops * chip.prefill_mfu),
        prefill_s=work.prefill_flops / devices / (chip.flops * chip.prefill_mfu),
        decode_s=work.decode_steps * step_s,
        decode_step_s=step_s,
    )
