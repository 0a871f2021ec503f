"""Agent Q in a whole run, exact: forks of forks where the search says, pairs that move weights, replayed bit for bit."""

import json

import pytest

from jaxagent import main as cli
from jaxagent import replay
from jaxagent.runs import record
from tests import tiny_run
from tests.test_branching_run import FLAGS

AGENT_Q = [flag for flag in FLAGS if "branching" not in flag]


@pytest.mark.slow
def test_a_search_is_replayed_bit_for_bit(tmp_path, capsys):
    argv = tiny_run.argv(tmp_path / "run", *AGENT_Q, "--config.rl.branching.at_once=2", preset="laptop+agentq")
    assert cli.main(argv) == 0
    groups = [g for number in range(3) for g in record.read(tmp_path / "run/record/rl", number).rounds[0]]
    assert all([e.fork_of is None for e in g.episodes[:2]] == [True, True] and len(g.episodes) == 6 for g in groups)
    deep = [e for g in groups for e in g.valid if e.forked_at]
    of_forks = {e.sample for g in groups for e in g.episodes if e.fork_of is not None}
    assert len(deep) > 5 and any(e.fork_of in of_forks for e in deep), "forks of forks"
    steps = tiny_run.numbers(tmp_path / "run")[-3:]
    assert max(s["policy/grad_norm"] for s in steps) > 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["logprob_gap_max"] == 0.0
    capsys.readouterr()
    assert replay.main(["replay", f"--config.workdir={tmp_path / 'run'}", "--verify=2", "--draw=1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "passed"
