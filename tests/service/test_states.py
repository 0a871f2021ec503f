"""The life of sessions: hand numbers, and random histories in which each ends exactly once and none is lost."""

import collections
import contextlib
import json
import math
import pathlib
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxagent.fleet.wire import RefusedCallError
from jaxagent.service import groups, leases, states, views
from jaxagent.service.episodes import episode_and_summary, to_bytes
from jaxagent.service.request import TaskRequest
from jaxagent.service.states import HELD, RolloutSession, ServiceRules, State
from jaxagent.service.store import open_database, sessions_of
from jaxagent.types import StopReason, Task
from tests.service.cluster import episode


@pytest.mark.parametrize(
    ("total", "fraction", "needed", "early"),
    [
        (8, 0.0, 0, 0),  # every group is accepted, and waits for all of its sessions
        (8, 0.25, 2, 4),  # ceil(2) + 2
        (8, 0.6, 5, 7),  # ceil(4.8) + 2
        (8, 0.9, 8, 8),  # ceil(7.2) + 2 is beyond the group
        (10, 0.7, 7, 9),  # 10 * 0.7 is 7.000000000000001
        (8, 1.0, 8, 0),
        (1, 0.5, 1, 1),
    ],
)
def test_how_many_usable_sessions_a_group_needs(total, fraction, needed, early):
    assert (states.needed(total, fraction), states.early_stop(total, fraction)) == (needed, early)


def test_a_session_goes_forward_and_its_times_begin_where_they_should():
    session = states.take(RolloutSession("t", 0), "n", "p", 100.0, 30.0, 600.0)
    assert (session.state, session.attempt, session.lease, session.deadline) == (State.INITIALIZING, 1, 130.0, 700.0)
    session = states.move(session, State.RUNNING, 110.0, 30.0, 60.0)
    assert (session.run_deadline, session.lease) == (170.0, 140.0)  # agent_timeout counts RUNNING alone
    again = states.move(session, State.RUNNING, 115.0, 30.0, 60.0)
    assert (again.run_deadline, again.lease) == (170.0, 145.0)  # to say it again gives no more time
    session = states.move(session, State.READY, 120.0, 30.0, 60.0)
    assert (session.state, session.run_deadline, session.lease) == (State.RUNNING, 170.0, 150.0)  # never back
    session = states.move(session, State.EVALUATING, 130.0, 30.0, 60.0)
    assert (session.state, session.run_deadline) == (State.EVALUATING, 0.0)
    again = states.lose(session, "gone", 2, 140.0)
    assert (again.state, again.node, again.losses, again.attempt) == (State.REGISTERED, "", 1, 1)
    again = states.lose(states.take(again, "n", "p", 150.0, 30.0, 600.0), "gone", 2, 160.0)
    assert (again.state, again.attempt) == (State.ERROR, 2) and "lost 2 times" in again.reason
    back = states.give_back(states.take(RolloutSession("t", 0), "n", "p", 0.0, 1.0, 1.0))
    assert (back.state, back.losses) == (State.REGISTERED, 0)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (StopReason.ANSWER, State.COMPLETED),
        (StopReason.TURN_LIMIT, State.COMPLETED),
        (StopReason.TIME_LIMIT, State.COMPLETED),  # the agent's own slowness: kept, at reward 0
        (StopReason.TIMEOUT, State.TIMEOUT),
        (StopReason.ENV_ERROR, State.ERROR),
        (StopReason.ENGINE_ERROR, State.ERROR),
        (StopReason.CANCELLED, State.ERROR),
    ],
)
def test_how_an_episode_ends_its_session(reason, state):
    body, digest = to_bytes(episode(Task("t", "p", ()), 0, 0.0, reason))
    _, result = episode_and_summary(body, digest)
    session = states.finish(states.take(RolloutSession("t", 0), "n", "p", 0.0, 1.0, 1.0), 1, result, 5.0)
    assert session.state is state and session.usable == (state is State.COMPLETED)
    assert (session.reward is None) == (state is not State.COMPLETED) == bool(session.reason)


NODES = ("a", "b", "c")
RULES = ServiceRules(lease_s=10.0, max_losses=3, keep_s=math.inf)


