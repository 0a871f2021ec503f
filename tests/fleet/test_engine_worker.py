"""The loop of an engine process around players that play nothing, with the real state machine of the coordinator."""

import contextlib
import threading
import time

import pytest

from jaxagent.data.codec import Packed
from jaxagent.fleet import worker as worker_module
from jaxagent.fleet.admission import Answer, Coordinator, Outcome
from jaxagent.fleet.manifest import WeightsError
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.wire import Beat, Job, Joined, TaskRef
from jaxagent.fleet.worker import EngineWorker
from tests.fleet.served import until
from tests.fleet.world import Oracle, digest, episode

LONG_S = 60.0  # longer than any of these takes, on a busy machine


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(worker_module, "BEATS_PER_LEASE", 200)
    for name, value in {"LONG_POLL_S": 0.05, "LOOK_S": 0.02, "LEAST_PAUSE_S": 0.01, "MOST_PAUSE_S": 0.02}.items():
        monkeypatch.setattr(worker_module, name, value)


class Hub:
    """The coordinator without HTTP, and a trainer. Also the link of every worker."""

    def __init__(self, plan, events=()):
        self.plan, self.lock = plan, threading.RLock()
        self.coordinator, self.past, self.epoch = Coordinator(plan, "initial"), [], 0
        self.versions, self.trained = ["initial"], []
        self.there = threading.Event()  # else every call waits, as a client's does
        self.there.set()
        self.putting = threading.Event()  # likewise, of `put`
        self.putting.set()
        self.ended, self.drains, self.left, self.facts = "", False, [], []
        self.puts: list[tuple[EpisodeId, int]] = []
        self.beats, self.asked = 0, []
        self.stood = ("", 0.0)  # phase of the newest beat, and seconds since its last sign of progress

    @contextlib.contextmanager
    def call(self):
        assert self.there.wait(LONG_S)
        with self.lock:
            yield self.coordinator
            self.past += self.coordinator.take_events()

    def restart(self):
        with self.lock:
            self.epoch += 1
            self.coordinator = Coordinator(self.plan, "initial", self.epoch, self.past)

    def join(self, role, facts, holding):
        with self.call() as coordinator:
            self.facts.append(facts)
            name, cancel = coordinator.join(time.monotonic(), holding)
            newest = coordinator.record.published
            return Joined(name, self.epoch, "run", self.plan.lease_s, newest, cancel, self.ended)

    def beat(self, name, holding, phase, phase_s, numbers):
        with self.call() as coordinator:
            cancel = coordinator.beat(time.monotonic(), name, holding)
            self.beats += 1
            self.stood = (phase, phase_s)
            return Beat(coordinator.record.published, cancel, self.ended, self.drains, coordinator.soon(name))

    def take(self, name, places, holding, wait_s):
        deadline = time.monotonic() + wait_s
        self.asked.append(places)
        while True:
            with self.call() as coordinator:
                works = coordinator.take(time.monotonic(), name, places, holding)
            if works or time.monotonic() > deadline:
                return [Job(work, TaskRef(7, "task")) for work in works]
            time.sleep(0.002)

    def put(self, work, version, packed):
        assert self.putting.wait(LONG_S)
        with self.call() as coordinator:
            self.puts.append((work.episode, version))
            answer = coordinator.put(work.episode, work.lease, version, packed.digest)
            if answer.complete:
                coordinator.close(work.episode.group, True)
            return answer

    def leave(self, name):
        with self.call() as coordinator:
            self.left.append(name)
            coordinator.leave(name)

    def train(self, steps=None):
        """Trains what comes, until all steps are done."""
        deadline = time.monotonic() + LONG_S
        for step in range(len(self.trained), steps or self.plan.steps):
            while (batch := self.batch(step)) is None:
                assert time.monotonic() < deadline, f"step {step} has no batch"
                time.sleep(0.002)
            learnt = [result.digest for which, result in batch.results.items() if which.group in set(batch.groups)]
            self.trained.append(batch)
            self.versions.append(digest(self.versions[-1], learnt))
            with self.call() as coordinator:
                assert coordinator.publish(step + 1, self.versions[-1]).outcome is Outcome.STORED

    def batch(self, step):
        with self.call() as coordinator:
            return coordinator.batch(step)


