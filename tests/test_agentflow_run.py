"""The AgentFlow recipe end to end, in a run of seconds: scripted roles, and two weights on one mesh."""

import pytest

from configs import agentflow
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.config import ConfigError
from jaxagent.envs.agentflow import prompts
from jaxagent.envs.agentflow.prompts import shortened_memory, without_middle
from jaxagent.envs.agentflow.reading import PYTHON
from jaxagent.runs import checks
from tests import tiny_run

CHANGES = (
    *(flag for flag in tiny_run.PYTHON_FLAGS.split() if "numerics" not in flag),
    "--config.numerics=exact",
    "--config.env.turn_tokens=20",
    "--config.env.context_tokens=256",
    "--config.warm_start.batch.row_tokens=256",
    "--config.rl.batch.row_tokens=256",
)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["laptop", "laptop-engines"])
def test_a_tiny_run(tmp_path, sandbox, preset):
    """A random planner solves nothing, but no episode fails, and its log-probs are the engine's."""
    flags = list(CHANGES)
    if preset == "laptop-engines":
        flags += [f"--config.roles.{name}.context_tokens=256" for name in ("executor", "verifier")]
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, config="agentflow", preset=preset)) == 0
    summary, last = tiny_run.ended(tmp_path / "run")
    assert summary["eval/n"] == 8 and last["logprob_gap/max"] == 0.0
    assert last["episode/trajectories"] >= 3 and last["episode/executor_replies"] >= 1


@pytest.mark.parametrize("preset", ["laptop", "laptop-engines", "laptop+flow_grpo", "slime_agentic", "flow_grpo"])
def test_presets(preset):
    cfg = schema.parse(agentflow.get_config(preset))
    checks.check(cfg)
    assert set(cfg.roles) == set(cfg.env.roles)
    assert cfg.rl.advantage.multi_trajectory == ("statistics" if "flow_grpo" in preset else "full")
    if preset in ("slime_agentic", "flow_grpo"):
        assert cfg.rl.kl.coefficient == 0.001 and cfg.rl.sampling.temperature == 0.7
        assert (cfg.rl.objective.clip_low, cfg.rl.objective.clip_high) == (0.2, 0.3)
        wanted = {"slime_agentic": (8, 8, 5, 4096, "all"), "flow_grpo": (32, 8, 3, 2048, "steps")}[preset]
        env = cfg.env
        assert (cfg.rl.tasks_per_step, cfg.rl.group_size, env.max_turns, env.turn_tokens, env.trained) == wanted


def test_a_role_that_is_missing_or_unknown_is_named():
    for changes, said in (
        ({"env": {"judge": True}}, r"config\.roles\.judge is missing"),
        ({"roles": {"verifyer": {"name": "arithmetic_verifier"}}}, r"no role 'verifyer'.*verifier"),
    ):
        raw = agentflow.get_config()
        raw.update(changes)
        with pytest.raises(ConfigError, match=said):
            checks.check(schema.parse(raw))


@pytest.mark.parametrize("preset", ["slime_agentic", "flow_grpo"])
def test_what_a_published_policy_may_write_leaves_the_verifier_room_for_a_reply(preset):
    """At three characters a token: programs have more, so do texts."""
    cfg = schema.parse(agentflow.get_config(preset))
    env, verifier, long = cfg.env, cfg.roles["verifier"], "ab " * 20_000
    action = prompts.action(PYTHON, long, long, without_middle(long, env.result_chars))
    actions = shortened_memory((action,) * env.max_turns, env.step_chars)
    shown = prompts.prompt(
        "verifier", env.style, env.coder, actions, question="q" * 1_000, plan=without_middle(long, env.plan_chars)
    )
    assert len(shown) / 3 + verifier.reply_tokens < verifier.context_tokens


def test_a_role_without_room_for_its_first_prompt_is_refused_at_start(tmp_path, capsys):
    flags = ["--config.roles.verifier.context_tokens=20", "--config.roles.verifier.reply_tokens=10"]
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, config="agentflow", preset="laptop-engines")) == 2
    told = capsys.readouterr().err
    assert "config.roles.verifier.context_tokens=20 has no room for a reply after the first prompt of" in told
