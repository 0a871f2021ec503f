"""The loop of an engine process with a real coordinator over HTTP, which stops and starts again meanwhile."""

import threading
import time

import pytest

from jaxagent.fleet import worker as worker_module
from jaxagent.fleet.plan import Plan
from jaxagent.fleet.worker import EngineWorker
from tests.fleet.served import FACTS, WAIT_S, Served, Trainer, oracle, packed


class Player:
    """Holds the digest of the published weights, and plays by making an episode of it."""

    def __init__(self, client):
        self.client, self.digest, self.version, self.count = client, "", -1, 0

    def hold(self, version):
        self.digest, self.version = self.client.weights(version).digest, version

    def expect(self, version):
        pass

    def play(self, job, done):
        def run():
            time.sleep(0.002)
            self.count += 1
            done(packed(job.work.episode, self.digest), self.version)

        assert job.work.version == self.version
        threading.Thread(target=run, daemon=True).start()

    def cancel(self, lease):
        pass

    def places(self):
        return 4

    def numbers(self):
        return {"progress": float(self.count), "versions": [self.version]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"LONG_POLL_S": 0.5, "LOOK_S": 0.05, "BEATS_PER_LEASE": 40}.items():
        monkeypatch.setattr(worker_module, name, value)


def test_two_engines_and_a_coordinator_that_is_started_again(tmp_path):
    plan = Plan(steps=6, groups_per_step=2, attempts=3, staleness=1, lease_s=4.0)
    reasons = []
    with Served(tmp_path, plan) as served:
        players = [Player(served.client()) for _ in range(2)]
        workers = [EngineWorker(player.client, player, FACTS, "pinned", 60.0) for player in players]
        threads = [threading.Thread(target=lambda w=w: reasons.append(w.run()), daemon=True) for w in workers]
        for thread in threads:
            thread.start()
        trainer = Trainer(served.client(), plan, keep_every=3)
        trainer.run(to=3)
        served.stop()
        served.start()
        trainer.run()
        trainer.client.end("the trainer has ended")
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
    # A beat may come between the last version and the trainer's word.
    ended = "the trainer has ended", "all steps are trained"
    assert len(reasons) == 2 and set(reasons) <= {f"the run has ended: {why}" for why in ended}
    assert trainer.versions == oracle(plan).versions
    assert sum(worker.numbers()["episodes"] for worker in workers) == 36, "each is stored once"
    assert all(worker.numbers()["joins"] >= 2 for worker in workers)
