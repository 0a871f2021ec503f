"""The whole loop, end to end, on a run of seconds: what it writes, how it is killed and continued, how it shards."""

import json
import os
import pathlib
import random
import shutil
import signal
import time
import typing

import jax
import numpy as np
import pytest

from jaxagent import loop
from jaxagent import main as cli
from jaxagent.config import ConfigError, Stage, flags
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.models import hf
from jaxagent.observe import jsonl
from jaxagent.observe.files import OUTDATED_FILE, RUN_FILE
from jaxagent.observe.shown_episodes import token_texts
from jaxagent.runs import devices, provenance
from jaxagent.runs.evaluation import policy as policies
from jaxagent.runs.parts import Parts, open_parts
from jaxagent.types import TokenKind
from tests import tiny_run
from tests.tiny_run import numbers

pytestmark = pytest.mark.slow  # whole runs, or what takes as long to prepare

DEADLINE_S = 600  # of one process; a tiny run takes well under a minute
STEPS = [("warm_start", s) for s in range(1, 7)] + [("rl", s) for s in range(5)]


def steps(workdir: pathlib.Path) -> list[tuple[str, int]]:
    return [(record["stage"], record["step"]) for record in jsonl.read(workdir / "metrics.jsonl")]


def summary(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "summary.json").read_text())


def test_every_step_is_recorded_once_with_what_a_person_needs(finished):
    assert steps(finished) == STEPS
    last = list(jsonl.read(finished / "metrics.jsonl"))[-1]
    for name in (
        "reward/em",
        "eval/em",
        "eval/em_sampled",
        "policy/entropy",
        "policy/clip_frac",
        "policy/ratio_p99",
        "logprob_gap/max",
        "groups/zero_signal_frac",
        "episode/turns",
        "stop/answer",
        "tokens_per_s",
        "time/rollout_s",
        "time/learn_s",
    ):
        assert isinstance(last[name], float), name


def test_every_stage_a_config_can_name_is_there():
    assert tuple(loop.STAGES) == typing.get_args(Stage)


def test_summary(finished):
    result = summary(finished)
    assert {"warm_start", "rl"} == set(result["stage_seconds"])
    assert result["compiles_after_warmup"] == 0
    assert result["logprob_gap_max"] == 0.0  # numerics="exact"
    assert (result["seed"], result["steps"], result["eval/n"]) == (0, 4, 8)
    for name in ("em_before_rl", "em_after_rl", "em_sampled_before_rl", "em_sampled_after_rl", "em_two_hop_after_rl"):
        assert 0.0 <= result[f"eval/{name}"] <= 1.0


def test_episodes_are_token_exact(finished):
    """Token texts of an episode join to the text, and only sampled tokens carry a log-prob."""
    table = Tokenizer.load(finished / "tokenizer").token_bytes()
    logged = [record for name in ("rl.eval", "rl.sampled.eval", "rl") for record in tiny_run.episodes(finished, name)]
    assert len(logged) == 3 * 8 * 2 + 4 * 8
    for record in logged:
        for trajectory in record["trajectories"]:
            text = "".join(token_texts(trajectory["tokens"], table))
            assert text.startswith(f"Question: {record['task']['prompt']}\n")
            assert record["text"].startswith(text.partition("<eos>")[0])
            assert len(trajectory["tokens"]) == len(trajectory["kinds"])
            assert trajectory["kinds"].count(TokenKind.ACTION) == len(trajectory["logprobs"]) > 0


def test_the_exported_policy_is_a_model_folder(finished):
    folder = finished / "policy"
    config = json.loads((finished / "config.json").read_text())["model"]
    from jaxagent.config import ModelConfig

    spec = hf.read_spec(folder, ModelConfig(**config))
    weights = hf.load(folder, spec, None)
    assert all(np.isfinite(np.asarray(w)).all() for w in jax.tree.leaves(weights))
    Tokenizer.load(folder).check_fits(spec.vocab_size)
    assert (finished / "report.html").stat().st_size > 10_000