class FakePlayer:
    """Plays by waiting; an episode's digest tells under which weights."""

    def __init__(self, hub, places=3, play_s=0.003):
        self.hub, self._places, self.play_s = hub, places, play_s
        self.version, self.holds, self.running = -1, [], {}
        self.expected: list[int] = []
        self.refuse: list[Exception] = []
        self.go, self.lock = threading.Event(), threading.Lock()  # `go`: episodes may end
        self.go.set()
        self.most = 0
        self.begun: list[EpisodeId] = []
        self.cancelled: list[str] = []

    def hold(self, version):
        if self.refuse:
            raise self.refuse.pop(0)
        if self.hub.plan.rule == "pinned":
            assert not self.running, "a swap while episodes run"
        self.version = version
        self.holds.append(version)

    def expect(self, version):
        if version not in self.expected:
            self.expected.append(version)

    def play(self, job, done):
        stop = threading.Event()
        with self.lock:
            self.running[job.work.lease] = stop
            self.most = max(self.most, len(self.running))
            self.begun.append(job.work.episode)
        pinned = self.hub.plan.rule == "pinned"
        assert self.version == job.work.version if pinned else self.version >= job.work.version
        threading.Thread(target=self._play, args=(job, done, stop, self.version), daemon=True).start()

    def _play(self, job, done, stop, version):
        ended = False
        while not ended and not stop.wait(self.play_s):
            ended = self.go.is_set()
        with self.lock:
            del self.running[job.work.lease]
        text = episode(job.work.episode, self.hub.versions[version], "" if self.hub.plan.rule == "pinned" else "x")
        done(Packed(text, b"") if ended else None, version)

    def cancel(self, lease):
        self.cancelled.append(lease)
        with self.lock:
            if lease in self.running:
                self.running[lease].set()

    def places(self):
        return self._places

    def numbers(self):
        return {"progress": float(len(self.begun))}


@contextlib.contextmanager
def working(hub, *players, grace_s=0.0):
    """Workers around the players; ended at the end, each with its reason."""
    workers = [EngineWorker(hub, player, {}, hub.plan.rule, 60.0) for player in players]
    reasons = [None] * len(workers)

    def run(i):
        try:
            reasons[i] = workers[i].run()
        except Exception as failure:
            reasons[i] = failure

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(workers))]
    for thread in threads:
        thread.start()
    try:
        yield workers, reasons
    finally:
        for player in players:
            player.go.set()
        for one in workers:
            one.end("the test is over", grace_s)
        for thread in threads:
            thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def stuck(places=3, **settings):
    """A worker whose episodes do not end before `go` is set."""
    hub = Hub(plan(**settings))
    player = FakePlayer(hub, places)
    player.go.clear()
    with working(hub, player) as ((worker,), reasons):
        yield hub, player, worker, reasons


def plan(**more):
    return Plan(**{"steps": 4, "groups_per_step": 2, "attempts": 3, "lease_s": 5.0, **more})


@pytest.mark.parametrize(("players", "staleness"), [(1, 0), (2, 1), (3, 2)])
def test_pinned_runs_come_to_the_weights_of_a_synchronous_loop(players, staleness):
    hub = Hub(plan(steps=6, staleness=staleness))
    everybody = [FakePlayer(hub, places=2 + i) for i in range(players)]
    with working(hub, *everybody):
        hub.train()
    assert hub.versions == Oracle(hub.plan, lambda group: True).versions
    for player in everybody:
        assert player.most <= player.places()
        assert len(player.holds) == len({*player.holds}), "a version was taken twice"
    assert set.union(*({*player.holds} for player in everybody)) <= set(range(6 - staleness))


def test_in_flight_takes_the_newest_version_while_episodes_go_on():
    hub = Hub(plan(steps=3, staleness=1, rule="in_flight", groups_per_step=1))
    player = FakePlayer(hub, places=6)
    with working(hub, player):
        hub.train(1)
        player.go.clear()
        hub_begun = len(player.begun)
        until(lambda: player.running and 1 in player.holds)
        assert player.running, "the swap waited for them"
        player.go.set()
        hub.train()
    assert player.holds == sorted(player.holds) and hub_begun <= len(player.begun)


def test_it_tells_all_its_free_places_so_that_nobody_helps_it_who_need_not():
    hub = Hub(plan(steps=2, staleness=1))
    one, other = FakePlayer(hub, places=8), FakePlayer(hub, places=8)
    one.go.clear()
    other.go.clear()
    with working(hub, one, other):
        until(lambda: len(one.running) == len(other.running) == 6)
        assert hub.asked[0] == 8
        assert {which.group.step for which in one.begun} != {which.group.step for which in other.begun}
        assert all(len({which.group.step for which in player.begun}) == 1 for player in (one, other))
        one.go.set()
        other.go.set()
        hub.train()


