"""Kills every process of a real run again and again, a worker of remote sandboxes among them, and compares the end.

    python -m benchmarks.real_soak --workdir=DIR              # 100 kill -9; goes on where an earlier one ended
    python -m benchmarks.real_soak --kills=6 --steps=4        # a look

A tiny terminal recipe (exact numerics, `pinned`, staleness 1) learns with the real trainer, two engines and a
coordinator, as `--config.fleet=on` starts them. Every attempt has a real sandbox of a worker (jaxagent.sandbox.worker)
that is killed and started again, too. Runs of a few steps follow each other until all kills are made. Each is compared
with one process that nobody disturbed: the weights before and after every step, the digest of every episode that a step
was made of, the exported policy's bytes, all metrics but times. Of the last run a certificate is made
(`jaxagent.replay --verify=3`). The last line is JSON. Exit code 1: something was lost, doubled or came out differently.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from jaxagent.fleet import restarts, settings, vitals
from jaxagent.fleet.child import LOGS
from jaxagent.observe import jsonl
from tests import tiny_run

KILLS = "kills.jsonl"  # of the soak: one line per kill, by which it goes on
STEPS, A_RUN = 12, 50  # steps of a run, and its kills at most
SHARES = {"trainer": 5, "coordinator": 5, "engine-0": 3, "engine-1": 3, "worker": 5, "launcher": 2}
PAUSE_S = 3.0  # before a kill, at most
DUE_S = 40.0  # without a further step for so long, the next kill comes all the same
READY_S = 120.0  # for a victim to be there
AT_WORK, BEGINS_S = 0.7, 40.0  # this part of the victims is waited for until they work, for so long at most
BEGINNINGS = ("starts", "begins", "opens data and model", "is joining", "reads its ledger")
PLAYS_S = 10.0  # for sandboxes to be in use before their worker is killed
RUN_S = 1800.0  # for the rest of a run after its last kill
WARM = 1  # sandboxes that each process keeps started
LOOK_S = 0.05
APART = ("time/", "engine/", "fleet/", "tokens_per_s", "episode/cached_tokens")  # by the clock, or by who played
FLAGS = [flag for flag in tiny_run.TERMINAL_FLAGS.split() if "numerics" not in flag] + [
    # Enough of a warm start for commands that work, and rewards that differ.
    "--config.model.embed_dim=64", "--config.model.mlp_dim=128", "--config.data.source.num_demonstrations=400",
    "--config.data.num_eval=2", "--config.warm_start.max_steps=500", "--config.warm_start.gate_every=1000",
    "--config.warm_start.batch_sequences=16", "--config.warm_start.batch.row_tokens=192",
    "--config.env.max_turns=3", "--config.env.turn_tokens=16", "--config.env.observation_tokens=24",
    "--config.env.context_tokens=192", "--config.rl.batch.row_tokens=192", "--config.eval.every=0",
    "--config.rl.staleness=1", "--config.rl.entropy_coefficient=0.02", "--config.rl.optimizer.warmup_steps=0",
    "--config.checkpoint.every=2", "--config.checkpoint.replay=all", "--config.env.sandbox.backend=remote",
    f"--config.env.sandbox.warm={WARM}",
    # A busy machine is slow, and no limit in seconds may decide anything.
    "--config.env.command_timeout_s=100", "--config.env.agent_timeout_s=400", "--config.env.verifier_timeout_s=100",
    "--config.env.episode_timeout_s=600", "--config.engine.request_timeout_s=600",
]  # fmt: skip
FLEET = ["--config.fleet=on", "--config.fleet.engines=2", "--config.fleet.restarts=10000"]


def soak(
    folder: pathlib.Path, kills: int, steps: int, seed: int, seconds: float = 1e9, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Makes what is left of so many kills, for so long at most. Returns what the last line says.

    Args:
      more: flags of all runs.
    """
    ends, folder = time.monotonic() + seconds, folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with Worker(folder, more) as worker:
        expected = folder / "undisturbed"
        if not ended(expected):
            _wait(start(expected, worker, steps), expected)
        while True:
            number = max((row["run"] for row in made(folder)), default=0)
            workdir = folder / f"run-{number}"
            over = ended(workdir)
            left = kills - len(made(folder))
            if over and left <= 0:
                break
            if over:
                number, workdir = number + 1, folder / f"run-{number + 1}"
            if not Run(folder, number, worker, steps, seed).disturb(kills, ends):
                return {**kills_of(folder), "unfinished": True}
            _print_difference(workdir, expected)
        runs = [path for path in sorted(folder.glob("run-*")) if path.is_dir()]
        outcome = {**kills_of(folder), **_sums([compare(run, expected) for run in runs])}
        command = [sys.executable, "-m", "jaxagent.replay", f"--config.workdir={runs[-1]}", "--verify=3"]
        with open(folder / "certificate.log", "wb") as log:
            code = subprocess.run(
                command, cwd=tiny_run.ROOT, env=_environment(), stdout=log, stderr=log, timeout=RUN_S
            ).returncode
        outcome["certificate"] = {0: "PASSED", 1: "FAILED", 3: "INCOMPLETE"}.get(code, f"exit code {code}")
    good = outcome["as_undisturbed"] == outcome["runs"] and not outcome["lost"] and not outcome["doubled"] and code == 0
    return {**outcome, "verdict": "as undisturbed" if good else "DIFFERENT"}


