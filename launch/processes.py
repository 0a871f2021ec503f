"""The command lines of a run of many processes. Every launcher starts these, and nothing else.

A run has one coordinator, a gang of trainers that share one mesh, and any number of engines that come and go. What the
roles are is said in docs/asynchronous.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

from jaxagent.config import Config, ConfigError, flags, nearest
from jaxagent.config.command import Parser
from jaxagent.fleet import local
from jaxagent.fleet.settings import TOKEN_VARIABLE, plan_of

TOKEN = TOKEN_VARIABLE  # the environment variable that holds the secret of a run
JOIN = "python -m jaxagent.join"
OURS = 100  # JAX's coordination moves on by one port per start of the gang, and begins again after so many


@dataclasses.dataclass(frozen=True)
class Run:
    """A recipe with its overrides, and the program that joins it."""

    config: str  # FILE[:PRESET]
    overrides: tuple[str, ...] = ()  # --config.FIELD=VALUE
    join: tuple[str, ...] = tuple(JOIN.split())

    def coordinator(self, listen: str) -> tuple[str, ...]:
        """The command of the one process that hands out episodes; `listen` is HOST:PORT."""
        return (*self.join, "--role=coordinator", f"--listen={listen}", *self._recipe())

    def trainer(
        self, coordinator: str, host: str, rank: int | str = 0, processes: int = 1, meet: str = ""
    ) -> tuple[str, ...]:
        """The command of one of the trainer's processes.

        Args:
          coordinator: its URL.
          host: by which other machines reach this process.
          rank: among the trainer's processes.
          processes: how many these are.
          meet: HOST:PORT of JAX's own coordination; another one at every start of the gang.
        """
        gang = (f"--rank={rank}", f"--processes={processes}", f"--meet={meet}") if processes > 1 else ()
        own = (f"--coordinator={coordinator}", f"--name=trainer-{rank}", f"--host={host}")
        return (*self.join, "--role=trainer", *own, *gang, *self._recipe())

    def engine(self, coordinator: str, host: str, name: str) -> tuple[str, ...]:
        """The command of one engine; `name` is its own, and stays when it is started again."""
        own = (f"--coordinator={coordinator}", f"--name={name}", f"--host={host}")
        return (*self.join, "--role=engine", *own, *self._recipe())

    def _recipe(self) -> tuple[str, ...]:
        return (f"--config={self.config}", *self.overrides)


def read(config: str, overrides: Sequence[str], options: object, join: str = JOIN) -> tuple[Run, Config]:
    """The run that a launcher's command line names, and its settings, checked before anything starts.

    Args:
      overrides: what the launcher's parser left over.
      options: its own flags, for "did you mean".

    Raises:
      ConfigError: a flag that is none, or a mistake in the config.
    """
    for word in overrides:
        if not word.startswith("--config.") or "=" not in word:
            known = [f"--{name}" for name in vars(options)]
            raise ConfigError(f"Unknown flag '{word}'. {nearest(word.partition('=')[0], known)}")
    words = ["launch", f"--config={config}"]
    settings = flags.parse_argv([*words, *overrides]).config
    if settings.fleet is None:  # whoever uses a launcher wants many processes
        overrides = ("--config.fleet=on", *overrides)
        settings = flags.parse_argv([*words, *overrides]).config
    plan_of(settings)
    return Run(config, tuple(overrides), tuple(shlex.split(join))), settings


def parser(program: str, page: str) -> Parser:
    """A launcher's own flags begin here: `page` is the text of --help, as it stands."""
    form = argparse.RawDescriptionHelpFormatter
    return Parser(prog=f"python -m launch.{program}", description=page, formatter_class=form, allow_abbrev=False)


def engine_count(asked: int | None, config: Config) -> int:
    """Of --engines, else of config.fleet.engines. Raises ConfigError where both are 0."""
    assert config.fleet is not None
    if not (engines := asked or config.fleet.engines):
        raise ConfigError("--engines is missing, and config.fleet.engines is 0.")
    return engines


def tell_idle_devices(config: Config, at_hand: Mapping[str, int]) -> None:
    """Prints what `idle_devices` yields."""
    for line in idle_devices(config, at_hand):
        print(line, file=sys.stderr, flush=True)


def idle_devices(config: Config, at_hand: Mapping[str, int]) -> Iterator[str]:
    """Yields what to tell of devices that a process would leave idle.

    Args:
      config: of the run.
      at_hand: role -> devices that a launcher gives to one process; 0: it does not know how many.

    Raises:
      ConfigError: a role has fewer than it needs.
    """
    fleet = config.fleet
    assert fleet is not None
    trainer = "config.mesh" if fleet.trainers == 1 else f"config.mesh over {fleet.trainers} processes"
    engine = "config.mesh; --config.fleet.engine=on makes engines smaller" if fleet.engine is None else "fleet.engine"
    of_engine = local.of_engine(config).mesh.devices
    for role, field, needed in (
        ("trainer", trainer, config.mesh.devices // fleet.trainers),
        ("engine", engine, of_engine),
    ):
        here = at_hand.get(role, 0)
        if 0 < here < needed:
            raise ConfigError(f"Each {role} process needs {needed} devices ({field}), and would have {here}.")
        if here > needed:
            yield f"Each {role} process uses {needed} of its {here} devices: {here - needed} stay idle ({field})."


def shown(command: Sequence[str]) -> str:
    """A command as a shell would take it."""
    return shlex.join(command)
