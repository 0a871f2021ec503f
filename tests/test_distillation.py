"""The stage "opd" end to end on a run of seconds: the student comes nearer to its teacher, whatever the loss."""

import dataclasses
import json

import numpy as np
import pytest

from jaxagent import main as cli
from jaxagent.config import flags
from jaxagent.models import hf
from jaxagent.observe import jsonl
from jaxagent.runs.parts import open_parts
from tests import tiny_run
from tests.models import tiny

pytestmark = pytest.mark.slow  # whole runs, or what takes as long to prepare

STEPS = 12


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """(folder of a random teacher wider than the student, dataset of both)."""
    workdir = tmp_path_factory.mktemp("teacher")
    with open_parts(flags.parse_argv(tiny_run.argv(workdir)).config, print) as parts:
        spec = dataclasses.replace(parts.spec, embed_dim=48, embed_init_std=0.3)  # sharper than the student begins
        hf.save(workdir / "policy", tiny.random_params(spec, 7), spec, "float32", workdir / "tokenizer")
        return workdir / "policy", parts.dataset


def argv(workdir, teacher, *extra):
    folder, dataset = teacher
    flags = (f"--config.opd.distill.teacher={folder}", f"--config.tokenizer.path={folder}",
             f"--config.data.source={dataset}", "--config.stages=opd", f"--config.opd.steps={STEPS}",
             "--config.opd.learning_rate=0.01", "--config.rl.optimizer.warmup_steps=0",
             "--config.eval.every=0", "--config.numerics=fast", "--config.eval.sampled=false",
             "--config.checkpoint.every=0", "--config.rl.optimizer.schedule=constant", "--config.rl.tasks_per_step=4",
             "--config.rl.group_size=8", "--config.engine.slots=32", "--config.engine.pages=256",
             "--config.rl.whiten_advantages=true")  # fmt: skip
    return tiny_run.argv(workdir, *flags, *extra)


def test_the_student_comes_nearer_to_its_teacher(tmp_path, teacher):
    assert cli.main(argv(tmp_path / "run", teacher, "--config.opd.distill.loss=reverse_kl")) == 0
    records = [r for r in jsonl.read(tmp_path / "run" / "metrics.jsonl") if r["stage"] == "opd" and r["step"] > 0]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    kl = [r["distill/reverse_kl"] for r in records]
    assert np.isfinite(kl).all() and kl[0] > 1.0 and np.mean(kl[-2:]) < 0.9 * np.mean(kl[:2]), kl
    assert all(0 <= r["distill/agreement"] <= 1 for r in records) and records[0]["loss/distill"] > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["logprob_gap_max"] < 1e-4
    assert "eval/em_after_opd" in summary


def test_a_teacher_that_is_missing_is_told_before_training(tmp_path, teacher, capsys):
    assert cli.main(argv(tmp_path / "run", teacher, "--config.opd.distill.teacher=")) == 2
    assert "distill.teacher must name" in capsys.readouterr().err
    assert cli.main(argv(tmp_path / "run", teacher, "--config.opd.distill.coefficient=0")) == 2
    assert "opd.distill.coefficient must be more than 0" in capsys.readouterr().err
    both = ["--config.stages=opd,rl", "--config.model.lora.rank=2"]
    assert cli.main(argv(tmp_path / "run", teacher, *both)) == 2
    assert "would both train adapters" in capsys.readouterr().err
    assert cli.main(argv(tmp_path / "run", teacher, f"--config.opd.distill.teacher={tmp_path}/no")) == 2
    assert "no folder" in capsys.readouterr().err


def test_stages_chain_in_one_config(tmp_path, teacher):
    """SFT on the dataset's demonstrations, RL, distillation, export; each stage goes on from the one before.

    Distillation is by single tokens' advantages here, of which a few steps are too noisy to come nearer. What these are
    in expectation is tested over a whole vocabulary in algorithms/test_distill.py, and that a policy comes nearer to
    its teacher by them in learner/test_distillation_learns.py.
    """
    flags = ["--config.sft.updates=12", "--config.sft.examples=8", "--config.sft.learning_rate=0.01",
             "--config.stages=sft,rl,opd", "--config.rl.steps=2",
             "--config.opd.steps=2", "--config.opd.distill.loss=sampled", "--config.rl.optimizer.learning_rate=0.01",
             "--config.rl.entropy_control.target=100", "--config.rl.entropy_control.step=0.001",
             "--config.numerics=exact"]  # fmt: skip  # log-probs are compared to the last bit
    assert cli.main(argv(tmp_path / "run", teacher, *flags)) == 0
    records = [r for r in jsonl.read(tmp_path / "run" / "metrics.jsonl") if r["step"] > 0]
    assert list(dict.fromkeys(r["stage"] for r in records)) == ["sft", "rl", "opd"]
    for stage in ("rl", "opd"):  # each begins at rl.entropy_coefficient
        assert [r["policy/entropy_coefficient"] for r in records if r["stage"] == stage] == [0.0, 0.001]
    distilled = [r for r in records if r["stage"] == "opd"]
    assert np.isfinite([r["distill/reverse_kl"] for r in distilled]).all() and distilled[0]["distill/reverse_kl"] > 1.0
    assert all(0 <= r["distill/agreement"] <= 1 and not r.get("loss/distill") for r in distilled)
    losses = [r["loss/total"] for r in records if r["stage"] == "sft"]
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0], losses
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["compiles_after_warmup"] == 0
    # What one stage ends with is what the next begins with: the same greedy episodes, log-probs included.
    shown = {}
    logs = [tiny_run.episodes(tmp_path / "run", f"{stage}.eval") for stage in ("sft", "rl", "opd")]
    for r in [row for log in logs for row in log]:
        tokens = [t["logprobs"] for t in r["trajectories"]] + [t["tokens"] for t in r["trajectories"]]
        shown.setdefault((r["stage"], r["step"]), {})[r["task"]["id"]] = tokens
    assert shown["sft", 0] != shown["sft", 12] == shown["rl", 0] != shown["rl", 2] == shown["opd", 0] != shown["opd", 2]
    assert (tmp_path / "run" / "policy" / "model.safetensors").is_file()
