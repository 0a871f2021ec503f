"""What the trainer's own engine gets while the trainer waits, and that nothing of it runs when the trainer goes on."""

import contextlib

import pytest

from jaxagent.fleet import vitals
from jaxagent.fleet import worker as worker_module
from jaxagent.fleet.admission import Coordinator
from jaxagent.fleet.manifest import WeightsError
from jaxagent.fleet.members import UNTIL, Members, RefusedError
from jaxagent.fleet.plan import Plan
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.wire import WIRE
from jaxagent.fleet.worker import EngineWorker
from jaxagent.runs.fleet import lend, source
from jaxagent.runs.fleet.lend import GIVEN_BACK, Lent, OwnPlayer
from tests.fleet.served import FACTS, Served, tasks_of
from tests.fleet.test_admission import taken
from tests.fleet.test_coordinator_calls import play
from tests.fleet.test_engine_worker import FakePlayer, Hub, plan, until
from tests.fleet.test_trainer_seams import CFG
from tests.fleet.test_trainer_seams import Coordinator as Link


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(worker_module, "BEATS_PER_LEASE", 200)
    monkeypatch.setattr(lend, "GRACE_S", 0.05)
    for name, value in {"LONG_POLL_S": 0.05, "LOOK_S": 0.02}.items():
        monkeypatch.setattr(worker_module, name, value)


# ---------------------------------------------------------------- what it gets


@pytest.mark.parametrize("rule", ["pinned", "in_flight"])
def test_it_gets_episodes_of_the_step_that_is_waited_for_and_of_none_after_it(rule):
    coordinator = Coordinator(Plan(6, 2, 1, staleness=2, rule=rule), "v0")
    own, _ = coordinator.join(0.0, (), until=0)
    works = taken(coordinator, own)
    assert [work.episode.group.step for work in works] == [0, 0]
    assert taken(coordinator, own, holding=[work.lease for work in works]) == []
    engine, _ = coordinator.join(0.0)
    assert {work.episode.group.step for work in taken(coordinator, engine)} == ({1} if rule == "pinned" else {1, 2})
    coordinator.leave(own)
    own, _ = coordinator.join(0.0, (), until=5)  # a trainer that waits later
    assert {work.episode.group.step for work in taken(coordinator, own)} == {0}, "the oldest first"


def test_it_has_no_share_of_the_engines_and_takes_none_from_a_step():
    """Two engines of a run with S = 1 play two steps, whatever the trainer's own does beside them."""
    coordinator = Coordinator(Plan(6, 4, 1, staleness=1), "v0")
    own, _ = coordinator.join(0.0, (), until=0)
    engines = [coordinator.join(0.0)[0] for _ in range(2)]
    works = [coordinator.take(0.0, name, 9, []) for name in engines]  # with room for more
    assert [work.episode.group.step for (work,) in works] == [0, 1]
    assert [work.episode.group.step for work in taken(coordinator, own)] == [0, 0, 0], "though an engine plays it"
    coordinator = Coordinator(Plan(6, 4, 1, staleness=1), "v0")
    own, _ = coordinator.join(0.0, (), until=0)
    assert len(taken(coordinator, own, 1)) == 1
    (work,) = coordinator.take(0.0, coordinator.join(0.0)[0], 1, [])
    assert work.episode.group.step == 0, "a step that only the trainer's own plays has no engine"


def test_an_empty_one_gets_nothing_of_a_later_step():
    coordinator = Coordinator(Plan(6, 2, 1, staleness=1), "v0")
    assert len(taken(coordinator, coordinator.join(0.0)[0])) == 2
    assert coordinator.take(0.0, coordinator.join(0.0, (), until=0)[0], 9, []) == []
    assert len(coordinator.take(0.0, coordinator.join(0.0)[0], 9, [])) == 1


def test_the_coordinator_learns_it_when_it_joins(tmp_path):
    with Served(tmp_path, Plan(6, 2, 1, staleness=1)) as served:
        client = served.both()
        client.publish(0, "w0", "lineage", tasks_of(served.plan, 0))
        name = client.join("engine", FACTS | {UNTIL: 0}).name
        assert [job.work.episode.group.step for job in play(client, name)] == [0, 0]


def test_engines_are_not_compared_with_the_mesh_of_the_trainers_own():
    members = Members("run", "c", strict=True)
    facts = {"config": "c", "mesh": {"data": 8}}
    members.add("t", "trainer", facts, 0.0)
    members.add("0-1", "engine", facts | {UNTIL: 0}, 0.0)
    one = facts | {"mesh": {"data": 1}}
    members.check("engine", one, "", WIRE)
    members.add("0-2", "engine", one, 0.0)
    members.check("engine", facts | {UNTIL: 1}, "", WIRE)
    with pytest.raises(RefusedError, match="mesh is"):
        members.check("engine", facts, "", WIRE)


