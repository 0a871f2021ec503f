"""One process of `benchmarks.fleet_soak`: the real coordinator, or a small trainer or engine without JAX.

The trainer uses the real calls, versions of weights as real files, and its own checkpoint. The engine is the real loop
of an engine process around a player that sleeps. Weights are a chain of digests and an episode's digest tells its
weights, so one wrong, lost or doubled episode shows in every version after it. Each process writes down what it saw.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxagent.config import Config
from jaxagent.config.errors import EXIT_CODES
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.fleet import manifest, settings, weight_reader, weights, worker
from jaxagent.fleet.admission import Answer, LeasedEpisode, Outcome, UnknownWorkerError
from jaxagent.fleet.child import STACKS, VITALS
from jaxagent.fleet.client import Client
from jaxagent.fleet.leaves import Leaves
from jaxagent.fleet.manifest import MismatchError, MissingError, WeightsError
from jaxagent.fleet.neighbours import Done
from jaxagent.fleet.plan import EpisodeId, Plan
from jaxagent.fleet.settings import plan_of
from jaxagent.fleet.vitals import Vitals, register_stacks
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Job, Sources, TaskRef, flat
from jaxagent.io import files
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory

MODULE = "benchmarks.fleet_soak_process"
RECORDS, SAVED, PACE, MORE, ENDED = "records", "saved.json", "pace", "more", "ended"  # in the workdir
CONFIG = "config.pickle"
SILENT_S = 5.0  # budget of the coordinator's loop
POLL_S = 2.0  # long polls, which are signs of progress
PLACES = 6  # of an engine
EPISODE_S, TRAIN_S = 1.2, 0.5  # median of episodes; of a step
SAVE_EVERY = 2  # steps
FIRST_ENGINES = 2  # the others wait until they are wanted
FETCH_S = 5.0
INITIAL = "initial"
LOCAL, OPENING = "127.0.0.1", "opens data and model"  # as fleet/local.py has them
UNWANTED = "waits to be wanted"  # phase of an engine that nobody has asked for yet

# ---------------------------------------------------------------- what is played and learnt, also by the oracle


def tree(chain: str) -> Leaves:
    """Weights."""
    return {("chain",): np.frombuffer(chain.encode().ljust(64), np.uint8)}


def learnt(chain: str, digests: Iterable[str]) -> str:
    """The weights after a step."""
    return hashlib.sha256(" ".join([chain, *digests]).encode()).hexdigest()


def task_of(step: int, number: int) -> TaskRef:
    """Which task a group plays."""
    return TaskRef(1000 * step + number, f"task-{step}-{number}")


def played(which: EpisodeId, chain: str) -> Packed:
    """An episode under weights: its tokens tell which one it is, and under which weights."""
    text = hashlib.sha256(f"{flat(which)} {chain}".encode()).digest()
    kinds = np.array([TokenKind.PROMPT] + [TokenKind.ACTION] * 31, np.uint8)
    action = kinds == TokenKind.ACTION
    logprobs, versions = np.where(action, -0.5, 0).astype(np.float32), np.where(action, 0, -1).astype(np.int32)
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    trajectory = Trajectory(tokens, kinds, logprobs, versions, np.zeros(32, np.int32))
    task = Task(task_of(which.group.step, which.group.number).id, "What?", ("x",))
    return codec.pack(Episode(task, which.sample, (trajectory,), float(text[0] % 3 == 0), {}, StopReason.ANSWER, 1))


def tasks_of(plan: Plan, version: int) -> dict[int, list[list[TaskRef]]]:
    """What comes with a version."""
    first = 0 if version == 0 else plan.admitted(version - 1)
    return {t: [[task_of(t, k) for k in range(plan.groups_per_step)]] for t in range(first, plan.admitted(version))}


# ---------------------------------------------------------------- what is written down


class Records:
    """Lines of a process and of those before it: what it saw, when. A line stays whatever becomes of the process."""

    def __init__(self, folder: pathlib.Path, name: str):
        (folder / RECORDS).mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder / RECORDS / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, kind: str, **row: Any) -> None:
        """Adds a line."""
        os.write(self._fd, (json.dumps({"kind": kind, "at": time.time(), **row}) + "\n").encode())


class Link(Client):
    """The real client, which writes down what the coordinator has acknowledged."""

    def __init__(self, url: str, token: str, patience_s: float, records: Records):
        super().__init__(url, token, patience_s)
        self._records, self._took, self._asked = records, False, False

    def take(self, name: str, places: int, holding: Iterable[str], wait_s: float = 0.0) -> list[Job]:
        """See `Client`."""
        if not self._asked:
            self._records.add("asks")
            self._asked = True
        jobs = super().take(name, places, holding, wait_s)
        if jobs and not self._took:
            self._records.add("took")
            self._took = True
        return jobs

    def put(self, work: LeasedEpisode, version: int, packed: Packed) -> Answer:
        """See `Client`."""
        answer = super().put(work, version, packed)
        self._records.add("put", episode=flat(work.episode), digest=packed.digest, outcome=answer.outcome.value)
        return answer


# ---------------------------------------------------------------- engine


class Sleeper:
    """A player that sleeps, and needs the weights for what it makes up then."""

    def __init__(self, link: Client, fetcher: WeightFetcher, server: WeightServer, own: pathlib.Path, seen: bool):
        self._link, self._fetcher, self._server, self._own = link, fetcher, server, own
        self._trainers = own.parents[2] / settings.WEIGHTS if seen else None
        self._lock = threading.Lock()
        self._running: dict[str, tuple[threading.Timer, Done, int]] = {}
        self._chain, self._version, self._played = "", -1, 0

    def hold(self, version: int) -> None:
        """See `Player`."""
        sources = self._sources(version)
        if self._trainers is not None:
            chain = read(self._trainers, sources)
        else:
            try:
                chain = read(self._own, sources)
            except WeightsError:
                self._fetcher.fetch(lambda: self._sources(version), FETCH_S)
                chain = read(self._own, sources)
            weights.delete(self._own, version)
        self._chain, self._version = chain, version

    def expect(self, version: int) -> None:
        """See `Player`. Nothing: what is killed here is a fetch for use."""

    def _sources(self, version: int) -> Sources:
        if (sources := self._link.weights(version)) is None:
            raise MissingError(f"the coordinator knows of no version {version}.")
        return sources

    def play(self, job: Job, done: Done) -> None:
        """See `Player`."""
        assert job.work.version == self._version and job.task == task_of(job.group.step, job.group.number)
        lease, chain, version = job.work.lease, self._chain, self._version

        def finish() -> None:
            with self._lock:
                mine = self._running.pop(lease, None) is not None
                self._played += 1
            if mine:
                done(played(job.work.episode, chain), version)

        timer = threading.Timer(random.lognormvariate(np.log(EPISODE_S), 0.7), finish)
        timer.daemon = True
        with self._lock:
            self._running[lease] = timer, done, version
        timer.start()

    def cancel(self, lease: str) -> None:
        """See `Player`."""
        with self._lock:
            found = self._running.pop(lease, None)
        if found is not None:
            timer, done, version = found
            timer.cancel()
            done(None, version)

    def places(self) -> int:
        """See `Player`."""
        return PLACES

    def numbers(self) -> dict[str, Any]:
        """See `Player`. Who sleeps makes progress."""
        here = weights.versions(self._own)
        return {**self._server.numbers(), "versions": here, "progress": time.monotonic() if self._running else 0.0}


def read(folder: pathlib.Path, sources: Sources) -> str:
    """The weights that were published, from a folder. Raises WeightsError."""
    with weight_reader.hold(folder, sources.version, sources.lineage) as held:
        if held.manifest.digest != sources.digest:
            raise MismatchError(f"{folder} has digest {held.manifest.digest}, {sources.digest} was published.")
        return held.read()[("chain",)].tobytes().decode().strip()


def play(cfg: Config, name: str, url: str, token: str, signs: Vitals) -> None:
    """An engine's process."""
    fleet, workdir, records = settings.of(cfg), pathlib.Path(cfg.workdir), Records(pathlib.Path(cfg.workdir), name)
    number = int(name.rpartition("-")[2])
    if number >= FIRST_ENGINES:
        signs.phase(UNWANTED, 1e6)
        while not (workdir / MORE).exists():
            time.sleep(0.1)
    worker.LONG_POLL_S = POLL_S
    link = Link(url, token, fleet.patience_s, records)
    own = workdir / settings.FOLDER / settings.ENGINES / name / settings.WEIGHTS
    own.mkdir(parents=True, exist_ok=True)
    with WeightServer([own], token, LOCAL, address=LOCAL) as server:
        player = Sleeper(link, WeightFetcher(own, token, server.url), server, own, seen=number % 2 == 0)
        asked: list[int] = []
        engine = worker.EngineWorker(link, player, facts(cfg, name, server.url), fleet.rule, fleet.hang_s, signs)
        for signum in EXIT_CODES:
            signal.signal(signum, lambda n, frame: (asked.append(n), engine.end("a signal", 1.0)))
        print(engine.run(), flush=True)
    if asked:
        raise SystemExit(EXIT_CODES[signal.Signals(asked[0])])


