"""An asynchronous run of many processes: `--config.fleet=on`. Without this section a run is one process."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxagent.config.errors import Removed
from jaxagent.config.ranges import NonNegativeInt, PositiveInt, Seconds

FOLDER = "fleet"  # of the workdir: what the processes of a run of many keep there


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetEngineConfig:
    """What each engine process has in place of config.mesh and of the engine's size."""

    data: PositiveInt = 1  # of its mesh
    fsdp: PositiveInt = 1  # likewise
    tensor: PositiveInt = 1  # likewise
    expert: PositiveInt = 1  # likewise
    slots: NonNegativeInt = 0  # 0 = engine.slots
    pages: NonNegativeInt = 0  # 0 = engine.pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Who plays and who trains. How far apart they may be is `rl.staleness`: see docs/asynchronous.md."""

    plan = "jaxagent.fleet.settings:plan_of"  # no field: what makes a plan of a config, and refuses what cannot be one

    # Which weights an episode has: one version from its beginning to its end, or the newest at every dispatch.
    rule: Literal["pinned", "in_flight"] = "pinned"
    window: PositiveInt = 1  # groups that a finished one may overtake, with `in_flight`; 1 = strict order
    engines: NonNegativeInt = 2  # engine processes that the command starts on this machine; 0 = others start them
    engine: FleetEngineConfig | None = None  # an engine's own mesh, slots and pages; none = those of the run
    trainers: PositiveInt = 1  # trainer processes, which share one mesh
    coordinator: str = ""  # http://host:port of a coordinator that runs already; "" = the command starts one
    listen: str = "127.0.0.1:0"  # where the coordinator of the command listens; port 0 = a free one
    lease_s: Seconds = 10.0  # an engine process that is silent for so long has lost its episodes
    patience_s: Seconds = 600.0  # for which a process waits for a coordinator that is away; then it ends
    start_s: Seconds = 3600.0  # budget of what happens once: opening data, restoring, compiling, the first step
    hang_s: Seconds = 900.0  # budget of any other phase: who shows no progress for so long is ended and started again
    # Of each process, by the command that started it; then the run ends, or goes on with the other engines.
    restarts: NonNegativeInt = 100

    removed: ClassVar = {
        "lend": Removed("the trainer's own engine plays evaluations alone", False),
        "in_flight": Removed("an engine plays env.concurrent_episodes at once", "fixed"),
        "transfer": Removed("engines take weights from files", "files"),
    }