class Histories(RuleBasedStateMachine):
    """Anything that clients, nodes, the network and the clock may do, in any order, on a real store.

    `self.given` has every attempt that a node was ever told of: even a node that was thought lost may send its episode.
    """

    @initialize()
    def begin(self):
        self.folder = contextlib.ExitStack()
        self.now, self.count = 1000.0, 0
        self.path = pathlib.Path(self.folder.enter_context(tempfile.TemporaryDirectory())) / "store"
        self.open()
        self.processes = dict.fromkeys(NODES, "")
        self.given: dict[tuple, dict] = {}
        self.ends: dict[tuple, str] = {}
        self.registered = 0

    def open(self):
        self.db = open_database(self.path)
        self.db.execute("PRAGMA synchronous=OFF")  # no machine fails here, and thousands of commits are made

    def do(self, function, *args):
        self.db.execute("BEGIN")
        try:
            return function(self.db, self.now, *args)
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        finally:
            if self.db.in_transaction:
                self.db.execute("COMMIT")

    @rule(n=st.integers(1, 5), fraction=st.sampled_from([0.0, 0.25, 0.5, 1.0]), priority=st.integers(0, 2))
    def submit(self, n, fraction, priority):
        self.count += 1
        row = {
            "task_id": f"t{self.count}",
            "instruction": "do it",
            "num_samples": n,
            "min_complete_accept_fraction": fraction,
            "dispatch_priority": priority,
            "timeout_seconds": 60,
        }
        for _ in range(2):  # the second time it is the same submission
            assert self.do(groups.submit, RULES, TaskRequest.of(row))["status"] == "running"
        self.registered += n

    @rule(node=st.sampled_from(NODES))
    def starts(self, node):
        self.processes[node] = f"{node}{self.now}-{len(self.given)}"
        places = {"init": 3, "run": 3, "postrun": 3}
        self.do(leases.register, RULES, node, self.processes[node], "", places)

    @rule(node=st.sampled_from(NODES), free=st.integers(0, 3), heard=st.booleans())
    def takes(self, node, free, heard):
        with contextlib.suppress(RefusedCallError):
            work = self.do(leases.take, RULES, node, self.processes[node], list(self.given), {"init": free})
            if heard:  # else the answer was lost on the way
                self.given |= {(w["task_id"], w["sample"], w["attempt"]): w for w in work}

    @rule(node=st.sampled_from(NODES), state=st.sampled_from(HELD), data=st.data())
    def beats(self, node, state, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.given)), max_size=4)) if self.given else []
        with contextlib.suppress(RefusedCallError):
            self.do(leases.beat, RULES, node, self.processes[node], [(key, state) for key in keys], {})

    @rule(
        data=st.data(),
        reason=st.sampled_from([StopReason.ANSWER, StopReason.TIME_LIMIT, StopReason.TIMEOUT, StopReason.ENV_ERROR]),
        actions=st.sampled_from([0, 5]),
        times=st.integers(1, 2),
    )
    def sends(self, data, reason, actions, times):
        if not self.given:
            return
        key = data.draw(st.sampled_from(sorted(self.given)))
        work = self.given[key]
        task = Task(work["task"]["id"], work["task"]["prompt"], ())
        body, digest = to_bytes(episode(task, work["number"], 1.0, reason, actions))
        sent = episode_and_summary(body, digest)
        for time in range(times):
            try:
                stored = self.do(leases.finish, RULES, key, *sent, body)
                assert not (stored and time), "the same episode was stored twice"
            except RefusedCallError:  # an earlier one of the same attempt, with other content
                assert key[:2] in self.ends or self.db.execute("SELECT 1 FROM episodes").fetchone()

    @rule(node=st.sampled_from(NODES), data=st.data())
    def gives_back(self, node, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.given)), max_size=3)) if self.given else []
        self.do(leases.give_back, self.processes[node], keys)

    @rule(node=st.sampled_from(NODES), leaves=st.booleans())
    def drains_or_leaves(self, node, leaves):
        with contextlib.suppress(RefusedCallError):
            if leaves:
                self.do(leases.leave, node, self.processes[node])
            else:
                self.do(leases.drain, node)

    @rule(data=st.data())
    def cancels(self, data):
        if self.count:
            self.do(groups.cancel, RULES, f"t{data.draw(st.integers(1, self.count))}", False)

    @rule(seconds=st.sampled_from([1.0, 11.0, 100.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.do(leases.sweep, RULES)

    @rule()
    def the_server_is_restarted(self):
        self.db.close()
        self.open()
        self.do(leases.resumed, RULES)

    def sessions(self):
        tasks = [f"t{i + 1}" for i in range(self.count)]
        return {(s.task_id, s.sample): s for task_id in tasks for s in sessions_of(self.db, task_id)}

    @invariant()
    def none_is_lost_and_an_end_is_final(self):
        if not hasattr(self, "db"):
            return
        sessions = self.sessions()
        assert len(sessions) == self.registered
        for key, session in sessions.items():
            if key in self.ends:
                assert session.state == self.ends[key], "a session that had ended changed"
            if session.state.is_final:
                self.ends[key] = session.state
            assert (session.state in HELD) == bool(session.lease and not session.state.is_final)
            stored = self.db.execute("SELECT 1 FROM episodes WHERE task_id = ? AND sample = ?", key).fetchone()
            assert bool(stored) == bool(session.digest)
        events = [json.loads(row["data"]) for row in self.db.execute("SELECT data FROM events WHERE kind = 'session'")]
        ends = collections.Counter((e["task_id"], e["sample"]) for e in events if State(e["state"]).is_final)
        assert all(ends[key] == session.state.is_final for key, session in sessions.items())
        tasks = self.db.execute("SELECT * FROM tasks").fetchall()
        for task in tasks:
            group = [s for s in sessions.values() if s.task_id == task["task_id"]]
            over = all(s.state.is_final for s in group)
            assert over == (task["status"] != "running")
            if over and task["reason"] != groups.CANCELLED:
                enough = sum(s.usable for s in group) >= task["needed"]
                assert task["status"] == ("completed" if enough else "failed")

    def teardown(self):
        """One node that works ends everything."""
        if not hasattr(self, "db"):
            return
        self.starts("a")
        for _ in range(200):
            self.given.clear()
            work = self.do(leases.take, RULES, "a", self.processes["a"], [], {"init": 3})
            for w in work:
                body, digest = to_bytes(episode(Task(w["task"]["id"], w["task"]["prompt"], ()), w["number"]))
                self.do(
                    leases.finish,
                    RULES,
                    (w["task_id"], w["sample"], w["attempt"]),
                    *episode_and_summary(body, digest),
                    body,
                )
            if all(session.state.is_final for session in self.sessions().values()):
                break
            self.now += 11.0
            self.do(leases.sweep, RULES)
            self.starts("a")
        assert all(session.state.is_final for session in self.sessions().values())
        self.none_is_lost_and_an_end_is_final()
        assert not views.status(self.db, self.now)["tasks"].get("running")
        self.db.close()
        self.folder.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
