"""Each call of the coordinator over HTTP, by hand: what it answers, what it refuses, and what it survives."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import http.client
import json
import logging
import pathlib
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import zipfile
import zlib

import pytest

from jaxagent.config import ConfigError
from jaxagent.config.command import bound_socket
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.fleet import api, book, fence, intake, ledger, members, playing, server, vitals, wire
from jaxagent.fleet import client as calls
from jaxagent.fleet.admission import LeasedEpisode, Outcome, UnknownWorkerError
from jaxagent.fleet.client import CallError, Client, CoordinatorGoneError, ReplacedError
from jaxagent.fleet.ledger import Ledger
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.vitals import WEIGHTS
from jaxagent.io import connections
from jaxagent.types import Task
from tests.fleet.served import FACTS, TOKEN, WAIT_S, Served, packed, played, task_of, tasks_of, until

PLAN = Plan(steps=3, groups_per_step=1, attempts=2, staleness=1)
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def served(tmp_path):
    with Served(tmp_path, PLAN) as found:
        yield found


def raw(served, method, path, body=None, headers=None):
    """A request as anybody can send it, who knows how a call is summed."""
    line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    headers = HEADERS if headers is None else headers
    if isinstance(body, (str, bytes)):
        came = wire.sum_of_call(method, path, headers)
        came.update(body.encode() if isinstance(body, str) else body)
        headers = {wire.SUM: came.hexdigest(), **headers}
    with contextlib.closing(line):
        line.request(method, path, body, headers)
        reply = line.getresponse()
        return reply.status, json.loads(reply.read())


def began(served, tasks=None):
    """Version 0 is there, and an engine."""
    client = served.both()
    answer = client.publish(0, "w0", "lineage", tasks_of(served.plan, 0) if tasks is None else tasks)
    assert answer.outcome is Outcome.STORED
    return client, client.join("engine", FACTS).name


def play(client, name, places=100):
    """Takes and hands in whatever there is now."""
    done = []
    while jobs := client.take(name, places, []):
        for job in jobs:
            answer = client.put(job.work, job.work.version, packed(job.work.episode, "w"))
            assert answer.outcome is Outcome.STORED, answer
            done.append(job)
    return done


# -------------------------------------------------------------------- what a run needs


def test_nothing_is_played_before_version_0_and_then_everything_that_it_admits(served):
    client = served.client()
    joined = client.join("engine", FACTS)
    assert joined.newest == -1 and joined.lease_s == PLAN.lease_s and joined.epoch == 1
    assert client.take(joined.name, 4, []) == [] and client.weights(0) is None
    got = []
    waiting = threading.Thread(target=lambda: got.extend(client.take(joined.name, 4, [], wait_s=20)))
    waiting.start()
    trainer = served.client()
    trainer.join("trainer", FACTS | {"source": "http://trainer:1"})
    assert trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome is Outcome.STORED
    waiting.join(20)
    assert [(job.group, job.sample, job.task) for job in got] == [
        (GroupId(0, 0, 0), sample, task_of(0, 0, 0)) for sample in (0, 1)
    ]
    assert client.weights(0) == wire.Sources(0, "w0", "lineage", ("http://trainer:1",))
    served.client().join("trainer", FACTS | {"source": "http://trainer:2", "rank": 1})
    assert client.weights(0) == wire.Sources(0, "w0", "lineage", ("http://trainer:1", "http://trainer:2"), trainers=2)
    leases = [job.work.lease for job in got]
    beat = client.beat(joined.name, [*leases, "1-99"], "plays", 1.5, {"tokens_per_s": 7})
    assert beat == wire.Beat(0, ("1-99",), "", False, soon=0)
    for job in got:
        answer = client.put(job.work, 0, packed(job.work.episode, "w0"))
        assert (answer.outcome, answer.complete) == (Outcome.STORED, job.sample == 1)
    assert client.put(got[0].work, 0, packed(got[0].work.episode, "w0")).outcome is Outcome.DUPLICATE
    batch = trainer.batch(0, wait_s=20)
    assert batch is not None and batch.groups == (GroupId(0, 0, 0),) and batch.ages == {0: 2}
    for which, found in batch.results.items():
        assert trainer.episode(which) == packed(which, "w0") and found.digest == packed(which, "w0").digest
    assert trainer.batch(1) is None
    assert trainer.publish(1, "w1", "lineage", tasks_of(PLAN, 1)).outcome is Outcome.STORED
    assert trainer.keep(1).outcome is Outcome.STORED
    status = client.status()
    assert status["steps"]["newest_version"] == 1 and status["members"]["engine"][joined.name]["phase"] == "plays"
    trainer.end("it is enough")
    assert client.beat(joined.name, []).ended == "it is enough" and client.take(joined.name, 4, []) == []


def test_an_engine_that_drains_gets_nothing_and_one_that_leaves_gives_back(served):
    client, name = began(served)
    jobs = client.take(name, 1, [])
    assert client.drain(name) and not client.drain("1-77")
    assert client.beat(name, [jobs[0].work.lease]).drain
    assert client.take(name, 4, [jobs[0].work.lease]) == []
    other = served.client()
    second = other.join("engine", FACTS).name
    assert {job.group.step for job in other.take(second, 9, [])} == {1}
    assert client.leave(name) and not client.leave(name)
    with pytest.raises(UnknownWorkerError, match="join again"):
        client.beat(name, [])
    assert jobs[0].work.episode in [job.work.episode for job in other.take(second, 9, [])]


def test_an_engine_is_helped_when_it_stands_still_and_not_while_its_weights_come(tmp_path):
    plan, now = dataclasses.replace(PLAN, groups_per_step=2), [0.0]
    with Served(tmp_path, plan, clock=lambda: now[0]) as served:
        client, name = began(served)
        held = [job.work.lease for job in client.take(name, 8, [])]
        other = served.client()
        second = other.join("engine", FACTS).name
        assert {job.group.step for job in play(other, second)} == {1}

        def later(phase_s):
            for _ in range(3):
                now[0] += 5.0
                client.beat(name, held, WEIGHTS, phase_s)
                other.beat(second, [])
            return {job.group for job in other.take(second, 8, [])}

        assert later(phase_s=1.0) == set(), "step 0 has its share"
        assert later(phase_s=plan.lease_s) == {GroupId(0, 0, 1)}


def test_a_join_that_got_no_answer_takes_nothing_from_its_process(served):
    client, name = began(served)
    jobs = client.take(name, 2, [])
    holding = [(job.work.lease, job.work.episode) for job in jobs]
    assert client.join("engine", FACTS, holding).cancel == ()  # under the old name, which it gives up
    stranger = served.client()  # as a process whose first answer was lost: it has no name to give up
    joined = stranger.join("engine", FACTS, holding)
    assert joined.cancel == () and stranger.beat(joined.name, [lease for lease, _ in holding]).cancel == ()


def test_a_second_take_of_one_engine_ends_the_first(served):
    client, twin = served.client(), served.client()
    name = client.join("engine", FACTS).name
    got = []
    waiting = threading.Thread(target=lambda: got.append(client.take(name, 1, [], wait_s=20)))
    waiting.start()
    until(lambda: client.status()["calls"].get("take"))
    assert twin.take(name, 1, []) == []
    waiting.join(20)
    assert got == [[]]


def test_who_is_slow_learns_of_the_newest_version_and_where_it_is(served):
    client, name = began(served)
    other = served.client()
    second = other.join("engine", FACTS | {"source": "http://engine:2"}).name
    trainer = served.client()
    trainer.join("trainer", FACTS | {"source": "http://trainer:1"})
    other.beat(second, [], numbers={"versions": [0], "sending": 3})
    assert client.weights(0).urls == ("http://engine:2", "http://trainer:1")
    assert other.weights(0).urls == ("http://trainer:1",)  # not from itself
    assert client.weights(1) is None and name


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("facts", "role", "word"),
    [
        (FACTS | {"config": "c1"}, "engine", "same config file"),
        (FACTS, "spectator", "neither of trainer, engine"),
    ],
)
def test_a_process_of_another_run_may_not_join(served, facts, role, word):
    with pytest.raises(ConfigError, match=word):
        served.client().join(role, facts)


def test_who_said_that_it_holds_what_has_been_stored_since_need_not_wait_for_more(served):
    """An engine asks while its last result is on its way: when that is stored, it is empty and may get another step."""
    client, name = began(served)
    jobs, held = client.take(name, 99, []), []
    begun = time.monotonic()
    for job in jobs:
        held = [job.work.lease]
        asking = threading.Thread(target=lambda held=held: client.take(name, 99, held, wait_s=20))
        if job is jobs[-1]:
            asking.start()
            time.sleep(0.3)
        client.put(job.work, job.work.version, packed(job.work.episode, "w"))
    asking.join(15)
    assert not asking.is_alive(), "it asks again, with what it holds now"
    assert client.take(name, 99, held, wait_s=20) == []
    assert {job.work.episode.group.step for job in client.take(name, 99, [])} == {1}
    assert time.monotonic() - begun < 20


def test_a_process_with_other_calls_or_of_another_folder_may_not_join(served, monkeypatch):
    client = served.client()
    client.join("engine", FACTS)
    client._run = "another"
    with pytest.raises(ConfigError, match="this coordinator's is"):
        client.status()
    row = {"role": "engine", "facts": FACTS, "holding": [], "wire": wire.WIRE + 1}
    code, told = raw(served, "POST", "/v1/join", json.dumps(row))
    assert code == 409 and "use one code" in told["error"]


def test_exact_and_pinned_runs_refuse_engines_that_would_sample_other_bits(tmp_path):
    with Served(tmp_path, PLAN, exact=True) as served:
        one, other, trainer = served.client(), served.client(), served.client()
        name = one.join("engine", FACTS | {"mesh": {"data": 1}}).name
        with pytest.raises(ConfigError, match=r"jaxlib is '2', not '1'"):
            other.join("engine", FACTS | {"jaxlib": "2", "mesh": {"data": 1}})
        with pytest.raises(ConfigError, match="mesh is"):
            other.join("engine", FACTS | {"mesh": {"data": 2}})
        trainer.join("trainer", FACTS | {"threads": 4, "mesh": {"data": 8}})  # what the trainer has is right
        with pytest.raises(UnknownWorkerError):
            one.beat(name, [])
        with pytest.raises(ConfigError, match="threads is 2, not 4"):
            one.join("engine", FACTS)
        one.join("engine", FACTS | {"threads": 4})


def test_other_runs_label_them(tmp_path):
    with Served(tmp_path, PLAN) as served:
        client = served.client()
        client.join("engine", FACTS)
        name = client.status() and served.client().join("engine", FACTS | {"jaxlib": "2"}).name
        assert client.status()["members"]["engine"][name]["differs"] == {"jaxlib": ["1", "2"]}


def test_who_has_not_joined_as_the_trainer_ends_nothing_and_publishes_nothing(served):
    trainer, engine, stranger = served.trainer(), served.client(), served.client()
    engine.join("engine", FACTS)
    assert trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome is Outcome.STORED
    for client, who in ((stranger, "a process that has not joined"), (engine, "engine 1-1")):
        for call in (
            lambda client=client: client.end("no"),
            lambda client=client: client.keep(1),
            lambda client=client: client.batch(0),
            lambda client=client: client.damaged(EpisodeId(GroupId(0, 0, 0), 0), "d"),
            lambda client=client: client.publish(0, "w1", "lineage", tasks_of(PLAN, 0)),
        ):
            with pytest.raises(ConfigError, match=f"{who} asks for /v1/.*, which is the trainer's alone"):
                call()
    names = {wire.NAME: trainer._name}
    for key in ({}, {wire.KEY: "0" * 32}, {wire.KEY: engine._key}):  # its name alone is in the status
        assert raw(served, "POST", "/v1/end", b'{"reason": "no"}', HEADERS | names | key)[0] == 410
    status = served.client().status()
    assert status["ended"] == "" and status["conflicts"] == [] and trainer._key not in json.dumps(status)
    trainer.end("it is enough")
    assert served.client().status()["ended"] == "it is enough"


def test_a_trainer_that_finds_its_run_over_joins_to_say_so_and_nobody_is_compared_with_it(tmp_path):
    with Served(tmp_path, PLAN, exact=True) as served:
        engine, trainer = served.client(), served.client()
        assert served.trainer()  # that another start of the same command has followed
        name = engine.join("engine", FACTS).name
        trainer.join("trainer", {"config": FACTS["config"], "host": "here"})
        trainer.end("all is trained")
        assert engine.beat(name, []).ended == "all is trained"


@pytest.mark.parametrize("when", ["at once", "after a lease", "after a restart"])
def test_a_trainer_takes_no_newer_ones_place(tmp_path, when):
    """Whether it was replaced, or stopped, or cut off while a launcher started another one: whatever it calls."""
    now = [0.0]
    with Served(tmp_path, PLAN, clock=lambda: now[0]) as served:
        old = served.client()
        name = old.join("trainer", FACTS).name
        assert old.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome is Outcome.STORED
        if when != "at once":
            now[0] += 2 * PLAN.lease_s
            until(lambda: not served.client().status()["members"]["trainer"])
        new = served.client()
        newer = new.join("trainer", FACTS).name
        if when == "after a restart":
            served.stop()
            served.start()
            assert new.batch(0) is None, "it joins again by itself"
        for call in (
            lambda: old.beat(name, []),
            lambda: old.batch(0),
            lambda: old.publish(0, "w0", "lineage", tasks_of(PLAN, 0)),
            lambda: old.keep(1),
            lambda: old.end("no"),
        ):
            with pytest.raises(ReplacedError, match=f"replaced by {newer}, which joined later: it must end"):
                call()
        assert list(served.client().status()["members"]["trainer"]) == [newer]
        assert new.publish(0, "w0", "lineage", tasks_of(PLAN, 0)).outcome is Outcome.DUPLICATE
        served.client().join("trainer", FACTS | {"rank": 1})  # of the same gang
        assert new.beat(newer, []).ended == "" and new.batch(0) is None


def test_a_trainer_that_was_silent_and_not_replaced_goes_on_under_its_name(tmp_path):
    now = [0.0]
    with Served(tmp_path, PLAN, clock=lambda: now[0]) as served:
        trainer = served.trainer()
        name = trainer._name
        for away in (lambda: now.__setitem__(0, now[0] + 2 * PLAN.lease_s), lambda: served.stop() or served.start()):
            away()
            until(lambda: not served.client().status()["members"]["trainer"])
            answer = trainer.publish(0, "w0", "lineage", tasks_of(PLAN, 0))
            assert answer.outcome in (Outcome.STORED, Outcome.DUPLICATE)
            assert list(served.client().status()["members"]["trainer"]) == [name]
            assert trainer.beat(name, []).newest == 0


def test_a_trainer_whose_first_call_comes_twice_is_one_trainer(served):
    """The answer to the first one was lost, or it is late: a second name would make the trainer its own successor."""
    key, first = "5" * 32, served.client()
    row = {"role": "trainer", "facts": FACTS, "holding": [], "wire": wire.WIRE, "run": "", "was": ""}
    names = [raw(served, "POST", "/v1/join", json.dumps(row), HEADERS | {wire.KEY: key})[1]["name"] for _ in range(2)]
    assert names[0] == names[1] and list(first.status()["members"]["trainer"]) == names[:1]
    assert first.join("trainer", FACTS).name != names[0], "another process is another trainer"


def test_engines_that_wait_are_asked_for_when_there_is_something_and_not_before(tmp_path, monkeypatch):
    """Else their looks alone fill a processor: each is a look at all engines, of which there are many."""
    looks = []
    take = book.Book.take
    monkeypatch.setattr(book.Book, "take", lambda self, *of: looks.append(of[1]) or take(self, *of))
    plan = dataclasses.replace(PLAN, groups_per_step=6)
    with Served(tmp_path, plan) as served:
        client, name = began(served)
        held = [job.work.lease for _ in range(12) for job in client.take(name, 99, [])]
        assert held
        others, got = [served.client() for _ in range(12)], []

        def wait(other):
            mine = other.join("engine", FACTS).name
            jobs = other.take(mine, 2, [], wait_s=20)
            got.append((time.monotonic(), jobs))

        threads = [threading.Thread(target=wait, args=(other,)) for other in others]
        play(client, name)
        for thread in threads:
            thread.start()
        until(lambda: len(set(looks)) == 13)  # each has looked once
        time.sleep(0.3)
        before = len(looks)
        for _ in range(4):
            client.beat(name, [])
            time.sleep(0.1)
        assert len(looks) == before, "nothing has changed"
        for step in range(2):
            assert client.batch(step, wait_s=20)
            begun = time.monotonic()
            client.publish(step + 1, f"w{step + 1}", "lineage", tasks_of(plan, step + 1))
        until(lambda: sum(bool(jobs) for _, jobs in got) == 6)
        client.end("over")
        for thread in threads:
            thread.join(20)
        assert sum(bool(jobs) for _, jobs in got) == 6 and max(at for at, jobs in got if jobs) - begun < 10


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /v1/status HTTP/1.1\r\n\r\n",
        b"POST /v1/beat HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%zz HTTP/1.1\r\nHost: [x:99999999\r\n\r\n",
        b"CONNECT a:b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nExpect: foo\r\n\r\n",
        b"POST /v1/beat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\nAuthorization: Bearer \xff\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" * 20,
    ],
)
def test_what_a_stranger_sends_costs_a_line_at_most(served, caplog, request_line):
    with socket.create_connection(("127.0.0.1", served.port), 20) as line:
        line.settimeout(20)
        line.sendall(request_line)
        assert line.recv(20).split()[1] in (b"400", b"401", b"417")
    served.client().status()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) <= 1 and not any(record.exc_info for record in lines), caplog.text


def test_its_numbers_are_there_for_prometheus_and_no_secret(served):
    client, name = began(served)
    play(client, name)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(f"{served.url}/metrics", headers=headers), timeout=20) as answer:
        kind, text = answer.headers["Content-Type"], answer.read().decode()
    assert kind.startswith("text/plain; version=0.0.4") and TOKEN not in text and client._key not in text
    sample = re.compile(r'jaxagent_fleet_[a-z_]+(\{[a-z]+="[a-z_A-Z]+"\})? (\S+)')
    found = {line.rpartition(" ")[0]: float(sample.fullmatch(line)[2]) for line in text.splitlines()}
    assert found['jaxagent_fleet_episodes{state="stored"}'] == 4
    assert found['jaxagent_fleet_processes{role="engine"}'] == 1 and found["jaxagent_fleet_ended"] == 0
    assert found['jaxagent_fleet_calls_total{call="put"}'] == 4
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{served.url}/metrics", timeout=20)


def test_a_coordinator_is_reached_by_ipv6_and_by_ipv4(tmp_path):
    folder = tmp_path / "one"
    for listen, hosts in (("[::1]:0", ["[::1]"]), ("0.0.0.0:0", ["[::1]", "127.0.0.1"])):
        _needs_ipv6()
        with bound_socket(*server.address_of(listen)) as address:
            loop = asyncio.new_event_loop()
            stop = asyncio.Event()
            serving = server.serve(folder, PLAN, TOKEN, address, stop=stop)
            served = threading.Thread(target=loop.run_until_complete, args=(serving,))
            served.start()
            try:
                port = address.getsockname()[1]
                until(lambda: (folder / server.ADDRESS).exists())
                told = json.loads((folder / server.ADDRESS).read_text())["url"]
                assert told == f"http://[::1]:{port}" or "[" not in told
                for host in hosts:
                    assert Client(f"http://{host}:{port}", TOKEN, 5.0).status()["wire"] == wire.WIRE
            finally:
                loop.call_soon_threadsafe(stop.set)
                served.join(20)
            (folder / server.ADDRESS).unlink()


def _needs_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as line:
            line.bind(("::1", 0))
    except OSError as why:
        pytest.skip(f"this machine has no ::1: {why}")


def test_tasks_must_be_those_of_the_steps_that_a_version_admits_and_the_same_again(served):
    client = served.trainer()
    right = tasks_of(PLAN, 0)
    for tasks, word in (
        ({}, "steps [0, 1], not of []"),
        ({**right, 2: right[1]}, "not of [0, 1, 2]"),
        ({0: right[0], 1: [[]]}, "must have [1]"),
    ):
        answer = client.publish(0, "w0", "lineage", tasks)
        assert answer.outcome is Outcome.REFUSED and word in answer.reason
    assert client.publish(1, "w1", "lineage", tasks_of(PLAN, 1)).outcome is Outcome.REFUSED
    assert client.publish(0, "w0", "lineage", right).outcome is Outcome.STORED
    for digest, lineage, tasks, word in (
        ("w1", "lineage", right, "now is w1"),
        ("w0", "other", right, "another lineage"),
        ("w0", "lineage", {**right, 1: [[wire.TaskRef(5, "x")]]}, "other tasks"),
    ):
        answer = client.publish(0, digest, lineage, tasks)
        assert answer.outcome is Outcome.CONFLICT and word.replace("other tasks", "another tasks") in answer.reason
    served.stop()
    served.start()
    assert client.publish(0, "w0", "lineage", right).outcome is Outcome.DUPLICATE
    assert client.publish(0, "w0", "other", right).outcome is Outcome.CONFLICT


def test_results_that_nobody_may_hand_in(served):
    client, name = began(served)
    (job, other) = client.take(name, 2, [])
    good = packed(job.work.episode, "w")
    stranger = LeasedEpisode(EpisodeId(GroupId(9, 0, 0), 0), "1-1", 0)
    assert client.put(stranger, 0, good).outcome is Outcome.REFUSED
    assert client.put(job.work, 1, good).outcome is Outcome.REFUSED  # pinned to 0
    quick = served.client(patience_s=0.1)
    with pytest.raises(CoordinatorGoneError, match=r"422.*digest"):
        quick.put(job.work, 0, Packed("0" * 64, good.body))
    with pytest.raises(CoordinatorGoneError, match=r"422.*damaged"):
        quick.put(job.work, 0, Packed(good.digest, good.body[:-3]))
    assert served.client().status()["conflicts"] == []
    theirs = client.put(job.work, 0, packed(other.work.episode, "w"))
    assert theirs.outcome is Outcome.REFUSED and "attempt 1 of the run, which is another one" in theirs.reason
    elsewhere = codec.pack(dataclasses.replace(played(job.work.episode, "w"), task=Task("task-\ud83d", "?", ("x",))))
    refused = client.put(job.work, 0, elsewhere)
    assert refused.outcome is Outcome.REFUSED
    assert refused.reason.endswith("it was played at task 'task-\\ud83d', and the group's is 'task-0'.")
    nothing = b'{"no": "episode"}'
    nothing = Packed(hashlib.sha256(nothing).hexdigest(), zlib.compress(nothing + b"\n{}"))
    answer = client.put(job.work, 0, nothing)
    assert answer.outcome is Outcome.REFUSED and "not an episode" in answer.reason
    assert client.put(job.work, 0, good).outcome is Outcome.STORED
    with pytest.raises(CoordinatorGoneError, match=r"422.*digest"):  # a header that came in damaged is no conflict
        quick.put(job.work, 0, Packed("0" * 64, good.body))
    assert served.client().status()["conflicts"] == []
    conflict = client.put(job.work, 0, packed(job.work.episode, "v"))
    assert conflict.outcome is Outcome.CONFLICT and served.client().status()["conflicts"] == [conflict.reason]
    with pytest.raises(CallError, match="404"):
        client.episode(other.work.episode)
    with pytest.raises(CallError, match="steps 0 to 0 can be"):
        client.batch(1)


@pytest.mark.parametrize(
    ("path", "row", "field"),
    [
        ("/v1/join", {"role": "engine", "wire": "x"}, "wire"),
        ("/v1/join", {"role": "engine", "wire": 1, "holding": [["1-1", 0, 0, 0, -1]]}, "an episode"),
        ("/v1/join", {"role": "engine", "wire": 1, "facts": []}, "facts"),
        ("/v1/beat", {"name": 3}, "name"),
        ("/v1/beat", {"name": "NAME", "holding": ["x"]}, "no lease"),
        ("/v1/beat", {"name": "NAME", "holding": "x"}, "holding"),
        ("/v1/beat", {"name": "NAME", "holding": [], "phase_s": -1}, "phase_s"),
        ("/v1/take", {"name": "NAME", "places": 2.5}, "places"),
        ("/v1/take", {"name": "NAME", "places": 1, "wait_s": "long"}, "wait_s"),
        ("/v1/batch", {}, "step"),
        ("/v1/publish", {"version": 0, "digest": "a", "lineage": "b", "tasks": {"x": []}}, "tasks"),
        ("/v1/publish", {"version": 0, "digest": "a", "lineage": "b", "tasks": {"0": [[7]]}}, "task"),
        ("/v1/publish", {"version": 0, "digest": "\ud83d", "lineage": "b", "tasks": {}}, "digest"),
        ("/v1/publish", {"version": 0, "digest": "a", "lineage": "b", "tasks": {"0": [[[0, "\ud83d"]]]}}, "task"),
        ("/v1/beat", {"name": "NAME", "numbers": {"sending": None}}, "'numbers' must hold numbers"),
        ("/v1/beat", {"name": "NAME", "numbers": {"sending": [3]}}, "'numbers' must hold numbers"),
        ("/v1/beat", {"name": "NAME", "numbers": {"versions": 0}}, "'numbers' must hold numbers"),
        ("/v1/beat", {"name": "NAME", "numbers": {"tokens": float("nan")}}, "NaN is not a number of JSON"),
        ("/v1/keep", {"step": True}, "step"),
        ("/v1/end", {"reason": None}, "reason"),
    ],
)
def test_a_malformed_call_is_told_its_field(served, path, row, field):
    name, trainer = served.client().join("engine", FACTS).name, served.client().join("trainer", FACTS)
    row = {key: name if value == "NAME" else value for key, value in row.items()}
    code, told = raw(served, "POST", path, json.dumps(row), HEADERS | {wire.NAME: trainer.name, wire.KEY: trainer.key})
    assert code == 400 and told["kind"] == "malformed" and field in told["error"]
    assert served.client().status()["run"]  # it goes on


def test_strangers_that_ask_for_work_leave_nothing_behind(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(api, "Playing", lambda *of: made.append(playing.Playing(*of)) or made[-1])
    with Served(tmp_path, PLAN) as served:
        for name in ("9-1", "9-2"):
            assert raw(served, "POST", "/v1/take", json.dumps({"name": name, "places": 1}))[0] == 410
    (handlers,) = made
    assert not handlers.core.asking


def test_what_is_no_call_at_all(served):
    for body in ("{", "[1]", "\xff" * 3, "[" * 100_000, '{"name": NaN'):
        code, told = raw(served, "POST", "/v1/beat", body.encode("latin-1"))
        assert code == 400 and told["kind"] == "malformed"
    assert raw(served, "GET", "/v1/nothing")[0] == 404
    assert raw(served, "GET", "/v1/join")[0] == 405
    assert raw(served, "PUT", "/v1/episodes/0/0/0/0?lease=1-1&version=0", b"")[0] == 400  # no digest
    code, told = raw(served, "POST", "/v1/beat", b"{}", HEADERS | {"Content-Encoding": "gzip"})
    assert code == 400 and "Content-Encoding" in told["error"]


def test_the_token_comes_first(served, tmp_path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
        assert raw(served, "GET", "/v1/status", headers=headers)[0] == 401
        assert raw(served, "GET", "/v1/nothing", headers=headers)[0] == 401
    with pytest.raises(ConfigError, match="token is wrong"):
        Client(served.url, "another token of the tests", 0.3).status()
    assert served.client().status()["calls"]["wrong_tokens"] > 6 + 1
    with pytest.raises(ConfigError, match="16 characters"):
        server.run(tmp_path / "other", PLAN, "short")


def test_who_was_accepted_before_waits_while_its_token_is_refused(served, caplog):
    """Another run's coordinator has the port for a while: that is no mistake of a process that has worked."""
    client = served.client(patience_s=0.3)
    client.join("engine", FACTS)
    client._token, client._run = "another token of the tests", "run-a"
    with pytest.raises(
        CoordinatorGoneError, match=r"401 .*\(it is the coordinator of run \w+; this process is of run run-a\)"
    ):
        client.status()
    assert "It is asked again for 0.3 s" in caplog.text
    client = served.client()
    client._token = "another token of the tests"
    threading.Timer(0.5, lambda: setattr(client, "_token", TOKEN)).start()
    assert client.status()["wire"] == wire.WIRE


