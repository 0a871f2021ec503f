"""Meetings of a trainer's processes: who is missing, who differs, who went another way. Threads are the processes."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest

from jaxagent.config.errors import WaitedInVainError
from jaxagent.learner import peers
from jaxagent.learner.peers import Meetings, PeerError


class Store:
    """The coordination service's store."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            self.values = {k: v for k, v in self.values.items() if not k.startswith(key)}


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(peers, "GRACE_S", 0.2)


def together(*programs):
    """Runs one function of a `Meetings` per process; what each returns or raises."""
    store = Store()
    own = [Meetings(store, i, len(programs)) for i in range(len(programs))]
    with concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
        futures = [pool.submit(program, one) for program, one in zip(programs, own, strict=True)]
        return [future.exception(10) or future.result() for future in futures], store


def test_all_hear_all_in_their_order_and_nothing_piles_up():
    def program(me):
        return [me.meet(f"step {i}", me.index + i, 5) for i in range(20)]

    heard, store = together(program, program, program)
    assert heard == [[[i, i + 1, i + 2] for i in range(20)]] * 3
    assert len(store.values) <= 12  # of the last meetings


def test_who_is_missing_is_named_to_all():
    go = lambda me: me.meet("an update", None, 0.1)  # noqa: E731
    found, _ = together(go, lambda me: None, go)
    for error in (found[0], found[2]):
        assert isinstance(error, PeerError) and "waits for process 1 of 3, not come to 'an update'" in str(error)


def test_a_missing_first_process_is_named():
    found, _ = together(lambda me: None, lambda me: me.meet("an update", None, 0.1))
    assert isinstance(found[1], PeerError) and "Process 0 has not come to 'an update'" in str(found[1])


def test_a_process_at_another_place_is_found():
    found, _ = together(lambda me: me.meet("an update", 0, 5), lambda me: me.meet("a bundle", 0, 5))
    assert all("0 is at 'an update', 1 is at 'a bundle'" in str(error) for error in found)


def test_a_service_that_is_gone_ends_the_waiting():
    class Gone(Store):
        def blocking_key_value_get(self, key, timeout_ms):
            raise RuntimeError("UNAVAILABLE: failed to connect\nmore")

    with pytest.raises(PeerError, match=r"service is gone: UNAVAILABLE: failed to connect$"):
        Meetings(Gone(), 1, 2).meet("an update", 0, 5)


def test_what_the_first_makes_is_everybodys(monkeypatch):
    monkeypatch.setattr(peers, "PIECE", 10)
    made = {"numbers": list(range(30)), "text": "é"}

    def program(me):
        def make():
            assert me.index == 0
            time.sleep(0.05)
            return made

        return [me.share("a decision", make, 5), me.meet("afterwards", None, 5)]

    heard, _ = together(program, program, program)
    assert heard == [[made, [None] * 3]] * 3


def test_a_failure_of_the_first_reaches_the_others():
    def fail():
        raise OSError("disk full")

    found, _ = together(*[lambda me: me.share("playing", fail, 5)] * 2)
    assert isinstance(found[0], OSError)
    assert str(found[1]) == "Process 0 failed at 'playing': OSError: disk full"


def test_the_others_learn_that_the_first_waited_in_vain():
    """So all end as those that are started again."""

    def wait():
        raise WaitedInVainError("Rollouts did not end.")

    found, _ = together(*[lambda me: me.share("playing", wait, 5)] * 3)
    assert all(isinstance(error, WaitedInVainError) for error in found)
    assert str(found[1]) == str(found[2]) == "Process 0 failed at 'playing': WaitedInVainError: Rollouts did not end."


def test_digests_that_differ_name_the_process(monkeypatch):
    store = Store()
    monkeypatch.setattr(peers, "_own", Meetings(store, 0, 2))
    other = threading.Thread(target=lambda: Meetings(store, 1, 2).meet("the plan", "b" * 16, 5))
    other.start()
    with pytest.raises(PeerError, match=r"disagree about the plan: process 0 says a{16}, process 1 says b{16}"):
        peers.agree("the plan", "a" * 16, 5)
    other.join(5)


def test_one_process_meets_nobody():
    assert (peers.count(), peers.index(), peers.is_first()) == (1, 0, True)
    assert peers.meet("alone", 7) == [7] and peers.share("alone", lambda: [1], 1) == [1]
    peers.agree("alone", "x")


def test_a_digest_is_of_shapes_types_and_contents():
    base = np.arange(6, dtype=np.int32)
    assert peers.digest([base]) == peers.digest([base.copy()])
    others = [base[::-1], base.reshape(2, 3), base.astype(np.int64), base + 1]
    assert len({peers.digest([x]) for x in (base, *others)}) == 5
    assert len(peers.digest([base])) == 16


def test_another_threads_meetings_do_not_wait_for_those_of_the_main_one(monkeypatch):
    store = Store()
    monkeypatch.setattr(peers, "_own", Meetings(store, 0, 2))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        publishes = threads.submit(peers.meetings_of("publishes"), "version 3", "a", 5)
        other = threads.submit(Meetings(store, 1, 2, "jaxagent-publishes").meet, "version 3", "b", 5)
        assert publishes.result() == other.result() == ["a", "b"], "before the main threads have met"
        met = threads.submit(Meetings(store, 1, 2).meet, "a step", 1, 5)
        assert peers.meet("a step", 0, 5) == met.result() == [0, 1]
