"""A finished run is made again and equals its record; a changed bit or token is named with its step and place."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from jaxagent import main as cli
from jaxagent import replay
from jaxagent.envs.base import Verdict
from jaxagent.envs.search.environment import SearchAttempt
from jaxagent.replay.rerun import name_of
from jaxagent.runs import provenance, record
from jaxagent.types import Episode
from tests import tiny_run
from tests.replay import forging

pytestmark = pytest.mark.slow


@pytest.fixture
def run(finished, tmp_path) -> pathlib.Path:
    """A copy of a finished run: steps 0 to 3, bundles of the steps 0, 3 and 4."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def command(workdir: pathlib.Path, *flags: str) -> int:
    return replay.main(["replay", f"--config.workdir={workdir}", *flags])


def last(capsys) -> tuple[dict, str]:
    """The JSON of the last line, and all that was said."""
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def test_a_finished_run_is_verified_with_a_certificate(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert command(run, "--verify=3", "--draw=7") == 0
    found, out = last(capsys)
    seal = record.read(run / "record/rl", 3).seal
    assert found["verdict"] == "passed" and "PASSED" in out and f"drawn with the newest seal {seal[:12]} and 7" in out
    certificate = json.loads((run / "replay/verify-3-7.json").read_text())
    steps = [int(step) for step in certificate["asked"]["steps"].split()]
    assert len(set(steps)) == 3 and [one["step"] for one in certificate["steps"]] == steps
    recorded = [record.read(run / "record/rl", step) for step in steps]
    episodes = [e for step in recorded for round_ in step.rounds for group in round_ for e in group.episodes]
    checked = certificate["checked"]
    assert checked["episodes"] == len(episodes) == 3 * 8 and not checked["largest_logprob_difference"]
    assert checked["tokens"] == sum(len(t) for e in episodes for t in e.trajectories)
    assert checked["logprobs"] == sum(int(t.action_mask.sum()) for e in episodes for t in e.trajectories) > 0
    assert [one["version"] for one in certificate["steps"]] == steps
    assert checked["versions_trained_again"] == [1, 2, 3, 4]
    assert checked["bundles"] == [3, 4] and {0, 4} <= set(checked["evaluations"]) <= {0, 2, 4}
    assert {one["field"] for one in certificate["bytes"] if one["place"] == "bundle 11 (step 4)"} == {
        "step", "params", "opt_state",
    }  # fmt: skip
    assert {one["field"] for one in certificate["bytes"] if one["place"] == "policy/"} == {
        path.name for path in (run / "policy").iterdir() if path.name != "README.md"
    }
    assert "policy/README.md: it is not made again" in certificate["not_checked"]
    by_version = {version: [step.before for step in recorded if step.number == version] for version in steps}
    for one in certificate["weights"]:
        assert one["again"] == one["logged"] and by_version.get(one["version"]) in (None, [], [one["logged"]])
    start = json.loads((run / "run.json").read_text())["starts"][0]
    made = certificate["digests"]
    assert made["code"]["package"] == start["code"] == provenance.code_digest()
    assert made["config"] == recorded[0].config and made["record"] == made["seals"]["3"] == seal
    assert set(made["data"]) == {"model", "tokenizer", "tasks", "held_out", "corpus"}
    assert certificate["made_again_with"]["packages"]["jaxlib"] and certificate["promise"].startswith("every token")
    text = (run / "replay/verify-3-7.txt").read_text()
    assert text in out and made["config"] in text and "versions of the weights" in text
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.relative_to(run).parts[0] for path in after if before.get(path) != after[path]} == {"replay"}


def test_one_episode_alone_is_what_it_was_in_its_step(run, capsys):
    step = record.read(run / "record/rl", 3)
    episode = step.rounds[0][1].episodes[2]
    assert command(run, "--step=3", f"--episode={name_of(episode)}") == 0
    found, _ = last(capsys)
    assert found["checked"]["episodes"] == 1 and found["checked"]["versions_trained_again"] == []  # of bundle 10
    assert command(run, "--step=3", "--episode=nobody#1") == 2
    assert "step 3 has no episode 'nobody#1'. Some of it: " in capsys.readouterr().err


def test_recorded_observations_and_another_version_of_the_code(run, capsys, monkeypatch):
    monkeypatch.setattr(provenance, "code_digest", lambda: "0" * 64)
    assert command(run, "--step=1", "--recorded") == 0
    found, out = last(capsys)
    assert found["asked"]["environment"] == "from the record" and found["checked"]["episodes"] == 8
    assert found["checked"]["tokens"] == found["checked"]["logprobs"] > 0  # what is copied is not claimed as checked
    assert "steps 0-3 were made by another version of this code" in out