def test_whose_the_port_is_and_which_run_a_process_is_of_are_said(served, tmp_path):
    listen, other = f"127.0.0.1:{served.port}", tmp_path / "other"
    run = json.loads((tmp_path / server.ADDRESS).read_text())["run"]
    with pytest.raises(
        ConfigError, match=f"in use.* The coordinator of another run \\({run}\\) has it: end that, or give"
    ):
        server.run(other, PLAN, TOKEN, listen)
    with pytest.raises(ConfigError, match="An earlier coordinator of this run"):
        server.run(tmp_path, PLAN, TOKEN, listen)
    with bound_socket("127.0.0.1", 0) as address, pytest.raises(ConfigError, match="Another program has it"):
        address.listen()
        server.run(other, PLAN, TOKEN, f"127.0.0.1:{address.getsockname()[1]}")
    # A process of another run, whose workdir says that its coordinator listened there, with this run's token.
    other.mkdir()
    (other / server.ADDRESS).write_text(json.dumps({"url": served.url, "run": "run-a"}))
    with pytest.raises(ConfigError, match=f"is of run run-a; this coordinator's is {run}"):
        Client(served.url, TOKEN, address=other / server.ADDRESS).join("engine", FACTS)


def test_a_proxy_that_changes_addresses_is_told_at_its_first_answer(served, monkeypatch, caplog):
    ask = calls.Line.ask
    monkeypatch.setattr(calls.Line, "ask", lambda self, method, path, *more: ask(self, method, f"/fleet{path}", *more))
    with pytest.raises(CoordinatorGoneError):
        served.client(patience_s=0.01).status()
    assert caplog.text.count("a proxy changes addresses") == 1 and "404 GET /fleet/v1/status" in caplog.text