def facts(cfg: Config, name: str, source: str) -> dict[str, Any]:
    """Of a process."""
    return {"config": settings.digest_of(cfg), "process": name, "host": LOCAL, "source": source}


# ---------------------------------------------------------------- trainer


def train(cfg: Config, name: str, url: str, token: str, signs: Vitals) -> None:
    """Rank 0 of the trainer."""
    fleet, plan, workdir = settings.of(cfg), plan_of(cfg), pathlib.Path(cfg.workdir)
    records, link = Records(workdir, "trainer"), Client(url, token, fleet.patience_s)
    versions = workdir / settings.FOLDER / settings.WEIGHTS
    versions.mkdir(parents=True, exist_ok=True)
    signs.phase("begins", fleet.start_s)
    saved = {"step": 0, "chain": INITIAL}
    with contextlib.suppress(FileNotFoundError):
        saved = json.loads((workdir / SAVED).read_text(encoding="utf-8"))
    chain = saved["chain"]
    with WeightServer([versions], token, LOCAL, address=LOCAL) as server:
        mine = facts(cfg, name, server.url)
        joined = link.join("trainer", mine)
        beats = threading.Thread(target=_beat, args=(link, joined.name, mine, joined.lease_s / 4), daemon=True)
        beats.start()

        def publish(version: int) -> None:
            digest = weights.publish(versions, manifest.shares(tree(chain)), joined.run, version).digest
            answer = link.publish(version, digest, joined.run, tasks_of(plan, version))
            assert answer.outcome in (Outcome.STORED, Outcome.DUPLICATE), answer
            weights.delete(versions, version - plan.staleness - 1)

        publish(saved["step"])
        for step in range(saved["step"], plan.steps):
            signs.phase(f"waits for step {step}", fleet.hang_s, done=step)
            records.add("asks", step=step)
            while (batch := link.batch(step, POLL_S)) is None:
                signs.tick()
            signs.phase(f"trains step {step}", fleet.hang_s)
            results = {which: found.digest for which, found in batch.results.items() if which.group in batch.groups}
            for which, digest in results.items():
                body = link.episode(which)
                assert body.digest == digest and codec.unpack(body, "here").sample == which.sample
            while step >= int((workdir / PACE).read_text(encoding="utf-8") or 0):
                time.sleep(0.1)
                signs.tick()
            time.sleep(TRAIN_S)
            chain = learnt(chain, results.values())
            rows = [[*flat(which), digest] for which, digest in results.items()]
            records.add("trained", step=step, chain=chain, results=rows)
            publish(step + 1)
            if (step + 1) % SAVE_EVERY == 0:
                files.replace(workdir / SAVED, json.dumps({"step": step + 1, "chain": chain}))
                assert link.keep(step + 1).outcome in (Outcome.STORED, Outcome.DUPLICATE)
        link.end("the trainer has ended")
    (workdir / ENDED).touch()


