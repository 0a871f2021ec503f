"""The config schema: every field, its type, its range and its meaning. No values: those stand in `configs/*.py`.

A config file's `get_config(preset)` returns an `ml_collections.ConfigDict`. `parse(config)` checks it against
these frozen dataclasses *before any device work* and converts it once, so that the rest of the code reads
`cfg.rl.group_size` and never a default. Errors are `ConfigError`s of one line that name the nearest valid field.
Imports nothing slow: `--help` and config errors answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxagent.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    SecondsOrZero,
    ZeroToOne,
    at_least,
    between,
    more_than,
)


class ConfigError(ValueError):
    """A user's mistake, told in one line. `main` prints it and exits with code 2."""


# What `Config.stages` can name; loop.py says how each is done.
Stage = Literal["warm_start", "sample", "sft", "rft", "dpo", "outcome_model", "opd", "rl"]

Seed = Annotated[int, between(0, 2**32 - 1)]  # what every generator of random numbers here takes


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices used."""

    data: PositiveInt  # copies of the model, each on its own part of the batch
    fsdp: PositiveInt  # shards of the parameters and of the batch
    tensor: PositiveInt  # shards of heads and of the MLP


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) beside frozen weights; read by the RL stage. See models/lora.py."""

    rank: NonNegativeInt  # 0 = off: all weights are trained
    alpha: PositiveFloat  # an adapter's product is scaled by alpha / rank
    rank_stabilised: bool  # by alpha / sqrt(rank) instead (arXiv 2312.03732)
    targets: str  # projections with adapters, "q_proj,v_proj"; "all-linear" = all but the vocabulary head


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy. With a `path`, the shape is read from its config.json; fields below must agree with it or be 0."""

    path: str  # a Hugging Face folder; "" = random init from the fields below. Given by flag, it clears MODEL_SHAPE
    family: Literal["", "qwen2", "qwen3", "llama"]
    num_layers: NonNegativeInt
    embed_dim: NonNegativeInt
    num_heads: NonNegativeInt
    num_kv_heads: NonNegativeInt
    head_dim: NonNegativeInt
    mlp_dim: NonNegativeInt
    vocab_multiple: PositiveInt  # vocabulary rows are padded up to a multiple of this
    rope_theta: NonNegativeFloat
    tie_embeddings: bool
    embed_init_std: NonNegativeFloat  # also the scale at which each layer starts to add to the residual stream
    param_dtype: Literal["float32", "bfloat16"]  # master weights
    compute_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "layer", "dots"]  # what the backward pass recomputes
    logprob_chunk_tokens: PositiveInt  # tokens whose [V] logits exist at once
    lora: LoraConfig


# Fields of ModelConfig that a Hugging Face folder describes: left "" or 0, or equal to what it says.
MODEL_SHAPE = ("family", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Where the tokenizer comes from."""

    path: str  # folder with tokenizer.json; "" = model.path when set, else trained on the dataset
    vocab_size: PositiveInt  # when trained here
    use_chat_template: bool  # render prompts with the tokenizer's own chat template


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Task sources. Those with a name are built on first use under the workdir; others are paths."""

    source: str  # a name of families/built_in.py (the laptop's), or a folder / file: array_record, parquet, jsonl
    eval_source: str  # "" = the held-out split of `source`
    seed: Seed  # of the world, not of the run: the held-out questions are the same for every run
    num_cities: PositiveInt  # size of the geography world
    num_tasks: NonNegativeInt  # of "terminal", "arithmetic" and "python_tasks", training and held-out together
    num_curriculum: NonNegativeInt  # geography's one-passage demonstrations
    num_demonstrations: NonNegativeInt  # whole episodes, of the built-in sources
    num_eval: PositiveInt  # held-out tasks, spread evenly over families of kinds ("one_hop", "two_hop") and over kinds


@dataclasses.dataclass(frozen=True)
class ShapingConfig:
    """What is added to an outcome for how it was reached (docs/rewards.md). A weight of 0 is off."""

    overlong_weight: NonNegativeFloat  # of DAPO's soft punishment of long episodes, in sampled tokens
    overlong_buffer_tokens: NonNegativeInt  # before the most tokens an episode can sample, where the punishment begins
    efficiency_weight: NonNegativeFloat  # of tool calls that repeat an earlier one or go over the budget
    efficiency_penalty: ZeroToOne  # of one such call, as a part of the weight; all together at most the weight
    efficiency_budget: NonNegativeInt  # tool calls per episode
    cap: NonNegativeFloat  # most that shaping can add or take


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Search-R1's two reward profiles. See docs/recipes.md for the score table."""

    profile: Literal["em", "em_format"]
    structure_score: ZeroToOne  # s
    final_format_score: ZeroToOne  # f
    retrieval_score: ZeroToOne  # r
    min_answers: Annotated[int, between(1, 2)]  # 2: as published, in prompt + response, where the prompt holds one
    shaping: ShapingConfig


