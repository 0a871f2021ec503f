"""The Python recipes end to end in real sandboxes, in runs of seconds; and the presets too large to run."""

import pytest

from configs import code_agent, gsm8k_python
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.algorithms.objectives import OBJECTIVES
from jaxagent.envs import Python
from jaxagent.runs import checks
from tests import tiny_run

CONFIGS = {"code_agent": code_agent, "gsm8k_python": gsm8k_python}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "family"), [("code_agent", "revise"), ("gsm8k_python", "two_step")])
def test_a_tiny_run(tmp_path, sandbox, config, family, capsys):
    """Warm start, gate, RL and evaluation. A random policy solves nothing, but no attempt fails."""
    flags = tiny_run.PYTHON_FLAGS.split()
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, config=config)) == 0
    assert "sandbox back end: " in capsys.readouterr().out
    summary, _ = tiny_run.ended(tmp_path / "run")
    assert summary["eval/n"] == 8 and summary["eval/solved_before_rl"] == summary["eval/solved_after_rl"] == 0.0
    assert f"eval/solved_{family}_after_rl" in summary and "eval/programs_after_rl" in summary


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        ("code_agent", "laptop"),
        ("code_agent", "laptop+gspo"),
        ("code_agent", "qwen2.5-3b"),
        ("gsm8k_python", "laptop"),
        ("gsm8k_python", "laptop+gspo"),
        ("gsm8k_python", "smollm2"),
        ("gsm8k_python", "qwen2.5-1.5b"),
    ],
)
def test_presets(config, preset):
    cfg = schema.parse(CONFIGS[config].get_config(preset))
    checks.check(cfg)
    assert cfg.env.needs_answers == (config == "gsm8k_python")
    assert isinstance(cfg.env, Python) and cfg.env.judge == ("tests" if config == "code_agent" else "answer")
    assert cfg.env.format == ("plain" if preset.startswith("laptop") else "fenced")
    assert cfg.stages == (("rl",) if preset.startswith("qwen") else ("warm_start", "rl"))
    assert type(cfg.rl.objective) is OBJECTIVES["gspo" if "gspo" in preset else "ppo_clip"]