# ---------------------------------------------------------------- taking back


class OwnHub(Hub):
    """Knows what it is told when a worker joins."""

    def join(self, role, facts, holding):
        joined = super().join(role, facts, holding)
        with self.call() as coordinator:
            coordinator._leases.workers[joined.name].until = facts[UNTIL]
        return joined


class Inner(FakePlayer):
    """Can be stopped, as `EnginePlayer`."""

    def stop(self, timeout_s):
        for lease in list(self.running):
            self.cancel(lease)
        until(lambda: not self.running)


@contextlib.contextmanager
def lent_to(hub, inner, step=0):
    player = OwnPlayer(inner)
    yield Lent(EngineWorker(hub, player, {UNTIL: step}, hub.plan.rule, 60.0), player), player
    inner.go.set()


def test_the_batch_is_there_when_nothing_is_in_hand():
    hub = OwnHub(plan(steps=3, staleness=1))
    for step in range(3):
        inner = Inner(hub, places=100)
        with lent_to(hub, inner, step) as (own, _):
            until(lambda step=step: own.goes_on() and hub.batch(step) is not None)
            numbers = own.take_back()
        assert {which.group.step for which in inner.begun} == {step}
        assert numbers["fleet/lent_episodes"] == 6 and numbers[GIVEN_BACK] == 0
        hub.train(step + 1)
    assert len(hub.left) == 3 and 0 < numbers["fleet/lent_idle_s"] <= numbers["fleet/lent_s"]


def test_what_runs_all_the_same_is_given_back_and_nothing_begins_afterwards():
    hub = OwnHub(plan(steps=1))
    inner = Inner(hub, places=4)
    inner.go.clear()
    with lent_to(hub, inner) as (own, player):
        until(lambda: len(inner.running) == 4)
        assert own.goes_on() and not own.goes_on(), "no progress, with episodes in hand"
        numbers = own.take_back()
        assert not inner.running and numbers[GIVEN_BACK] == 4 and numbers["fleet/lent_episodes"] == 0
        assert own.goes_on(), "it has ended: there is nothing that could hang"
        ended = []
        job = type("Job", (), {"work": type("Work", (), {"version": 7})})
        player.play(job, lambda *result: ended.append(result))
        assert ended == [(None, 7)] and len(inner.begun) == 4
        with pytest.raises(WeightsError):
            player.hold(1)
    with hub.call() as coordinator:
        assert coordinator.waiting() and not coordinator.holding()


def test_what_the_loop_dies_of_ends_the_wait():
    hub = OwnHub(plan(steps=1))
    inner = Inner(hub)
    inner.refuse = [ValueError("a defect")]
    with lent_to(hub, inner) as (own, _):
        until(lambda: own._failure is not None)
        with pytest.raises(ValueError, match="a defect"):
            own.goes_on()


# ---------------------------------------------------------------- the wait


class Lender:
    """Writes down."""

    budget_s = 77.0

    def __init__(self, signs):
        self.said, self.signs = [], iter(signs)

    @contextlib.contextmanager
    def lent(self, step):
        self.said.append(f"lends {step}")
        try:
            yield self
        finally:
            self.said.append("takes back")

    def goes_on(self):
        return next(self.signs)

    def numbers(self):
        return {"fleet/lent_s": 1.5}


def test_the_trainer_lends_only_where_it_waits_and_shows_no_sign_for_what_hangs(tmp_path):
    link, ticks = Link(tmp_path, waits=3), []
    link.store()
    link.batch = lambda step, wait_s=0.0, batch=link.batch: batch(step, wait_s)
    signs = Vitals(tmp_path / "signs.json")
    signs.tick = lambda: ticks.append(vitals.read(tmp_path / "signs.json").budget_s)
    lender = Lender([True, False])
    batches = source.Batches(CFG.rl, CFG.fleet, link, tmp_path / "ledger", signs, print, lender=lender)
    assert batches.batch(3).metrics["fleet/lent_s"] == 1.5
    assert lender.said == ["lends 3", "takes back"] and ticks == [77.0]
    assert batches.batch(3).metrics["fleet/lent_s"] == 1.5
    assert len(lender.said) == 2, "the batch was there"


def test_a_run_that_is_told_to_end_while_it_waits_takes_its_devices_back(tmp_path):
    lender = Lender([True])
    link = Link(tmp_path, waits=9)
    link.batch = lambda step, wait_s=0.0: None

    def look(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.Batches(CFG.rl, CFG.fleet, link, tmp_path, Vitals(), print, look, lender).batch(3)
    assert lender.said == ["lends 3", "takes back"]