@dataclasses.dataclass(frozen=True)
class RetrieverConfig:
    """The search engine behind the environment."""

    backend: Literal["bm25", "dense", "http"]
    corpus: str  # jsonl of {"id", "contents"}; "" = the dataset's own passages
    index: str  # dense: folder with vectors and FAISS index
    url: str  # http: the POST /retrieve endpoint
    topk: PositiveInt
    timeout_s: Seconds
    retries: NonNegativeInt


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Where commands run; see docs/sandboxes.md. Every limit is one sandbox's."""

    backend: str  # "auto" = the best that works here, "remote", or names of sandbox/choose.py: "bubblewrap,podman"
    unsafe: bool  # plain processes, without any protection, where nothing else works
    workers: str  # read by "remote": their URLs, separated by commas
    token_file: str  # read by "remote": a file with the workers' token
    root: str  # folder that holds a whole root; "" = a minimal one over this machine's /usr
    image: str  # of docker and podman; "" = the root
    layers: str  # folder with a layer per task id, for tasks with an image of their own (Dockerfile, container.def)
    images: str  # folder where such images are kept once they are built; "" = none is built
    bases: tuple[str, ...]  # what FROM may name: "debian:12=debootstrap:bookworm"; see docs/sandboxes.md, Images
    build_network: bool  # build steps have this machine's network; only for tasks that you trust
    warm: NonNegativeInt  # sandboxes kept started ahead
    memory_mb: PositiveInt
    disk_mb: PositiveInt  # everything written
    files: PositiveInt  # files and folders written
    processes: PositiveInt
    cpus: PositiveFloat


@dataclasses.dataclass(frozen=True)
class TerminalConfig:
    """The terminal environment: one attempt is one shell in one sandbox."""

    tools: Literal["plain", "endless", "qwen3_xml"]  # how commands are written; see envs/terminal_tasks/dialogue.py
    command_timeout_s: Seconds
    output_chars: PositiveInt  # of a command's output, at most
    agent_timeout_s: SecondsOrZero  # the attempt's own, then reward 0 without verification; 0 = what the task says
    verifier_timeout_s: SecondsOrZero  # 0 = what the task says
    verify_overlong: bool  # also judge an attempt whose tokens ran out; else it gets 0 without verification
    initial_test: bool  # run the test of the initial state, if there is one, at the start of every attempt
    solved_reward: PositiveFloat  # from which an attempt counts as solved, in reports
    sandbox: SandboxConfig


