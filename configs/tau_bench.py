"""tau-bench retail: serve a simulated customer of a shop with 16 tools (Yao et al., https://arxiv.org/abs/2406.12045).

    python -m jaxagent.main --config=configs/tau_bench.py                # a generated shop, a laptop
    python -m jaxagent.main --config=configs/tau_bench.py:laptop+gspo    # any of algorithms/published.py
    python -m jaxagent.main --config=configs/tau_bench.py:qwen3-4b --config.model.path=Qwen3-4B-Instruct-2507 \
        --config.data.source=data/retail --config.data.eval_source=data/retail/retail_dev_tasks.jsonl \
        --config.roles.user.token_file=KEY                            # the published files and recipe, 4 GPUs
    python -m jaxagent.main --config=configs/tau_bench.py:qwen3-4b --config.model.path=Qwen3-4B-Instruct-2507 \
        --config.data.source=data/retail --config.data.eval_source=data/retail/retail_dev_tasks.jsonl \
        --config.roles.user=engine --config.roles.user.path=CUSTOMER --config.roles.user.context_tokens=16384
                                                                      # the customer is a model on the same GPUs
    python -m jaxagent.main --config=configs/tau_bench.py:tau2 --config.model.path=Qwen3-4B-Instruct-2507 \
        --config.data.source=data/tau2/domains/retail --config.roles.user.token_file=KEY \
        --config.roles.judge.token_file=KEY                           # tau2-bench's retail domain, 4 GPUs

Laptop: a policy of about one million parameters, random at first, learns on two CPU cores to serve the scripted
customers of a generated shop: it finds who speaks, asks what he wants, looks the order up, acts, asks for more. Most
demonstrations make up what they should have looked up, or say goodbye after the first of two wishes; RL unlearns that.
Held-out tasks are of customers and orders that training never saw; the demonstrations are of other shops. Held-out
tasks solved, greedy: 0.25 to 0.80, 0.25 to 0.80 and 0.19 to 0.51 (seeds 0, 1, 2), in 30 to 35 minutes beside other
runs (4 to 7 of them RL).

data/retail has orders.json, products.json, users.json, wiki.md, tools_info.json and the tasks of three splits,
retail_{train,dev,test}_tasks.jsonl.

qwen3-4b: the constants of slime's example (examples/tau-bench): 32 tasks x 8 attempts, 1,024 tokens a message at
temperature 1, at most 30 messages, one update of 256 attempts, lr 1e-6 without warm-up, weight decay 0.1, clip 0.2 and
0.28, no KL, new tasks until 32 groups have rewards that differ (10 rounds at most), evaluation every 5 steps on the 20
dev tasks, greedy; the customer is gemini-2.5-flash-lite. What differs: sampled tokens are trained as they were sampled,
where slime renders and encodes the conversation anew; a message that is no readable call is answered by a warning and
costs a turn, where slime drops the attempt; a message cut by its token limit ends the attempt with reward 0, where
slime goes on with what there is of it; a message ends behind its first call; a conversation has at most 16,384 tokens.
Published: dev tasks solved from 0.739 to 0.791. Not run by us: `--dry_run` says what it needs.

tau2: tau2-bench (https://arxiv.org/abs/2506.07982) on its own folder of the retail domain. The benchmark's
constants: 200 steps, 10 failed calls, 74 tasks of training and 40 held out, gpt-4.1 as user and as judge at temperature
0. It was published for evaluation alone, so all about training is qwen3-4b's. What differs from the published
environment: the prompts of agent, user and judge are in words of ours, and what docs/recipes.md lists. Not run by us.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    return parts.chosen("configs/tau_bench.py", preset, {"laptop": laptop, "qwen3-4b": qwen3_4b, "tau2": tau2})


def laptop() -> ConfigDict:
    """GRPO with the scripted customer in a generated shop; learns in minutes on two CPU cores."""
    config = parts.laptop()
    config.workdir = "runs/tau_bench"
    config.tokenizer.vocab_size = 1152  # every name is one token, an id of three digits is two

    config.data.source = ConfigDict({"name": "tau_store", "num_users": 300, "num_tasks": 2_400, "compact": True})
    config.data.source.num_demonstrations = 16_000
    config.data.source.num_curriculum = 6_000
    config.data.source.flawed_frac = 0.55
    config.data.num_eval = 96

    config.env = ConfigDict({"name": "tau_bench", "tools": "plain", "store": "", "policy": ""})
    config.env.max_turns = 12
    config.env.turn_tokens = 40
    config.env.observation_tokens = 62  # of an order what an agent needs
    config.env.context_tokens = 448
    config.env.episode_timeout_s = 120.0
    config.env.max_failed_steps = 3
    config.roles = ConfigDict({"user": {"name": "retail_customer"}})

    config.engine.slots = 112
    config.engine.pages = 896
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 1_400  # all of them: the habit of looking must be there, if rare
    config.warm_start.curriculum = ConfigDict({"steps": 140, "sequences": 32})  # to copy
    config.warm_start.batch_sequences = 36
    config.warm_start.batch.row_tokens = 448
    config.warm_start.gate_every = 1_400
    config.warm_start.gate_family = "one"
    config.warm_start.gate_questions = 6

    config.rl.steps = 80
    config.rl.tasks_per_step = 14
    config.rl.group_size = 8
    config.rl.optimizer = parts.optimizer(4e-4, schedule="linear")
    config.rl.batch.row_tokens = 448
    config.eval.every = 0  # before and after
    return config


def qwen3_4b() -> ConfigDict:
    """slime's recipe on Qwen3-4B-Instruct-2507; the split over 4 GPUs and the engine's sizes are ours."""
    config = parts.laptop()
    config.workdir = "runs/tau_bench_qwen3-4b"
    config.mesh.fsdp = 4
    config.numerics = "fast"
    config.checkpoint.replay = "newest"

    # The shape of Qwen3-4B-Instruct-2507, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.family = "qwen3"
    config.model.num_layers = 36
    config.model.embed_dim = 2560
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.mlp_dim = 9728
    config.model.rope_theta = 5_000_000.0
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.vocab_size = 151_936
    config.tokenizer.use_chat_template = True

    config.data.source = ConfigDict({"name": "files", "path": "data/retail"})
    config.data.eval_source = "data/retail/retail_dev_tasks.jsonl"
    config.data.num_eval = 20

    config.env = ConfigDict({"name": "tau_bench", "tools": "native", "store": "", "policy": ""})
    config.env.max_turns = 30
    config.env.turn_tokens = 1024
    config.env.observation_tokens = 4096
    config.env.context_tokens = 16_384  # the shop's policy and its tools are 4,200
    config.env.episode_timeout_s = 3600.0
    config.env.max_failed_steps = 3
    config.roles = ConfigDict({"user": {"name": "http", "model": "gemini-2.5-flash-lite", "temperature": 1.0}})
    config.roles.user.url = "https://generativelanguage.googleapis.com/v1beta/openai"
    config.roles.user.send_seed = False  # Gemini's endpoint refuses it
    config.roles.user.send_temperature = True
    config.roles.user.limit_field = "max_tokens"
    config.roles.user.retries = 6  # it limits how often it is asked, and six growing pauses are a minute
    config.roles.user.reply_tokens = 512
    config.roles.user.timeout_s = 120.0

    config.engine.slots = 256
    config.engine.pages = 8_192
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 600.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.steps = 500
    config.rl.tasks_per_step = 32
    config.rl.group_size = 8
    config.rl.updates_per_step = 1
    # Groups whose rewards all agree are dropped, and new tasks are played in their place.
    config.rl.refill = ConfigDict({"max_rounds": 10, "tasks_per_round": 32})
    config.rl.aggregation = ConfigDict({"name": "sequence_mean"})
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, weight_decay=0.1)
    config.rl.batch = parts.batch(row_tokens=16_384, micro_rows=4, targets_multiple=256)
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval = ConfigDict({"every": 5, "sampled": False})
    config.checkpoint.every = 20
    return config


def tau2() -> ConfigDict:
    """tau2-bench's retail domain with its published limits and models, trained as qwen3-4b."""
    config = qwen3_4b()
    config.workdir = "runs/tau_bench_tau2"
    config.data.source = ConfigDict({"name": "files", "path": "data/tau2/domains/retail"})
    config.data.eval_source = ""  # the split "test"
    config.data.num_eval = 40

    config.env = ConfigDict({"name": "tau2", "domain": "retail", "store": "", "nl_assertions": "judge"})
    config.env.max_steps = 200  # messages and batches of results, of both sides
    config.env.max_errors = 10
    config.env.max_turns = 100  # the agent's messages among 200 steps
    config.env.turn_tokens = 1024
    config.env.observation_tokens = 4096
    config.env.context_tokens = 32_768
    config.rl.batch.row_tokens = 32_768  # a row holds a whole conversation
    config.env.episode_timeout_s = 3600.0
    config.env.max_failed_steps = 3
    gpt = {"name": "http", "url": "https://api.openai.com/v1", "model": "gpt-4.1-2025-04-14", "temperature": 0.0}
    gpt |= {"retries": 6, "send_seed": True, "send_temperature": True, "limit_field": "max_tokens"}
    config.roles = ConfigDict({"user": gpt | {"timeout_s": 120.0}, "judge": gpt | {"timeout_s": 120.0}})
    config.roles.judge.reply_tokens = 1024  # a reason, and a score for each statement
    return config
