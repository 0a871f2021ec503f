"""The whole command on a tiny run: every version of the weights, and every metric, as in a run of one process."""

import json
import os
import pathlib
import random
import signal
import time

import pytest

from jaxagent.fleet import manifest, settings, vitals, weight_reader, weights
from jaxagent.fleet.child import LOGS
from jaxagent.fleet.episodes import FOLDER
from jaxagent.fleet.server import LEDGER
from jaxagent.observe import jsonl
from tests.fleet.tiny_fleet import DEADLINE_S, compare, digests, ended, fleet, oracle_run
from tests.once import once

pytestmark = pytest.mark.slow

SLOW = ("--config.env=tests.fleet.slow_search:SlowSearch", "--config.env.prompt=plain", "--config.env.turn_s=0.5")


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """Runs of one process, by staleness and other flags; of all files and workers."""

    def of(staleness: int, *extra: str) -> pathlib.Path:
        return (
            once(
                tmp_path_factory,
                f"a run of one process {staleness} {extra}",
                lambda folder: oracle_run(folder / "run", staleness, *extra),
            )
            / "run"
        )

    return of


@pytest.mark.parametrize(("staleness", "engines", "compute"), [(0, 1, "bfloat16"), (1, 2, "float32")])
def test_a_fleet_is_the_run_of_one_process(tmp_path, expected, staleness, engines, compute):
    """Also where versions leave in bfloat16, of masters in float32."""
    workdir, extra = tmp_path / "run", [f"--config.model.compute_dtype={compute}"] * (compute != "float32")
    by_platform = "--config.engine.tile_rows=0"  # given so to all, each puts its own in place
    ended(fleet(workdir, engines, f"--config.rl.staleness={staleness}", by_platform, *extra), workdir)
    compare(workdir, expected(staleness, *extra))
    with weight_reader.OpenVersion(weights.path_of(workdir / settings.FOLDER / settings.WEIGHTS, 5)) as held:
        assert {leaf.dtype for leaf in held.manifest.leaves} == {compute}
    last = list(jsonl.read(workdir / "metrics.jsonl"))[-1]
    assert last["fleet/engines"] >= 1 and last["fleet/trainer_wait_s"] > 0
    assert last.get("staleness/mean", 0) == staleness
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["fleet"] == {"restarts": {}, "first_reasons": {}} and summary["logprob_gap_max"] == 0.0
    assert summary["compiles_after_warmup"] == 0 and last.get("policy/drift_max", 0) >= 0
    assert (workdir / settings.FOLDER / LOGS / "engine-0.log").exists()
    if not staleness:  # it goes on with other settings, which the turns of the probe follow
        ended(fleet(workdir, engines, *extra, "--config.rl.steps=6", "--config.env.turn_tokens=5"), workdir)


def test_under_lora_versions_are_adapters_and_the_run_is_that_of_one_process(tmp_path, expected):
    """Engines that did not make the trainer's very bits of them would end, and with them the run."""
    workdir, lora = tmp_path / "run", "--config.model.lora.rank=4"
    ended(fleet(workdir, 1, "--config.rl.staleness=1", lora), workdir)
    compare(workdir, expected(1, lora))
    folder = workdir / settings.FOLDER / settings.WEIGHTS
    first = weights.path_of(folder, 0) / weights.MANIFEST
    run = manifest.decode(first.read_bytes(), str(first)).lineage
    with weight_reader.hold(folder / weights.BASE, weights.FIRST, run) as base:
        for version in (0, 5):
            with weight_reader.hold(folder, version, run, base=base.manifest.digest) as held:
                assert held.manifest.merged and held.manifest.size < base.manifest.size / 4
    said = (workdir / settings.FOLDER / LOGS / "engine-0.log").read_text()
    assert "does not" not in said and "fetched again" not in said


