"""A mixture in fast numerics, with replayed routing and without: what logs and metrics hold, and that it repeats."""

import json

import pytest

from jaxagent import main as cli
from jaxagent import replay
from jaxagent.data import codec
from jaxagent.observe import jsonl
from tests import tiny_run

FLAGS = (
    "--config.model.family=qwen3_moe", "--config.numerics=fast", "--config.rl.steps=2", "--config.eval.every=0",
    "--config.rl.updates_per_step=2", "--config.rl.optimizer.warmup_steps=0", "--config.rl.entropy_coefficient=0.01",
    "--config.warm_start.max_steps=2", "--config.warm_start.curriculum_steps=1", "--config.episodes.learn=true",
)  # fmt: skip


def steps(workdir):
    return [r for r in jsonl.read(workdir / "metrics.jsonl") if r["stage"] == "rl" and r["step"]]


def episodes(workdir):
    return [codec.decode_episode(row, "a log") for row in tiny_run.episodes(workdir, "rl")]


@pytest.mark.slow
def test_recorded_routing_goes_through_a_run_and_its_replay(tmp_path, capsys):
    workdir = tmp_path / "with"
    assert cli.main(tiny_run.argv(workdir, *FLAGS)) == 0
    tiny_run.ended(workdir)
    for record in steps(workdir):
        assert 0 < record["routing/entropy"] < 2.08 and 1 < record["routing/max_load"] <= 4
        assert 0 <= record["routing/dead_frac"] < 1
        assert record["routing/replayed_frac"] == 1.0 and 0 <= record["routing/replayed_differ_frac"] < 0.1
    trajectories = [t for episode in episodes(workdir) for t in episode.trajectories]
    assert trajectories and all(t.experts.shape == (len(t), 2) for t in trajectories)
    assert all((t.experts[:-1] < 8).all() and (t.experts[-1] == 255).all() for t in trajectories)
    # Weights that are trained again from the record have its digests: they come from the recorded experts, too.
    capsys.readouterr()
    assert replay.main(["replay", f"--config.workdir={workdir}", "--verify=1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "passed"


@pytest.mark.slow
def test_without_it_nothing_is_recorded(tmp_path):
    workdir = tmp_path / "without"
    assert cli.main(tiny_run.argv(workdir, *FLAGS, "--config.rl.routing.replay=never")) == 0
    tiny_run.ended(workdir)
    assert not any(name.startswith("routing/replayed") for record in steps(workdir) for name in record)
    assert all(t.experts is None for episode in episodes(workdir) for t in episode.trajectories)