def test_bodies_are_bounded(served, monkeypatch):
    monkeypatch.setattr(wire, "MAX_CALL_BYTES", 1000)
    monkeypatch.setattr(wire, "MAX_EPISODE_BYTES", 2000)
    assert raw(served, "POST", "/v1/beat", b"x" * 1001)[0] == 413
    path = "/v1/episodes/0/0/0/0?lease=1-1&version=0"
    assert raw(served, "PUT", path, b"x" * 2001, HEADERS | {wire.DIGEST: "d"})[0] == 413
    chunks = (b"x" * 500 for _ in range(5))  # which say no length
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        assert raw(served, "PUT", path, chunks, HEADERS | {wire.DIGEST: "d"})[0] == 413
    served.client().status()


def test_a_body_that_never_comes_holds_nobody_up(served, monkeypatch):
    monkeypatch.setattr(intake, "CALL_BODY_S", 0.2)
    with socket.create_connection(("127.0.0.1", served.port), 20) as slow:
        slow.settimeout(20)
        slow.sendall(b"POST /v1/beat HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n")
        slow.sendall(f"Authorization: Bearer {TOKEN}\r\n\r\n{{".encode())
        served.client().status()
        assert b"422" in slow.recv(1000)  # as after any other loss on the way, it is sent again


def test_a_head_that_never_ends_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    with Served(tmp_path, PLAN) as served, socket.create_connection(("127.0.0.1", served.port), 20) as slow:
        slow.settimeout(20)
        slow.sendall(b"POST /v1/beat HTTP/1.1\r\nHost: ")
        served.client().status()
        assert slow.recv(1000) == b""