def test_in_flight_every_token_has_the_log_prob_of_its_own_version(tmp_path):
    """Weights change while episodes wait for their tool; what an engine has cached is computed again then."""
    workdir = tmp_path / "run"
    ended(fleet(workdir, 1, "--config.rl.staleness=2", "--config.fleet.rule=in_flight", *SLOW), workdir)
    steps = [row for row in jsonl.read(workdir / "metrics.jsonl") if row["stage"] == "rl" and row["step"]]
    assert [(row["logprob_gap/max"], row["logprob_gap/scored_frac"]) for row in steps] == [(0.0, 1.0)] * 5
    assert max(row["policy/drift_max"] for row in steps) > 0


def test_two_trainer_processes_read_the_versions_that_they_score_again(tmp_path):
    workdir = tmp_path / "run"
    ended(fleet(workdir, 1, "--config.rl.staleness=1", "--config.fleet.trainers=2", "--config.mesh.data=2"), workdir)
    steps = [row for row in jsonl.read(workdir / "metrics.jsonl") if row["stage"] == "rl" and row["step"]]
    assert [(row["logprob_gap/max"], row["logprob_gap/scored_frac"]) for row in steps] == [(0.0, 1.0)] * 5
    assert steps[-1]["policy/drift_max"] > 0
    assert json.loads((workdir / "summary.json").read_text())["compiles_after_warmup"] == 0


def test_kill_9_of_each_role_changes_nothing(tmp_path, expected):
    """Each once, the trainer two versions after its only bundle of RL: the same versions and metrics come out."""
    workdir = tmp_path / "run"
    process = fleet(workdir, 2, "--config.rl.staleness=1", "--config.checkpoint.every=3", *SLOW)
    rng = random.Random(0)
    folder = workdir / settings.FOLDER
    for newest, name, longest in ((1, "engine-0", 0.5), (2, "coordinator", 0.5), (5, "trainer", 0.0)):
        until = time.monotonic() + DEADLINE_S
        while max(digests(workdir) if folder.is_dir() else {}, default=0) < newest and time.monotonic() < until:
            assert process.poll() is None, pathlib.Path(f"{workdir}.log").read_text()[-4000:]
            time.sleep(0.05)
        time.sleep(rng.random() * longest)
        sign = vitals.read(folder / vitals.FOLDER / f"{name}.json")
        assert sign is not None
        os.kill(sign.pid, signal.SIGKILL)
    said = ended(process, workdir)
    compare(workdir, expected(1, *SLOW))
    assert "resuming rl at step 3" in said
    told = json.loads((workdir / "summary.json").read_text())["fleet"]
    assert told["restarts"] == {"engine-0": 1, "trainer": 1, "coordinator": 1}
    assert told["first_reasons"]["trainer"] == "trainer was ended by SIGKILL"
    assert "engine-0 was ended by SIGKILL: engine-0 starts again" in said


def test_ctrl_c_saves_and_the_same_command_continues_and_plays_damaged_episodes_again(tmp_path, expected):
    """One byte of three of four stored episodes; the weights are those of a run that nobody ended or damaged."""
    workdir = tmp_path / "run"
    process = fleet(workdir, 1, "--config.rl.staleness=1")
    until = time.monotonic() + DEADLINE_S
    while len(digests(workdir) if (workdir / settings.FOLDER).is_dir() else {}) < 2 and time.monotonic() < until:
        assert process.poll() is None, pathlib.Path(f"{workdir}.log").read_text()[-4000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert "the same command continues." in pathlib.Path(f"{workdir}.log").read_text()
    found = sorted((workdir / settings.FOLDER / LEDGER / FOLDER).rglob("*.z"))
    damaged = [path for i, path in enumerate(found) if i % 4]
    for path in damaged:
        body = path.read_bytes()
        path.write_bytes(body[:40] + bytes([body[40] ^ 255]) + body[41:])
    said = ended(fleet(workdir, 1, "--config.rl.staleness=1"), workdir)
    compare(workdir, expected(1))
    told = json.loads((workdir / "summary.json").read_text())["fleet"]
    assert 0 < told["damaged_episodes"] <= len(damaged) < len(found) and not told["restarts"]
    assert "is damaged on disk" in said and "it is played again" in said
