"""The one check of a config, called by a run, by its dry run and by an evaluation: what one refuses, all refuse."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxagent.algorithms import checks as algorithm
from jaxagent.algorithms.compose import as_opd
from jaxagent.algorithms.group_rewards import Decoupled, OutcomeModel, Preferences
from jaxagent.config import LEAST_TEMPERATURE, BatchConfig, Config, ConfigError, EnvConfig, nearest, relations
from jaxagent.config.choice import object_at, own_class
from jaxagent.config.errors import failure_line
from jaxagent.config.fleet import FleetConfig
from jaxagent.config.parse import convert, hints
from jaxagent.engine import automaton
from jaxagent.envs.base import Environment, check_texts
from jaxagent.models import hf, lora
from jaxagent.models.families import family_of
from jaxagent.models.spec import ModelSpec
from jaxagent.rollout import groups
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.runs import roles

EXACT_TILE_ROWS = 64
OPD, RL = "opd", "rl"  # the stages that sample, and train adapters


def check(cfg: Config) -> None:
    """Refuses what cannot work, before anything is opened and before any device work.

    Raises:
      ConfigError: naming the fields.
    """
    cfg = cfg.for_platform("cpu")  # sizes that are open yet: those of any platform pass
    if not cfg.workdir.strip():
        raise ConfigError("config.workdir is empty: name the folder of the run, such as runs/first.")
    if not cfg.stages:
        raise ConfigError("config.stages is empty: name at least one stage.")
    if twice := [stage for i, stage in enumerate(cfg.stages) if stage in cfg.stages[:i]]:
        raise ConfigError(f"config.stages names '{twice[0]}' twice: a stage is run once.")
    if not isinstance(cfg.env, Environment):
        raise ConfigError(f"config.env: {type(cfg.env).__qualname__} must extend jaxagent.envs.base.Environment.")
    _check_environment(cfg)
    roles.check(cfg, cfg.env)
    relations.check(cfg)
    algorithm.check(cfg.rl)
    _check_group_reward(cfg)
    if cfg.model.family:
        family_of(cfg.model.family)
    if cfg.model.lora and (not cfg.model.path or pathlib.Path(cfg.model.path).is_dir()):
        lora.targets(cfg.model.lora, model_spec(cfg))
    groups.check(cfg.rl)
    if cfg.rl.branching is not None:
        _check_branching(cfg)
    if OPD in cfg.stages:
        _check_opd(cfg)
    with_adapters = [at for at, stage in enumerate(cfg.stages) if stage in (OPD, RL)]
    if cfg.model.lora and with_adapters and with_adapters[0] < len(cfg.stages) - 1:
        raise ConfigError(
            f"config.stages: with model.lora '{cfg.stages[with_adapters[0]]}' must be the last stage, since those "
            "after it would train the merged policy in full. Start another run with model.path set to this policy."
        )
    if cfg.rl.phases is not None and (cfg.fleet is not None or cfg.env.new_task is None):
        why = "who plays episodes elsewhere does not have" if cfg.fleet else f"{type(cfg.env).__qualname__} cannot make"
        raise ConfigError(f"config.rl.phases needs new tasks, which {why}: set rl.phases=none.")
    if cfg.fleet is not None:
        _check_fleet(cfg, cfg.fleet)
    _check_rows("rl", cfg.rl.batch, cfg.env.context_tokens)
    if cfg.sft is not None and cfg.sft.negatives and cfg.sft.negative_frac == 0:
        raise ConfigError("sft.negatives is given: sft.negative_frac must be more than 0.")
    if cfg.outcome_model is not None and cfg.rl.batch.row_tokens < cfg.env.context_tokens:
        raise ConfigError("rl.batch.row_tokens must be env.context_tokens or more for the stage 'outcome_model'.")
    if cfg.numerics == "exact" and cfg.engine.tile_rows < EXACT_TILE_ROWS:
        raise ConfigError(
            f"numerics='exact' needs engine.tile_rows of {EXACT_TILE_ROWS} or more, got {cfg.engine.tile_rows}: "
            "below that XLA's reductions depend on what they are fused with."
        )
    if cfg.rl.sampling.greedy:
        raise ConfigError(f"rl.sampling.temperature must be {LEAST_TEMPERATURE:g} or more: below, sampling is greedy.")


def model_spec(cfg: Config) -> ModelSpec:
    """The model's shape: from config.json of `model.path`, else from the config's own fields.

    Raises:
      ConfigError: `model.path` has no config.json, or one of a model this code does not compute.
    """
    if not cfg.model.path:
        return ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size)
    return hf.read_spec(cfg.model.path, cfg.model)


def _check_environment(cfg: Config) -> None:
    """Refuses what a class of the user's own says of itself and the package could not work with."""
    env = cfg.env
    assert isinstance(env, Environment)
    for name, hint in hints(EnvConfig).items():
        convert(hint, getattr(env, name), f"config.env.{name}")
    try:
        for name in ("stop_strings", "tokens"):
            check_texts(name, getattr(env, name))
        automaton.build(env.stop_strings, (), 1, cfg.engine.stop_states)  # their states are those of any vocabulary
        if type(env.most_turns) is not int or env.most_turns < 1:
            raise ValueError(f"the environment's most_turns must be at least 1, got {env.most_turns!r}")
    except ValueError as error:
        raise ConfigError(f"config.env: {type(env).__qualname__}: {error}.") from error
    except Exception as error:  # whatever its properties raise
        raise ConfigError(f"config.env: {type(env).__qualname__}: {failure_line(error)}.") from error
    own_class(env.rollout, "config.env: rollout")


