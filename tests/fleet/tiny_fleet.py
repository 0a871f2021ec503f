"""The whole command as a fleet on a tiny run, and what must come out of it: what one process comes to."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from jaxagent.fleet import segments, settings
from jaxagent.fleet.server import LEDGER
from jaxagent.observe import jsonl
from tests import tiny_run
from tests.fleet import oracle

DEADLINE_S = 900
FLAGS = [
    "--config.warm_start.max_steps=3",
    "--config.warm_start.curriculum_steps=0",  # a program less to compile in every process
    "--config.warm_start.gate_every=9",
    "--config.rl.steps=5",
    "--config.eval.every=0",
    "--config.checkpoint.every=2",
]
# So little training earns no reward, and something must move the weights.
FLAGS += ["--config.rl.entropy_coefficient=0.1", "--config.rl.optimizer.warmup_steps=0"]
APART = ("time/", "engine/", "fleet/", "tokens_per_s", "episode/cached_tokens")


def start(module: str, workdir: pathlib.Path, *extra: str) -> subprocess.Popen:
    # As a user starts it: on one device, and no more threads than it needs, each of which makes compiling dearer.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    environment["PYTHONPATH"] = str(tiny_run.ROOT)
    with open(f"{workdir}.log", "ab") as log:
        command = [sys.executable, "-m", module, *tiny_run.argv(workdir, *FLAGS, *extra)[1:]]
        return subprocess.Popen(command, cwd=tiny_run.ROOT, env=environment, stdout=log, stderr=log)


def fleet(workdir: pathlib.Path, engines: int, *extra: str) -> subprocess.Popen:
    return start("jaxagent.main", workdir, "--config.fleet=on", f"--config.fleet.engines={engines}", *extra)


def ended(process: subprocess.Popen, workdir: pathlib.Path) -> str:
    """Waits for a good end. Returns what was printed."""
    try:
        code = process.wait(DEADLINE_S)
    finally:
        process.kill()
    said = pathlib.Path(f"{workdir}.log").read_text()
    assert code == 0, said[-4000:]
    return said


def alive(pid: int) -> bool:
    """Whether a process is there, and has not only to be reaped."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def numbers(workdir: pathlib.Path) -> list[dict]:
    """Every record without what depends on the clock or on who played."""
    return [
        {name: value for name, value in record.items() if not name.startswith(APART) and not name.endswith("_s")}
        for record in jsonl.read(workdir / "metrics.jsonl")
    ]


def digests(workdir: pathlib.Path) -> dict[int, str]:
    """Of all versions that a fleet has published."""
    return {row["version"]: row["digest"] for row in records(workdir) if row["kind"] == "published"}


def arrivals(workdir: pathlib.Path) -> list[tuple]:
    """Group and number of every episode, in the order in which a fleet has stored them."""
    return [(*row["group"], row["sample"]) for row in records(workdir) if row["kind"] == "stored"]


def records(workdir: pathlib.Path) -> list[dict]:
    """Of a fleet's ledger."""
    return list(segments.read(workdir / settings.FOLDER / LEDGER / segments.FOLDER).records)


def compare(workdir: pathlib.Path, expected: pathlib.Path) -> None:
    """Raises AssertionError that names the first version, or number, that is not the one process' own."""
    wanted = {int(v): digest for v, digest in json.loads((expected / oracle.FILE).read_text()).items()}
    assert len(set(wanted.values())) == 6, "The weights of one process do not move."
    found = digests(workdir)
    assert found == wanted, f"Versions differ: {[v for v in sorted(found | wanted) if found.get(v) != wanted.get(v)]}."
    rows, others = numbers(workdir), numbers(expected)
    assert len(rows) == len(others) == 3 + 6, f"{len(rows)} records, {len(others)} of one process."
    for row, other in zip(rows, others, strict=True):
        names = [
            name for name in sorted(row | other) if (row.get(name), name in row) != (other.get(name), name in other)
        ]
        assert not names, (
            f"Step {row['step']}: {names[0]} is {row.get(names[0])}, {other.get(names[0])} of one process."
        )
    gaps = [row["logprob_gap/max"] for row in rows if "logprob_gap/max" in row]
    assert len(gaps) == 5 and set(gaps) == {0.0}, f"Engines and trainer compute other log-probs: {gaps}."


def oracle_run(workdir: pathlib.Path, staleness: int, *extra: str) -> None:
    """A run of one process, which writes down the digests of its versions."""
    ended(start("tests.fleet.oracle", workdir, f"--config.rl.staleness={staleness}", *extra), workdir)
