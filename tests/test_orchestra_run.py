"""ToolOrchestra end to end, in a run of seconds: an engine's expert beside the policy; and the presets."""

import dataclasses

import pytest

from configs import memagent, tool_orchestra
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.algorithms.group_rewards import Preferences
from jaxagent.config import ConfigError
from jaxagent.observe import episode_store
from jaxagent.runs import checks
from tests import tiny_run

FLAGS = (
    "--config.numerics=exact --config.tokenizer.vocab_size=1024 --config.data.source.num_tasks=240 "
    "--config.data.source.num_cities=250 --config.data.source.num_demonstrations=400 --config.env.turn_tokens=12 "
    "--config.env.max_turns=3 --config.env.observation_tokens=80 --config.env.context_tokens=224 "
    "--config.env.sandbox.warm=4 --config.warm_start.batch.row_tokens=224 --config.warm_start.curriculum_steps=0 "
    "--config.warm_start.max_steps=300 --config.warm_start.gate_every=300 --config.warm_start.batch_sequences=16 "
    "--config.rl.steps=10 --config.rl.batch.row_tokens=224 --config.episodes.learn=true"
)


@pytest.mark.slow
def test_an_engines_expert_and_the_policy_are_two_weights_in_one_run(tmp_path, sandbox):
    """The expert has the warm start's weights: its log-probs do not follow the policy's updates."""
    argv = tiny_run.argv(tmp_path / "run", *FLAGS.split(), preset="laptop-engine", config="tool_orchestra")
    assert cli.main(argv) == 0
    summary, _ = tiny_run.ended(tmp_path / "run", 10, "env_error", "engine_error")
    assert summary["logprob_gap_max"] == 0.0
    assert summary["eval/cost_before_rl"] > 0 and "eval/cost_after_rl" in summary
    episodes, _ = episode_store.read(tmp_path / "run/episodes")
    heard = [talk for episode in episodes for talk in episode.heard]
    engines = [talk.trajectory for talk in heard if talk.role == "answer-3"]
    assert engines and all(talk.trajectory is None for talk in heard if talk.role != "answer-3")
    frozen, policy = _versions(engines), _versions([t for episode in episodes for t in episode.trajectories])
    assert frozen == {0} and max(policy) > 0  # no update of RL reaches the expert


def _versions(trajectories):
    return {int(v) for t in trajectories for v in t.policy_versions[t.action_mask]}


@pytest.mark.parametrize("preset", ["laptop", "laptop-engine", "laptop+gspo", "qwen3-8b"])
def test_presets(preset):
    cfg = schema.parse(tool_orchestra.get_config(preset))
    checks.check(cfg)
    assert set(cfg.roles) == set(cfg.env.roles)


@pytest.mark.parametrize("score", ["sovled", "em"])
def test_an_outcome_that_no_verdict_has_is_refused_before_the_run(score):
    cfg = schema.parse(tool_orchestra.get_config("laptop"))
    cfg = dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, group_reward=Preferences(score=score)))
    with pytest.raises(ConfigError, match=rf"rl\.group_reward\.score='{score}': .*ToolOrchestra.*solved"):
        checks.check(cfg)


def test_preferences_are_refused_where_nothing_counts_what_they_weigh():
    cfg = schema.parse(memagent.get_config("laptop"))
    checks.check(cfg)
    cfg = dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, group_reward=Preferences()))
    with pytest.raises(ConfigError, match=r"'preferences' weighs 'cost', which attempts of config\.env \(MemAgent\)"):
        checks.check(cfg)

    class Counting(type(cfg.env)):
        components, counted = ("solved",), ("cost", "latency_s")

    checks.check(dataclasses.replace(cfg, env=Counting(**vars(cfg.env))))


def test_the_published_constants():
    rl = schema.parse(tool_orchestra.get_config("qwen3-8b")).rl
    assert (rl.group_size, rl.tasks_per_step, rl.refill.tasks_per_round) == (8, 16, 384)
    assert (rl.objective.clip_low, rl.objective.clip_high, rl.objective.clip_dual) == (0.2, 0.28, 10.0)
    assert (rl.kl.coefficient, rl.kl.estimator, rl.kl.where) == (1e-4, "k2", "loss")
    assert (rl.shaping.correct_boost, rl.shaping.truncated_factor, rl.optimizer.learning_rate) == (0.1, 0.1, 1e-6)
    assert (rl.sampling.temperature, rl.entropy_coefficient, rl.epochs) == (1.0, 0.0, 1)
