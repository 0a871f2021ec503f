"""A whole run whose trainer is two processes: what process 0 plays and all train is what one process does."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxagent.fleet import weight_reader, weights
from tests import tiny_run

PROGRAM = """
import sys
from jaxagent.config import flags
from jaxagent.runs import devices
process, processes, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = flags.parse_argv(["main", *sys.argv[4:]]).config
with devices.distributed(process, processes, address):
    devices.provide(config.mesh)
    from jaxagent import loop
    loop.run(config)
"""
# Clocks, and what an engine on fewer devices does otherwise: more sessions share a device's cache.
APART = ("time/", "engine/", "tokens_per_s", "episode/cached_tokens")
FLAGS = ("--config.mesh.data=2", "--config.rl.steps=2", "--config.rl.batch.micro_rows=4",
         "--config.warm_start.max_steps=2", "--config.warm_start.curriculum_steps=0")  # fmt: skip


# Publishes two versions of one array that both processes have a half of, in chunks of 1 KiB.
PUBLISHES = """
import os, signal, sys
import jax, numpy as np
from jaxagent.config import MeshConfig
from jaxagent.fleet import manifest, weights
from jaxagent.learner import peers
from jaxagent.models import sharding
from jaxagent.runs import devices
from jaxagent.runs.fleet import trees
process, processes, address, folder, dies = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
manifest.CHUNK_BYTES = 1024
with devices.distributed(process, processes, address):
    devices.provide(MeshConfig(1, 2, 1, 1))
    mesh = sharding.make_mesh(MeshConfig(1, 2, 1, 1))
    meet = peers.meetings_of("publishes")
    for version in range(2):
        def tick():
            if dies == "1" and process == 1 and version == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        host = np.arange(version, version + 6 * 50 * 64, dtype=np.float32).reshape(6, 50, 64)
        where = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
        leaf = jax.make_array_from_callback(host.shape, where, lambda index: host[index])
        shares = trees.shares({"w": leaf, "scale": jax.device_put(np.ones(3), jax.NamedSharding(mesh, jax.P()))})
        assert len(shares[1].pieces) == 37 + process  # of 75
        of = {"tick": tick, "rank": process, "meet": lambda what, said: meet(what, said, 30.0)}
        weights.publish(folder, shares, "run", version, **of)
"""


def start(program: str, processes: int, name: str, args: list[str]) -> list[subprocess.Popen]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    started = []
    for i in range(processes):
        with open(f"{name}.log.{i}", "ab") as log:
            command = [sys.executable, "-c", program, str(i), str(processes), address, *args]
            started.append(subprocess.Popen(command, cwd=tiny_run.ROOT, env=env, stdout=log, stderr=log))
    return started


def run(processes: int, workdir: pathlib.Path) -> None:
    started = start(PROGRAM, processes, str(workdir), tiny_run.argv(workdir, *FLAGS)[1:])
    try:
        deadline = time.monotonic() + 900
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for process in started:
            process.wait(60)
    finally:
        for process in started:
            process.kill()
    said = "".join(pathlib.Path(f"{workdir}.log.{i}").read_text()[-3000:] for i in range(processes))
    assert [p.returncode for p in started] == [0] * processes, said


@pytest.mark.slow
def test_two_processes_train_and_play_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    run(1, one)
    run(2, two)
    first, second = ([json.loads(line) for line in (w / "metrics.jsonl").read_text().splitlines()] for w in (one, two))
    assert [(r["stage"], r["step"]) for r in first] == [(r["stage"], r["step"]) for r in second]
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name in [name for name in a if not name.startswith(APART) and not name.endswith("_s")]:
            if isinstance(a[name], float):
                assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6), (a["stage"], a["step"], name)
            else:
                assert b[name] == a[name], (a["stage"], a["step"], name)
    assert (two / "policy" / "config.json").is_file() and (two / "summary.json").is_file()
    assert not list(two.glob("*.orbax-checkpoint-tmp"))


@pytest.mark.slow
def test_a_process_killed_while_it_writes_its_part_leaves_the_version_before(tmp_path):
    """The same again publishes the version: each chunk by the one process that had it, and the bits of the whole."""
    folder = tmp_path / "weights"
    for dies in ("1", "0"):
        started = start(PUBLISHES, 2, str(tmp_path / dies), [str(folder), dies])
        try:
            if dies == "1":
                assert started[1].wait(120) == -signal.SIGKILL
                assert weights.versions(folder) == [0]
            else:
                said = "".join(pathlib.Path(f"{tmp_path / dies}.log.{i}").read_text()[-3000:] for i in range(2))
                assert [process.wait(120) for process in started] == [0, 0], said
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert weights.versions(folder) == [0, 1]
    for version in range(2):
        with weight_reader.hold(folder, version, "run") as held:
            leaf = held.read()["w",]
        assert np.array_equal(leaf.reshape(-1), np.arange(version, version + 6 * 50 * 64, dtype=np.float32))
    weights.delete(folder, 2, ())
    assert not list(folder.iterdir()), "what the killed one left goes, too"
