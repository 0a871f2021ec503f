"""Whoever owns a run's folder forges it, and renews all digests and seals: a certificate fails, or says what it leaves.

One recorded run; forgeries that do not hide each other share a verification.
"""

import dataclasses
import json
import pathlib
import random
import shutil

import jax
import numpy as np
import pytest

from jaxagent import evaluate, replay
from jaxagent import main as cli
from jaxagent.config import parse, to_dict
from jaxagent.rollout import groups
from jaxagent.runs import provenance, record
from jaxagent.types import StopReason
from tests import tiny_run
from tests.replay import forging

pytestmark = pytest.mark.slow


@pytest.fixture
def run(finished, tmp_path) -> pathlib.Path:
    """A copy of a finished run: steps 0 to 3, bundles 7, 10 and 11 of the steps 0, 3 and 4."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def verified(run: pathlib.Path, *flags: str) -> tuple[int, dict]:
    """The exit code, and the certificate."""
    code = replay.main(["replay", f"--config.workdir={run}", *(flags or ("--verify=1",))])
    (path,) = (run / "replay").glob("*.json")
    return code, json.loads(path.read_text())


def draw_without(run: pathlib.Path, step: int) -> int:
    """A number with which one step of the four is drawn that is not this one."""
    seal = record.read(run / "record/rl", 3).seal
    drawn = (random.Random(f"replay/{seal}/{draw}").sample(range(4), 1)[0] for draw in range(20))
    return next(draw for draw, other in enumerate(drawn) if other != step)


def places(certificate: dict) -> set[str]:
    """What of it differs: "place: field"."""
    return {f"{each['place']}: {each['field']}" for each in certificate["differences"]}


def test_what_is_stored_of_the_last_policy_is_made_again(run):
    """Weights of the last version, with a record of them; a collision; the optimiser's state; an export; results."""
    before = forging.digest_of(run / "checkpoints/10")
    forging.bundle(
        run / "checkpoints/10", lambda state: forging.colliding(state["params"]["layers"]["wq"], "layers.wq")
    )
    assert forging.digest_of(run / "checkpoints/10") == before  # what the record's digest cannot see

    (run / "checkpoints/10/digests.json").unlink()

    def last(state):
        state["params"]["layers"]["wq"].reshape(-1)[5] += 0.25
        for leaf in jax.tree.leaves(state["opt_state"]):
            leaf[...] = 7

    forging.bundle(run / "checkpoints/11", last)
    after = forging.digest_of(run / "checkpoints/11")
    forging.sealed(run, lambda step: dataclasses.replace(step, after=after) if step.number == 3 else step)
    forging.policy(run / "policy", lambda tensors: tensors["model.norm.weight"].__iadd__(0.25))
    config = json.loads((run / "policy/config.json").read_text())
    (run / "policy/config.json").write_text(json.dumps(config | {"rope_theta": 2.0}))
    (run / "policy/modeling.py").write_text("")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"eval/em_after_rl": 1.0, "eval/em_before_rl": 0.5}))
    forging.lines(run / "metrics.jsonl", lambda row: row | ({"eval/em": 1.0} if row.get("eval/n") else {}))

    code, certificate = verified(run)
    assert code == 1 and certificate["verdict"] == "failed"
    drawn = int(certificate["asked"]["steps"])  # its evaluation is made again, too, where there was one
    assert places(certificate) - {f"metrics.jsonl, rl, {n} steps: eval/em" for n in (drawn + 1, 4)} == {
        "version 4 (trained): weights",
        "bundle 10 (step 3): params",
        "bundle 11 (step 4): params",
        "bundle 11 (step 4): opt_state",
        "policy/: model.safetensors",
        "policy/: config.json",
        "metrics.jsonl, rl, 0 steps: eval/em",
        "summary.json: eval/em_after_rl",
        "summary.json: eval/em_before_rl",
    }
    assert any(line.startswith("bundle 10 (step 3): it has no digests") for line in certificate["not_checked"])
    assert "policy/modeling.py: it is not made again" in certificate["not_checked"]
    assert {0, 4} <= set(certificate["checked"]["evaluations"])
    assert ("evaluations after 2 steps" in certificate["not_checked"]) == (drawn != 1)


