"""kill -9 of a real coordinator process, again and again, with engines and a trainer that never hear of it."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxagent.fleet import server
from jaxagent.fleet.book import Book
from jaxagent.fleet.client import Client
from jaxagent.fleet.plan import Plan
from tests.fleet.served import TOKEN, WAIT_S, Trainer, engines, oracle

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from jaxagent.fleet import server
from jaxagent.fleet.plan import Plan
from tests.fleet.served import TOKEN, usable
server.run(sys.argv[1], Plan(**eval(sys.argv[3])), TOKEN, sys.argv[2], "c0", judge=usable)
"""


class Process:
    """A coordinator's, on a port that stays."""

    def __init__(self, folder, settings):
        self.folder, self.settings = folder, settings
        self.port, self.starts = 0, 0
        self.start()
        self.url = json.loads((folder / server.ADDRESS).read_text())["url"]
        self.port = int(self.url.rpartition(":")[2])

    def start(self):
        self.starts += 1
        (self.folder / server.ADDRESS).unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.folder), f"127.0.0.1:{self.port}", repr(self.settings)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        deadline = time.monotonic() + WAIT_S
        while not (self.folder / server.ADDRESS).exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)

    def kill(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        return self.process.wait(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"staleness": 2}, {"staleness": 1, "rounds": 3}])
def test_a_run_whose_coordinator_is_killed_comes_to_the_same(tmp_path, settings):
    settings = {"steps": 8, "groups_per_step": 3, "attempts": 2, **settings}
    plan, chance = Plan(**settings), random.Random(0)
    found = Process(tmp_path, settings)
    over = threading.Event()

    def kills():
        """Once in every step, somewhere."""
        seen = 0
        while not over.wait(0.005):
            if len(trainer.batches) != seen:
                seen = len(trainer.batches)
                time.sleep(0.2 * chance.random())
                assert found.kill() == -signal.SIGKILL
                found.start()

    trainer = Trainer(Client(found.url, TOKEN, WAIT_S), plan)
    killer = threading.Thread(target=kills, daemon=True)
    try:
        with engines(found.url, 3, play_s=0.1) as workers:
            killer.start()
            trainer.run(5)
            trainer.run()  # as if it had been killed: it goes back to what it saved, and repeats
            over.set()
            killer.join(WAIT_S)
        assert found.starts > 4
        assert trainer.versions == oracle(plan).versions
        stored = [which for worker in workers for which in worker.stored]
        assert len(stored) == len(set(stored))  # acknowledged once
        assert found.kill(signal.SIGTERM) == 0
    finally:
        over.set()
        found.process.kill()
        found.process.wait(WAIT_S)
    book = Book(tmp_path / server.LEDGER, plan)
    assert book.rules.record.versions == oracle(plan).versions and book.epoch == found.starts + 1
    book.close()
