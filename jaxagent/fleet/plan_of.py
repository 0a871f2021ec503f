"""A run's settings -> the coordinator's rules."""

from __future__ import annotations

from jaxagent.config import Config, ConfigError
from jaxagent.fleet.plan import Plan


def plan_of(cfg: Config) -> Plan:
    """The plan of a run with `config.fleet`.

    Raises:
      ConfigError: the settings exclude each other, or the run has no fleet.
    """
    rl, fleet = cfg.rl, cfg.fleet
    if fleet is None:
        raise ConfigError("config.fleet is None: the run is one process, and has no coordinator.")
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
    if devices // trainers % cfg.mesh.tensor:
        raise ConfigError(
            f"config.mesh.tensor ({cfg.mesh.tensor}) must divide the devices of each trainer process: with "
            f"fleet.trainers={trainers} these are {devices // trainers}."
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