@dataclasses.dataclass(frozen=True)
class PythonConfig:
    """The Python environment: programs run in a sandbox, each in a fresh process."""

    format: Literal["plain", "fenced", "qwen3_xml"]  # how programs and answers are written; see envs/python.py
    judge: Literal["answer", "tests"]  # a stated answer against the gold one, or hidden tests of the last program
    system: str  # the system message; "" = the format's own (none for "plain")
    run_timeout_s: Seconds  # of one program; past it the policy sees what was printed until then
    output_chars: PositiveInt  # shown of a program's output, at most: its beginning and its end
    traceback: Literal["whole", "message"]  # message: without the frames
    judge_timeout_s: Seconds  # of all hidden tests of a submission
    sandbox: SandboxConfig


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """The environment. "search" reads `prompt`, `final_turn`, `reward` and `retriever`; the others read their own."""

    name: Literal["search", "terminal", "python"]
    prompt: Literal["search_r1", "plain", "chat"]  # the published instruction, "Question: ...\n", or a short one
    max_turns: PositiveInt
    final_turn: bool  # one more generation with search disabled after max_turns (N+1 variant)
    turn_tokens: PositiveInt  # sampled tokens per turn, at most
    observation_tokens: PositiveInt  # an observation is cut to this many tokens (head kept)
    context_tokens: PositiveInt  # the whole trajectory, at most; also the engine's cache length
    episode_timeout_s: Seconds
    max_failed_steps: NonNegativeInt  # steps in a row of which every episode failed: the run saves and stops; 0 = never
    reward: RewardConfig
    retriever: RetrieverConfig
    terminal: TerminalConfig
    python: PythonConfig


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The generation engine."""

    slots: PositiveInt  # turns that generate at once
    steps_per_dispatch: PositiveInt  # K: tokens per slot between two looks of the host
    prefill_tokens: PositiveInt  # cached between two dispatches, at most: long prompts do not stall those who generate
    pages: PositiveInt  # of the key/value cache
    page_tokens: PositiveInt  # per page; part of the numerics: the trainer's exact log-probs go page by page too
    tile_rows: PositiveInt  # rows computed together; part of the numerics likewise
    kv_on_update: Literal["keep", "recompute"]  # what sessions in progress have cached when weights change
    cache_dtype: Literal["float32", "bfloat16"]
    request_timeout_s: Seconds


# Below it sampling is greedy: logits divided by less lie further apart than f32 can tell, and their differences are
# rounding errors of many nats.
LEAST_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The distribution that is sampled. Log-probs are always of this distribution."""

    temperature: NonNegativeFloat  # 0 = greedy
    top_p: Annotated[float, between(0, 1, without="low")]  # 1 = off
    top_k: NonNegativeInt  # 0 = off
    min_p: ZeroToOne  # 0 = off

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature < LEAST_TEMPERATURE


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on f32 masters."""

    learning_rate: NonNegativeFloat
    schedule: Literal["constant", "cosine", "linear"]
    warmup_steps: NonNegativeInt
    b1: Annotated[float, between(0, 1, without="high")]
    b2: Annotated[float, between(0, 1, without="high")]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    grad_clip: NonNegativeFloat  # of the global norm; 0 = off


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """How trajectories become device arrays."""

    row_tokens: PositiveInt  # T: tokens of one packed row
    micro_rows: PositiveInt  # rows per micro-batch over all devices
    targets_multiple: PositiveInt  # log-prob positions per row are padded to a multiple of this
    share_prefix: bool  # what sequences of an update begin with alike is computed once per row


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised warm start on demonstrations, ended by accuracy per relation, not by a fixed count."""

    demonstrations: str  # full.jsonl, or a folder with it and curriculum.jsonl; "" = the dataset's own
    max_steps: NonNegativeInt
    curriculum_sequences: PositiveInt  # demonstrations per update of the curriculum
    batch_sequences: PositiveInt  # and after it
    optimizer: OptimizerConfig
    batch: BatchConfig
    curriculum_steps: NonNegativeInt  # first steps: one short passage, loss on observation tokens too
    early_answer_frac: ZeroToOne  # of the harder kinds' demonstrations, what ends too early: what RL has to unlearn
    gate_every: PositiveInt  # steps between two looks at the gate
    gate_family: str  # of kinds: "one_hop" looks at "one_hop/capital", "one_hop/currency", ...
    gate_accuracy: ZeroToOne  # greedy score on training tasks that every kind of the family must reach
    gate_questions: PositiveInt  # tasks per kind


