"""The web agent: the laptop's recipe end to end in a real Chromium, in a run of seconds; the one too large to run."""

import os
import shutil

import pytest

from configs import web_agent
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.data.sources import load_tasks
from jaxagent.envs.browser import chromium
from jaxagent.runs import checks
from tests import tiny_run

FLAGS = (
    "--config.numerics=fast --config.tokenizer.vocab_size=620 --config.data.source.num_tasks=120 "
    "--config.data.source.num_demonstrations=32 --config.data.source.num_curriculum=8 --config.data.num_eval=4 "
    "--config.env.observation_tokens=64 --config.env.concurrent_episodes=8 --config.warm_start.curriculum.steps=1 "
    "--config.warm_start.curriculum.sequences=4 --config.warm_start.max_steps=3 --config.rl.steps=2"
)


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
    """Warm start and two steps of RL. A random policy buys nothing, but every attempt is judged."""
    pytest.importorskip("playwright")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, chromium.NAMES)), None)
    if not program:
        pytest.skip("there is no Chromium on the PATH")
    flags = [*FLAGS.split(), f"--config.env.chromium={program}"]
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags, config="web_agent")) == 0
    summary, last = tiny_run.ended(tmp_path / "run")
    assert summary["eval/n"] == 4 and summary["eval/solved_before_rl"] == summary["eval/solved_after_rl"] == 0.0
    assert last["reward/solved"] == 0.0
    (dataset,) = (tmp_path / "run").glob("web_shop*")
    tasks = load_tasks(dataset, "heldout", need_answers=False)
    assert {task.kind.partition("/")[0] for task in tasks} == {"maker", "price"}


def test_the_large_preset_has_the_published_constants():
    config = schema.parse(web_agent.get_config("qwen2.5-1.5b"))
    rl = config.rl
    assert (rl.tasks_per_step, rl.group_size, rl.updates_per_step, rl.steps) == (16, 8, 2, 150)
    assert (rl.optimizer.learning_rate, rl.kl.coefficient, rl.kl.estimator) == (1e-6, 0.01, "k3")
    assert (config.env.max_turns, config.env.turn_tokens, config.data.num_eval) == (15, 512, 128)
    assert config.env.score == "solved" and config.data.source.scale == "full"


def test_webrl_has_the_released_constants():
    """THUDM/WebRL: scripts/config/main, process_data.py (window, twice as many, P(YES)), gen_task.py (values)."""
    config = schema.parse(web_agent.get_config("webrl"))
    checks.check(config)
    rl, critic = config.rl, config.rl.critic
    assert (rl.optimizer.learning_rate, critic.optimizer.learning_rate, rl.optimizer.grad_clip) == (1e-6, 1e-6, 1.0)
    assert (config.env.turn_tokens, config.env.context_tokens, rl.sampling.temperature) == (512, 16_384, 1.0)
    assert (rl.replay.low, rl.replay.high, rl.replay.times, rl.replay.capacity) == (0.5, 0.95, 2.0, 100_000)
    assert rl.replay.turns and (rl.phases.low, rl.phases.high) == (0.05, 0.75)
    assert (rl.kl.coefficient, rl.objective.sure, rl.objective.sure_factor) == (1.0, 0.8, 5.0)
    assert rl.group_reward.tokens == 16_384 and rl.kl.refresh_every == rl.phases.steps
    assert (critic.loss.bins, critic.loss.low, critic.loss.high) == (2, -0.5, 1.5)
