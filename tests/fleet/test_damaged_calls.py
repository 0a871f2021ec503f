"""Calls over a link that flips bits, between the real client and a real coordinator: never another effect or answer."""

import random

import pytest

from jaxagent.fleet import client as calls
from jaxagent.fleet import intake, wire
from jaxagent.fleet.admission import Outcome
from jaxagent.fleet.client import CallError, Client
from jaxagent.fleet.plan import Plan
from tests.fleet.flips import Flips
from tests.fleet.served import FACTS, TOKEN, WAIT_S, Served, Trainer, engines, oracle, packed, tasks_of

PLAN = Plan(steps=4, groups_per_step=2, attempts=2, staleness=1)
BITS = 90  # of each call that are hit, each way


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A damaged length leaves both sides waiting for bytes that never come."""
    monkeypatch.setattr(wire, "CALL_S", 0.4)
    monkeypatch.setattr(wire, "BODY_S", 0.3)
    monkeypatch.setattr(intake, "CALL_BODY_S", 0.3)
    monkeypatch.setattr(calls, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(calls, "LONGEST_PAUSE_S", 0.05)


@pytest.mark.parametrize("seed", range(2))
def test_a_run_over_a_link_that_flips_bits_comes_to_what_a_plain_loop_comes_to(tmp_path, caplog, seed):
    with Served(tmp_path, PLAN) as served, Flips(served.port, 0.2, seed) as link:
        with engines(link.url, 2) as workers:
            trainer = Trainer(Client(link.url, TOKEN, WAIT_S), PLAN)
            trainer.run()
        stored = served.client().status()
    assert trainer.versions == oracle(PLAN).versions
    assert [batch.groups for batch in trainer.batches] == oracle(PLAN).batches
    assert stored["conflicts"] == [] and "refused" not in stored["calls"], stored["calls"]
    assert len(workers) == 2 and min(link.flips.values()) > 5, link.flips
    for process in ("a call of", "An answer of"):  # told, and not again and again
        assert sum(process in line for line in caplog.messages) <= 3, caplog.messages
    assert stored["calls"]["answered_damaged"] > 0 and "came in damaged" in caplog.text


def test_whichever_bit_of_a_call_or_its_answer_flips_it_has_its_one_effect(tmp_path):
    chance = random.Random(0)
    with Served(tmp_path, PLAN) as served, Flips(served.port) as link:
        engine, trainer = Client(link.url, TOKEN, WAIT_S), Client(link.url, TOKEN, WAIT_S)
        trainer.join("trainer", FACTS)
        assert trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome is Outcome.STORED
        name = engine.join("engine", FACTS).name
        jobs = []
        while got := engine.take(name, 9, [job.work.lease for job in jobs]):
            jobs += got
        for job in jobs[1:]:
            engine.put(job.work, 0, packed(job.work.episode, "w0"))
        job, right = jobs[0], packed(jobs[0].work.episode, "w0")
        engine.put(job.work, 0, right)
        batch = trainer.batch(0)
        assert batch is not None
        again = {
            "batch": lambda: trainer.batch(0) == batch,
            "publish": lambda: (
                trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome in (Outcome.STORED, Outcome.DUPLICATE)
            ),
            "put": lambda: engine.put(job.work, 0, right).outcome is Outcome.DUPLICATE,
            "weights": lambda: engine.weights(0) == wire.Sources(0, "w0", "lineage", (), trainers=0),
            "missing": lambda: engine.weights(5) is None,
            "episode": lambda: trainer.episode(job.work.episode) == right,
        }
        for call, holds in again.items():
            assert holds(), call
            for direction in link.flips:
                before = link.flips[direction]
                for _ in range(BITS // len(again)):
                    link.aim(direction, chance.randrange(700), chance.randrange(8))
                    assert holds(), (call, direction)
                assert link.flips[direction] > before, (call, direction)
        rules = served.client().status()
        assert rules["conflicts"] == [] and rules["steps"]["newest_version"] == 0


def test_a_token_is_wrong_when_it_is_so_again_and_again(tmp_path):
    with Served(tmp_path, PLAN) as served, Flips(served.port) as link:
        client = Client(link.url, TOKEN, WAIT_S)
        client.status()
        before = "GET /v1/status HTTP/1.1", f"Host: {link.url[7:]}", "Accept-Encoding: identity", "Content-Length: 0"
        link.aim("asked", len("\r\n".join((*before, "Authorization: Bearer a t"))), 0)
        assert client.status()["calls"]["wrong_tokens"] == 1


def test_a_coordinator_that_keeps_another_digest_than_it_was_told_is_no_one_to_go_on_with(tmp_path, monkeypatch):
    with Served(tmp_path, PLAN) as served:
        trainer = served.trainer()
        monkeypatch.setattr(wire, "text", lambda row, key, *more: "w9" if key == "digest" else row[key])
        with pytest.raises(CallError, match=r"has kept digest w9 for version 0, and was told w0:"):
            trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0))


def test_an_answer_to_an_earlier_call_is_none_to_a_later_one(tmp_path, monkeypatch, caplog):
    """A proxy that has lost count of its connections."""
    with Served(tmp_path, PLAN) as served:
        trainer = served.trainer()
        ask, kept = calls.Line.ask, []

        def late(self, *request):
            kept.append(ask(self, *request))
            return kept[-2] if len(kept) == 2 else kept[-1]

        monkeypatch.setattr(calls.Line, "ask", late)
        first = trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0))
        assert first.outcome is Outcome.STORED
        again = trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0))
        assert again.outcome is Outcome.DUPLICATE and len(kept) == 3 and "came in damaged" in caplog.text
        trainer.beat(trainer._name, [])
        assert served.client().status()["members"]["trainer"][trainer._name]["numbers"] == {"damaged_answers": 1}


def test_a_trainers_first_call_that_comes_again_makes_no_second_trainer(tmp_path, monkeypatch):
    """A proxy that sends twice what was answered once, or late what was sent anew."""
    with Served(tmp_path, PLAN) as served:
        ask, joins = calls.Line.ask, []

        def twice(self, *request):
            reply = ask(self, *request)
            if request[1] == "/v1/join":
                joins.append(request)
                ask(self, *request)
            return reply

        monkeypatch.setattr(calls.Line, "ask", twice)
        first = served.trainer()
        assert first.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome is Outcome.STORED
        second = served.trainer()
        line = calls.Line("127.0.0.1", served.port)
        assert ask(line, *joins[0]).status == 409  # of the one before
        assert second.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome is Outcome.DUPLICATE
        assert list(served.client().status()["members"]["trainer"]) == [second._name]


def test_what_is_no_coordinator_of_this_code_is_said(tmp_path, monkeypatch):
    ask = calls.Line.ask

    def without(self, *request):
        reply = ask(self, *request)
        return reply._replace(headers={})

    with Served(tmp_path, PLAN) as served, monkeypatch.context() as patched:
        patched.setattr(calls.Line, "ask", without)
        with pytest.raises(calls.CoordinatorGoneError, match=r"is damaged, of other code, or of a proxy"):
            served.client(patience_s=0.1).status()
