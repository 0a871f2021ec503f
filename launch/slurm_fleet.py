"""A run of many processes in a Slurm job: one coordinator, a gang of trainers, engines that come back when they fail.

    sbatch --nodes=4 launch/slurm_fleet.sh --config=configs/search_r1.py:qwen2.5-3b --config.workdir=/shared/runs/a
    sbatch --nodes=1 --gres=gpu:8 : --nodes=6 --gres=gpu:4 launch/slurm_fleet.sh ...    # a heterogeneous job
    bash launch/slurm_fleet.sh --print --config=... --config.workdir=DIR                # what it would start; no Slurm

The first TRAINERS nodes train (of a heterogeneous job: all nodes of its first part), every other node plays; nodes are
whole. The coordinator runs on the first node. The workdir must be a folder that all nodes see, and so must the folder
in which the job is submitted. Logs are in fleet/logs of the workdir.

Settings are environment variables (sbatch hands them on):
  TRAINERS=1           nodes that train, one process on each; also --config.fleet.trainers
  ENGINES_PER_NODE=1   engine processes per other node
  TRAINER_SRUN=""      more options of srun for the trainers, for example --gpus-per-task=8
  ENGINE_SRUN=""       the same for the engines
  PORT=8500            where the coordinator listens; JAX's own coordination uses PORT+1 and up to 100 more
  RESTARTS=100         of each process; then the job ends
  GRACE_S=120          for the trainer to save after SIGTERM: less than the seconds of --signal
  PYTHON=python        the interpreter, and JOIN="$PYTHON -m jaxagent.join" what it starts

Before the time limit, or at `scancel --signal=TERM --batch JOB`, the trainer saves, and the job goes back into the
queue; the run goes on when it starts again. So it does after a preemption (--requeue). A job that is cancelled ends.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from jaxagent.config import Config, ConfigError
from jaxagent.config.command import exit_code
from jaxagent.config.errors import EXIT_CODES, WAITED, WaitedInVainError
from jaxagent.fleet import local, settings, vitals
from jaxagent.fleet.child import LOGS, Program
from jaxagent.fleet.supervise import Gang, Supervisor
from jaxagent.launch import processes

PLACES = {"TRAINERS": "1", "ENGINES_PER_NODE": "1", "PORT": "8500", "RESTARTS": "100", "GRACE_S": "120"}
SCONTROL_S = 60.0  # for one answer of Slurm
FIRST = "trainer-0"  # whose signs of life this batch step reads, too
SRUN = ("srun", "--cpu-bind=none")
NODE, RANK = "$SLURMD_NODENAME", "$SLURM_PROCID"  # a shell on the node knows them
_VARIABLE = re.compile(r"(\$SLURM\w+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the trainer, 2 for a user's mistake."""
    return exit_code(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(words: list[str]) -> int:
    if {"--help", "-h"}.intersection(words):
        print(__doc__)
        return 0
    only_show = "--print" in words
    words = [word for word in words if word != "--print"]
    for word in words:
        if not word.startswith(("--config=", "--config.")) or "=" not in word:
            raise ConfigError(f"Unknown flag '{word}'. Valid: --config=FILE, --config.FIELD=VALUE, --print, --help.")
    config = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    if not config:
        raise ConfigError("--config=FILE is missing.")
    if not any(word.startswith("--config.workdir=") for word in words):
        raise ConfigError("--config.workdir=DIR is missing: a folder that all nodes see.")
    here = {**PLACES, **os.environ}
    for name in PLACES:
        least = int(name in ("TRAINERS", "ENGINES_PER_NODE", "PORT"))
        if not here[name].isdecimal() or int(here[name]) < least:
            raise ConfigError(f"{name} must be a whole number from {least}, got '{here[name]}'.")
    own = [word for word in words if word.startswith("--config.fleet.trainers=")]
    if own and own[-1].partition("=")[2] != here["TRAINERS"]:
        raise ConfigError(f"{own[-1]} and TRAINERS={here['TRAINERS']} (environment) differ: a job has the latter.")
    trainers, engines = nodes(here, only_show)
    overrides = [word for word in words if not word.startswith("--config=")]
    overrides = ["--config.fleet=on", *overrides, f"--config.fleet.trainers={len(trainers)}"]
    join = here.get("JOIN") or f"{here.get('PYTHON', 'python')} -m jaxagent.join"
    run, cfg = processes.read(config[0], overrides, None, join)
    gpus = int(here.get("SLURM_GPUS_ON_NODE") or 0)  # of the first node, and in a job of one part of every node
    of_engine = 0 if "SLURM_HET_SIZE" in here else gpus // max(1, int(here["ENGINES_PER_NODE"]))
    processes.tell_idle_devices(cfg, {"trainer": gpus, "engine": of_engine})
    job = Job(run, cfg, trainers, engines, here)
    return job.show() if only_show else job.run()


def nodes(here: Mapping[str, str], only_show: bool) -> tuple[list[str], list[str]]:
    """Those that train, and those that play.

    Raises:
      ConfigError: this is no Slurm job, or has too few nodes, or more than two parts.
    """
    if (parts := here.get("SLURM_HET_SIZE", "")) not in ("", "2"):
        raise ConfigError(f"A heterogeneous job must have two parts, trainers and engines; this one has {parts}.")
    if parts:
        return _hosts(here["SLURM_JOB_NODELIST_HET_GROUP_0"]), _hosts(here["SLURM_JOB_NODELIST_HET_GROUP_1"])
    count = int(here["TRAINERS"])
    if "SLURM_JOB_NODELIST" in here:
        every = _hosts(here["SLURM_JOB_NODELIST"])
    elif only_show:
        every = [f"NODE{i}" for i in range(count + 1)]
    else:
        raise ConfigError("This is not a Slurm job: start it with sbatch, or add --print.")
    if not 0 < count < len(every):
        raise ConfigError(f"{len(every)} nodes for TRAINERS={count} leave none for engines: ask sbatch for more.")
    return every[:count], every[count:]


def _of_engines(srun: int) -> int:
    """What ends an srun of engines, other than their own decision, is a node that may come back."""
    return srun if srun in (0, 2) else WAITED


def _hosts(nodelist: str) -> list[str]:
    return _scontrol("show", "hostnames", nodelist).split()


def _scontrol(*words: str) -> str:
    """What scontrol answers. Raises WaitedInVainError: it fails, or says nothing in time."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, encoding="utf-8", timeout=SCONTROL_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as failure:
        answer = (getattr(failure, "stderr", "") or "").strip()
        raise WaitedInVainError(f"scontrol {' '.join(words)}: {answer or failure}") from failure
    return done.stdout


class Job:
    """The processes of a job, as programs of this batch step."""

    def __init__(
        self, run: processes.Run, cfg: Config, trainers: list[str], engines: list[str], here: Mapping[str, str]
    ):
        self._run, self._cfg, self._trainers, self._engines, self._here = run, cfg, trainers, engines, here
        self._folder = pathlib.Path(cfg.workdir).absolute() / settings.FOLDER
        self._ends = self._folder / "ends"  # exit codes of trainers: srun tells the highest of those that it killed
        self._port, self._sign = int(here["PORT"]), self._folder / vitals.FOLDER / f"{FIRST}.json"
        self._url = f"http://{trainers[0]}:{self._port}"

    def run(self) -> int:
        """Returns the exit code, when nothing of the job is left."""
        self._ends.mkdir(parents=True, exist_ok=True)
        token = {settings.TOKEN_VARIABLE: local.token_of(self._folder)}
        local.announce(self._url, self._folder)
        gangs = [
            Gang("coordinator", self.coordinator, needed=True),
            Gang("trainers", self.trainers, leads=True, code=self.code),
            *(
                Gang(f"engines-{k}", lambda _, k=k: self.engines(k), ready=self.opened, code=_of_engines)
                for k in range(len(self._engines))
            ),
        ]
        restarts, grace_s = int(self._here["RESTARTS"]), float(self._here["GRACE_S"])
        start_s = settings.of(self._cfg).start_s
        supervisor = Supervisor(gangs, self._folder, token, restarts, start_s, grace_s=grace_s + 10)
        code = supervisor.run()
        if supervisor.asked and code:
            job = self._here.get("SLURM_JOB_ID", "")
            print(f"saved; Slurm is asked to put job {job} back into the queue", file=sys.stderr, flush=True)
            _scontrol("requeue", job)
        return code

    def show(self) -> int:
        """Prints what would be started."""
        print(f"# on {self._trainers[0]}, with {settings.TOKEN_VARIABLE} from {self._folder / settings.TOKEN_FILE}")
        programs = [*self.coordinator(0), *self.trainers(0)]
        programs += [program for k in range(len(self._engines)) for program in self.engines(k)]
        for program in programs:
            print(processes.shown(program.command))
        return 0

    def coordinator(self, start: int) -> list[Program]:
        """In this batch step."""
        return [Program("coordinator", self._run.coordinator(f"0.0.0.0:{self._port}"))]

    def trainers(self, start: int) -> list[Program]:
        """One srun for the gang; at every start with another port for JAX's own coordination."""
        count, port = len(self._trainers), self._port + 1 + start % processes.OURS
        for path in [self._sign, *self._ends.glob("*")]:
            path.unlink(missing_ok=True)
        said = f"--said={self._ends}/{RANK}"
        command = self._run.trainer(self._url, NODE, RANK, count, f"{self._trainers[0]}:{port}")
        where = [
            f"--nodes={count}",
            f"--ntasks={count}",
            f"--nodelist={','.join(self._trainers)}",
            "--kill-on-bad-exit=1",
        ]
        return [self._srun(FIRST, 0, where, f"trainer-{RANK}", 0, command, said)]

    def engines(self, k: int) -> list[Program]:
        """One srun for a node's engines."""
        name, count = f"engine-{NODE}-{RANK}", self._here["ENGINES_PER_NODE"]
        where = [
            "--nodes=1",
            f"--ntasks={count}",
            f"--nodelist={self._engines[k]}",
            "--kill-on-bad-exit=0",
            "--no-kill",
        ]
        command = self._run.engine(self._url, NODE, name)
        return [self._srun(f"engines-{self._engines[k]}", 1, where, name, int(self._here["RESTARTS"]), command)]

    def opened(self) -> bool:
        """Whether the first trainer has made what engines open."""
        sign = vitals.read(self._sign)
        return sign is not None and sign.phase != local.OPENING

    def code(self, srun: int) -> int:
        """What an srun's exit code means: what a trainer has said, or that it was killed with its node."""
        said = set()
        for path in self._ends.glob("*"):
            with contextlib.suppress(OSError, ValueError):
                said.add(int(path.read_text(encoding="utf-8")))
        own = [code for code in (2, 1, *sorted(said - {0, 137, *EXIT_CODES.values()})) if code in said]
        return own[0] if own else srun if srun in EXIT_CODES.values() else WAITED

    def _srun(
        self, name: str, part: int, where: list[str], task: str, restarts: int, command: Sequence[str], *more: str
    ) -> Program:
        """A program that keeps one process alive on each of its nodes (launch/keep.py)."""
        python, options = self._here.get("PYTHON", "python"), self._here.get(f"{('TRAINER', 'ENGINE')[part]}_SRUN", "")
        keep = [*shlex.split(python), "-m", "jaxagent.launch.keep", f"--name={task}", f"--folder={self._folder}", *more]
        keep += [f"--restarts={restarts}", f"--grace_s={self._here['GRACE_S']}"]
        keep += [f"--start_s={settings.of(self._cfg).start_s}", "--", *command]
        group = [f"--het-group={part}"] if "SLURM_HET_SIZE" in self._here else []
        shell = " ".join(
            "".join(
                f'"{part}"' if part in (NODE, RANK) else shlex.quote(part) for part in _VARIABLE.split(word) if part
            )
            for word in keep
        )
        words = [*SRUN, *group, *where, *shlex.split(options), "bash", "-c", f"exec {shell}"]
        log = self._folder / LOGS / f"{'trainers' if part == 0 else name}.log"
        return Program(name, tuple(words), on_console=part == 0, watched=False, log=log)


if __name__ == "__main__":
    sys.exit(main())
