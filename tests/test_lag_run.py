"""A run with `rl.staleness` that is killed and continued is the run that was not: its lag is in the bundle.

Its tokens, scored again under the versions that sampled them, have the very log-probs that were recorded.
"""

import json
import shutil

import pytest

from jaxagent import main as cli
from jaxagent.envs.search.environment import SearchAttempt
from jaxagent.learner import checkpoint
from tests import tiny_run
from tests.test_sampling_run import FLAGS, by_length
from tests.tiny_run import numbers

STALENESS, KEPT = 2, 2  # steps that the second run finds done


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_that_goes_on_keeps_its_lag(adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(SearchAttempt, "verify", by_length)
    flags = (*FLAGS, f"--config.rl.staleness={STALENESS}", *(["--config.model.lora.rank=2"] if adapters else []))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main(tiny_run.argv(whole, *flags)) == 0
    bundles = sorted(int(path.name) for path in (whole / "checkpoints").iterdir())
    assert bundles == [0, 1, 2, 3, 4]
    past = [sorted(path.name for path in (whole / f"checkpoints/{n}").glob("past")) for n in bundles]
    assert past == [[], ["past"], ["past"], ["past"], ["past"]]
    host = checkpoint.read_host(whole / "checkpoints", KEPT)
    assert sorted(host["tasks"]["assigned"]) == ["2", "3", "4"], "drawn by what was known two steps before each"
    steps = [row for row in numbers(whole) if row["step"]]
    assert [row["staleness/max"] for row in steps] == [0.0, 1.0, 2.0, 2.0]
    assert [row["staleness/frac_2"] for row in steps] == [0.0, 0.0, 1.0, 1.0]
    assert max(row["policy/grad_norm"] for row in steps[:2]) > 0, "the policies differ"
    assert [(row["logprob_gap/max"], row["logprob_gap/scored_frac"]) for row in steps] == [(0.0, 1.0)] * 4
    assert steps[-1]["policy/drift_max"] > steps[-1]["policy/drift_mean"] > 0, "the policy has moved since it sampled"

    shutil.copytree(whole, killed)
    for number in bundles[KEPT + 1 :]:
        shutil.rmtree(killed / f"checkpoints/{number}")
    shutil.rmtree(killed / "policy")
    assert cli.main(tiny_run.argv(killed, *flags)) == 0
    assert numbers(killed) == numbers(whole)
    weights = [(workdir / "policy/model.safetensors").read_bytes() for workdir in (whole, killed)]
    assert weights[0] == weights[1]
    for workdir in (whole, killed):
        summary = json.loads((workdir / "summary.json").read_text())
        assert summary["compiles_after_warmup"] == 0 and summary["logprob_gap_max"] == 0.0


@pytest.mark.slow
def test_a_step_that_scores_nothing_again_says_so(tmp_path, monkeypatch):
    """Staleness 1, several updates per step, scored again in every other step."""
    monkeypatch.setattr(SearchAttempt, "verify", by_length)
    flags = (*FLAGS, "--config.rl.staleness=1", "--config.rl.rescore_every=2")
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags)) == 0
    steps = [row for row in numbers(tmp_path / "run") if row["step"]]
    assert [row["logprob_gap/max"] for row in steps] == [0.0, None, 0.0, None]
    assert [row["staleness/max"] for row in steps] == [0.0, 1.0, 1.0, 1.0] and steps[2]["policy/drift_max"] > 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["logprob_gap_max"] == 0.0