def test_what_the_policy_learnt_from_is_compared_whichever_steps_are_drawn(run):
    """A reward; an attempt called a timeout; one left out; one of another number; all in steps that are not sampled."""
    first = record.read(run / "record/rl", 3).rounds[0][0].episodes[0]

    def forged(place, episode):
        if place == 0:
            return dataclasses.replace(episode, reward=1.0, rewards=episode.rewards | {"em": 1.0})
        if place == 1:
            return dataclasses.replace(episode, stop_reason=StopReason.TIMEOUT, error="too slow")
        return None if place == 2 else dataclasses.replace(episode, sample=episode.sample + (place == 3))

    forging.episodes(run, 3, forged)
    code, certificate = verified(run, "--verify=1", f"--draw={draw_without(run, 3)}")
    assert code == 1 and certificate["asked"]["steps"] != "3"
    found = places(certificate)
    assert {
        f"step 3, round 0, task {first.task.id}: attempts",
        "metrics.jsonl, rl, 4 steps: reward/mean",
        "metrics.jsonl, rl, 4 steps: reward/em",
        "metrics.jsonl, rl, 4 steps: stop/timeout",
        "metrics.jsonl, rl, 4 steps: episode/count",
        "version 4 (trained): weights",
        "bundle 11 (step 4): params",
        "bundle 11 (step 4): opt_state",
    } <= found
    assert "failures: whether these attempts had to fail (1 timeout)" in certificate["not_checked"]


def test_what_a_certificate_does_not_check_is_named_in_it(run):
    """What a forger can do unseen: another warm start, another digest of the code, timeouts that the metrics tell."""
    path = run / "config.json"
    ours = json.loads(path.read_text())
    ours["warm_start"]["max_steps"] += 94
    path.write_text(json.dumps(ours))
    digest = provenance.config_digest(to_dict(parse(evaluate.stored_config(str(run)))))
    forging.sealed(run, lambda step: dataclasses.replace(step, config=digest, code="0" * 64))
    forging.episodes(
        run, 3, lambda place, e: e if place in (0, 4) else dataclasses.replace(e, stop_reason=StopReason.TIMEOUT)
    )
    told = groups.episode_metrics(record.read(run / "record/rl", 3).rounds[0])
    told = {name: value for name, value in told.items() if name.startswith(("stop/", "reward/", "episode/"))}
    forging.lines(run / "metrics.jsonl", lambda row: row | (told if (row["stage"], row["step"]) == ("rl", 4) else {}))
    code, certificate = verified(run)
    assert code == 0 and certificate["verdict"] == "passed"
    unseen = certificate["not_checked"]
    assert any(line.startswith("code: ") for line in unseen)
    assert "failures: whether these attempts had to fail (6 timeout)" in unseen
    assert any("are as bundle 7 has them, however warm_start made them" in line for line in unseen)
    assert any(line.startswith("another record in the place of this one") for line in unseen)
    text = (run / f"replay/verify-1-{certificate['digests']['record'][:12]}.txt").read_text()
    assert all(f"  - {line}\n" in text for line in unseen)


def test_scores_are_made_again_where_metrics_do_not_tell_of_them(run):
    forging.lines(
        run / "metrics.jsonl", lambda row: {n: v for n, v in row.items() if not n.startswith(("eval/", "stop/"))}
    )
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"eval/em_after_rl": 1.0, "eval/em_before_rl": 0.5}))
    code, certificate = verified(run)
    assert code == 1 and places(certificate) == {"summary.json: eval/em_after_rl", "summary.json: eval/em_before_rl"}
    lacking = [line.split(" steps: ")[0] for line in certificate["not_checked"] if " results lack, " in line]
    assert lacking == [f"metrics.jsonl, {n}" for n in range(5)]


def test_a_damaged_record_fails_with_a_certificate_that_says_where(run):
    """Groups that are exchanged, a file that was cut, a header that is none: each is a step's, and ends the chain."""
    whole, folder = (run / "record/rl/00000002.step").read_bytes(), run / "record/rl"

    def exchanged(step):
        first, second, *others = step.rounds[0]
        return dataclasses.replace(step, rounds=((second, first, *others),)) if step.number == 2 else step

    forging.sealed(run, exchanged)
    ids = [group.task.id for group in record.read(folder, 2).rounds[0]]
    code, certificate = verified(run)
    first = certificate["differences"][0]
    assert code == 1 and (first["place"], first["field"]) == ("step 2, round 0", "tasks")
    assert first["logged"] == " ".join(ids) and first["again"] == " ".join((ids[1], ids[0], *ids[2:]))
    assert "steps 2-3: not made again, since the record breaks off" in certificate["not_checked"]
    for damage, place in ((whole[:-9], "step 2: record"), (b"{}" + whole, "step 2: the record's file")):
        record.path_of(folder, 2).write_bytes(damage)
        shutil.rmtree(run / "replay")
        code, certificate = verified(run)
        assert code == 1 and certificate["verdict"] == "failed" and place in places(certificate)