def _beat(link: Client, name: str, mine: Mapping[str, Any], every_s: float) -> None:
    while True:
        time.sleep(every_s)
        try:
            link.beat(name, ())
        except UnknownWorkerError:
            name = link.join("trainer", mine).name


def follow(cfg: Config, signs: Vitals) -> None:
    """Another rank: what is left of it without collectives is that it shares rank 0's fate."""
    signs.phase("follows rank 0", settings.of(cfg).hang_s)
    while not (pathlib.Path(cfg.workdir) / ENDED).exists():
        time.sleep(0.1)
        signs.tick()


# ---------------------------------------------------------------- the command


def command(argv: list[str]) -> int:
    """The real one, with this module as the program of its processes."""
    from jaxagent.config import flags  # late: parsing takes as long as all else that a process begins with
    from jaxagent.fleet import local

    cfg = flags.parse_argv(argv).config
    (pathlib.Path(cfg.workdir) / CONFIG).write_bytes(pickle.dumps(cfg))
    return local.run(cfg, argv, MODULE)


def workdir_of(argv: list[str]) -> pathlib.Path:
    """The run's."""
    (found,) = (flag.partition("=")[2] for flag in argv if flag.startswith("--config.workdir="))
    return pathlib.Path(found)


def main(argv: list[str]) -> int:
    """Runs one process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("role", "name", "coordinator", "meet", "processes"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--rank", type=int, default=0)
    options, rest = parser.parse_known_args(argv[1:])
    if options.role == "coordinator":
        from jaxagent import join  # late: the other roles start sooner without its server

        join.SILENT_S = SILENT_S
        return join.main(argv)
    if options.role == "command":
        return command([argv[0], *rest])
    cfg = pickle.loads((workdir_of(rest) / CONFIG).read_bytes())
    register_stacks(pathlib.Path(os.environ[STACKS]))
    signs = Vitals(pathlib.Path(os.environ[VITALS]))
    signs.phase(OPENING, settings.of(cfg).start_s)
    token = os.environ[settings.TOKEN_VARIABLE]
    if options.role == "engine":
        play(cfg, options.name, options.coordinator, token, signs)
    elif options.rank:
        follow(cfg, signs)
    else:
        train(cfg, options.name, options.coordinator, token, signs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
