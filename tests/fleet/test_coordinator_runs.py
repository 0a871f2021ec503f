"""Whole runs through a real coordinator and the loops of engine processes: HTTP, ledger and files do not pretend."""

import pytest

from jaxagent.fleet.plan import Plan
from tests.fleet.served import FACTS, Served, Trainer, engines, oracle, usable


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (1, {"staleness": 0}),
        (3, {"staleness": 2}),
        (2, {"staleness": 1, "rounds": 3}),
        (2, {"staleness": 1, "rounds": 2, "groups_per_round": 4}),
    ],
)
def test_a_run_comes_to_what_a_plain_loop_comes_to(tmp_path, count, settings):
    plan = Plan(steps=5, groups_per_step=3, attempts=2, **settings)
    with Served(tmp_path, plan, judge=usable if plan.rounds > 1 else None) as served:
        with engines(served.url, count) as workers:
            trainer = Trainer(served.client(), plan)
            if plan.rounds == 1:
                trainer.run(to=2)
                served.stop()
                served.start()
            trainer.run()
        assert all(engine.worker.numbers()["joins"] > 1 for engine in workers) or plan.rounds > 1
        assert FACTS["config"] == "c0" and trainer.versions == oracle(plan).versions
        assert [batch.groups for batch in trainer.batches] == oracle(plan).batches
        stored = [episode for worker in workers for episode in worker.stored]
        assert len(stored) == len(set(stored)) == sum(len(batch.results) for batch in trainer.batches)
