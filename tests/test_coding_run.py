"""The coding recipes end to end, with a real agent program in real sandboxes, in runs of seconds; and their presets."""

import pytest

from configs import coding_agent, polar_swe
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.agents import ClaudeCode, Codex, Shell
from jaxagent.algorithms.aggregate import RolloutMean, TokenMean
from jaxagent.algorithms.estimators import GroupMeanStd, LeaveOneOutStd
from jaxagent.algorithms.objectives import PPOClip
from jaxagent.config import KLConfig, OversampleConfig
from jaxagent.envs import Coding
from jaxagent.envs.terminal import dialogue
from jaxagent.runs import checks
from tests import tiny_run

CONFIGS = {"coding_agent": coding_agent, "polar_swe": polar_swe}


@pytest.mark.slow
@pytest.mark.parametrize("config", ["coding_agent:laptop", "coding_agent:builtin", "polar_swe:laptop"])
def test_a_tiny_run(tmp_path, sandbox, config, capsys):
    """Warm start, gate, RL and evaluation. A random policy mends nothing, but every attempt is played and judged."""
    name, _, preset = config.partition(":")
    flags = tiny_run.CODING_FLAGS.split()
    if preset == "builtin":  # agent programs have a limit of their own
        flags.append("--config.env.observation_tokens=16")
    if name == "polar_swe":  # groups of 4 attempts, one of which is begun beyond what is wanted
        flags += ["--config.rl.group_size=3", "--config.rl.oversample.min_group=2"]
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, config=name, preset=preset)) == 0
    assert "sandbox back end: " in capsys.readouterr().out
    summary, _ = tiny_run.ended(tmp_path / "run", 2, "timeout", "env_error", "engine_error")
    assert summary["eval/n"] == 8 and summary["eval/resolved_before_rl"] == summary["eval/resolved_after_rl"] == 0.0
    assert {f"eval/resolved_{kind}_after_rl" for kind in ("flip", "bound", "number", "name")} & set(summary)


def test_the_laptop_presets_differ_in_who_plays():
    agent, builtin = (schema.parse(coding_agent.get_config(preset)) for preset in ("laptop", "builtin"))
    for cfg in (agent, builtin):
        checks.check(cfg)
    assert isinstance(agent.env, Coding) and isinstance(agent.env.agent, Shell)
    assert (agent.env.rollout, builtin.env.rollout) == (
        "jaxagent.gateway.harness:HarnessRollout",
        "jaxagent.rollout.multi_turn:MultiTurn",
    )
    assert agent.numerics == builtin.numerics == "exact"
    one, other = (schema.to_dict(cfg) for cfg in (agent, builtin))
    differ = {key for key in one["env"] if one["env"][key] != other["env"][key]}
    assert differ == {"play", "agent", "command_timeout_s", "output_chars"}
    assert {key for key in one if one[key] != other[key]} == {"env", "workdir"}
    # What the program shows the policy is what the built-in dialogue would.
    shell = agent.env.agent
    assert shell.shown.format(output="a", code=0) == dialogue.observation("plain", "", "a", 0)
    assert shell.failed.format(output="a", code=2) == dialogue.observation("plain", "", "a", 2)
    assert shell.late.format(output="a", timeout_s=10.0) == dialogue.timed_out("plain", "", "a", 10.0)
    assert (shell.begin, shell.end, shell.done) == (*dialogue.action("plain", "|").split("|"), dialogue.finish("plain"))
    task = shell.task.format(instruction=agent.env.instruction.format(statement="Mend it."))
    assert [message.content for message in builtin.env.messages("Mend it.")] == [task] and not shell.system
    assert shell.max_turns == agent.env.max_turns == builtin.env.max_turns
    assert (builtin.env.output_chars, builtin.env.command_timeout_s) == (shell.output_chars, shell.command_timeout_s)


@pytest.mark.parametrize(("preset", "program"), [("claude_code", ClaudeCode), ("codex", Codex)])
def test_the_published_coding_agent(preset, program):
    """slime, coding_agent_rl."""
    cfg = schema.parse(coding_agent.get_config(preset))
    checks.check(cfg)
    rl = cfg.rl
    assert type(cfg.env.agent) is program and cfg.env.play == "agent"
    assert (rl.tasks_per_step, rl.group_size, rl.updates_per_step, rl.epochs) == (8, 8, 1, 1)  # global batch 64
    assert rl.advantage == GroupMeanStd(drop_zero_signal=False, multi_trajectory="full")  # every chain: the full reward
    assert (rl.objective, rl.kl, rl.aggregation, rl.oversample) == (PPOClip(0.2, 0.28), None, RolloutMean(), None)
    optimizer = rl.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.b2) == (1e-6, 0.1, 0.98)
    assert (cfg.env.context_tokens, cfg.env.turn_tokens, rl.sampling.temperature) == (96 * 1024, 32_768, 1.0)
    assert (cfg.env.run_s, cfg.env.verify_s, cfg.env.verify_empty, cfg.env.ladder) == (1800.0, 600.0, True, "slime")
    assert cfg.env.reward == "resolved" and cfg.tokenizer.use_chat_template


def test_the_published_polar():
    cfg = schema.parse(polar_swe.get_config("qwen3-4b"))
    checks.check(cfg)
    rl = cfg.rl
    assert isinstance(rl.advantage, LeaveOneOutStd) and not rl.whiten_advantages
    assert (rl.objective, rl.aggregation, rl.kl) == (PPOClip(0.2, 0.28), RolloutMean(), KLConfig(0.001, "k3", "loss"))
    # 8 attempts, min_complete_accept_fraction 0.6: 5 are enough; early_stop_min_usable_sessions = min(8, 5 + 2).
    assert rl.oversample == OversampleConfig(extra_tasks=0, extra_attempts=1, min_group=5)
    assert (rl.tasks_per_step, rl.group_size + rl.oversample.extra_attempts, rl.group_size) == (4, 8, 7)
    optimizer = rl.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.b2) == (1e-6, 0.1, 0.98)
    assert (cfg.env.run_s, cfg.mesh.tensor, cfg.env.verify_empty, cfg.env.ladder) == (2400.0, 2, False, "swebench")
    assert isinstance(cfg.env.agent, Codex)


def test_the_laptop_polar():
    cfg = schema.parse(polar_swe.get_config())
    checks.check(cfg)
    assert isinstance(cfg.rl.advantage, LeaveOneOutStd) and cfg.rl.kl is None
    assert cfg.rl.oversample == OversampleConfig(extra_attempts=1, min_group=5) and cfg.rl.group_size == 7
    other = schema.parse(coding_agent.get_config("laptop+dapo"))
    checks.check(other)
    assert (other.rl.aggregation, other.workdir) == (TokenMean(), "runs/coding_agent_dapo")
