"""WebRL in a whole run: phases, their reference, replayed turns; exact, without compiling, the same when continued."""

import dataclasses
import json
import shutil

import pytest

from jaxagent import main as cli
from jaxagent import replay
from jaxagent.envs.base import Verdict
from jaxagent.envs.search.environment import Search, SearchAttempt
from jaxagent.learner.checkpoint import bundles, read_host
from tests import tiny_run
from tests.tiny_run import numbers

FLAGS = tuple(
    f"--config.{flag}"
    for flag in (
        "env=tests.test_webrl_run:Asking", "stages=rl", "eval.every=0", "eval.sampled=false", "data.num_eval=2",
        "checkpoint.keep=9", "rl.group_size=3", "rl.steps=5", "rl.phases.steps=2", "rl.kl.refresh_every=2",
        "rl.phases.tasks=3", "rl.phases.low=0", "rl.phases.high=1", "rl.replay.low=0.0", "rl.replay.high=1.0",
        "rl.replay.capacity=5", "rl.optimizer.warmup_steps=0",
        "rl.advantage.critic.warmup_updates=0",
    )
)  # fmt: skip
KEPT = 3  # steps that the second run finds done: the middle of the second phase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking(Search):
    """Asks a question that was not answered once more, in other words."""

    def new_task(self, failed, rng):
        return dataclasses.replace(failed, prompt=f"{failed.prompt} Say {rng.randrange(100)}.")


async def by_length(self, transcript):
    """A verifier that a random policy sometimes pleases."""
    reward = float(len(transcript.response) % 2)
    return Verdict(reward, {"em": reward})


def argv(workdir):
    """argv of the run: an advantage along tokens has no `drop_zero_signal`."""
    return [flag for flag in tiny_run.argv(workdir, *FLAGS, preset="laptop+webrl") if "drop_zero_signal" not in flag]


@pytest.mark.slow
def test_phases_survive_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(SearchAttempt, "verify", by_length)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main(argv(whole)) == 0
    shutil.copytree(whole, killed)
    folders = sorted((p for p in (killed / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    for path in folders[KEPT + 1 :]:
        shutil.rmtree(path)
    shutil.rmtree(killed / "policy")
    assert cli.main(argv(killed)) == 0
    assert numbers(killed) == numbers(whole)
    states = [read_host(w / "checkpoints", bundles(w / "checkpoints")[-1])["tasks"] for w in (whole, killed)]
    assert json.dumps(states[0], sort_keys=True) == json.dumps(states[1], sort_keys=True)

    assert replay.main(["replay", f"--config.workdir={whole}", "--verify=3", "--draw=1"]) == 0

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["logprob_gap_max"] == 0.0
    steps = numbers(whole)[1:]
    assert [s["phases/number"] for s in steps] == [0, 0, 1, 1, 2]
    assert steps[1]["phases/new"] == steps[3]["phases/new"] == 3 and steps[1]["phases/held_out"] == 0
    assert [s["phases/attempts_at_new_tasks"] for s in steps] == [0, 0, 6, 3, 6]  # 3 new tasks, two in a step
    assert steps[0]["replay/used"] == 0 and steps[-1]["replay/turns"] > 0
    assert max(s["policy/grad_norm"] for s in steps) > 0 and max(s["critic/grad_norm"] for s in steps) > 0
