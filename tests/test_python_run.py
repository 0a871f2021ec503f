"""The Python recipes end to end in real sandboxes, in runs of seconds; and the presets too large to run."""

import json

import pytest

from configs import code_agent, gsm8k_python
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.algorithms.objectives import OBJECTIVES
from jaxagent.config import ConfigError
from jaxagent.envs import Python
from jaxagent.observe import jsonl
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
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["eval/n"] == 8
    assert summary["eval/solved_before_rl"] == summary["eval/solved_after_rl"] == 0.0
    assert f"eval/solved_{family}_after_rl" in summary and "eval/programs_after_rl" in summary
    last = list(jsonl.read(tmp_path / "run/metrics.jsonl"))[-1]
    failures = ("timeout", "env_error", "engine_error", "cancelled")
    assert last["step"] == 2 and not any(last[f"stop/{name}"] for name in failures)


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


@pytest.mark.parametrize("config", CONFIGS)
def test_an_unknown_preset_is_named(config):
    with pytest.raises(ConfigError, match=r"has no preset 'labtop'\. Did you mean 'laptop'\?"):
        CONFIGS[config].get_config("labtop")


def test_tasks_of_another_family_are_refused(tmp_path, capsys):
    flags = ("--config.env=python", "--config.env.judge=tests", "--config.stages=rl")
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags)) == 2
    assert "makes tasks for the environment 'search', and config.env is 'python'" in capsys.readouterr().err
