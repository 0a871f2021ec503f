"""ToolOrchestra: a small policy calls experts, each of which has a price (Su et al., arXiv 2511.21689).

    python -m jaxagent.main --config=configs/tool_orchestra.py                    # scripted experts, a laptop
    python -m jaxagent.main --config=configs/tool_orchestra.py:laptop-engine      # one expert is an engine's (below)
    python -m jaxagent.evaluate --config=configs/tool_orchestra.py --greedy       # accuracy and cost of a finished run
    python -m jaxagent.main --config=configs/tool_orchestra.py:qwen3-8b \
        --config.model.path=Qwen3-8B --config.data.source=data/orchestra          # the published recipe, 8 GPUs

The policy calls three tools with the name of an expert: `search`, `enhance_reasoning` (the expert writes a Python
program, which a sandbox runs) and `answer`, which ends the episode. Its reward compares outcome, cost, latency and use
of tools inside the group, in the user's weights (`rl.group_reward`).

Laptop: a policy of about a million parameters, random at first, learns on two CPU cores whom to ask. The experts are
scripted and have the published prices: the dear one knows nearly everything, the cheap one sums of one step, and all
that a program or a search has put before it. Demonstrations mostly call the dear one, or more than is needed. After RL
held-out problems are solved at least as often, for much less: docs/recipes.md has the numbers.

laptop-engine: the same without the dear search. An engine of the run plays the cheap answerer with the weights that
the warm start ended with; demonstrations then hold an expert's conversations too. It shows two weights interleaved on
one mesh; such an expert knows little, so nothing is to be expected of the numbers.

qwen3-8b: the published constants (8 attempts at each of 16 tasks from 384 that are played, learning rate 1e-6, KL
0.0001 of type mse, clip 0.2 / 0.28, dual clip 10, 30 turns, 24,000 + 8,768 tokens, boost 0.1, penalty 0.1), experts
and prices of its tools.json. Where it differs: a task is one conversation and not a sample per turn; the code's trainer
learns from all groups with signal of its 384; the weights of tasks without preferences of their own, the number of
steps (10 epochs, of a number of rows that is not given) and the split over 8 GPUs are ours. Not run by us: `--dry_run`
says what it needs. Every expert is `http`: give each its --config.roles.NAME.url.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts

# Who can do what in the published tools.json: model, price of a million prompt and reply tokens in dollars, and what
# the policy is told of each.
REASONERS = {
    "reasoner-1": ("gpt-5", 1.25, 10.0, "strong, insights that can be relied on"),
    "reasoner-2": ("gpt-5-mini", 0.25, 2.0, "fine on some problems, errs on difficult ones"),
    "reasoner-3": ("Qwen2.5-Coder-32B-Instruct", 0.8, 0.8, "reasons over what was found"),
}
ANSWERERS = {
    "answer-1": ("gpt-5", 1.25, 10.0, "excellent in most domains"),
    "answer-2": ("gpt-5-mini", 0.25, 2.0, "reasonable, gets stuck in complex reasoning and special knowledge"),
    "answer-3": ("Llama-3.3-70B-Instruct", 0.9, 0.9, "easy to medium problems, no long plans"),
    "answer-4": ("Qwen3-32B", 0.8, 0.8, "simple steps, may misread details"),
    "answer-math-1": ("Qwen2.5-Math-72B-Instruct", 0.9, 0.9, "mathematics of middle school"),
    "answer-math-2": ("Qwen2.5-Math-7B-Instruct", 0.2, 0.2, "mathematics of primary school"),
}
SEARCHERS = {
    "search-1": ("gpt-5", 1.25, 10.0, "finds what is missing, with concise queries"),
    "search-2": ("gpt-5-mini", 0.25, 2.0, "reasons over what was found and writes queries"),
    "search-3": ("Qwen3-32B", 0.8, 0.8, "writes queries"),
}
LATENCY = {  # seconds on average, as its tools.json has them; told to the policy
    "reasoner-1": 31, "reasoner-2": 25, "reasoner-3": 9, "answer-1": 96, "answer-2": 27, "answer-3": 15, "answer-4": 11,
    "answer-math-1": 13, "answer-math-2": 9, "search-1": 22, "search-2": 16, "search-3": 8,
}  # fmt: skip


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {"laptop": laptop, "laptop-engine": laptop_engine, "qwen3-8b": qwen3_8b}
    return parts.chosen("configs/tool_orchestra.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO with scripted experts."""
    config = parts.laptop()
    config.workdir = "runs/tool_orchestra"
    config.tokenizer.vocab_size = 2048
    config.data.source = ConfigDict({"name": "orchestra", "num_tasks": 3_000, "num_cities": 300})
    config.data.source.num_demonstrations = 9_000
    config.data.source.expert_frac = 0.0
    config.data.num_eval = 120

    config.env = ConfigDict({"name": "tool_orchestra", "prompt": "plain", "judge": ""})
    config.env.max_turns = 4
    config.env.turn_tokens = 16
    config.env.observation_tokens = 112
    config.env.context_tokens = 224
    config.env.episode_timeout_s = 120.0
    config.env.max_failed_steps = 3
    config.env.reasoners = ConfigDict({"reasoner-3": ""})
    config.env.answerers = ConfigDict({"answer-1": "", "answer-3": ""})
    config.env.searchers = ConfigDict({"search-1": "", "search-3": ""})
    config.env.latency = ConfigDict({"name": "tokens"})
    config.env.price_prompt = config.env.price_reply = 0.2  # the published ones of the orchestrator itself
    config.env.code_interpreter_per_second = 8.3e-6
    config.env.run_timeout_s = 15.0  # takes milliseconds, unless the machine is very busy
    config.env.output_chars = 80
    config.env.expert_context_tokens = 160
    config.env.max_documents = 4
    config.env.retriever = ConfigDict({"name": "bm25", "corpus": "", "topk": 2})
    config.env.sandbox = parts.sandbox()

    config.roles = ConfigDict()
    for name in ("reasoner-3", "answer-1", "answer-3", "search-1", "search-3"):  # envs/orchestra/roles.py
        config.roles[name] = ConfigDict({"name": "orchestra_expert", "expert": name})

    config.engine.slots = 64
    config.engine.pages = 320
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 300
    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 32
    config.warm_start.batch.row_tokens = 224
    config.warm_start.gate_every = 300  # all of its steps: the dear expert alone would open it at once
    config.warm_start.gate_family = "two_step"
    config.warm_start.gate_questions = 8
    config.warm_start.gate_accuracy = 0.9

    config.rl.steps = 40
    config.rl.tasks_per_step = 24
    config.rl.group_size = 8
    config.rl.group_reward = ConfigDict({"name": "preferences", "accuracy": 1.0, "cost": 0.5, "latency": 0.1})
    config.rl.group_reward.score = "solved"
    config.rl.optimizer = parts.optimizer(3e-4, schedule="linear")
    config.rl.batch.row_tokens = 224
    config.eval.every = 10
    config.checkpoint.every = 10
    return config