@dataclasses.dataclass(frozen=True)
class OfflineConfig:
    """How a stage that learns from data is trained."""

    updates: PositiveInt
    examples: PositiveInt  # episodes, demonstrations or pairs per update
    optimizer: OptimizerConfig
    batch: BatchConfig


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Attempts of the current policy at training tasks, logged without training, with rl.sampling."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt  # of the shuffled training tasks; none comes twice before each came once
    attempts: PositiveInt  # at each of them


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on demonstrations, with demonstrations of not using the tool among them."""

    demonstrations: str  # jsonl, as the warm start's; "" = the dataset's full.jsonl
    negatives: str  # jsonl of the same form; "" = none
    negative_frac: Annotated[float, between(0, 1, without="high")]  # of the examples of an update
    aggregation: Literal["token_mean", "sequence_mean"]
    training: OfflineConfig


@dataclasses.dataclass(frozen=True)
class RFTConfig:
    """Rejection-sampling fine-tuning: imitate one's own distinct successes."""

    episodes: str  # file or folder of logged episodes; "" = this run's own
    min_reward: FiniteFloat  # from which an attempt is a success
    per_task: PositiveInt  # successes of one task, at most
    aggregation: Literal["token_mean", "sequence_mean"]
    training: OfflineConfig


@dataclasses.dataclass(frozen=True)
class DPOConfig:
    """Direct preference optimisation on the best and worst attempts at a task."""

    episodes: str  # as rft.episodes
    pairs_per_task: PositiveInt
    min_gap: NonNegativeFloat  # least difference of a pair's rewards; equal rewards never make one
    beta: PositiveFloat
    length_normalised: bool  # per action token instead of summed
    nll_coefficient: NonNegativeFloat  # of the chosen attempt's NLL per action token; 0 = off
    training: OfflineConfig


@dataclasses.dataclass(frozen=True)
class OutcomeModelConfig:
    """A model of an episode's outcome: the policy's weights with a scalar head, trained on logged episodes."""

    episodes: str  # as rft.episodes
    loss: Literal["binary", "bradley_terry"]
    min_reward: FiniteFloat  # from which an attempt is a success
    held_out_frac: Annotated[float, between(0, 1, without="both")]  # of the tasks: they measure accuracy and AUC
    training: OfflineConfig


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """KL to a reference policy."""

    coefficient: NonNegativeFloat  # 0 = no reference is kept
    estimator: str  # of algorithms/kl.py
    where: Literal["loss", "reward", "advantage"]  # advantage: token by token, after baselines
    refresh_every: NonNegativeInt  # RL steps between two copies of the policy into the reference; 0 = it stays frozen


@dataclasses.dataclass(frozen=True)
class CorrectionConfig:
    """Importance weights for samples of another policy than the learner's: other numerics, or older weights."""

    name: str  # of algorithms/corrections.py; "none" = the ratio is taken to the recorded log-probs
    level: str  # whose ratio a token has: its own, its sequence's product or geometric mean
    low: ZeroToOne  # a ratio of 1, on-policy, always counts in full
    high: Annotated[float, at_least(1)]
    veto: ZeroToOne  # a trajectory with a token whose ratio is below counts 0; 0 = none
    normalise: bool  # divide the weights by their mean over the rollout batch
    opsm_delta: NonNegativeFloat  # read by "opsm": drift of a sequence, nats per token, from which bad ones are masked


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value function: the policy's model code with a scalar head. Read when rl.advantage has a critic."""

    gamma: ZeroToOne
    lam: ZeroToOne
    returns_lam: ZeroToOne  # read by "gae_adaptive": lambda of the critic's targets
    adaptive_alpha: PositiveFloat  # read by "gae_adaptive": lambda = 1 - 1 / (alpha * action tokens)
    turn_gamma: ZeroToOne  # read by "gae_turns" and "gae_bilevel": discount per turn
    loss: Literal["squared", "hl_gauss", "two_hot"]  # the latter two: a head of `bins` logits, cross-entropy
    bins: Annotated[int, at_least(2)]  # read by "hl_gauss" and "two_hot", as the next two: values from `low` to `high`
    low: FiniteFloat
    high: FiniteFloat
    sigma: PositiveFloat  # read by "hl_gauss": standard deviation of the target, in bin widths; published 0.75
    value_clip: NonNegativeFloat  # read by "squared", in units of reward; 0 = off
    value_coefficient: NonNegativeFloat
    warmup_updates: NonNegativeInt  # critic-only updates before the policy moves
    warmup_epochs: PositiveInt  # passes of the critic over each update's data until then; afterwards one
    optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class EchoConfig:
    """ECHO: cross-entropy on observation tokens from the same forward pass."""

    coefficient: NonNegativeFloat  # 0 = off; published: 0.05
    schedule: Literal["constant", "linear_decay", "step_decay"]
    targets: Literal["env_only", "full_observation", "warning_only", "warning_plus_env"]
    denominator: Literal["full_observation", "targets", "token_mean", "constant", "constant_sum"]
    max_tokens: NonNegativeInt  # 0 = no cap per sequence


