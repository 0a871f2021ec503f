"""One process of a run of many: the coordinator, a trainer, or an engine. See docs/asynchronous_operating.md.

    python -m jaxagent.join --role=coordinator --config=search_r1 --config.fleet=on --listen=0.0.0.0:8200
    python -m jaxagent.join --role=trainer --config=search_r1 --config.fleet=on --coordinator=http://HOST:8200
    python -m jaxagent.join --role=engine --config=search_r1 --config.fleet=on --coordinator=http://HOST:8200 --name=e7

`python -m jaxagent.main --config=search_r1 --config.fleet=on` starts all of them on one machine. All get the same
config file and the same `--config` flags. The environment variable JAXAGENT_FLEET_TOKEN is the secret that they share.
Exit codes as those of jaxagent.main, 75 also for a port that is taken and a file that is not there, and 70 after an
error that nobody expected.
"""

from __future__ import annotations

import argparse
import errno
import functools
import logging
import os
import pathlib
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from jaxagent.config import Config, ConfigError, flags
from jaxagent.config.command import Parser, amount, count, exit_code, path_error, quiet_libraries
from jaxagent.config.errors import EXIT_CODES, WaitedInVainError, ending_signals, is_full_disk
from jaxagent.fleet import local, server, settings
from jaxagent.fleet.child import STACKS, VITALS
from jaxagent.fleet.client import Client, ReplacedError
from jaxagent.fleet.restarts import CRASHED
from jaxagent.fleet.settings import plan_of
from jaxagent.fleet.vitals import Vitals, register_stacks
from jaxagent.fleet.worker import EngineWorker
from jaxagent.runs import devices
from jaxagent.types import Group

ROLES = ("coordinator", "trainer", "engine")
GRACE_S = 5.0  # for what an engine plays when it is told to end
SILENT_S = 30.0  # a coordinator's loop looks around once a second


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    if path := os.environ.get(STACKS):
        register_stacks(pathlib.Path(path))
    try:
        return exit_code(lambda: _unless_for_now(argv))
    except Exception:
        traceback.print_exc()
        return CRASHED


def _unless_for_now(argv: Sequence[str]) -> None:
    """A taken port, or a file that is not there, may be right again in a moment: no mistake of the user's."""
    try:
        _run(argv)
    except ConfigError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        raise WaitedInVainError(str(error)) from error
    except OSError as error:
        if is_full_disk(error) or (line := path_error(error)) is None:
            raise
        raise WaitedInVainError(line) from error