def test_bodies_together_are_bounded(served, monkeypatch):
    client, name = began(served)
    (job, _) = client.take(name, 2, [])
    good = packed(job.work.episode, "w")
    again = served.client(patience_s=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(intake, "MOST_IN_MEMORY", 10)
        with pytest.raises(CoordinatorGoneError, match=r"503.*in memory already"):
            again.put(job.work, 0, good)
    assert client.put(job.work, 0, good).outcome is Outcome.STORED


# -------------------------------------------------------------------- disks


@pytest.mark.parametrize(
    "token", ["too short", "ein Geheimnis für uns", "one that has\na second line", "one with a space "]
)
def test_a_token_that_no_header_can_have_is_refused_at_the_start(token):
    """Processes that asked with it would be told, after the stages before RL, that it is wrong."""
    with pytest.raises(ConfigError, match=r"at least 16 characters, printable ASCII\.$"):
        api.Api(None, token)  # pyright: ignore[reportArgumentType]


def test_a_coordinator_that_misses_nobody_any_more_ends_and_a_full_disk_under_its_signs_is_no_reason(tmp_path):
    """One whose sweeps had died would wait for a dead engine for ever."""
    fails = threading.Event()

    def clock() -> float:
        assert not fails.is_set(), "no time"
        return time.monotonic()

    with Served(tmp_path, PLAN, clock=clock) as served:
        fails.set()
        assert re.search(r"no sweeps: .*no time", str(served.ended()))
    signs = vitals.Vitals(tmp_path / "a folder that is not there" / "x.json")
    signs.phase("waits", 1.0)
    assert signs.now()[0] == "waits"


def test_a_full_disk_stores_nothing_and_goes_on_when_there_is_room(served, monkeypatch, tmp_path):
    client, name = began(served)
    (job, other) = client.take(name, 2, [])
    good = packed(job.work.episode, "w")
    impatient = served.client(patience_s=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(playing, "RESERVE_BYTES", 1 << 60)
        with pytest.raises(CoordinatorGoneError, match=r"507.*not stored"):
            impatient.put(job.work, 0, good)
    with monkeypatch.context() as patched:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(book.EpisodeFiles, "put", full)
        with pytest.raises(CoordinatorGoneError, match=r"507 .*disk is full"):
            impatient.put(job.work, 0, good)
        sent = []
        waiting = threading.Thread(target=lambda: sent.append(client.put(job.work, 0, good)))
        waiting.start()
        time.sleep(0.1)
        assert not sent
    waiting.join(20)
    assert sent[0].outcome is Outcome.STORED
    assert client.put(other.work, 0, packed(other.work.episode, "w")).complete


def test_one_of_two_that_come_at_once_waits_for_what_becomes_of_the_other(served, monkeypatch):
    """The second is a duplicate only when the first is on disk; where that failed, it is stored itself."""
    client, name = began(served)
    (job, _) = client.take(name, 2, [])
    good, entered, fail, put = packed(job.work.episode, "w"), threading.Event(), [True], book.EpisodeFiles.put

    def slow(*of):
        if fail.pop() if fail else False:
            entered.set()
            time.sleep(0.3)
            raise OSError(errno.ENOSPC, "No space left on device")
        put(*of)

    monkeypatch.setattr(book.EpisodeFiles, "put", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(served.client(patience_s=0.0).put, job.work, 0, good)
        assert entered.wait(20)
        second = threads.submit(client.put, job.work, 0, good)
        with pytest.raises(CoordinatorGoneError, match="507"):
            first.result(20)
        assert second.result(20).outcome is Outcome.STORED
    assert client.put(job.work, 0, good).outcome is Outcome.DUPLICATE


def test_a_ledger_that_fails_ends_the_process_and_nothing_was_promised(served, monkeypatch):
    client, name = began(served)
    (job, _) = client.take(name, 2, [])
    with monkeypatch.context() as patched:

        def broken(fd, content):
            raise OSError(errno.EIO, "Input/output error")

        patched.setattr(ledger, "_write", broken)
        with pytest.raises(CoordinatorGoneError):
            served.client(patience_s=0.2).put(job.work, 0, packed(job.work.episode, "w"))
        failure = served.ended()
    assert isinstance(failure, server.CoordinatorError) and "Input/output error" in str(failure)
    served.start()
    joined = client.join("engine", FACTS, [(job.work.lease, job.work.episode)])
    assert joined.epoch == 2


def test_no_answer_leaves_before_its_line_is_on_disk(served, monkeypatch):
    client, name = began(served)
    (job, other) = client.take(name, 2, [])
    write, go, answers = ledger._write, threading.Event(), []

    def slow(fd, content):
        assert go.wait(20)
        write(fd, content)

    monkeypatch.setattr(ledger, "_write", slow)
    calls = [
        lambda: client.put(job.work, 0, packed(job.work.episode, "w")),
        lambda: client.put(other.work, 0, packed(other.work.episode, "w")),
        lambda: client.batch(0, wait_s=20),
        lambda: served.client().beat(name, []),  # of itself it writes nothing
    ]
    threads = [threading.Thread(target=lambda call=call: answers.append(call())) for call in calls]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    assert not answers
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 4


def test_a_coordinator_that_was_taken_over_ends_where_nobody_calls(served, tmp_path):
    fence.take(tmp_path / server.LEDGER)
    began = time.monotonic()
    assert "epoch 2 has taken over" in str(served.ended()) and time.monotonic() - began < WAIT_S / 4


def test_the_rules_of_a_run_do_not_change(served, tmp_path):
    began(served)
    served.stop()
    other = Served(tmp_path, Plan(steps=3, groups_per_step=1, attempts=2, staleness=2))
    with pytest.raises(ConfigError, match="staleness=1; this one has staleness=2"):
        other.start()
    with Served(tmp_path, Plan(steps=9, groups_per_step=1, attempts=2, staleness=1, lease_s=3)) as longer:
        assert longer.client().status()["steps"]["of"] == 9


# -------------------------------------------------------------------- again, and forgotten


def test_a_ledger_of_an_earlier_version_goes_on(tmp_path):
    """Written by the code of before, whose plan had a field more, and killed with the third of four episodes stored."""
    with zipfile.ZipFile(pathlib.Path(__file__).with_name("ledger_of_before.zip")) as stored:
        stored.extractall(tmp_path)
    with contextlib.closing(book.Book(tmp_path, PLAN)) as found:
        rules = found.rules
        assert (rules.record.versions, rules.record.formed, found.epoch) == (["w0", "w1"], 1, 2)
        assert found.batch(0).results.keys() == {EpisodeId(GroupId(0, 0, 0), sample) for sample in range(2)}
        assert [played.task.id for played in found.read(GroupId(0, 0, 0))] == ["task-0"] * 2
        name, _ = rules.join(0.0)
        jobs = [job for _ in range(2) for job in found.take(0.0, name, 1, [])]
        assert jobs[0].work.episode == EpisodeId(GroupId(1, 0, 0), 1)
        again = wire.tasks_of({"tasks": wire.tasks_to(tasks_of(PLAN, 1))})
        assert found.publish(1, "w1", "lineage", again).outcome is Outcome.DUPLICATE


def test_a_ledger_that_somebody_removed_takes_no_episode_with_it(served, tmp_path):
    client, name = began(served)
    play(client, name)
    served.stop()
    segments = tmp_path / server.LEDGER / "segments"
    segments.rename(tmp_path / "elsewhere")  # nothing is made in its place
    before = sorted((tmp_path / server.LEDGER).rglob("*.z"))
    with pytest.raises(ConfigError, match=r"has no ledger any more, and episodes of one .* back from a copy"):
        served.start()
    assert sorted((tmp_path / server.LEDGER).rglob("*.z")) == before
    (tmp_path / "elsewhere").rename(segments)
    served.start()
    assert served.client().status()["episodes"]["stored"] == len(before)


def test_a_new_coordinator_goes_on_with_the_same_callers(served):
    client, name = began(served)
    jobs = client.take(name, 2, [])
    assert client.put(jobs[0].work, 0, packed(jobs[0].work.episode, "w")).outcome is Outcome.STORED
    served.stop()
    sent = []
    waiting = threading.Thread(
        target=lambda: sent.append(client.put(jobs[1].work, 0, packed(jobs[1].work.episode, "w")))
    )
    waiting.start()  # while nobody listens
    time.sleep(0.1)
    served.start()
    waiting.join(20)
    assert sent[0].outcome is Outcome.STORED and sent[0].complete  # a lease of before counts
    with pytest.raises(UnknownWorkerError):
        client.beat(name, [])
    assert client.join("engine", FACTS).epoch == 2
    assert client.batch(0, wait_s=20).groups == (GroupId(0, 0, 0),)
    status = client.status()
    assert status["epoch"] == 2 and status["episodes"]["stored"] == 2


def test_what_is_kept_is_forgotten_on_disk_too_and_a_restart_knows_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(book, "LEAST_DEAD", 8)
    monkeypatch.setattr(book, "DEAD_PART", 0.0)
    plan = Plan(steps=4, groups_per_step=2, attempts=2, staleness=1)
    with Served(tmp_path, plan) as served:
        client, name = began(served)
        for step in range(3):
            play(client, name)
            assert client.batch(step, wait_s=20)
            assert (
                client.publish(step + 1, f"w{step + 1}", "lineage", tasks_of(plan, step + 1)).outcome is Outcome.STORED
            )
        assert client.keep(4).outcome is Outcome.REFUSED, "beyond the newest version"
        assert client.keep(2).outcome is Outcome.STORED and client.keep(2).outcome is Outcome.DUPLICATE
        with pytest.raises(CallError, match="steps 2 to 3 can be"):
            client.batch(1)
        old, new = EpisodeId(GroupId(0, 0, 0), 0), EpisodeId(GroupId(2, 0, 1), 1)
        with pytest.raises(CallError, match="404"):
            client.episode(old)
        folder = tmp_path / server.LEDGER / "episodes"
        until(lambda: len(list(folder.rglob("*.z"))) <= 8)
        before = client.status()
        served.stop()
        with Ledger(tmp_path / server.LEDGER) as log:
            kinds = [line["kind"] for line in log.recovered()]
        assert kinds.count("stored") == 8 and kinds.count("tasks") == 2  # of steps 2 and 3
        assert len(list(folder.rglob("*.z"))) == 8
        served.start()
        after = client.status()
        for field in ("steps", "oldest_unfinished_group", "run"):
            assert after[field] == before[field]
        assert client.episode(new) == packed(new, "w")
        assert client.put(LeasedEpisode(old, "1-1", 0), 0, packed(old, "w")).outcome is Outcome.LATE
        assert client.publish(1, "w1", "lineage", tasks_of(plan, 1)).outcome is Outcome.DUPLICATE
        assert client.batch(2).groups == (GroupId(2, 0, 0), GroupId(2, 0, 1))


def test_a_run_that_is_given_more_steps_plays_them_when_their_tasks_have_come(tmp_path):
    plan = Plan(steps=3, groups_per_step=2, attempts=1, staleness=1)
    with Served(tmp_path, plan) as served:
        client, name = began(served)
        for step in range(3):
            play(client, name)
            assert client.batch(step, wait_s=20)
            client.publish(step + 1, f"w{step + 1}", "lineage", tasks_of(plan, step + 1))
        assert "all steps" in client.status()["ended"]
    longer = dataclasses.replace(plan, steps=6)
    with Served(tmp_path, longer) as served:
        client = served.both()
        name = client.join("engine", FACTS).name
        assert client.take(name, 4, []) == []  # nobody has said which tasks steps 3 and 4 have
        both = tasks_of(longer, 2) | tasks_of(longer, 3)
        assert sorted(both) == [3, 4]
        assert client.publish(3, "w3", "lineage", both).outcome is Outcome.DUPLICATE
        assert {job.work.episode.group.step for job in play(client, name)} == {3, 4}
        assert client.batch(3, wait_s=20)
        served.stop()
        served.start()
        assert client.publish(3, "w3", "lineage", both).outcome is Outcome.DUPLICATE
        other = {**both, 4: [[wire.TaskRef(5, "x"), wire.TaskRef(6, "y")]]}
        assert client.publish(3, "w3", "lineage", other).outcome is Outcome.CONFLICT
        assert client.publish(4, "w4", "lineage", tasks_of(longer, 4)).outcome is Outcome.STORED


@pytest.mark.parametrize("window", [1, 4])
def test_a_run_that_is_given_fewer_steps_ends_earlier_and_forgets_nothing(tmp_path, window):
    rule = "pinned" if window == 1 else "in_flight"
    plan = Plan(steps=6, groups_per_step=2, attempts=2, staleness=1, rule=rule, window=window, lease_s=60)
    with Served(tmp_path, dataclasses.replace(plan, steps=3)) as served:
        began(served)
    with Served(tmp_path, plan) as served:  # which had more in between: the ledger's first line has 3
        client = served.both()
        name = client.join("engine", FACTS).name
        for step in range(3):
            play(client, name)
            assert client.batch(step, wait_s=20)
            client.publish(step + 1, f"w{step + 1}", "lineage", tasks_of(plan, step + 1))
        (begun, *_) = client.take(name, 2, [])  # of step 3
        play(client, name)
        before = client.status()["episodes"]["stored"]
    with pytest.raises(ConfigError, match=r"has trained 3 steps, and the config gives it 2: .* Give it as many"):
        Served(tmp_path, dataclasses.replace(plan, steps=2)).start()
    shorter = dataclasses.replace(plan, steps=4)
    with Served(tmp_path, shorter) as served:
        client = served.both()
        name = client.join("engine", FACTS).name
        assert client.publish(3, "w3", "lineage", tasks_of(shorter, 3)).outcome is Outcome.DUPLICATE
        play(client, name)
        status = client.status()
        assert status["episodes"]["waiting"] == 0 and status["episodes"]["stored"] == before
        late = dataclasses.replace(begun.work, episode=EpisodeId(GroupId(4, 0, 0), 0), version=3)
        assert client.put(late, 3, packed(late.episode, "w")).outcome is Outcome.LATE
        batch = client.batch(3, wait_s=20)
        assert {group.step for group in batch.groups} == {3} and len(batch.groups) == 2
        assert client.publish(4, "w4", "lineage", {}).outcome is Outcome.STORED
        assert client.status()["ended"] == "all steps are trained"
    with Served(tmp_path, plan) as served:  # and more again: what was played is still there
        client = served.both()
        name = client.join("engine", FACTS).name
        assert client.publish(4, "w4", "lineage", tasks_of(plan, 3) | tasks_of(plan, 4)).outcome is Outcome.DUPLICATE
        assert {job.work.episode.group.step for job in play(client, name)} == {5}
        assert {group.step for group in client.batch(4, wait_s=20).groups} == {4}


def test_groups_that_nobody_judged_are_judged_after_a_restart(tmp_path):
    plan = Plan(steps=1, groups_per_step=1, attempts=1, rounds=2)
    begun, go = threading.Event(), threading.Event()
    seen = []

    def judge(episodes):
        seen.append(episodes[0].sample)
        begun.set()
        return go.is_set()

    def hangs(episodes):
        begun.set()
        go.wait(20)
        raise SystemExit  # as if killed: nothing is said

    with Served(tmp_path, plan, judge=hangs) as served:
        client, name = began(served)
        play(client, name)
        assert begun.wait(20)
        assert client.batch(0) is None
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        go.set()
        stopping.join(60)
        served.settings["judge"] = judge
        served.start()
        assert client.batch(0, wait_s=20).groups == (GroupId(0, 0, 0),) and seen == [0]


def test_a_judge_that_fails_ends_the_process_and_names_the_group(tmp_path):
    plan = Plan(steps=1, groups_per_step=1, attempts=1, rounds=2)
    with Served(tmp_path, plan, judge=lambda episodes: 1 / 0) as served:
        client, name = began(served)
        (job,) = client.take(name, 1, [])
        with contextlib.suppress(CoordinatorGoneError):
            served.client(patience_s=0.1).put(job.work, 0, packed(job.work.episode, "w"))
        failure = served.ended()
        assert isinstance(failure, server.CoordinatorError) and "(0, 0, 0) cannot be judged" in str(failure)
        assert "ZeroDivisionError" in str(failure)


def test_a_coordinator_that_is_away_for_too_long(tmp_path):
    gone = Client("http://127.0.0.1:9", TOKEN, patience_s=0.2)
    with pytest.raises(CoordinatorGoneError, match=r"127.0.0.1:9 has failed for"):
        gone.status()
    for url in ("https://x", "127.0.0.1:80", "http://x:99999", "http://x/path"):
        with pytest.raises(ConfigError, match="http://HOST:PORT"):
            Client(url, TOKEN)
    client = Client("http://127.0.0.1:9", TOKEN, patience_s=60)
    threading.Timer(0.1, client.close).start()
    with pytest.raises(CoordinatorGoneError, match="closed"):
        client.status()


def test_a_server_that_drips_is_left_at_the_deadline(monkeypatch):
    monkeypatch.setattr(wire, "CALL_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        done = threading.Event()

        def drip():
            line, _ = listening.accept()
            with line, contextlib.suppress(OSError):
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while not done.wait(0.05):
                    line.sendall(b"x")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}", TOKEN, patience_s=0.1)
        with pytest.raises(CoordinatorGoneError, match=r"deadline|timed out"):
            client.status()
        done.set()
        thread.join(20)


def test_where_it_listens_and_what_it_decided_are_in_its_folder(served, tmp_path):
    address = json.loads((tmp_path / server.ADDRESS).read_text())
    assert address["url"] == served.url and address["epoch"] == 1
    began(served)
    with pytest.raises(ConfigError):
        served.client().join("engine", {"config": "c1", "host": "h"})
    served.stop()
    told = (tmp_path / server.LOG).read_text()
    assert "engine 1-1 joins from here" in told and "engine on h may not join" in told and "version 0" in told
    for listen in ("8000", "a:b", "h:99999"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            server.address_of(listen)
    assert server.address_of("[::1]:5") == ("::1", 5) and server.address_of(":5") == server.address_of("0.0.0.0:5") == (
        "",
        5,
    )
    assert members.ROLES == ("trainer", "engine")