@dataclasses.dataclass(frozen=True)
class PositiveNLLConfig:
    """Negative log-likelihood of the policy's own good attempts."""

    coefficient: NonNegativeFloat  # 0 = off; VAPO: 0.1
    min_reward: FiniteFloat  # from which an attempt is good


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: a teacher judges every token that the policy samples. See algorithms/distill.py."""

    coefficient: NonNegativeFloat  # of the teacher's term, beside the reward's; 0 = off
    teacher: str  # a Hugging Face folder (a run's exported policy), or the http:// address of an engine.serve
    loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"]  # sampled: an advantage; others: of distributions
    support: Literal["vocabulary", "student", "teacher", "union"]  # not read by "sampled"; student: its top-k tokens
    top_k: PositiveInt  # read unless the support is the vocabulary
    jsd_beta: Annotated[float, between(0, 1, without="both")]  # read by "jsd": the teacher's share of the mixture
    timeout_s: Seconds  # http: of one request
    retries: NonNegativeInt  # http: of one request, after the first attempt
    request_tokens: PositiveInt  # http: tokens of one request, at most (one trajectory may be longer)


@dataclasses.dataclass(frozen=True)
class EntropyControlConfig:
    """Steers the entropy to a target by rl.entropy_coefficient, which is then where the coefficient starts."""

    target: NonNegativeFloat  # nats per action token; 0 = off, the coefficient is constant
    step: PositiveFloat  # by which the coefficient rises (entropy below target) or falls per RL step
    maximum: PositiveFloat  # of the coefficient; the minimum is 0


@dataclasses.dataclass(frozen=True)
class RefillConfig:
    """Dynamic sampling: rounds of new tasks until enough groups have signal. See rollout/selection.py."""

    max_rounds: PositiveInt  # rounds per step at most; 1 = off: all groups are used, with signal or without
    tasks_per_round: NonNegativeInt  # 0 = as many as are missing


@dataclasses.dataclass(frozen=True)
class OversampleConfig:
    """More attempts than needed, stopped early. Off while both are 0; on, which attempts are used depends on timing."""

    extra_tasks: NonNegativeInt  # tasks started beyond those wanted; the step goes on when enough groups are complete
    extra_attempts: NonNegativeInt  # attempts started per task beyond group_size
    min_group: Annotated[int, at_least(2)]  # finished attempts from which a group that was cut short is used


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """Which tasks come next. See data/curriculum.py for the formulas."""

    name: Literal["off", "target", "failed", "learnability"]  # off: whole shuffled epochs
    target: ZeroToOne  # read by "target": the success rate that is looked for
    width: PositiveFloat  # read by "target": distance from it at which a task's chance is 0
    explore: ZeroToOne  # part of the draws that go evenly over all tasks
    success_reward: FiniteFloat  # from which an attempt counts as a success
    decay: Annotated[float, between(0, 1, without="low")]  # of a task's older attempts, per new group; 1 = never
    prior: ZeroToOne  # success rate of a task not met yet
    prior_attempts: PositiveFloat  # how many attempts the prior counts as


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Past successes, replayed while their probability under the policy lies in a window. See rollout/replay.py."""

    per_step: NonNegativeInt  # attempts replayed per step at most; 0 = off
    capacity: PositiveInt  # attempts kept
    use: Literal["nll", "policy"]  # policy: with rl.correction, and advantages from groups
    coefficient: NonNegativeFloat
    min_reward: FiniteFloat  # from which an attempt is a success
    low: ZeroToOne  # exclusive bound of exp(mean log-prob per token); WebRL: 0.5
    high: ZeroToOne  # inclusive bound; WebRL: 0.95