def laptop_engine() -> ConfigDict:
    """The laptop's, with the cheap answerer played by an engine: the weights that the warm start ended with."""
    config = laptop()
    config.workdir = "runs/tool_orchestra_engine"
    config.data.source.expert_frac = 0.5
    del config.roles["search-1"], config.env.searchers["search-1"]
    config.roles["answer-3"] = ConfigDict(
        {"name": "engine", "path": "", "context_tokens": 224} | _priced(0.9, 0.9, reply_tokens=16, timeout_s=60.0)
    )
    config.roles["answer-3"].sampling = ConfigDict({"temperature": 1.0})
    config.rl.steps = 10
    return config


def qwen3_8b() -> ConfigDict:
    """The published recipe on Qwen3-8B."""
    config = laptop()
    config.workdir = "runs/tool_orchestra_qwen3-8b"
    config.mesh.fsdp = 4
    config.mesh.tensor = 2  # every device has a half of the engine's weights
    config.numerics = "fast"
    config.checkpoint.replay = "newest"

    # The shape of Qwen3-8B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.family = "qwen3"
    config.model.num_layers = 36
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.mlp_dim = 12_288
    config.model.rope_theta = 1_000_000.0
    config.model.tie_embeddings = False
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.vocab_size = 151_936
    config.tokenizer.use_chat_template = True

    config.data.source = ConfigDict({"name": "files", "path": "data/orchestra"})
    config.data.num_eval = 256
    config.env.prompt = "orchestra"
    config.env.max_turns = 30
    config.env.turn_tokens = 8_768
    config.env.observation_tokens = 8_000
    config.env.context_tokens = 32_768  # 24,000 of prompt and 8,768 of response
    config.env.episode_timeout_s = 7_200.0
    config.env.judge = "judge"
    config.env.latency = ConfigDict({"name": "measured"})
    config.env.run_timeout_s = 60.0
    config.env.output_chars = 16_000
    config.env.expert_context_tokens = 24_000
    config.env.max_documents = 30
    config.env.retriever = ConfigDict({"name": "http", "url": "http://127.0.0.1:8000/retrieve", "topk": 5})
    config.env.retriever.timeout_s = 60.0
    config.env.retriever.retries = 2
    config.env.sandbox.update(warm=64, memory_mb=2048, disk_mb=256)
    config.roles = ConfigDict()
    for tool, able in (("reasoners", REASONERS), ("answerers", ANSWERERS), ("searchers", SEARCHERS)):
        config.env[tool] = ConfigDict({name: _told(name, *about) for name, about in able.items()})
        for name, (model, prompt, reply, _) in able.items():
            config.roles[name] = _http(model, 28_000 if "gpt" in model else 8_000)
            config.roles[name].update(_priced(prompt, reply))
    config.roles.judge = _http("gpt-5", 4_000)

    config.engine.slots = 64
    config.engine.pages = 20_480  # 40 whole episodes, 24 GB a chip; those that wait for experts give theirs up
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 900.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.steps = 500
    config.rl.tasks_per_step = 16
    config.rl.group_size = 8
    config.rl.refill = ConfigDict({"max_rounds": 2, "tasks_per_round": 384})
    config.rl.updates_per_step = 1
    config.rl.objective = ConfigDict({"name": "dual_clip", "clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0})
    config.rl.kl = ConfigDict({"coefficient": 1e-4, "estimator": "k2", "where": "loss"})  # k2 is verl's "mse"
    config.rl.shaping = ConfigDict({"truncated_factor": 0.1, "correct_boost": 0.1, "min_reward": 1.0})
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.999)
    config.rl.batch.row_tokens = 32_768
    config.rl.batch.micro_rows = 4  # a row for each two devices
    config.rl.batch.targets_multiple = 256
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval.every = 50
    config.checkpoint.every = 50
    return config


def _priced(prompt: float, reply: float, **limits: float) -> dict[str, float]:
    """Prices of a million tokens."""
    return {"price_prompt": prompt, "price_reply": reply, **limits}


def _told(name: str, model: str, prompt: float, reply: float, words: str) -> str:
    """What the policy is told of an expert: its skill, its price and how long it takes, never which model it is."""
    return f"{words}; ${prompt:g} and ${reply:g} for a million tokens in and out, about {LATENCY[name]} s."


def _http(model: str, reply_tokens: int) -> ConfigDict:
    """An expert behind HTTP."""
    role = {"name": "http", "url": "http://127.0.0.1:8001/v1", "model": model, "token_file": "", "temperature": 1.0}
    reasons = "gpt" in model  # such models have one temperature, 1, and another name for a reply's limit
    role |= {"send_seed": True, "send_temperature": not reasons, "limit_field": "max_tokens"}
    if reasons:
        role["limit_field"] = "max_completion_tokens"
    else:
        role["temperature"] = 0.2
    return ConfigDict(role | {"retries": 6, "calls": 256, "reply_tokens": reply_tokens, "timeout_s": 600.0})