def start(workdir: pathlib.Path, worker: Worker, steps: int, *more: str) -> subprocess.Popen[bytes]:
    """The command, on one device, as a user starts it; what it prints is in `workdir`.log."""
    flags = [*FLAGS, *worker.flags, f"--config.rl.steps={steps}", *more]
    argv = tiny_run.argv(workdir, *flags, preset="laptop+grpo", config="endless_terminals")
    with open(f"{workdir}.log", "ab") as log:
        command = [sys.executable, "-m", "jaxagent.main", *argv[1:]]
        return subprocess.Popen(
            command, cwd=tiny_run.ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


class Worker:
    """The worker of sandboxes, which somebody starts again when it has died: here."""

    def __init__(self, folder: pathlib.Path, more: Sequence[str] = ()):
        self._folder, self._token = folder, folder / "token"
        if not self._token.exists():
            self._token.write_text(secrets.token_hex(16), encoding="utf-8")
            with socket.socket() as probe:  # the port stays that of the runs' config
                probe.bind(("127.0.0.1", 0))
                (folder / "port").write_text(str(probe.getsockname()[1]), encoding="utf-8")
        self.url = f"http://127.0.0.1:{(folder / 'port').read_text(encoding='utf-8')}"
        own = {"workers": self.url, "token_file": self._token}
        self.flags = [*more, *(f"--config.env.sandbox.{name}={value}" for name, value in own.items())]  # of all runs
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        self.start()
        _until(lambda: self.running() is not None, READY_S, "the worker of sandboxes answers")
        return self

    def __exit__(self, *failure: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

    def start(self) -> None:
        """Starts it; it answers soon."""
        command = [sys.executable, "-m", "jaxagent.sandbox.worker", f"--token_file={self._token}"]
        with open(self._folder / "worker.log", "ab") as log:
            # Few places: those of killed processes are taken until their lease is over.
            command += [f"--port={self.url.rpartition(':')[2]}", "--lease_s=20", "--max_sandboxes=20"]
            self._process = subprocess.Popen(command, cwd=tiny_run.ROOT, env=_environment(), stdout=log, stderr=log)

    def kill(self) -> None:
        """As a dead host: every sandbox is gone with it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def running(self) -> int | None:
        """Sandboxes that it has; None: it does not answer."""
        headers = {"Authorization": f"Bearer {self._token.read_text(encoding='utf-8')}", "X-Jaxagent-Client": "soak"}
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(
                urllib.request.Request(f"{self.url}/health", headers=headers), timeout=2.0
            ) as answer,
        ):
            return json.load(answer)["running"]
        return None


class Run:
    """One run, which is killed at its first steps as at its last."""

    def __init__(self, folder: pathlib.Path, number: int, worker: Worker, steps: int, seed: int):
        self._folder, self._number, self._worker, self._steps, self._seed = folder, number, worker, steps, seed
        self._workdir = folder / f"run-{number}"
        self._fleet = self._workdir / settings.FOLDER
        self._command = start(self._workdir, worker, steps, *FLEET)
        self._dead: set[int] = set()

    def disturb(self, kills: int, ends: float) -> bool:
        """Kills until this run's part is made, and waits for its end. False: the time was over before, or it ended."""
        try:
            while not ended(self._workdir):
                own = [row for row in made(self._folder) if row["run"] == self._number]
                if len(made(self._folder)) >= kills or len(own) >= A_RUN or self._steps_done() >= self._steps:
                    _wait(self._command, self._workdir)
                    break
                if not self._kill_when_due(len(own) / A_RUN * (self._steps - 1), len(made(self._folder)), ends):
                    return False
            _wait(self._command, self._workdir)
            return True
        finally:
            if self._command.poll() is None:
                self._command.kill()
                self._command.wait()

    def _kill_when_due(self, steps: float, number: int, ends: float) -> bool:
        chance = random.Random(f"{self._seed}/{number}")
        until = time.monotonic() + DUE_S
        while not self._published() or (self._steps_done() < steps and time.monotonic() < until):
            if time.monotonic() > ends:
                return False
            if self._command.poll() is not None:
                return True
            until = until if self._published() else time.monotonic() + DUE_S
            time.sleep(LOOK_S)
        time.sleep(PAUSE_S * chance.random())
        self._kill(self.victim(chance), chance)
        return True

    def victim(self, chance: random.Random) -> str:
        """Whom to kill next."""
        return chance.choices(list(SHARES), list(SHARES.values()))[0]

    def _kill(self, name: str, chance: random.Random) -> None:
        row: dict[str, Any] = {"run": self._number, "role": name.partition("-")[0], "steps": self._steps_done()}
        if name == "worker":
            busy = 3 * WARM  # the trainer and the engines keep so many; one more is in use
            with contextlib.suppress(TimeoutError):
                _until(lambda: (self._worker.running() or 0) > busy or self._over(), PLAYS_S, "sandboxes are in use")
            row["sandboxes"] = self._worker.running()
            self._worker.kill()
            time.sleep(2 * chance.random())  # its host's supervisor
            self._worker.start()
        elif name == "launcher":
            pids = [pid for one in ("trainer", "coordinator", "engine-0", "engine-1") if (pid := self._pid(one))]
            self._command.kill()
            self._command.wait()
            _until(lambda: not any(map(_alive, pids)), 30.0, "a killed launcher's processes are gone")
            self._command = start(self._workdir, self._worker, self._steps, *FLEET)
        else:
            _until(lambda: self._pid(name) is not None or self._over(), READY_S, f"{name} is there")
            if chance.random() < AT_WORK:
                with contextlib.suppress(TimeoutError):
                    _until(lambda: self._phase(name) not in BEGINNINGS or self._over(), BEGINS_S, f"{name} works")
            if (pid := self._pid(name)) is None:
                return
            row["phase"] = self._phase(name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._dead.add(pid)
        with open(self._folder / KILLS, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{len(made(self._folder))}: {row}", flush=True)

    def _over(self) -> bool:
        return self._command.poll() is not None

    def _published(self) -> bool:
        return any((self._fleet / settings.WEIGHTS).glob("*/manifest*"))

    def _steps_done(self) -> int:
        return len(list((self._workdir / "record" / "rl").glob("*.step")))

    def _phase(self, name: str) -> str:
        """Where a process is; that it starts, where it has not said so."""
        with contextlib.suppress(ValueError, OSError):
            sign = vitals.read(self._fleet / vitals.FOLDER / f"{name}.json")
            return "starts" if sign is None or sign.pid in self._dead else sign.phase
        return "starts"

    def _pid(self, name: str) -> int | None:
        with contextlib.suppress(ValueError, OSError):
            sign = vitals.read(self._fleet / vitals.FOLDER / f"{name}.json")
            if sign is not None and sign.pid not in self._dead and _alive(sign.pid):
                return sign.pid
        return None


# ---------------------------------------------------------------- what came out


def compare(workdir: pathlib.Path, expected: pathlib.Path) -> dict[str, Any]:
    """What a run was made of and came to, beside the undisturbed one.

    lost: attempts that a step of it lacks. doubled: attempts that a step has twice, or beyond its own.
    """
    steps, others = _record(expected), _record(workdir)
    lost = doubled = 0
    differences = []
    for number in sorted(steps | others):
        wanted, there = steps.get(number, {}), others.get(number, {})
        differences += [f"step {number}: {k}" for k in sorted(wanted | there) if wanted.get(k) != there.get(k)]
        attempts, played = (collections.Counter(e[:2] for e in side.get("episodes", ())) for side in (wanted, there))
        lost, doubled = lost + (attempts - played).total(), doubled + (played - attempts).total()
    rows, wanted_rows = _numbers(workdir), _numbers(expected)
    differences += [f"{len(rows)} records of metrics, {len(wanted_rows)} undisturbed"] * (len(rows) != len(wanted_rows))
    for row, wanted_row in zip(rows, wanted_rows, strict=False):
        names = [name for name in sorted(row | wanted_row) if row.get(name) != wanted_row.get(name)]
        differences += [f"metrics of step {row.get('step')}: {name}" for name in names]
    differences += ["the exported policy"] * (_policy(workdir) != _policy(expected))
    return {
        "versions": len(others) + 1,
        "episodes": sum(len(step["episodes"]) for step in others.values()),
        "lost": lost,
        "doubled": doubled,
        "differences": differences,
    }


def kills_of(folder: pathlib.Path) -> dict[str, Any]:
    """How many kills of which role, and what they cost."""
    roles = collections.Counter(row["role"] for row in made(folder))
    logs = [*folder.glob(f"run-*/{settings.FOLDER}/{LOGS}/*.log"), *folder.glob("run-*.log")]
    again = sum(path.read_text(encoding="utf-8", errors="replace").count(" is played again: ") for path in logs)
    reasons = [
        row["reason"] for path in folder.glob(f"run-*/{settings.FOLDER}/{restarts.FILE}") for row in jsonl.read(path)
    ]
    return {
        "kills": sum(roles.values()),
        "kills_of": dict(sorted(roles.items())),
        "restarts": len(reasons),
        "restarts_not_by_kill": [reason for reason in reasons if "SIGKILL" not in reason],
        "attempts_played_again": again,
    }


def made(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The kills so far."""
    path = folder / KILLS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def ended(workdir: pathlib.Path) -> bool:
    """Whether a run has come to its end."""
    return (workdir / "summary.json").exists()


def _sums(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(one[name] for one in runs) for name in ("versions", "episodes", "lost", "doubled")}
    return {"runs": len(runs), "as_undisturbed": sum(not one["differences"] for one in runs), **sums}


def _print_difference(workdir: pathlib.Path, expected: pathlib.Path) -> None:
    outcome = compare(workdir, expected)
    print(f"{workdir.name}: {outcome | {'differences': outcome['differences'][:8]}}", flush=True)


def _record(workdir: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Of every recorded step: weights before and after, tasks, and the digests of its episodes."""
    steps = {}
    for path in (workdir / "record" / "rl").glob("*.step"):
        with path.open("rb") as file:
            header = json.loads(file.readline())
        episodes = [
            (g, a, said) for r in header["rounds"] for g, group in enumerate(r) for a, (said, _) in enumerate(group)
        ]
        steps[header["step"]] = {**{k: header[k] for k in ("before", "after", "tasks")}, "episodes": episodes}
    return steps


def _numbers(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(APART) and not name.endswith("_s")}
        for row in jsonl.read(workdir / "metrics.jsonl")
    ]


def _policy(workdir: pathlib.Path) -> str:
    return hashlib.sha256((workdir / "policy" / "model.safetensors").read_bytes()).hexdigest()


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    return {**kept, "PYTHONPATH": str(tiny_run.ROOT)}


def _wait(process: subprocess.Popen[bytes], workdir: pathlib.Path) -> None:
    code = process.wait(RUN_S)
    if code:
        raise RuntimeError(f"{workdir.name} ended with exit code {code}: {_tail(pathlib.Path(f'{workdir}.log'))}")


def _until(over: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not over():
        if time.monotonic() > deadline:
            raise TimeoutError(f"It did not come in {seconds:g} s that {what}.")
        time.sleep(LOOK_S)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    return False


def _tail(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-3000:]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--seconds", type=float, default=1e9, help="then it ends, and the same command goes on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=pathlib.Path, help="kept; default: a temporary one, kept after a failure")
    given = parser.parse_args()
    folder = given.workdir or pathlib.Path(tempfile.mkdtemp(prefix="real-soak-"))
    print(f"workdir {folder}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    outcome = soak(folder, given.kills, given.steps, given.seed, given.seconds)
    good = outcome.get("verdict") == "as undisturbed"
    if good and given.workdir is None:
        shutil.rmtree(folder)
    print(json.dumps(outcome))
    sys.exit(0 if good or outcome.get("unfinished") else 1)


if __name__ == "__main__":
    main()