@dataclasses.dataclass(frozen=True)
class TemperatureConfig:
    """How the sampling temperature goes on from rl.sampling.temperature, step by step. Evaluation keeps that one."""

    schedule: Literal["constant", "linear", "cosine"]
    final: Annotated[float, at_least(LEAST_TEMPERATURE)]  # in the last step


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """The reinforcement-learning stage. Names are checked by `algorithms.checks.check`, which knows them all."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt
    group_size: PositiveInt
    staleness: NonNegativeInt  # steps by which the rollouts' weights lag behind; 0 = on-policy (see loop.Served)
    updates_per_step: PositiveInt  # optimiser updates (mini-batches) per rollout batch and epoch
    epochs: PositiveInt
    advantage: str  # of algorithms/advantages.py, best_of_k.py, process.py (from groups), token_advantages.py
    best_of: PositiveInt  # read by "max_at_k" and "pass_at_k": k
    multi_trajectory: Literal["full", "divide", "statistics"]  # an episode of several: see algorithms/estimate.py
    whiten_advantages: bool  # to mean 0 and variance 1 over the rollout batch's action tokens
    objective: str  # of algorithms/policy_loss.py
    clip_low: ZeroToOne  # the importance ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat
    clip_dual: Annotated[float, more_than(1)]  # read by "dual_clip": cap of a ratio whose advantage is negative
    tau_positive: PositiveFloat  # read by "sapo": how fast the gate closes where the advantage is positive
    tau_negative: PositiveFloat  # and elsewhere
    correction: CorrectionConfig
    aggregation: str  # of algorithms/aggregate.py
    aggregation_constant: PositiveFloat  # tokens; Dr.GRPO's divisor
    drop_zero_signal: bool  # leave out groups whose rewards are all equal; read by advantages from groups
    entropy_coefficient: NonNegativeFloat
    entropy_control: EntropyControlConfig
    z_coefficient: NonNegativeFloat  # of (log Z)^2 of the sampled distribution's logits, on action tokens; 0 = off
    sampling: SamplingConfig
    temperature: TemperatureConfig
    refill: RefillConfig
    keep_groups_frac: Annotated[float, between(0, 1, without="low")]  # StarPO-S: the part of largest std; 1 = all
    oversample: OversampleConfig
    curriculum: CurriculumConfig
    replay: ReplayConfig
    tool_epsilon: ZeroToOne  # chance per turn that it begins with a random tool call, not trained; 0 = never
    optimizer: OptimizerConfig
    batch: BatchConfig
    kl: KLConfig
    critic: CriticConfig
    echo: EchoConfig
    positive_nll: PositiveNLLConfig
    distill: DistillConfig


@dataclasses.dataclass(frozen=True)
class OPDConfig:
    """The stage "opd", on-policy distillation: `rl` with its teacher, without its reward."""

    steps: NonNegativeInt
    coefficient: PositiveFloat  # in this stage in place of rl.distill.coefficient
    learning_rate: PositiveFloat  # in place of rl.optimizer.learning_rate: exact divergences bear more than rewards


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation."""

    every: NonNegativeInt  # RL steps; 0 = only before and after
    sampled: bool  # also with rl.sampling, beside greedy


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Bundles of state, optimiser, task position, RNG, config and metrics position."""

    every: NonNegativeInt  # steps; 0 = only at stage ends, on SIGTERM and on Ctrl-C
    keep: PositiveInt


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole truth of one run."""

    workdir: str
    seed: Seed
    numerics: Literal["exact", "fast"]  # exact: the trainer's log-probs are the engine's, bit for bit
    mesh: MeshConfig
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    env: EnvConfig
    engine: EngineConfig
    stages: tuple[Stage, ...]  # what a run does, in order, each at most once
    warm_start: WarmStartConfig
    sample: SampleConfig
    sft: SFTConfig
    rft: RFTConfig
    dpo: DPOConfig
    outcome_model: OutcomeModelConfig
    opd: OPDConfig
    rl: RLConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    log_episodes: bool  # RL and greedy evaluation episodes too, token by token, to episodes/*.jsonl of the workdir


