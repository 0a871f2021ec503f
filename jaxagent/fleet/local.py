"""One command, many processes of this machine: `--config.fleet=on`. Starts them, and shows the trainer's console."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence

from jaxagent.config import Config, ConfigError
from jaxagent.config.command import bound_socket
from jaxagent.fleet import restarts, server, settings, vitals
from jaxagent.fleet.child import LOGS, Program
from jaxagent.fleet.client import Client, url_in
from jaxagent.fleet.settings import plan_of
from jaxagent.fleet.status import played_again
from jaxagent.fleet.supervise import Gang, Supervisor
from jaxagent.io import files

ADDRESS_FILE = "address.json"  # where the coordinator listens
LOCK_FILE = ".lock"
SUMMARY_FILE = "summary.json"  # of the workdir
LOCAL = "127.0.0.1"
ASK_S = 1.0  # for one answer of the coordinator: whoever watches must not wait


def run(cfg: Config, argv: Sequence[str], module: str = "jaxagent.join") -> int:
    """Runs the whole command; returns its exit code.

    Args:
      argv: its command line, which every process gets.
      module: the program that every process runs.

    Raises:
      ConfigError: the settings exclude each other, or another command runs in the workdir.
    """
    fleet = settings.of(cfg)
    plan_of(cfg)
    folder = pathlib.Path(cfg.workdir) / settings.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_FILE, "ab") as lock:
        files.lock(lock.fileno(), folder)  # raises ConfigError: another command supervises here
        for note in [*settings.notes(cfg), *sharing(cfg, gpus())]:
            print(note, flush=True)
        programs = _LocalPrograms(cfg, argv, folder, module)
        coordinator = [] if fleet.coordinator else [Gang("coordinator", programs.coordinator, needed=True)]
        trainer = Gang("trainer", programs.trainers, leads=True, ready=lambda: bool(programs.url()))
        engines = [
            Gang(f"engine-{i}", lambda start, i=i: [programs.engine(i)], ready=programs.trainer_has_opened)
            for i in range(fleet.engines)
        ]
        token = {settings.TOKEN_VARIABLE: token_of(folder)}
        supervisor = Supervisor(
            [*coordinator, trainer, *engines], folder, token, fleet.restarts, fleet.start_s, programs.report_end
        )
        code = supervisor.run()
    if code == 0:
        _add_to_summary(pathlib.Path(cfg.workdir) / SUMMARY_FILE, folder)
    return code


class _LocalPrograms:
    """The processes of this machine, as programs."""

    def __init__(self, cfg: Config, argv: Sequence[str], folder: pathlib.Path, module: str):
        self._fleet, self._folder, self._module = settings.of(cfg), folder, module
        self._argv = tuple(argv[1:])
        self._address = folder / ADDRESS_FILE
        self._url = ""
        self._devices = devices_of(cfg, gpus())
        if not self._fleet.coordinator:
            self._address.unlink(missing_ok=True)  # of an earlier one

    def url(self) -> str:
        """Where the coordinator listens, or did before it died; "" while there was none."""
        if self._fleet.coordinator:
            return self._fleet.coordinator
        self._url = url_in(self._address) or self._url
        return self._url

    def coordinator(self, start: int) -> list[Program]:
        """One that is started again listens where the first one did, unless somebody else has that port now."""
        listen, (host, port) = self._fleet.listen, server.address_of(self._fleet.listen)
        if (url := self.url()) and not port:
            with contextlib.suppress(ConfigError), bound_socket(host, before := int(url.rpartition(":")[2])):
                listen = f"{listen.rpartition(':')[0]}:{before}"
        return [self._program("coordinator", "coordinator", f"--listen={listen}")]

    def trainers(self, start: int) -> list[Program]:
        """All of the gang, which meet at a port of their own."""
        if not start:
            announce(self.url(), self._folder)
        count = self._fleet.trainers
        if count == 1:
            return [self._program("trainer", "trainer", on_console=True)]
        gang = (f"--processes={count}", f"--meet={LOCAL}:{_free_port()}")
        return [self._program("trainer", f"trainer-{i}", *gang, f"--rank={i}", on_console=i == 0) for i in range(count)]

    def engine(self, number: int) -> Program:
        """One engine."""
        return self._program("engine", f"engine-{number}")

    def trainer_has_opened(self) -> bool:
        """Whether the trainer has made what engines open: data and tokenizer lie in the workdir."""
        names = ["trainer"] if self._fleet.trainers == 1 else ["trainer-0"]
        signs = [vitals.read(self._folder / vitals.FOLDER / f"{name}.json") for name in names]
        return bool(self.url()) and all(sign is not None and sign.phase != OPENING for sign in signs)

    def report_end(self, name: str) -> None:
        """The coordinator gives an engine's episodes to others at once, and not when its lease runs out."""
        if not name.startswith("engine") or not self.url():
            return
        link = Client(self.url(), token_of(self._folder), ASK_S)
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):  # it is away: then the lease runs out
            for member, row in link.ask("GET", "/v1/status", None, ASK_S)["members"]["engine"].items():
                if (row["process"], row["host"]) == (name, LOCAL):
                    link.ask("POST", "/v1/leave", {"name": member}, ASK_S)

    def _program(self, role: str, name: str, *more: str, on_console: bool = False) -> Program:
        where = [] if role == "coordinator" else [f"--coordinator={self.url()}"]
        own = (f"--role={role}", f"--name={name}", *where, *more)
        command = (sys.executable, "-m", self._module, *own, *self._argv)
        return Program(name, command, on_console, self._devices.get(name, {}))