def _run(argv: Sequence[str]) -> None:
    options, rest = _parser().parse_known_args(argv[1:])
    cfg = flags.parse_argv([argv[0], *rest]).config
    fleet = settings.of(cfg)
    signs = Vitals(pathlib.Path(os.environ[VITALS]) if VITALS in os.environ else None)
    signs.phase(local.OPENING, fleet.start_s)
    token = os.environ.get(settings.TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{settings.TOKEN_VARIABLE} is not set: all processes of a run share a secret.")
    if options.role == "coordinator":
        _coordinate(cfg, options, token, signs)
        return
    if not (url := options.coordinator or fleet.coordinator):
        raise ConfigError("Say where the coordinator listens: --coordinator=http://HOST:PORT.")
    # Late imports: what they name loads jax, which the coordinator does without.
    quiet_libraries()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    address = pathlib.Path(cfg.workdir) / settings.FOLDER / server.ADDRESS
    link = Client(url, token, fleet.patience_s, address)
    try:
        (_train if options.role == "trainer" else _play)(cfg, options, link, token, signs)
    except ReplacedError as error:
        raise SystemExit(f"error: {error}") from error


def _coordinate(cfg: Config, options: argparse.Namespace, token: str, signs: Vitals) -> None:
    listen = options.listen or settings.of(cfg).listen
    folder = pathlib.Path(cfg.workdir) / settings.FOLDER
    exact = cfg.numerics == "exact"
    signs.phase("reads its ledger", settings.of(cfg).start_s)
    serves = False

    def alive() -> None:
        nonlocal serves
        if serves:
            signs.tick()
        else:
            serves = True
            signs.phase("serves", SILENT_S, done=1)

    try:
        server.run(folder, plan_of(cfg), token, listen, settings.digest_of(cfg), exact, _judge(cfg), alive)
    except server.CoordinatorError as error:
        if isinstance(error.__cause__, OSError):  # its disk: the ledger may be there again in a moment
            raise WaitedInVainError(str(error)) from error
        raise SystemExit(f"error: {error}") from error


def _judge(cfg: Config) -> server.Judge | None:
    """Whether a group is learnt from, with dynamic sampling."""
    if cfg.rl.refill is None:
        return None
    from jaxagent.algorithms.streams import shaped  # what selects groups loads jax, and needs no device
    from jaxagent.rollout.groups import signal

    return lambda episodes: bool(signal([shaped(Group(episodes[0].task, episodes), cfg.rl)])[0])


def _train(cfg: Config, options: argparse.Namespace, link: Client, token: str, signs: Vitals) -> None:
    from jaxagent import loop
    from jaxagent.plan import memory
    from jaxagent.runs.fleet.trainer import Trainer

    with devices.distributed(options.rank, options.processes, options.meet):
        config = devices.provide_for(cfg)
        # The fleet's processes know each other by the config that they were given.
        with Trainer(cfg, link, token, options.name or "trainer", options.host, signs) as trainer:
            loop.run(memory.for_devices(config), trainer.connect, trainer.alive)


def _play(cfg: Config, options: argparse.Namespace, link: Client, token: str, signs: Vitals) -> None:
    name = options.name or f"engine-{socket.gethostname()}-{os.getpid()}"
    with local.errors_of_engine(cfg):
        own = devices.provide_for(local.of_engine(cfg))
    from jaxagent.runs import checks
    from jaxagent.runs.fleet import player
    from jaxagent.runs.fleet.trainer import facts

    checks.check(cfg.for_platform(devices.available()[0].platform))
    devices.keep_compiled_programs()
    signals: list[int] = []

    def listen(worker: EngineWorker) -> None:
        for signum in ending_signals():
            signal.signal(signum, lambda number, frame: _told_to_end(worker, number, signals))

    with local.errors_of_engine(cfg):
        own_facts = functools.partial(facts, cfg, name, options.host)
        player.run(own, link, token, name, options.host, own_facts, signs, listen)
    if signals:
        raise SystemExit(EXIT_CODES[signal.Signals(signals[0])])


def _told_to_end(worker: EngineWorker, number: int, signals_so_far: list[int]) -> None:
    """A signal: it winds up; at once where it has not joined yet, since then it waits for a coordinator alone."""
    signals_so_far.append(number)
    if not worker.joined:
        raise SystemExit(EXIT_CODES[signal.Signals(number)])
    worker.end("a signal", GRACE_S)


def _parser() -> Parser:
    parser = Parser("jaxagent.join", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", required=True, choices=ROLES, help="what this process does")
    parser.add_argument("--coordinator", default="", help="http://HOST:PORT of the coordinator; for the other roles")
    parser.add_argument("--listen", default="", help="HOST:PORT of a coordinator; default: config.fleet.listen")
    parser.add_argument("--name", default="", help="of the process, in logs and messages; an engine's own folder, too")
    parser.add_argument("--host", default="127.0.0.1", help="by which other machines reach this process")
    parser.add_argument("--meet", default="", help="HOST:PORT where several trainer processes meet")
    parser.add_argument("--rank", type=amount, default=0, help="of a trainer process")
    parser.add_argument("--processes", type=count, default=1, help="trainer processes that meet")
    return parser


if __name__ == "__main__":
    devices.use_huge_pages()
    sys.exit(main())