def test_an_engine_is_told_while_it_plays_which_version_comes_next():
    hub = Hub(plan(steps=3, staleness=1, groups_per_step=1))
    player = FakePlayer(hub, places=6)
    with working(hub, player):
        hub.train(1)
        player.go.clear()
        until(lambda: player.running and player.version == 0)  # it plays step 1, and step 2 waits under version 1
        until(lambda: player.expected == [1])
        assert player.holds == [0]
        player.go.set()
        hub.train()
    assert player.holds == [0, 1]


def test_a_worker_that_was_silent_joins_again_and_goes_on_with_what_it_plays():
    with stuck(places=6, steps=1) as (hub, player, worker, _):
        until(lambda: len(player.running) == 6)
        with hub.lock:
            for name in list(hub.coordinator._leases.workers):
                hub.coordinator.leave(name)  # as if its lease had run out
        until(lambda: worker.numbers()["joins"] == 2)
        beats = hub.beats
        until(lambda: hub.beats > beats + 2)  # it would have learnt what to give up
        player.go.set()
        hub.train()
    assert len(player.begun) == 6 and not player.cancelled


def test_results_wait_in_memory_while_the_coordinator_is_away_and_are_sent_to_the_next_one():
    with stuck(places=4, steps=2, staleness=1) as (hub, player, worker, _):
        until(lambda: len(player.running) == 4)
        hub.there.clear()
        player.go.set()
        until(lambda: worker.numbers()["unsent"] == 4)
        hub.restart()
        hub.there.set()
        hub.train()
    assert hub.versions == Oracle(hub.plan, lambda group: True).versions
    assert len(player.begun) == len({*player.begun}) == 12, "an episode was played again"


def test_what_cannot_be_sent_is_bounded():
    hub = Hub(plan(steps=1, groups_per_step=20))
    player = FakePlayer(hub, places=4)
    hub.putting.clear()
    with working(hub, player) as ((worker,), _):
        until(lambda: worker.numbers()["unsent"] == 8)
        time.sleep(0.05)
        assert worker.numbers()["unsent"] == 8 and len(player.begun) == 8, "twice its places"
        hub.putting.set()
        hub.train()


def test_an_episode_that_somebody_else_handed_in_is_given_up():
    with stuck(steps=1, groups_per_step=1) as (hub, player, worker, _):
        until(lambda: len(player.running) == 3)
        which = EpisodeId(GroupId(0, 0, 0), 1)
        with hub.call() as coordinator:
            coordinator.put(which, "0-99", 0, episode(which, "initial"))
        until(lambda: worker.numbers()["cancelled"] == 1)
        assert len(player.running) == 2 and len(player.cancelled) == 1
        player.go.set()
        hub.train()


def test_a_version_that_cannot_be_had_is_not_replaced_and_its_episodes_go_back():
    hub = Hub(plan(steps=2, groups_per_step=1))
    player = FakePlayer(hub)
    player.refuse = [WeightsError("a byte differs"), OSError(28, "No space left on device")]
    with working(hub, player) as ((worker,), _):
        hub.train()
        numbers = worker.numbers()
    assert numbers["weights_failed"] == 2 and numbers["given_back"] == 6 and player.holds == [0, 1]
    assert hub.versions == Oracle(hub.plan, lambda group: True).versions


def test_an_engine_whose_episodes_are_stuck_makes_no_progress_by_asking_for_more():
    with stuck(places=6, steps=1, groups_per_step=1) as (hub, player, *_):
        until(lambda: len(player.running) == 3)
        until(lambda: hub.stood[0] == "playing" and hub.stood[1] > 5 * worker_module.LONG_POLL_S)
        player.go.set()
        hub.train()
        until(lambda: hub.stood[0] == "asking for episodes")
        beats = hub.beats
        until(lambda: hub.beats > beats + 20)
        assert hub.stood[1] < LONG_S / 10, "an engine that has nothing to play does not hang"


