"""All sampling strategies at once in a whole run: exact, without compiling, and the same when it is continued."""

import json
import shutil

import pytest

from jaxagent import main as cli
from jaxagent.envs.base import Verdict
from jaxagent.envs.search.environment import SearchAttempt
from tests import tiny_run
from tests.tiny_run import numbers

FLAGS = tuple(
    f"--config.{flag}"
    for flag in (
        "stages=rl", "eval.every=0", "eval.sampled=false", "data.num_eval=2", "checkpoint.keep=9",
        "rl.group_size=3", "rl.temperature.schedule=cosine", "rl.temperature.final=0.5", "rl.refill.max_rounds=3",
        "rl.keep_groups_frac=0.5", "rl.batch.share_prefix=true", "engine.page_tokens=8", "engine.pages=600",
        "rl.curriculum=learnability", "rl.replay.per_step=2", "rl.replay.low=0.0",
        "rl.replay.high=1.0", "rl.replay.capacity=5", "rl.tool_epsilon=0.25", "rl.optimizer.warmup_steps=0",
    )
)  # fmt: skip
KEPT = 2  # steps that the second run finds done


async def by_length(self, transcript):
    """A verifier that a random policy sometimes pleases, so that groups have signal and successes exist."""
    reward = float(len(transcript.response) % 2)
    return Verdict(reward, {"em": reward})


@pytest.mark.slow
def test_every_strategy_survives_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(SearchAttempt, "verify", by_length)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main(tiny_run.argv(whole, *FLAGS)) == 0
    shutil.copytree(whole, killed)
    bundles = sorted((p for p in (killed / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    assert len(bundles) == 5
    for path in bundles[KEPT + 1 :]:  # as a run that died in step 3: metrics beyond the bundle are dropped
        shutil.rmtree(path)
    shutil.rmtree(killed / "policy")
    assert cli.main(tiny_run.argv(killed, *FLAGS)) == 0
    assert numbers(killed) == numbers(whole)
    states = [json.dumps(_tasks(w), sort_keys=True) for w in (whole, killed)]
    assert states[0] == states[1]

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0
    assert summary["logprob_gap_max"] == 0.0  # at every temperature, after forced words, beside replayed attempts
    steps = numbers(whole)[1:]
    assert [s["sampling/temperature"] for s in steps] == pytest.approx([1.0, 0.875, 0.625, 0.5])
    assert max(s["sampling/rounds"] for s in steps) > 1 and max(s["episode/forced_turns"] for s in steps) > 0
    assert steps[0]["replay/used"] == 0 and steps[-1]["replay/used"] == 2 and steps[-1]["replay/size"] == 5
    assert steps[-1]["loss/nll"] > 0 and max(s["policy/grad_norm"] for s in steps) > 0
    assert all(s["sampling/groups_trained"] <= 1 for s in steps)  # half of two
    assert steps[-1]["curriculum/tasks_seen"] > 4


def _tasks(workdir):
    """The last bundle's task state: position, statistics and buffer."""
    from jaxagent.learner.checkpoint import bundles, read_host

    folder = workdir / "checkpoints"
    return read_host(folder, bundles(folder)[-1])["tasks"]