def test_the_same_command_again_does_nothing(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    by_platform = [f"--config.engine.{name}=0" for name in ("tile_rows", "page_tokens", "steps_per_dispatch")]
    for flags_again in ((), by_platform):  # the sizes that suit a CPU are those of the run
        assert cli.main(tiny_run.argv(run, *flags_again)) == 0
    assert (run / "metrics.jsonl").read_bytes() == before


def test_an_export_that_the_run_has_outgrown_is_made_again(finished, tmp_path, monkeypatch):
    """Ended between more training and its export: the same command must not take the older policy for the new one.

    On another number of cores, too, which the config has to say, and the run's record then says.
    """
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    exported = (run / "policy/config.json").stat().st_mtime_ns

    def ended(*_, **__):
        raise SystemExit(143)

    cores = devices.threads()
    monkeypatch.setattr(devices, "threads", lambda explicit=False: cores + 1)
    assert cli.main(tiny_run.argv(run)) == 0  # of a run that has ended nothing is asked
    with pytest.raises(ConfigError, match=rf"threads {cores} -> {cores + 1}\. .*taskset -c 0-{cores - 1}\).*=accept"):
        loop.run(flags.parse_argv(tiny_run.argv(run, "--config.rl.steps=5")).config)
    assert provenance.accepted(provenance.read(run / RUN_FILE)["starts"]) == []
    longer = flags.parse_argv(tiny_run.argv(run, "--config.rl.steps=5", "--config.resume.numerics=accept")).config
    with monkeypatch.context() as patched:
        patched.setattr(loop, "rl_stage", ended)
        with pytest.raises(SystemExit):
            loop.run(longer)
    assert not (run / "policy" / OUTDATED_FILE).exists()  # nothing was trained, nor written
    with monkeypatch.context() as patched:
        patched.setattr(Parts, "export", ended)
        with pytest.raises(SystemExit):
            loop.run(longer)
    assert (run / "policy" / OUTDATED_FILE).exists()
    there = f"rl, from step 4 on: threads {cores} -> {cores + 1}"
    assert provenance.accepted(provenance.read(run / RUN_FILE)["starts"]) == [there]
    # From now on these are the run's.
    assert cli.main(tiny_run.argv(run, "--config.rl.steps=5")) == 0  # every step is in the newest bundle
    assert not (run / "policy" / OUTDATED_FILE).exists()
    assert (run / "policy/config.json").stat().st_mtime_ns > exported


def test_killed_at_three_moments_and_continued(finished, tmp_path):
    """kill -9, in each stage and where one ends: no record is lost or doubled, and the run ends as the other one."""
    workdir = tmp_path / "killed"
    rng = random.Random(0)
    for after in (rng.randrange(1, 6), 6, rng.randrange(7, len(STEPS))):
        process = tiny_run.start(workdir)
        deadline = time.monotonic() + DEADLINE_S
        while len(steps(workdir)) < after and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(rng.random() * 0.3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert len(set(steps(workdir))) == len(steps(workdir))
    assert tiny_run.start(workdir).wait(DEADLINE_S) == 0
    assert steps(workdir) == STEPS
    assert numbers(workdir) == numbers(finished)  # to the bit
    for log in ("rl", "rl.eval", "rl.sampled.eval"):  # every episode once
        ours, theirs = (tiny_run.episodes(folder, log) for folder in (workdir, finished))
        names = ("step", "sample", "reward", "trajectories")
        assert [[e[n] for n in names] for e in ours] == [[e[n] for n in names] for e in theirs]


def test_numbers_do_not_depend_on_concurrency(finished, tmp_path):
    """Three slots instead of eight, other chunks, so few pages that sessions lose theirs: the same run, to the bit."""
    workdir = tmp_path / "narrow"
    flags = ("slots=3", "steps_per_dispatch=2", "prefill_tokens=64", "pages=8")
    process = tiny_run.start(workdir, *(f"--config.engine.{flag}" for flag in flags))
    assert process.wait(DEADLINE_S) == 0, pathlib.Path(f"{workdir}.log").read_text()
    assert len(numbers(workdir)) == len(STEPS) and "loss/total" in numbers(workdir)[-1]
    assert numbers(workdir) == numbers(finished)


def test_killed_interrupted_and_continued_without_periodic_bundles(finished, tmp_path):
    """checkpoint.every=0: a stage's end is kept and what is asked for, and nothing else; a kill goes back to that."""
    workdir = tmp_path / "stopped"
    keep = ("--config.checkpoint.every=0", "--config.checkpoint.keep=99", "--config.checkpoint.replay=newest")
    for signum, code, bundles in ((signal.SIGKILL, -9, {6}), (signal.SIGINT, 130, None)):
        process = tiny_run.start(workdir, *keep)
        deadline = time.monotonic() + DEADLINE_S
        before = list(jsonl.read(workdir / "metrics.jsonl")) if workdir.exists() else []
        while time.monotonic() < deadline and process.poll() is None:
            records = list(jsonl.read(workdir / "metrics.jsonl"))
            if len(records) != len(before) and ("rl", 1) in steps(workdir):
                break
            time.sleep(0.02)
        process.send_signal(signum)
        assert process.wait(DEADLINE_S) == code
        found = {int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()}
        assert found == bundles or (bundles is None and len(found) == 2 and 6 in found)
    done = steps(workdir)
    said = pathlib.Path(f"{workdir}.log").read_text()
    assert f"interrupted: saved at step {done[-1][1]}; the same command continues." in said
    assert "Traceback" not in said
    assert tiny_run.start(workdir).wait(DEADLINE_S) == 0
    assert steps(workdir)[: len(done)] == done and steps(workdir) == STEPS
    assert numbers(workdir) == numbers(finished)


@pytest.mark.parametrize("preset", ["laptop-ppo", "laptop-echo"])
def test_other_algorithms_run(tmp_path, preset):
    flags = ["--config.stages=rl", "--config.rl.steps=2"]
    flags += ["--config.rl.advantage.critic.warmup_updates=1"] * (preset == "laptop-ppo")
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, preset=preset)) == 0
    last = list(jsonl.read(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert summary(tmp_path / "run")["compiles_after_warmup"] == 0
    if preset == "laptop-ppo":
        assert np.isfinite(last["loss/value"]) and last["critic/squared_error"] >= 0
    else:
        assert np.isfinite(last["loss/ce"])


def test_a_correction_and_a_reference_that_follows_the_policy(tmp_path):
    """The critic learns in step 1, the policy moves in step 2, then the reference becomes a copy of it."""
    flags = ("--config.stages=rl", "--config.rl.steps=3", "--config.rl.updates_per_step=1",
             "--config.rl.advantage.critic.warmup_updates=1", "--config.rl.kl.coefficient=0.1",
             "--config.rl.kl.estimator=abs", "--config.rl.optimizer.warmup_steps=0",
             "--config.rl.kl.refresh_every=2")  # fmt: skip
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, preset="laptop+vtrace")) == 0
    last = list(jsonl.read(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert last["step"] == 3 and last["policy/kl_reference"] == 0.0
    assert summary(tmp_path / "run")["compiles_after_warmup"] == 0


def test_stages_that_learn_from_data(tmp_path):
    """Sampled and logged by one run; another starts from its policy and learns from its log, relabelled."""
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["sample.steps=2", "sample.tasks_per_step=4", "sample.attempts=4", "warm_start.max_steps=3"]
    options = [f"--config.{flag}" for flag in ("stages=warm_start,sample", *options)]
    assert cli.main(tiny_run.argv(first, *options)) == 0
    rows = list(tiny_run.episodes(first, "sample"))
    assert len(rows) == 32 and steps(first)[-2:] == [("sample", 1), ("sample", 2)]
    # This policy earns nothing yet, so the test says what is good: a first action token with an odd id.
    for row in rows:
        tokens, kinds = (np.array(row["trajectories"][0][name]) for name in ("tokens", "kinds"))
        row["reward"] = float(tokens[kinds == TokenKind.ACTION][0] % 2)
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["stages=rft,dpo,outcome_model", f"model.path={first / 'policy'}", "eval.every=0"]
    for stage in ("rft", "dpo", "outcome_model"):
        options += [f"{stage}.episodes={tmp_path / 'labelled.jsonl'}", f"{stage}.updates=6"]
        options += [f"{stage}.examples=8", f"{stage}.learning_rate=0.01"]
    options += ["rl.optimizer.warmup_steps=0"]
    assert cli.main(tiny_run.argv(second, *(f"--config.{flag}" for flag in options))) == 0
    result = summary(second)
    assert result["compiles_after_warmup"] == 0
    assert {f"eval/em_{when}_{stage}" for when in ("before", "after") for stage in ("rft", "dpo")} <= set(result)
    assert 0 <= result["outcome_model/auc"] <= 1 and (second / "outcome_model/value_head.npy").is_file()
    # The last bundle is the outcome model's; the policy in it is the one that was exported.
    cfg = flags.parse_argv(tiny_run.argv(second, *(f"--config.{flag}" for flag in options))).config
    with open_parts(cfg, print) as parts:
        policy, _ = policies.load(parts, policies.choose(cfg, "latest"))
        jax.tree.map(np.testing.assert_array_equal, policy, hf.load(second / "policy", parts.spec, None))
    last = {record["stage"]: record for record in jsonl.read(second / "metrics.jsonl")}
    nll = [r["loss/total"] for r in jsonl.read(second / "metrics.jsonl") if r["stage"] == "rft" and r["step"] > 0]
    assert nll[-1] < nll[0] - 0.5
    assert last["dpo"]["dpo/accuracy"] >= 0.75 and last["dpo"]["dpo/loss"] < 0.6  # log 2 at first


def test_a_mesh_of_eight_devices_by_flags_alone(tmp_path):
    flags = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.rl.steps=3",
             "--config.stages=rl")  # fmt: skip
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags)) == 0
    assert steps(tmp_path / "run")[-1] == ("rl", 3)
    result = summary(tmp_path / "run")
    assert result["compiles_after_warmup"] == 0
    assert result["logprob_gap_max"] <= 1e-5


def test_the_console_says_what_it_does_and_its_lines_are_kept(finished):
    lines = [line[20:] for line in (finished / "console.txt").read_text().splitlines()]
    places = [
        next(i for i, line in enumerate(lines) if words in line)
        for words in (" M parameters on 1 x cpu", "attention: ", "compiling for warm_start, rl:")
    ]
    assert places == sorted(places) and "warm_start: 6 steps" in lines[places[-1] :]
    assert any(line.startswith("warm_start: the gate stayed closed at step 6 of 6: worst kind 0.") for line in lines)
    assert any(line.startswith("rl 4/4 ") for line in lines) and "report.html" in lines[-1]
