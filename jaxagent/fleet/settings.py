"""What a fleet's processes read from the run's config: the rules, the digest by which they know each other. No JAX."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from jaxagent.config import Config, ConfigError, to_dict
from jaxagent.config.fleet import FOLDER as FOLDER
from jaxagent.config.fleet import FleetConfig
from jaxagent.fleet.plan import Plan

WEIGHTS = "weights"  # of that folder: the versions that the trainer has published
ENGINES = "engines"  # of that folder: what each engine process keeps
TOKEN_VARIABLE, TOKEN_FILE = "JAXAGENT_FLEET_TOKEN", "token"
# Sections that processes may have otherwise without playing or training anything else.
OWN = ("workdir", "mesh", "eval", "checkpoint", "resume", "episodes")
RULES = ("rule", "window")  # of the section `fleet`, what all must have


def of(cfg: Config) -> FleetConfig:
    """The section.

    Raises:
      ConfigError: the config has none.
    """
    if cfg.fleet is None:
        raise ConfigError("config.fleet is none: a run of many processes needs --config.fleet=on.")
    return cfg.fleet


def digest_of(cfg: Config) -> str:
    """Of all settings that must be equal in all processes."""
    row = {name: value for name, value in to_dict(cfg).items() if name not in OWN}
    row["fleet"] = {name: row["fleet"][name] for name in RULES}
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]


def notes(cfg: Config) -> Iterator[str]:
    """Yields what to tell of settings that work, and perhaps not as their owner thinks."""
    fleet, rl = of(cfg), cfg.rl
    if fleet.rule == "pinned" and 0 < fleet.engines <= rl.staleness:
        yield (
            f"fleet.engines is {fleet.engines}, and rl.staleness + 1 is {rl.staleness + 1}: with the rule 'pinned' an "
            "engine holds one version at a time, so steps that could overlap are played one after another. Start more "
            "engines, or use fleet.rule='in_flight'."
        )
    if rl.staleness and rl.correction is None:
        yield (
            f"rl.staleness is {rl.staleness} and rl.correction is none: nothing but the objective's own clipping "
            "corrects for samples of older weights."
        )
    if fleet.rule == "pinned" and cfg.numerics != "exact":
        yield "numerics='fast': tokens depend on what an engine computes beside them, and the run is not reproducible."


def plan_of(cfg: Config) -> Plan:
    """The plan of a run with `config.fleet`.

    Raises:
      ConfigError: the settings exclude each other, or the run has no fleet.
    """
    rl, fleet = cfg.rl, of(cfg)
    if rl.oversample is not None:
        raise ConfigError(
            "config.rl.oversample stops attempts by the clock; with config.fleet every attempt that is begun is "
            "trained. Set one of them to None."
        )
    devices, trainers = cfg.mesh.devices, fleet.trainers
    if devices % trainers:
        raise ConfigError(
            f"fleet.trainers ({trainers}) must divide the devices of config.mesh ({devices}): each process has as many."
        )
    if devices // trainers % (cfg.mesh.tensor * cfg.mesh.expert):
        axes = "tensor" if cfg.mesh.expert == 1 else "expert x tensor"
        raise ConfigError(
            f"config.mesh.{axes} ({cfg.mesh.expert * cfg.mesh.tensor}) must divide the devices of each trainer "
            f"process: with fleet.trainers={trainers} these are {devices // trainers}."
        )
    return Plan(
        steps=rl.steps,
        groups_per_step=rl.tasks_per_step,
        attempts=rl.group_size,
        staleness=rl.staleness,
        rule=fleet.rule,
        window=fleet.window,
        rounds=rl.refill.max_rounds if rl.refill is not None else 1,
        groups_per_round=rl.refill.tasks_per_round if rl.refill is not None else 0,
        lease_s=fleet.lease_s,
    )
