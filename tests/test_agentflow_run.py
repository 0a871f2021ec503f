"""The AgentFlow recipe end to end, in a run of seconds: scripted roles, and two weights on one mesh."""

import json

import pytest

from jaxagent import main as cli
from jaxagent.observe import jsonl
from tests import tiny_run

CHANGES = (
    *(flag for flag in tiny_run.PYTHON_FLAGS.split() if "numerics" not in flag),
    "--config.numerics=exact",
    "--config.env.turn_tokens=20",
    "--config.env.context_tokens=256",
    "--config.warm_start.batch.row_tokens=256",
    "--config.rl.batch.row_tokens=256",
)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["laptop", "laptop-engines"])
def test_a_tiny_run(tmp_path, sandbox, preset):
    """A random planner solves nothing, but no episode fails, and its log-probs are the engine's."""
    flags = list(CHANGES)
    if preset == "laptop-engines":
        flags += [f"--config.roles.{name}.context_tokens=256" for name in ("executor", "verifier")]
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, config="agentflow", preset=preset)) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["eval/n"] == 8
    last = list(jsonl.read(tmp_path / "run/metrics.jsonl"))[-1]
    failures = ("timeout", "env_error", "engine_error", "cancelled")
    assert last["step"] == 2 and not any(last[f"stop/{name}"] for name in failures)
    assert last["logprob_gap/max"] == 0.0
    assert last["episode/trajectories"] >= 3 and last["episode/executor_replies"] >= 1