def test_what_lies_beside_the_chain_is_named(run):
    """A policy that is said to be outdated, with its scores; a bundle whose step another one has, too; a log-prob."""

    def forged(place, episode):
        first = episode.trajectories[0]
        moved = first.logprobs - np.float32(0.5) * (first.action_mask * (place == 0))
        return dataclasses.replace(episode, trajectories=(dataclasses.replace(first, logprobs=moved),))

    step = 2  # without signal, nothing is learnt from it
    forging.episodes(run, step, forged)
    gap = {"logprob_gap/max": 0.5}
    forging.lines(run / "metrics.jsonl", lambda row: row | (gap if (row["stage"], row["step"]) == ("rl", 3) else {}))
    forging.policy(run / "policy", lambda tensors: tensors["model.norm.weight"].__iadd__(0.25))
    (run / "policy/OUTDATED").touch()
    shutil.copytree(run / "checkpoints/11", run / "checkpoints/12")
    forging.bundle(run / "checkpoints/11", lambda state: state["params"]["layers"]["wq"].__iadd__(0.25))
    code, certificate = verified(run, "--verify=1", f"--draw={draw_without(run, step)}")
    assert code == 0 and not certificate["policy"]["ended"]
    beside = {
        "log-probs of step 2: off the exact ones by 0.5, not 0",
        "policy/ and summary.json: the run has not ended, or went on since",
        "bundles 11: of another stage, an earlier step, or one that a later bundle has",
    }
    assert beside <= set(certificate["not_checked"])


def test_a_seal_that_somebody_holds_shows_another_record(run, finished):
    """The seal that was printed when a bundle was saved is in the record; in one that was sealed anew it is not."""
    printed = [line.split("seal ")[1] for line in (run / "console.txt").read_text().splitlines() if "; seal " in line]
    seals = [header["seal"] for header in record.headers(run / "record/rl").values()]
    assert printed == seals
    forging.episodes(run, 3, lambda place, episode: dataclasses.replace(episode, reward=1.0))
    assert printed[-1] not in [header["seal"] for header in record.headers(run / "record/rl").values()]


def test_a_run_that_was_made_longer_under_other_settings_is_certified_whole(run):
    """Each step with the stage's settings of then; what a step cannot depend on may have been anything."""
    flags = ("rl.steps=6", "rl.optimizer.learning_rate=0.0003", "eval.every=0", "checkpoint.every=0", "data.num_eval=4")
    flags += ("eval.sampled=false",)
    assert cli.main(tiny_run.argv(run, *(f"--config.{flag}" for flag in flags))) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert "eval/em_sampled_after_rl" not in summary  # which the earlier evaluation had
    more = {"eval/em_before_rl": 0.125, "eval/em_sampled_after_rl": 0.5}  # as if of other tasks
    (run / "summary.json").write_text(json.dumps(summary | more))
    code, certificate = verified(run, "--verify=6")
    checked, unseen = certificate["checked"], certificate["not_checked"]
    assert code == 0 and certificate["verdict"] == "passed" and certificate["run"]["from_version"] == 0
    assert certificate["asked"]["steps"] == "0 1 2 3 4 5" and checked["versions_trained_again"] == [1, 2, 3, 4, 5, 6]
    assert checked["bundles"] == [4, 6] and certificate["policy"]["compared"] == ["a bundle", "policy/"]
    assert not any("another config" in line for line in unseen)
    assert "the evaluation after 2 steps: it was of other held-out tasks" in unseen
    assert "summary.json, 'eval/em_sampled_after_rl': it is not made again" in unseen
    # Of a config that nothing keeps the steps are left out, by name, and so is what only they lead to.
    (run / "checkpoints/7").rename(run.parent / "7")
    assert replay.main(["replay", f"--config.workdir={run}", "--verify=1", "--draw=1"]) == 0
    later = json.loads((run / "replay/verify-1-1.json").read_text())
    assert later["run"]["from_version"] == 4 and later["checked"]["versions_trained_again"] == [5, 6]
    assert "steps 0-3: the record of them, or a bundle before them, is not kept" in later["not_checked"]