def test_what_could_not_be_compared_makes_a_certificate_incomplete(run, capsys):
    shutil.rmtree(run / "checkpoints/11")
    shutil.rmtree(run / "policy")
    assert command(run, "--verify=1", "--draw=7", "--recorded") == 3
    found, out = last(capsys)
    assert found["verdict"] == "incomplete" and "INCOMPLETE" in out and "PASSED" not in out
    assert "policy        version 4: NOT COMPARED" in out and found["checked"]["evaluations"] == []
    assert found["why"] == [
        "rewards and the reasons of ends were not made again: --recorded was said",
        "the trained policy was not compared: of its version no later bundle and no export is there, or no record",
    ]


def rewritten(run: pathlib.Path, number: int, change) -> Episode:
    """Changes the first episode of a step, with all digests and seals from there on; returns it as it was."""
    changed = record.read(run / "record/rl", number).rounds[0][0].episodes[0]
    forging.episodes(run, number, lambda place, episode: episode if place else change(episode))
    return changed


def with_column(episode: Episode, name: str, position: int, value) -> Episode:
    column = getattr(episode.trajectories[0], name).copy()
    column[position] = value
    return dataclasses.replace(
        episode,
        trajectories=(dataclasses.replace(episode.trajectories[0], **{name: column}), *episode.trajectories[1:]),
    )


def test_a_changed_token_and_a_changed_bit_of_a_log_prob_are_named(run, capsys):
    first = record.read(run / "record/rl", 1).rounds[0][0].episodes[0].trajectories[0]
    at = int(np.flatnonzero(first.action_mask)[1])
    token = int(first.tokens[at])
    episode = rewritten(run, 1, lambda e: with_column(e, "tokens", at, (token + 1) % 500))
    assert command(run, "--step=1") == 1
    place = f"step 1, episode {name_of(episode)}, trajectory 0, position {at}"
    assert f"first difference: {place}: tokens is {(token + 1) % 500} in the record, and {token} now" in last(capsys)[1]

    rewritten(run, 1, lambda e: with_column(e, "tokens", at, token))
    bit = np.nextafter(first.logprobs[at], np.float32(0))
    rewritten(run, 1, lambda e: with_column(e, "logprobs", at, bit))
    capsys.readouterr()
    assert command(run, "--step=1") == 1
    assert f"first difference: {place}: logprobs is {bit!s} (0x" in last(capsys)[1]


def test_a_token_that_was_changed_without_its_digests_is_found_twice(run, capsys):
    folder = run / "record/rl"
    step = record.read(folder, 1)
    rewritten(run, 1, lambda e: dataclasses.replace(e, reward=e.reward + 1))
    path = record.path_of(folder, 2)
    head, _, bodies = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(head) | {"previous": step.seal}).encode() + b"\n" + bodies)
    assert command(run, "--step=1") == 1
    out = last(capsys)[1]
    assert "first difference: step 2: the record's seal is" in out and "step 2, what it says of step 1" in out
    assert f"{step.rounds[0][0].episodes[0].task.id}#" in out and ": reward is " in out


def with_flipped_bit(state: dict) -> None:
    """One bit of one weight."""
    state["params"]["layers"]["wq"].reshape(-1).view(np.uint32)[5] ^= 1 << 20


def test_a_changed_bit_of_a_weight_is_named(run, capsys):
    forging.bundle(run / "checkpoints/10", with_flipped_bit)
    assert command(run, "--step=3") == 1
    out = last(capsys)[1]
    assert "first difference: version 3 (restored): weights is" in out
    assert "step 3, episode" in out and ": logprobs is " in out


