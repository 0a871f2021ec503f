"""The terminal recipes end to end in a real sandbox, in a run of seconds; and the presets too large to run."""

import pathlib
import tempfile

import pytest

from configs import echo, endless_terminals
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.algorithms.aggregate import SequenceMean
from jaxagent.algorithms.estimators import GAE, GroupMeanStd
from jaxagent.algorithms.objectives import PPOClip
from jaxagent.algorithms.value_losses import Squared
from jaxagent.config import EchoConfig
from jaxagent.data.sources import load_tasks
from jaxagent.envs import check
from jaxagent.observe import jsonl
from jaxagent.runs import checks
from tests import tiny_run
from tests.envs.terminal import harbor_tasks


@pytest.mark.slow
def test_a_tiny_run(tmp_path, sandbox, capsys):
    """Warm start, gate, RL and evaluation. A random policy solves nothing, but every attempt is verified."""
    flags = tiny_run.TERMINAL_FLAGS.split()
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, preset="laptop+grpo", config="endless_terminals")) == 0
    assert "sandbox back end: " in capsys.readouterr().out
    summary, last = tiny_run.ended(tmp_path / "run")
    assert summary["eval/n"] == 8 and summary["eval/solved_before_rl"] == summary["eval/solved_after_rl"] == 0.0
    assert "eval/solved_level2_after_rl" in summary and "eval/solved_sampled_after_rl" in summary
    assert last["reward/solved"] == 0.0 and last["episode/unverified"] == 0.0
    (dataset,) = (tmp_path / "run").glob("terminal_tasks-*")
    kinds = {task.kind.partition("/")[0] for task in load_tasks(dataset, "train", need_answers=False)}
    assert kinds == {"level1", "level2"}
    rows = list(jsonl.read(dataset / "full.jsonl"))
    assert all(row["turns"][-1] == {"action": "<done>", "observation": ""} for row in rows)


@pytest.mark.slow
def test_a_folder_of_harbors_tasks_is_trained_on_by_one_flag(tmp_path, sandbox, capsys):
    """Of several steps, too: two steps of RL in their own images; what is proven beside the folder counts."""
    names = frozenset(("hello", "sort", "sum", "rename", "link", "steps-mean"))
    harbor_tasks.write_all(tmp_path / "tasks", names)
    with tempfile.TemporaryDirectory(prefix="jaxagent-test-images-", ignore_cleanup_errors=True) as images:
        pathlib.Path(images).chmod(0o711)
        bases = "--config.env.sandbox.software.bases=('*=host',)"
        software = (f"--config.env.sandbox.software.images={images}", bases)
        assert check.main(["check", str(tmp_path / "tasks"), *software]) == 0
        own = [flag for flag in tiny_run.TERMINAL_FLAGS.split() if "data.source." not in flag]
        flags = (*own, "--config.stages=rl", "--config.env.context_tokens=512", "--config.rl.batch.row_tokens=512")
        flags += (f"--config.data.source={tmp_path}/tasks", *software, "--config.data.unchecked=refuse")
        flags += ("--config.env.sandbox.files=9000", "--config.env.sandbox.disk_mb=64")
        argv = tiny_run.argv(tmp_path / "run", *flags, preset="laptop+grpo", config="endless_terminals")
        capsys.readouterr()
        assert cli.main(argv) == 0
    summary, _ = tiny_run.ended(tmp_path / "run")
    assert summary["eval/n"] == 2 and "images of 6 tasks" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["laptop", "qwen2.5-7b", "laptop+grpo"])
def test_presets_of_endless_terminals(preset):
    cfg = schema.parse(endless_terminals.get_config(preset))
    checks.check(cfg)
    if preset == "qwen2.5-7b":  # as published
        rl = cfg.rl
        assert rl.advantage == GAE(gamma=1.0, lam=1.0, critic=rl.critic) and not rl.whiten_advantages
        assert (rl.objective, rl.critic.loss, rl.aggregation) == (PPOClip(0.2, 0.28), Squared(0.2), SequenceMean())
        assert (rl.optimizer.learning_rate, rl.critic.optimizer.learning_rate) == (5e-7, 1e-6)
        assert (rl.optimizer.grad_clip, rl.optimizer.warmup_steps, rl.epochs) == (0.1, 20, 2)
        assert (rl.tasks_per_step, rl.group_size, rl.sampling.temperature, rl.kl) == (16, 16, 0.6, None)
        assert (cfg.env.max_turns, cfg.env.turn_tokens, cfg.env.context_tokens) == (16, 2048, 16_384)
        assert (cfg.env.command_timeout_s, cfg.env.agent_timeout_s) == (10.0, 300.0)


@pytest.mark.parametrize("preset", ["laptop", "laptop-grpo", "qwen3-8b", "qwen3-8b-grpo"])
def test_presets_of_echo(preset):
    cfg = schema.parse(echo.get_config(preset))
    checks.check(cfg)
    assert (cfg.rl.echo is None) == ("grpo" in preset)
    assert cfg.rl.advantage == GroupMeanStd(drop_zero_signal=not preset.startswith("qwen3"))
    if preset == "qwen3-8b":  # as published
        rl, terminal = cfg.rl, cfg.env
        assert (rl.objective, rl.kl, rl.aggregation) == (PPOClip(0.2, 0.2), None, SequenceMean())
        assert (rl.optimizer.learning_rate, rl.optimizer.b2, rl.optimizer.grad_clip) == (1e-6, 0.999, 0.2)
        assert rl.echo == EchoConfig(0.05)
        assert (rl.tasks_per_step, rl.group_size, rl.epochs, rl.sampling.temperature) == (16, 16, 1, 0.8)
        assert (cfg.env.context_tokens, terminal.verify_overlong, terminal.output_chars) == (34_096, False, 50_000)
        assert (terminal.command_timeout_s, terminal.verifier_timeout_s, terminal.agent_timeout_s) == (30, 120, 600)