OPENING = "opens data and model"  # the trainer's first phase: until then engines have nothing to open


def announce(url: str, folder: pathlib.Path) -> None:
    """Says where the coordinator listens and what is written where, how to look at the run, and how to join it."""
    token = f"$(cat {folder / settings.TOKEN_FILE})"
    lines = [
        f"the coordinator listens on {url}; each process's output is in {folder / LOGS}",
        f'its status: curl -H "Authorization: Bearer {token}" {url}/v1/status',
        f"one more engine: {settings.TOKEN_VARIABLE}={token} python -m jaxagent.join --role=engine --coordinator={url} "
        "with the --config flags of this command",
    ]
    print("".join(f"fleet: {line}\n" for line in lines), end="", file=sys.stderr, flush=True)


def gpus() -> list[str]:
    """The GPUs of this machine that a process may see, by the names that CUDA_VISIBLE_DEVICES takes."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    return [str(i) for i in range(len(list(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))))]


def needs(cfg: Config) -> dict[str, int]:
    """The processes that have devices, and how many each of them needs."""
    fleet, own = settings.of(cfg), of_engine(cfg).mesh.devices
    names = ["trainer"] if fleet.trainers == 1 else [f"trainer-{i}" for i in range(fleet.trainers)]
    return dict.fromkeys(names, cfg.mesh.devices // fleet.trainers) | {f"engine-{i}": own for i in range(fleet.engines)}


def devices_of(cfg: Config, gpu_names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The environment by which each process has GPUs of its own: as many as it needs, the trainer's first.

    Where there are too few they share what there is, and its memory.
    """
    devices = needs(cfg)
    if not gpu_names:
        return {}
    if sum(devices.values()) > len(gpu_names):
        share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / len(devices):.3f}"}
        return {} if "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ else dict.fromkeys(devices, share)
    environments, start = {}, 0
    for name, count in devices.items():
        environments[name] = {"CUDA_VISIBLE_DEVICES": ",".join(gpu_names[start : start + count])}
        start += count
    return environments


def of_engine(cfg: Config) -> Config:
    """The config as an engine process takes it: with the mesh, slots and pages of config.fleet.engine."""
    if (own := settings.of(cfg).engine) is None:
        return cfg
    engine = dataclasses.replace(cfg.engine, slots=own.slots or cfg.engine.slots, pages=own.pages or cfg.engine.pages)
    sizes = {axis: getattr(own, axis) for axis in ("data", "fsdp", "expert", "tensor")}
    mesh = dataclasses.replace(cfg.mesh, context=1, **sizes)
    return dataclasses.replace(cfg, engine=engine, mesh=mesh)


@contextlib.contextmanager
def errors_of_engine(cfg: Config) -> Iterator[None]:
    """Has an error about the mesh of an engine process name the section that sets it.

    Raises:
      ConfigError: as inside, with config.fleet.engine in the place of config.mesh where engines have their own.
    """
    try:
        yield
    except ConfigError as error:
        if settings.of(cfg).engine is None:
            raise
        raise ConfigError(re.sub(r"\b(config\.)?mesh\b", "config.fleet.engine", str(error))) from error


def sharing(cfg: Config, gpu_names: Sequence[str]) -> Iterator[str]:
    """Yields what to tell where processes share GPUs, or leave some idle."""
    devices = needs(cfg)
    total = sum(devices.values())
    if gpu_names and (idle := len(gpu_names) - total):
        counts = ", ".join(f"{name} {count}" for name, count in devices.items())
        how = f"{idle} stay idle" if idle > 0 else "they share them, and their memory"
        yield f"this machine has {len(gpu_names)} GPUs, and its processes want {total} ({counts}): {how}."


def token_of(folder: pathlib.Path) -> str:
    """The run's secret: from the environment, or made once and kept in the folder, for its owner's eyes only.

    Raises:
      ConfigError: its file is empty, as a full disk leaves it.
    """
    if own_token := os.environ.get(settings.TOKEN_VARIABLE):
        return own_token
    path = folder / settings.TOKEN_FILE
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
    if not (token := path.read_text(encoding="utf-8").strip()):
        raise ConfigError(f"'{path}' is empty: remove it, and the command makes another secret.")
    return token


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return probe.getsockname()[1]


def _add_to_summary(path: pathlib.Path, folder: pathlib.Path) -> None:
    """What was started again, and why, beside what the trainer has written."""
    with contextlib.suppress(FileNotFoundError):
        fleet_row = restarts.summary(folder)
        if (again := played_again(folder)) is not None:
            fleet_row["damaged_episodes"] = again
        summary = json.loads(path.read_text(encoding="utf-8")) | {"fleet": fleet_row}
        files.replace_json(path, summary)
