"""A whole run on adapters: exact numbers, a reference that follows, a run that goes on, and what it leaves behind."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxagent import main as cli
from jaxagent import replay
from jaxagent.config import flags
from jaxagent.models import hf
from jaxagent.observe import jsonl
from jaxagent.runs.evaluation import policy as policies
from jaxagent.runs.parts import open_parts
from tests import tiny_run
from tests.test_loop import summary
from tests.tiny_run import numbers

FLAGS = (
    "--config.warm_start.max_steps=2", "--config.warm_start.curriculum_steps=1", "--config.rl.steps=4",
    "--config.rl.updates_per_step=1", "--config.rl.optimizer.warmup_steps=0", "--config.rl.kl.coefficient=0.1",
    "--config.rl.kl.estimator=abs", "--config.rl.kl.refresh_every=2", "--config.eval.every=0",
    "--config.rl.entropy_coefficient=0.01",  # so that the policy moves whatever the rewards
)  # fmt: skip


@pytest.mark.slow
def test_a_run_and_its_continuation(tmp_path):
    workdir = tmp_path / "run"
    argv = tiny_run.argv(workdir, *FLAGS, preset="laptop-lora")
    assert cli.main(argv) == 0
    result = summary(workdir)
    assert result["logprob_gap_max"] == 0.0  # what was sampled by merged weights, scored by the trainer
    assert result["compiles_after_warmup"] == 0
    kl = {r["step"]: r["policy/kl_reference"] for r in jsonl.read(workdir / "metrics.jsonl") if r["stage"] == "rl" and r["step"]}  # fmt: skip # noqa: E501
    assert kl[1] == 0.0 and kl[2] > 0 and kl[3] == 0.0 and kl[4] > 0  # to the base; to the policy after step 2

    # The exported policy is the base with the exported adapter in it; the base itself is what the warm start left.
    cfg = flags.parse_argv(argv).config
    spec = hf.read_spec(workdir / "policy", cfg.model)
    policy = hf.load(workdir / "policy", spec, None)
    base, merged = (load_file(workdir / name / "model.safetensors") for name in ("base", "policy"))
    adapter = load_file(workdir / "adapter" / "adapter_model.safetensors")
    settings = json.loads((workdir / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(workdir / "base")
    for name, weights in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (adapter.pop(f"{module}.lora_{side}.weight", None) for side in "AB")
        if a is not None:
            assert np.abs(b).max() > 0
            weights = weights + settings["lora_alpha"] / settings["r"] * b @ a
        np.testing.assert_allclose(weights, merged[name], rtol=1e-5, atol=1e-6)
    assert not adapter

    # What is evaluated of the last bundle, in which there are adapters alone, is the policy as it was served.
    with open_parts(cfg, print) as parts:
        served, version = policies.load(parts, policies.choose(cfg, "latest"))
    jax.tree.map(np.testing.assert_array_equal, served, policy)
    assert version == 4

    # The last bundle lost: the run goes on from the one before, with adapters and base from disk, to the same bits.
    again = tmp_path / "again"
    shutil.copytree(workdir, again)
    bundles = sorted(int(p.name) for p in (again / "checkpoints").iterdir() if p.name.isdigit())
    shutil.rmtree(again / "checkpoints" / str(bundles[-1]))
    for name in ("policy", "adapter"):
        shutil.rmtree(again / name)
    assert cli.main(tiny_run.argv(again, *FLAGS, preset="laptop-lora")) == 0
    assert numbers(again) == numbers(workdir)
    for file in ("adapter/adapter_model.safetensors", "policy/model.safetensors"):
        assert (again / file).read_bytes() == (workdir / file).read_bytes()

    # A certificate compares what scales the adapters; where the base lies is the owner's business.
    path = workdir / "adapter" / "adapter_config.json"
    for change, code in (
        ({"base_model_name_or_path": "elsewhere"}, 0),
        ({"lora_alpha": settings["lora_alpha"] + 1}, 1),
    ):
        path.write_text(json.dumps(settings | change))
        assert replay.main(["replay", f"--config.workdir={workdir}", "--verify=1", "--draw=7"]) == code
    (difference,) = json.loads((workdir / "replay/verify-1-7.json").read_text())["differences"]
    assert (difference["place"], difference["field"]) == ("adapter/", "adapter_config.json")


@pytest.mark.slow
def test_adapters_of_experts_and_a_run_that_begins_with_them(tmp_path):
    """A mixture trains two steps, exactly; another run goes on from its adapters, with experts on two devices."""
    first, second = tmp_path / "first", tmp_path / "second"
    argv = (*FLAGS, "--config.rl.steps=2", "--config.model.lora.rank=2")
    assert cli.main(tiny_run.argv(first, *argv, preset="laptop-moe")) == 0
    assert summary(first)["logprob_gap_max"] == 0.0
    saved = load_file(first / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts.{}.up_proj.lora_B.weight"
    assert max(np.abs(saved[name.format(expert)]).max() for expert in range(8)) > 0

    cfg = flags.parse_argv(tiny_run.argv(first, *argv, preset="laptop-moe")).config
    source = policies.choose(cfg, str(first / "adapter"))
    assert source.base == first / "base"
    with open_parts(policies.configured(cfg, source), print) as parts:
        served, _ = policies.load(parts, source)
        jax.tree.map(np.testing.assert_array_equal, served, hf.load(first / "policy", parts.spec, None))

    begins = f"--config.model.path={first / 'base'}", f"--config.model.lora.path={first / 'adapter'}"
    goes_on = (*argv, "--config.stages=rl", "--config.mesh.expert=2", "--config.rl.batch.micro_rows=2", *begins)
    assert cli.main(tiny_run.argv(second, *goes_on, preset="laptop-moe")) == 0
    kl = {r["step"]: r["policy/kl_reference"] for r in jsonl.read(second / "metrics.jsonl") if r["stage"] == "rl" and r["step"]}  # fmt: skip # noqa: E501
    assert kl[1] == 0.0 and kl[2] > 0  # to where it began
    assert summary(second)["logprob_gap_max"] == 0.0
    shutil.rmtree(first / "adapter")
    assert cli.main(tiny_run.argv(second, *goes_on, "--config.rl.steps=3", preset="laptop-moe")) == 0
    assert cli.main(tiny_run.argv(tmp_path / "none", *goes_on, preset="laptop-moe")) == 2