def test_told_to_end_it_begins_nothing_hands_in_what_is_ready_and_gives_back_the_rest():
    hub = Hub(plan(steps=1))
    player, other = FakePlayer(hub, places=5), FakePlayer(hub, places=1)  # six between them
    player.go.clear()
    other.go.clear()
    with working(hub, player, other) as ((worker, _), reasons):
        until(lambda: len(player.running) == 5 and len(other.running) == 1)
        hub.putting.clear()
        worker.end("SIGTERM", 0.1)
        until(lambda: reasons[0] is not None)
        assert reasons[0] == "SIGTERM" and len(player.cancelled) == 5 and len(hub.left) == 1
        begun = len(player.begun)
        hub.putting.set()
        other.go.set()
        hub.train()
        assert len(player.begun) == begun


def test_an_engine_that_is_drained_finishes_what_it_plays():
    with stuck(steps=1, groups_per_step=1) as (hub, player, _, reasons):
        until(lambda: len(player.running) == 3)
        hub.drains = True
        time.sleep(0.3)
        assert reasons[0] is None and not player.cancelled
        player.go.set()
        until(lambda: reasons[0] is not None)
    assert len(hub.puts) == 3 and reasons[0] == "the coordinator wants fewer engines" and len(hub.left) == 1


def test_it_ends_with_the_run_and_with_a_broken_player():
    hub = Hub(plan(steps=1))
    with working(hub, FakePlayer(hub)) as (_, reasons):
        hub.train()
        hub.ended = "the trainer has ended"
        until(lambda: reasons[0] is not None)
    assert reasons == ["the run has ended: the trainer has ended"]
    player = FakePlayer(hub := Hub(plan(steps=1)))
    player.refuse = [RuntimeError("no such device")]
    with working(hub, player) as (_, reasons):
        until(lambda: reasons[0] is not None)
    assert isinstance(reasons[0], RuntimeError)


def test_a_refused_result_is_dropped_and_counted():
    hub = Hub(plan(steps=1, groups_per_step=1))
    player, real = FakePlayer(hub), hub.put
    answers = [Answer(Outcome.REFUSED, "it has version 9")]
    hub.put = lambda *args: answers.pop() if answers else real(*args)
    with working(hub, player) as ((worker,), _):
        hub.train()  # the lease that came to nothing is lost, and the episode played again
        assert worker.numbers()["refused"] == 1 and len(player.begun) == 4


def test_who_is_refused_all_the_time_ends(monkeypatch):
    monkeypatch.setattr(worker_module, "MOST_REFUSED", 3)
    monkeypatch.setattr(worker_module, "SENDERS", 1)  # so that answers come in their order
    for outcomes, ends in (
        ((Outcome.REFUSED, Outcome.CONFLICT, Outcome.REFUSED), True),
        ((Outcome.REFUSED, Outcome.REFUSED, None, Outcome.CONFLICT, Outcome.REFUSED), False),
    ):
        hub = Hub(plan(steps=3, groups_per_step=1))
        real, answers, lock = hub.put, list(outcomes), threading.Lock()

        def put(*args, real=real, answers=answers, lock=lock):
            with lock:
                outcome = answers.pop(0) if answers else None
                return real(*args) if outcome is None else Answer(outcome, "it has version 9")

        hub.put = put
        with working(hub, FakePlayer(hub)) as (_, reasons):
            if ends:
                until(lambda reasons=reasons: reasons[0] is not None)
                assert isinstance(reasons[0], RuntimeError)
                assert "none of the last 3 episodes" in str(reasons[0]) and "version 9" in str(reasons[0])
            else:
                hub.train()
                assert reasons[0] is None or isinstance(reasons[0], str)


def test_where_it_stands_is_told_with_the_time_since_the_last_progress():
    class Watch:
        phases, ticks = [], 0

        def phase(self, name, budget_s, done=None):
            self.phases.append((name, budget_s))

        def tick(self):
            self.ticks += 1

    hub, watch = Hub(plan(steps=1)), Watch()
    player = FakePlayer(hub, places=6)
    player.go.clear()
    one = EngineWorker(hub, player, {}, "pinned", 60.0, watch)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    until(lambda: len(player.running) == 6)
    until(lambda: one._stands.now()[0] == "playing")
    until(lambda: one._stands.now()[1] >= 0.04)  # nothing goes on
    ticks = watch.ticks
    player.go.set()
    hub.train()
    assert watch.ticks > ticks
    one.end("over", 0.0)
    thread.join(LONG_S)
    names = [name for name, _ in watch.phases]
    assert {"is joining", "is taking weights", "is playing", "is ending"} <= {*names}
    assert all(budget == 60.0 for _, budget in watch.phases)
