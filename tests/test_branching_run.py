"""A whole run with forks, exact: recorded, replayed bit for bit, gone on with; statistics are of its roots."""

import json

import numpy as np
import pytest

from jaxagent import main as cli
from jaxagent import replay
from jaxagent.algorithms.streams import action_mask
from jaxagent.observe import jsonl
from jaxagent.replay.rerun import name_of
from jaxagent.runs import record
from tests import tiny_run

pytestmark = pytest.mark.slow
# After a warm start that suffices for searches and form, so that episodes have more than one turn.
FLAGS = [
    *["--config.numerics=exact", "--config.warm_start.max_steps=80", "--config.warm_start.curriculum_steps=20"],
    *["--config.warm_start.batch_sequences=8", "--config.env.reward=em_format", "--config.env.turn_tokens=12"],
    *["--config.env.max_turns=3", "--config.rl.group_size=6", "--config.rl.branching.turns=1", "--config.rl.steps=3"],
    *["--config.checkpoint.replay=all", "--config.eval.every=0", "--config.eval.sampled=false"],
]


def test_a_run_with_forks_is_replayed_bit_for_bit_and_gone_on_with(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli.main(tiny_run.argv(whole, *FLAGS, preset="laptop+tree")) == 0
    forks = []
    for number in range(3):
        (round_,) = record.read(whole / "record/rl", number).rounds
        for group in round_:
            by_sample = {episode.sample: episode for episode in group.episodes}
            assert [e.fork_of is None for e in group.episodes] == [True, True, False, False, False, False]
            for fork in (e for e in group.valid if e.forked_at):
                (own,), (parents,) = fork.trajectories, by_sample[fork.fork_of].trajectories
                length = int(fork.metrics["copied_tokens"])
                np.testing.assert_array_equal(own.tokens[:length], parents.tokens[:length])
                assert not action_mask(own)[:length].any() and action_mask(own)[length:].any()
                forks.append((number, fork))
        record_of = list(jsonl.read(whole / "metrics.jsonl"))[-1]
        assert record_of["episode/count"] == 2 * 2 and record_of["forks/count"] == 2 * 4
    assert len(forks) > 5
    assert max(fork.metrics["prefilled_tokens"] for _, fork in forks) <= 64  # a page; metrics have their mean
    assert record_of["forks/prefilled_tokens"] <= 64 < record_of["forks/copied_tokens"]

    capsys.readouterr()
    assert replay.main(["replay", f"--config.workdir={whole}", "--verify=3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["verdict"] == "passed" and found["checked"]["episodes"] == 3 * 2 * 6
    number, fork = forks[-1]
    for how in ([], ["--recorded"]):
        episode = f"--episode={name_of(fork)}"
        assert replay.main(["replay", f"--config.workdir={whole}", f"--step={number}", episode, *how]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        sampled = int(fork.trajectories[0].action_mask.sum())
        assert found["checked"]["episodes"] == 1 and found["checked"]["logprobs"] == sampled

    assert cli.main(tiny_run.argv(parts, *FLAGS, "--config.rl.steps=2", preset="laptop+tree")) == 0
    assert cli.main(tiny_run.argv(parts, *FLAGS, preset="laptop+tree")) == 0
    for number in range(3):
        seals = [record.read(run / "record/rl", number).rounds for run in (whole, parts)]
        assert results(seals[0]) == results(seals[1])


def results(rounds):
    return [
        [(e.sample, e.fork_of, e.forked_at, e.reward, [t.tokens.tolist() for t in e.trajectories]) for e in g.episodes]
        for round_ in rounds
        for g in round_
    ]