def test_a_damaged_bundle_and_a_damaged_file_are_named(run, capsys):
    file = max((p for p in (run / "checkpoints/7/state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert command(run, "--step=1") == 1
    out = last(capsys)[1]
    assert "first difference: bundle 7 (step 0): files is" in out and "differs from its digest" in out


def test_a_record_that_was_cut_short_fails(run, capsys, tmp_path):
    shutil.move(run / "record/rl/00000003.step", tmp_path / "3.step")
    assert command(run, "--verify=1", "--draw=7") == 1
    assert "where the stage ends: steps is 3 in the record, and 4 in its newest bundle now" in last(capsys)[1]
    shutil.move(run / "checkpoints/11", tmp_path / "11")
    shutil.move(run / "policy", tmp_path / "policy")
    (run / "summary.json").unlink()
    assert command(run, "--verify=1", "--draw=7") == 0  # as it is where a run was killed, twice
    out = last(capsys)[1]
    assert "the record has 3 steps and metrics.jsonl 4, as where a run was killed" in out
    assert "version 3, the newest bundle of a run that goes on: compared in a bundle" in out
    (run / "record/rl/00000000.step").unlink()
    assert command(run, "--step=2") == 2 and command(run, "--verify=1") == 2  # nothing is left to begin from
    shutil.move(tmp_path / "3.step", run / "record/rl/00000003.step")
    assert command(run, "--step=3") == 1
    assert "first difference: step 0: the record's file is" in last(capsys)[1]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--step=4"], "--step=4: the record of 'rl' has the steps 0 to 3."),
        ([], "Say either --step=N or --verify=K."),
        (["--step=1", "--verify=1"], "Say either --step=N or --verify=K."),
        (["--verify=1", "--episode=t#1"], "--episode is of one step"),
        (["--step=1", "--draw=1"], "--draw chooses the steps of --verify"),
        (["--step=1", "--config.rl.steps=9"], "--config.rl.steps: a replay has the run's own config"),
        (["--step=1", "--config=configs/search_r1.py"], "--config: a replay has the run's own config"),
        (["--step=1", "--recordet"], "Unknown flag '--recordet'. Did you mean 'recorded'?"),
        (["--step=-1"], "step: must be a whole number, at least 0"),
        (["--verify=0"], "verify: must be a whole number, at least 1"),
        (["--step=1", "--stage=opd"], "--stage=opd: the run has the stages warm_start, rl."),
    ],
)
def test_mistakes_in_the_command_are_one_line(finished, flags, told, capsys):
    assert command(finished, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and told in error


def test_a_run_without_a_record_and_other_data_are_refused(run, capsys, tmp_path):
    assert command(tmp_path / "nowhere", "--step=1") == 2
    assert "There is no run in" in capsys.readouterr().err
    shutil.move(run / "checkpoints/7", tmp_path / "7")
    assert command(run, "--step=1") == 2
    told = (
        "--step=1: no bundle is left from which it could be trained again; there are those of the steps [3, 4]. Steps"
    )
    assert told in capsys.readouterr().err
    shutil.move(tmp_path / "7", run / "checkpoints/7")
    (corpus,) = run.glob("geography-*/corpus.jsonl")
    corpus.write_bytes(b"".join(corpus.read_bytes().splitlines(keepends=True)[:200]))
    assert command(run, "--step=1") == 2
    assert "The corpus has changed since" in capsys.readouterr().err
    shutil.rmtree(run / "record")
    assert command(run, "--step=1") == 2
    assert "has no record of the stage 'rl'. A run keeps what a replay needs with --config.checkpoint.replay=all" in (
        capsys.readouterr().err
    )


def test_help(capsys):
    assert replay.main(["replay", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--verify" in out and "--episode" in out and "Exit codes" in out


STRATEGIES = (
    "stages=rl", "eval.every=0", "eval.sampled=false", "data.num_eval=2", "checkpoint.every=3", "rl.steps=6",
    "rl.staleness=1", "rl.group_size=3", "rl.temperature.schedule=cosine", "rl.temperature.final=0.5",
    "rl.refill.max_rounds=3", "rl.keep_groups_frac=0.5", "rl.curriculum=learnability", "rl.replay.per_step=2",
    "rl.replay.low=0.0", "rl.replay.high=1.0", "rl.replay.capacity=5", "rl.tool_epsilon=0.25", "rl.entropy_control=on",
    "rl.kl.coefficient=0.1", "rl.optimizer.warmup_steps=0",
)  # fmt: skip


async def by_length(self, transcript):
    """A verifier that a random policy sometimes pleases, so that groups have signal and every step changes weights."""
    reward = float(len(transcript.response) % 2)
    return Verdict(reward, {"em": reward})


def test_everything_that_a_step_depends_on_is_made_again(tmp_path, monkeypatch, capsys):
    """Staleness, curriculum, replay buffer, dynamic sampling, forced tools, entropy control, a reference, at once."""
    monkeypatch.setattr(SearchAttempt, "verify", by_length)
    workdir = tmp_path / "all"
    assert cli.main(tiny_run.argv(workdir, *(f"--config.{flag}" for flag in STRATEGIES))) == 0
    headers = record.headers(workdir / "record/rl")
    assert len({header["before"] for header in headers.values()}) > 3  # it has learnt
    assert any(len(header["tasks"]) > 1 for header in headers.values())  # rounds
    assert command(workdir, "--verify=6", "--draw=1") == 0
    certificate = json.loads((workdir / "replay/verify-6-1.json").read_text())
    assert [one["version"] for one in certificate["steps"]] == [0, 0, 1, 2, 3, 4]
    assert certificate["run"]["from_version"] == 0
    assert {one["field"] for one in certificate["bytes"]} >= {"version 2 before it", "reference"}  # of bundle 3
    # What is trained on another token is another policy, and the record says of what.
    forging.episodes(workdir, 1, lambda place, episode: with_other_token(episode))
    capsys.readouterr()
    assert command(workdir, "--step=2") == 1
    assert "first difference: version 2 (trained): weights is" in last(capsys)[1]


def with_other_token(episode: Episode) -> Episode:
    """The first sampled token is another."""
    at = int(np.flatnonzero(episode.trajectories[0].action_mask)[0])
    return with_column(episode, "tokens", at, (int(episode.trajectories[0].tokens[at]) + 1) % 500)
