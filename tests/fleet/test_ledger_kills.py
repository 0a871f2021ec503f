"""Real processes that append, publish and take over while they are killed: what was acknowledged is there, once."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxagent.fleet import episodes, ledger, segments, weight_reader, weights

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Appends a counter that goes on from what the ledger holds; says each number when it is acknowledged.
APPENDS = """
import sys
from jaxagent.fleet.ledger import Ledger
with Ledger(sys.argv[1]) as log:
    found = [r["v"] for r in log.recovered()]
    keep = 50
    value = max(found, default=-1) + 1
    while True:
        waiting = [(v, log.append([{"v": v, "filler": "x" * (v % 700)}])) for v in range(value, value + 5)]
        value += 5
        for v, future in waiting:
            future.result(20)
            print(v, flush=True)
        if value % 100 < 5:
            log.compact(lambda record: record["v"] >= value - keep).result(20)
"""

# Stores episodes: first the file, then the line, then the word.
STORES = """
import dataclasses, sys
from jaxagent.data import codec
from jaxagent.fleet.episodes import EpisodeFiles
from jaxagent.fleet.ledger import Ledger
from tests.fleet.test_episode_files import EPISODE
with Ledger(sys.argv[1]) as log:
    known = {((r["v"] // 4, 0, 0), r["v"] % 4): r["digest"] for r in log.recovered()}
    store = EpisodeFiles(sys.argv[1], known)
    for v in range(len(known), 10**9):
        key, packed = ((v // 4, 0, 0), v % 4), codec.pack(dataclasses.replace(EPISODE, sample=v, text="t" * 9000))
        store.put(key, packed)
        log.append([{"v": v, "digest": packed.digest}]).result(20)
        print(v, packed.digest, flush=True)
"""

# Publishes versions and deletes old ones.
PUBLISHES = """
import sys
import numpy as np
from jaxagent.fleet import manifest, weights
manifest.CHUNK_BYTES = 4096
version = max(weights.versions(sys.argv[1]), default=-1) + 1
for version in range(version, 10**9):
    tree = {("w", i): np.full(9000, version, np.int32) for i in range(3)}
    weights.publish(sys.argv[1], manifest.shares(tree), "run", version)
    print(version, flush=True)
    weights.delete(sys.argv[1], version - 2)
"""


class Told:
    """A program that has said something. It writes to a file: what a pipe's reader holds back would be lost here.

    Args:
      program: its source.
      folder: its argument.
    """

    def __init__(self, program, folder):
        self._out, self._err = folder.parent / f"{folder.name}.out", folder.parent / f"{folder.name}.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, str(folder)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=err,
            )

    def __enter__(self):
        until = time.monotonic() + 60
        while not self.lines():
            assert self.process.poll() is None and time.monotonic() < until, self.error()
            time.sleep(0.005)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(20)

    def lines(self):
        """Those that it has said in whole."""
        return [line[:-1] for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def error(self):
        return self._err.read_text()


def killed(program, folder, chance):
    """Runs it until it has said something, a while longer, and kills it; returns what it said."""
    with Told(program, folder) as told:
        time.sleep(chance.random() * 0.25)
    assert told.process.returncode == -signal.SIGKILL, told.error()
    return told.lines()


@pytest.mark.slow
def test_lines_of_a_process_that_is_killed_again_and_again(tmp_path):
    chance, said = random.Random(0), []
    for _ in range(10):
        said += map(int, killed(APPENDS, tmp_path, chance))
        found = [record["v"] for record in segments.read(tmp_path / "segments").records]
        assert found == list(range(found[0], found[-1] + 1))  # none lost, none twice, in order
        assert said[-1] <= found[-1] and found[0] <= max(0, found[-1] - 49)  # what was wanted is kept
    assert said == sorted(set(said)) and len(said) >= 10  # one for each life at least, on however slow a machine


@pytest.mark.slow
def test_episodes_of_a_process_that_is_killed_again_and_again(tmp_path):
    chance, said = random.Random(1), {}
    for _ in range(8):
        for line in killed(STORES, tmp_path, chance):
            v, digest = line.split()
            assert int(v) not in said
            said[int(v)] = digest
    with ledger.Ledger(tmp_path) as log:
        known = {record["v"]: record["digest"] for record in log.recovered()}
    assert said.items() <= known.items() and list(known) == list(range(len(known)))
    store = episodes.EpisodeFiles(tmp_path, {((v // 4, 0, 0), v % 4): digest for v, digest in known.items()})
    assert len(store.removed) <= 1 and len(known) >= 8
    for v, digest in known.items():
        assert episodes.read(tmp_path, ((v // 4, 0, 0), v % 4), digest).sample == v


@pytest.mark.slow
def test_versions_of_a_process_that_is_killed_again_and_again(tmp_path):
    chance, said = random.Random(2), []
    for _ in range(8):
        said += map(int, killed(PUBLISHES, tmp_path, chance))
        for version in weights.versions(tmp_path):
            with weight_reader.hold(tmp_path, version, "run") as held:
                assert all((leaf == version).all() for leaf in held.read().values())
        assert said[-1] in weights.versions(tmp_path)
    assert said == sorted(set(said)) and len(said) >= 8
    weights.delete(tmp_path, 10**7)
    assert os.listdir(tmp_path) == [weights.path_of(tmp_path, weights.FIRST).name]  # later engines compare with it


@pytest.mark.slow
def test_a_stopped_writer_that_wakes_up_after_it_was_replaced(tmp_path):
    with Told(APPENDS, tmp_path) as told:
        time.sleep(0.1)
        told.process.send_signal(signal.SIGSTOP)
        with ledger.Ledger(tmp_path) as log:
            mine = max(record["v"] for record in log.recovered()) + 1
            log.append([{"v": mine}]).result(20)
            told.process.send_signal(signal.SIGCONT)
            assert told.process.wait(20) == 1 and "epoch 2 has taken over from epoch 1" in told.error()
            log.append([{"v": mine + 1}]).result(20)
    found = [record["v"] for record in segments.read(tmp_path / "segments").records]
    assert found == list(range(found[0], mine + 2)) and max(map(int, told.lines())) < mine