def parse(config: Mapping[str, Any]) -> Config:
    """Checks names, types and ranges of every field and converts to `Config`.

    Raises:
      ConfigError: unknown, missing or ill-typed field, or a number out of its range, named with its full path.
    """
    return _build(Config, config, "config")


def to_dict(config: Any) -> dict[str, Any]:
    """A plain nested dict of a parsed config (for checkpoints and reports)."""
    return dataclasses.asdict(config)


def absent(config: Mapping[str, Any], cls: type = Config, path: str = "config") -> list[str]:
    """Full paths of fields and sections of the schema that a config stored by another version of it lacks."""
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        if name not in config:
            found.append(f"{path}.{name}")
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(config[name], Mapping):
            found += absent(config[name], hint, f"{path}.{name}")
    return found


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest valid name, or a list of all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else f"Valid: {', '.join(valid)}."


def check_folder(path: str | pathlib.Path) -> None:
    """Raises ConfigError where a model's or tokenizer's folder is none, and says how to get one of the hub's."""
    if not pathlib.Path(path).is_dir():
        named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path))
        hub = f"A model of the Hugging Face hub is downloaded first: hf download {path} --local-dir {path}. "
        raise ConfigError(
            f"The folder '{path}' does not exist. {hub if named else ''}A small model for a laptop is made by: "
            f"python -m jaxagent.data_pipelines.smollm2 --out={path}"
        )


def _build(cls: type, value: Any, path: str) -> Any:
    if (to_dict := getattr(value, "to_dict", None)) is not None:
        value = to_dict()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} must be a section with fields, got {value!r}.")
    hints = typing.get_type_hints(cls, include_extras=True)
    for name in value:
        if name not in hints:
            raise ConfigError(f"Unknown config field '{path}.{name}'. {nearest(name, hints)}")
    missing = [name for name in hints if name not in value]
    if missing:
        raise ConfigError(f"Config field '{path}.{missing[0]}' is missing. configs/search_r1.py sets every field.")
    return cls(**{name: _convert(hint, value[name], f"{path}.{name}") for name, hint in hints.items()})


def _convert(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, value, path)
    origin = typing.get_origin(hint)
    if origin is Annotated:
        kind, allowed = typing.get_args(hint)
        value = _convert(kind, value, path)
        if value not in allowed:
            need = "finite" if isinstance(value, float) and not math.isfinite(value) else allowed
            raise ConfigError(f"{path} must be {need}, got {value!r}.")
        return value
    if origin is Literal:
        options = typing.get_args(hint)
        if value not in options:
            close = difflib.get_close_matches(str(value), map(str, options), n=1, cutoff=0.5)
            guess = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"{path} must be one of {', '.join(map(repr, options))}, got {value!r}.{guess}")
        return value
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise ConfigError(f"{path} must be a sequence, got {value!r}.")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, types.UnionType):
        hint = tuple(h for h in typing.get_args(hint))
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path} must be {getattr(hint, '__name__', hint)}, got {type(value).__name__} {value!r}.")
    return value
