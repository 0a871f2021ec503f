"""A whole run small enough for tests: one layer, a small world, a handful of steps. Shared by the end-to-end tests."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from jaxagent.data import codec
from jaxagent.observe import jsonl
from jaxagent.observe.episode_store import StoredEpisodes

ROOT = pathlib.Path(__file__).resolve().parents[1]

FLAGS = (
    "--config.model.num_layers=1 --config.model.embed_dim=32 --config.model.num_heads=2 --config.model.num_kv_heads=2 "
    "--config.model.head_dim=16 --config.model.mlp_dim=64 --config.tokenizer.vocab_size=512 "
    "--config.data.num_eval=8 --config.env.turn_tokens=6 --config.env.max_turns=2 --config.env.observation_tokens=90 "
    "--config.engine.slots=8 --config.engine.prefill_tokens=256 --config.engine.pages=64 "
    "--config.warm_start.max_steps=6 --config.warm_start.curriculum_steps=2 --config.warm_start.gate_every=2 "
    "--config.warm_start.gate_questions=1 --config.warm_start.curriculum_sequences=4 "
    "--config.warm_start.batch_sequences=4 --config.warm_start.batch.row_tokens=400 "
    "--config.env.context_tokens=400 --config.rl.batch.row_tokens=400 "
    "--config.rl.steps=4 --config.rl.tasks_per_step=2 --config.rl.group_size=4 "
    "--config.rl.advantage.drop_zero_signal=false --config.eval.every=2 --config.checkpoint.every=1"
)
# On top of them for the search recipe.
SEARCH_FLAGS = (
    "--config.data.source.num_cities=300 --config.data.source.num_curriculum=64 "
    "--config.data.source.num_demonstrations=64"
)

# On top of them for the terminal's recipes: the smallest sizes that hold their episodes.
TERMINAL_FLAGS = (
    "--config.numerics=fast --config.tokenizer.vocab_size=700 --config.data.source.num_tasks=120 "
    "--config.data.source.num_demonstrations=32 --config.env.turn_tokens=8 --config.env.observation_tokens=16 "
    "--config.env.context_tokens=128 --config.env.verify_overlong=true "
    "--config.env.sandbox.warm=4 --config.warm_start.batch.row_tokens=128 "
    "--config.warm_start.curriculum_steps=0 --config.warm_start.max_steps=3 --config.rl.steps=2 "
    "--config.rl.batch.row_tokens=128"
)


# On top of them for the Python recipes.
PYTHON_FLAGS = (
    "--config.numerics=fast --config.tokenizer.vocab_size=700 --config.data.source.num_tasks=120 "
    "--config.data.source.num_demonstrations=32 --config.env.turn_tokens=8 --config.env.observation_tokens=16 "
    "--config.env.context_tokens=192 --config.env.sandbox.warm=4 --config.warm_start.batch.row_tokens=192 "
    "--config.warm_start.curriculum_steps=0 --config.warm_start.max_steps=3 --config.rl.steps=2 "
    "--config.rl.batch.row_tokens=192"
)

# On top of them for the coding recipes.
CODING_FLAGS = (
    "--config.numerics=fast --config.tokenizer.vocab_size=700 --config.data.source.num_tasks=120 "
    "--config.data.source.num_demonstrations=32 --config.env.turn_tokens=8 --config.env.context_tokens=192 "
    "--config.env.sandbox.warm=4 --config.warm_start.batch.row_tokens=192 --config.warm_start.curriculum_steps=0 "
    "--config.warm_start.max_steps=3 --config.rl.steps=2 --config.rl.batch.row_tokens=192"
)


def argv(workdir: pathlib.Path, *extra: str, preset: str = "laptop", config: str = "search_r1") -> list[str]:
    """argv of a tiny run; `extra` flags come last and win."""
    file = f"--config={ROOT / 'configs' / config}.py:{preset}"
    along_tokens = preset in ("laptop-ppo", "laptop+vtrace")  # an advantage that knows no groups
    flags = [flag for flag in FLAGS.split() if not (along_tokens and "drop_zero_signal" in flag)]
    generated = not any(flag.startswith("--config.data.source=") for flag in extra)
    own = SEARCH_FLAGS.split() if config == "search_r1" and generated else []
    every = [*flags, *own, *extra]
    stages = next((flag for flag in reversed(extra) if flag.startswith("--config.stages=")), "warm_start")
    if "warm_start" not in stages:
        every = [flag for flag in every if not flag.startswith("--config.warm_start.")]
    return ["main", file, f"--config.workdir={workdir}", *every]


def ended(workdir: pathlib.Path, step: int = 2, *failures: str) -> tuple[dict, dict]:
    """The summary and the last record of a run that has come to `step`, compiled nothing late, and failed no attempt.

    `failures` are the reasons that may not occur, by default all.
    """
    summary = json.loads((workdir / "summary.json").read_text())
    last = list(jsonl.read(workdir / "metrics.jsonl"))[-1]
    failures = failures or ("timeout", "env_error", "engine_error", "cancelled")
    assert summary["compiles_after_warmup"] == 0
    assert last["step"] == step and not any(last[f"stop/{name}"] for name in failures)
    return summary, last


def numbers(workdir: pathlib.Path) -> list[dict]:
    """Every record without what depends on the clock or on how turns were scheduled."""
    apart = ("time/", "engine/", "tokens_per_s", "episode/cached_tokens")
    return [
        {name: value for name, value in record.items() if not name.startswith(apart) and not name.endswith("_s")}
        for record in jsonl.read(workdir / "metrics.jsonl")
    ]


def episodes(workdir: pathlib.Path, name: str) -> list[dict]:
    """The episodes of one log of a run as lines of earlier versions had them, with the stage and the step."""
    log = StoredEpisodes(workdir / "episodes", name)
    where = [({"stage": name.partition(".")[0], "step": b["step"]}, log.of(b)) for b in log.blocks]
    return [about | codec.encode_episode(episode) for about, block in where for episode in block]


def put(raw: dict, path: str, value) -> None:
    """Sets a field of a plain config; sections that are off, or that a recipe leaves to their defaults, are opened."""
    first, _, rest = path.partition(".")
    if rest:
        raw[first] = raw.get(first) or {}
        put(raw[first], rest, value)
    else:
        raw[first] = value


def start(workdir: pathlib.Path, *extra: str) -> subprocess.Popen:
    """The same run as a process of its own, as a user starts it: on one CPU device, output in `workdir`.log."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with open(f"{workdir}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxagent.main", *argv(workdir, *extra)[1:]],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
