"""Small exact runs of the laptop recipes, and the numbers that a run leaves: what tests/golden compares bit for bit.

A run is the real command line in a process of its own, on one CPU device, with exact numerics and seed 0. XLA compiles
other code for other kinds of processors, so golden numbers belong to one kind and one version of jaxlib. The terminal's
and the Python recipe run the machine's own shell and Python, in plain processes where no sandbox works.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

from jaxagent.observe import jsonl
from jaxagent.runs import devices
from tests import tiny_run

FOLDER = pathlib.Path(__file__).parent
TIMEOUT_S = 500.0  # with nothing compiled yet, on a crowded machine
# Clocks, and what the engine counts as requests happen to arrive.
ARRIVAL = re.compile(
    r".*_s|engine/(compiles|cached_tokens|prefill_tokens|prefill_padded_tokens|dispatches|decode_turns|preemptions)"
    r"|episode/cached_tokens"
)

# Enough of a warm start that the policy searches, runs commands and is rewarded for form: losses and gradients that
# are all zero would compare nothing. (Predicted observations see to that in the terminal and in Python.)
_COMMON = (
    "--config.numerics=exact --config.seed=0 --config.checkpoint.every=0 --config.rl.tasks_per_step=4 "
    "--config.rl.steps=3 --config.env.episode_timeout_s=300 --config.engine.request_timeout_s=300"
)
_SEARCH = (
    f"{_COMMON} --config.warm_start.max_steps=80 --config.warm_start.curriculum_steps=20 "
    "--config.warm_start.gate_every=40 --config.warm_start.batch_sequences=8 --config.env.reward=em_format "
    "--config.env.turn_tokens=12"
)
_TERMINAL = (
    f"{tiny_run.TERMINAL_FLAGS} {_COMMON} --config.env.sandbox.unsafe=true --config.warm_start.max_steps=60 "
    "--config.env.command_timeout_s=100 --config.env.agent_timeout_s=200"
)
_PYTHON = (
    f"{tiny_run.PYTHON_FLAGS} {_COMMON} --config.env.sandbox.unsafe=true --config.warm_start.max_steps=60 "
    "--config.env.run_timeout_s=50 --config.env.judge_timeout_s=50"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe's preset and the flags that make it small."""

    config: str
    preset: str
    flags: str
    after: str = ""  # the recipe whose data and policy it goes on with, without a warm start


RECIPES = {
    "search_grpo": Recipe("search_r1", "laptop", f"{_SEARCH} --config.rl.kl.coefficient=0.01"),
    "search_ppo": Recipe(
        "search_r1", "laptop-ppo", f"{_SEARCH} --config.rl.advantage.critic.warmup_updates=1", after="search_grpo"
    ),
    "search_echo": Recipe("search_r1", "laptop-echo", _SEARCH, after="search_grpo"),
    "terminal": Recipe("echo", "laptop", _TERMINAL),
    "python": Recipe(
        "code_agent", "laptop", f"{_PYTHON} --config.rl.echo.coefficient=0.05 --config.rl.echo.max_tokens=32"
    ),
}


def kind() -> str:
    """What golden numbers belong to: the kind of this machine's processor and the version of jaxlib."""
    return f"{devices.processor()}-jaxlib-{importlib.metadata.version('jaxlib')}"


def file(name: str) -> pathlib.Path:
    """Where the golden numbers of a recipe are on this kind of machine."""
    return FOLDER / kind() / f"{name}.jsonl"


def run(name: str, folder: pathlib.Path) -> list[dict[str, object]]:
    """Runs a recipe in `folder`/`name`, and first the one that it goes on from; returns its numbers.

    Raises:
      RuntimeError: a run has failed; with its output.
    """
    recipe, workdir = RECIPES[name], folder / name
    flags = recipe.flags.split()
    if recipe.after:
        before = folder / recipe.after
        if not before.is_dir():
            run(recipe.after, folder)
        (dataset,) = before.glob("geography-*")
        flags += ["--config.stages=rl", f"--config.model.path={before / 'policy'}", f"--config.data.source={dataset}"]
    # One pool of threads everywhere: how many there are can decide how XLA splits a sum.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_")) or "CACHE" in k}
    done = subprocess.run(
        [sys.executable, "-m", *_argv(recipe, workdir, flags)],
        cwd=tiny_run.ROOT,
        env=kept | {"JAX_PLATFORMS": "cpu", "NPROC": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return numbers(workdir)


def _argv(recipe: Recipe, workdir: pathlib.Path, flags: list[str]) -> list[str]:
    return ["jaxagent.main", *tiny_run.argv(workdir, *flags, preset=recipe.preset, config=recipe.config)[1:]]


def numbers(workdir: pathlib.Path) -> list[dict[str, object]]:
    """A run's metrics.jsonl without what depends on time or arrival, and a digest of the policy that it exported."""
    records = [
        {name: value for name, value in record.items() if not ARRIVAL.fullmatch(name)}
        for record in jsonl.read(workdir / "metrics.jsonl")
    ]
    weights = (workdir / "policy/model.safetensors").read_bytes()
    return [*records, {"policy": hashlib.sha256(weights).hexdigest()}]


def differences(golden: list[dict[str, object]], found: list[dict[str, object]]) -> list[str]:
    """One line for every number of one run that is not the other's, to the last bit, and for every name in one only."""
    lines = [] if len(golden) == len(found) else [f"{len(golden)} golden records, {len(found)} found"]
    for expected, actual in zip(golden, found, strict=False):
        where = f"{expected.get('stage', 'end')} {expected.get('step', '')}".rstrip()
        for name in sorted({*expected, *actual}):
            texts = [json.dumps(record[name]) if name in record else "no such name" for record in (expected, actual)]
            if texts[0] != texts[1]:
                lines.append(f"{where} {name}: {texts[0]} golden, {texts[1]} found")
    return lines