def _check_branching(cfg: Config) -> None:
    """Refuses forks of what nobody can bring into the state of another attempt by doing the same."""
    env, name = cfg.env, type(cfg.env).__qualname__
    assert isinstance(env, Environment)
    if object_at(env.rollout, "config.env.rollout") is not MultiTurn:
        why = "plays its attempts itself or has others play them"
    elif cfg.roles or env.roles:
        why = "has roles, whose answers a fork would have to be given again"
    elif not env.repeatable:
        why = "says that an attempt which does the same may be answered otherwise (repeatable = False)"
    elif cfg.fleet is not None:
        raise ConfigError("rl.branching needs fleet=none: the attempts of a group may be played by several processes.")
    else:
        return
    raise ConfigError(f"rl.branching plays a parent's actions again, and config.env ({name}) {why}: use none.")


def _check_group_reward(cfg: Config) -> None:
    """Refuses preferences for what the environment's attempts do not have, which the first group alone would tell."""
    reward, env = cfg.rl.group_reward, cfg.env
    assert isinstance(env, Environment)
    name, scores = type(env).__qualname__, (env.score, *env.components)
    if isinstance(reward, OutcomeModel) and not reward.folder and "outcome_model" not in cfg.stages:
        raise ConfigError(
            "rl.group_reward='outcome_model' needs a model: name its folder (rl.group_reward.folder), or have the "
            "stage 'outcome_model' before 'rl' in config.stages."
        )
    if isinstance(reward, Decoupled):
        if not reward.components or len(reward.weights) not in (0, len(reward.components)):
            raise ConfigError(
                "rl.group_reward='gdpo' needs components, and a weight of each or none: got "
                f"{len(reward.components)} components and {len(reward.weights)} weights."
            )
        for component in reward.components:
            if env.components:  # else the first group tells
                _check_component("components", component, scores, name)
    if not isinstance(reward, Preferences):
        return
    if missing := [counter for counter in reward.weighs if counter not in env.counted]:
        raise ConfigError(
            f"rl.group_reward='preferences' weighs '{missing[0]}', which attempts of config.env ({name}) do not count. "
            "An environment of your own names what its attempts count in `counted`."
        )
    _check_component("score", reward.score, scores, name)


def _check_component(field: str, component: str, scores: Sequence[str], name: str) -> None:
    if component not in scores:
        raise ConfigError(
            f"rl.group_reward.{field}='{component}': verdicts of config.env ({name}) have no such component. "
            f"{nearest(component, scores)} An environment of your own names its others in `components`."
        )


def _check_rows(section: str, batch: BatchConfig, context_tokens: int) -> None:
    """Refuses rows that cannot hold the longest trajectory."""
    if context_tokens - 1 > batch.row_tokens:  # the last token is only a target, never an input
        raise ConfigError(
            f"{section}.batch.row_tokens ({batch.row_tokens}) must hold a whole trajectory: at least "
            f"env.context_tokens - 1 ({context_tokens - 1})."
        )


def _check_opd(cfg: Config) -> None:
    """Refuses a stage "opd" that cannot work."""
    if cfg.model.lora and RL in cfg.stages:
        raise ConfigError(
            "config.model.lora.rank: the stages 'opd' and 'rl' would both train adapters, on different weights: run "
            "one of them, and the other in a run of its own with model.path at the first one's policy."
        )
    if cfg.opd.distill is None:
        raise ConfigError("The stage 'opd' needs a teacher: --config.opd.distill.teacher=FOLDER.")
    algorithm.check(as_opd(cfg).rl)


def _check_fleet(cfg: Config, fleet: FleetConfig) -> None:
    """Refuses a run of many processes that cannot work."""
    if RL not in cfg.stages:
        raise ConfigError("config.fleet: the stage 'rl' is what many processes do, and config.stages does not have it.")
    object_at(fleet.plan, "config.fleet")(
        cfg
    )  # rl.staleness, rl.oversample, fleet.rule, fleet.window and fleet.trainers
    if fleet.hang_s <= fleet.patience_s:
        raise ConfigError(
            f"fleet.hang_s ({fleet.hang_s:g}) must be more than fleet.patience_s ({fleet.patience_s:g}): who waits for "
            "a coordinator that is away does not hang."
        )
