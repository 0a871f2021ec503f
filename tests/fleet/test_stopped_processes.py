"""Who was stopped for longer than it may wait goes on, and who waited in vain says in one line for what."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import types

import pytest

from jaxagent import join
from jaxagent.config import command
from jaxagent.config.errors import WAITED, WaitedInVainError
from jaxagent.fleet import client as client_module
from jaxagent.fleet import wire
from jaxagent.fleet.client import Client, CoordinatorGoneError
from jaxagent.fleet.line import Line, Reply
from jaxagent.learner import peers
from jaxagent.rollout.workers import OverdueError, Workers
from jaxagent.runs.fleet import probe

COLLECTS = """
import asyncio
from jaxagent.rollout.workers import Workers
async def episode():
    for _ in range(6):  # what goes on after the stop needs a moment, as episodes do
        await asyncio.sleep(0.15)
    return "played"
with Workers(1) as workers:
    print("begins", flush=True)
    print(workers.run(episode(), 2.5), flush=True)
"""


def test_the_rollouts_limit_counts_no_time_in_which_the_process_was_stopped():
    process = subprocess.Popen([sys.executable, "-c", COLLECTS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(process.pid, signal.SIGCONT)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "played\n")


def test_what_hangs_in_the_rollouts_loop_is_one_line_and_a_code_of_its_own(capsys):
    async def hangs():
        await asyncio.Event().wait()

    async def of_its_own():
        raise TimeoutError("the tool's")

    with Workers(1) as workers:
        assert command.exit_code(lambda: workers.run(hangs(), 0.05)) == WAITED
        with pytest.raises(TimeoutError, match="the tool's") as raised:
            workers.run(of_its_own(), 5.0)
    assert not isinstance(raised.value, OverdueError)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: The rollouts' loop has not ended 'test_what_hangs") and "within 0.05 s" in line
    assert line.endswith("The same command goes on.")


class Clock:
    """Time that jumps, as it does for a process that was stopped."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        self.now += 0.01
        return self.now


@pytest.mark.parametrize(("jumps", "comes"), [(1, True), (10_000, False)])
def test_a_process_that_was_stopped_still_meets_the_others(monkeypatch, jumps, comes):
    clock, asked = Clock(), []

    class Store:
        def blocking_key_value_get(self, key, wait_ms):
            asked.append(key)
            if len(asked) <= jumps:
                clock.now += 3600.0 if jumps == 1 else wait_ms / 1000
                raise RuntimeError("DEADLINE_EXCEEDED")
            return "said"

    monkeypatch.setattr(peers, "time", clock)
    meetings = peers.Meetings(Store(), 1, 2)
    assert meetings.wait("key", 900.0) == ("said" if comes else None)


@pytest.mark.parametrize("comes", [True, False])
def test_the_limit_for_several_others_counts_no_time_in_which_the_first_was_stopped(monkeypatch, comes):
    """It is one limit for all of them, of running time."""
    clock, asked = Clock(), []

    class Store:
        def blocking_key_value_get(self, key, wait_ms):
            asked.append(key)
            if key.endswith("/1") and len(asked) == 1:
                clock.now += 3600.0  # it was stopped
                raise RuntimeError("DEADLINE_EXCEEDED")
            if key.endswith("/1") or (comes and asked.count(key) > 20):
                return '["an update", 7]'
            clock.now += wait_ms / 1000
            raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(peers, "time", clock)
    began = clock.now
    found = peers.Meetings(Store(), 0, 3)._verdict(0, "an update", 7, 3, 60.0)
    if comes:
        assert found == {"said": [7, 7, 7]}
    else:
        assert "process 2 of 3, not come to 'an update' in 60 s" in found["missing"]
        assert 58.0 < clock.now - began - 3600.0 < 60.0


def test_who_does_not_come_to_a_meeting_is_named_in_one_line(monkeypatch, capsys):
    class Store:
        def __init__(self):
            self.told = {}

        def blocking_key_value_get(self, key, wait_ms):
            raise RuntimeError("DEADLINE_EXCEEDED")

        def key_value_set(self, key, value):
            self.told[key] = value

        def key_value_delete(self, key):
            pass

    monkeypatch.setattr(peers, "time", Clock())
    meetings = peers.Meetings(Store(), 0, 2)
    assert command.exit_code(lambda: meetings.meet("the batches of an update", "x", 0.5)) == WAITED
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: The trainer waits for process 1 of 2, not come to 'the batches of an update' in 0.5 s. "
        "The same command goes on."
    )


def answered(method, path, body, headers, *limits):
    """As a coordinator answers, with the sum of what was asked and of what it says."""
    told = b'{"left": true}'
    return Reply(200, {wire.SUM: wire.sum_of_answer(wire.sum_of_call(method, path, headers), 200, "", told)}, told)


@pytest.mark.parametrize("used", [False, True])
def test_a_clients_patience_counts_no_time_in_which_it_was_stopped(monkeypatch, used):
    clock, asked = Clock(), []

    def ask(self, *request):
        asked.append(request)
        self.used = used
        if len(asked) == 1:
            clock.now += 3600.0
            raise TimeoutError("the deadline of the call is over")
        return answered(*request)

    monkeypatch.setattr(Line, "ask", ask)
    monkeypatch.setattr(client_module, "time", clock)
    assert Client("http://127.0.0.1:1", "token", patience_s=300.0).leave("1-1") and len(asked) == 2


def test_a_clients_patience_ends_and_says_how_long_that_was(monkeypatch, caplog, capsys):
    clock = Clock()

    def ask(self, *request):
        clock.now += 20.0
        raise TimeoutError("timed out")

    monkeypatch.setattr(Line, "ask", ask)
    monkeypatch.setattr(client_module, "time", clock)
    with pytest.raises(CoordinatorGoneError, match=r"has failed for \d+ s \(fleet.patience_s=90\): timed out\.$"):
        Client("http://127.0.0.1:1", "token", patience_s=90.0).leave("1-1")
    assert 2 <= len(caplog.messages) <= 3  # it does not wait in silence
    assert "http://127.0.0.1:1 has not taken the call for" in caplog.text and "it is asked for 90 s" in caplog.text
    # No launcher may take it for a mistake that another start would repeat: 1 and 2 are.
    leave = Client("http://127.0.0.1:1", "token", patience_s=90.0).leave
    assert command.exit_code(lambda: int(leave("1-1"))) == WAITED
    assert capsys.readouterr().err.endswith("timed out. The same command goes on.\n")


def test_a_signal_ends_an_engine_that_has_not_joined_at_once():
    ends, asked = [], []
    worker = types.SimpleNamespace(joined=False, end=lambda *of: ends.append(of))
    with pytest.raises(SystemExit) as raised:
        join._told_to_end(worker, signal.SIGTERM, asked)
    assert raised.value.code == 143 and not ends
    worker.joined = True
    join._told_to_end(worker, signal.SIGTERM, asked)
    assert len(ends) == 1 and asked == [signal.SIGTERM] * 2


@pytest.mark.parametrize("late", [1, 2])
def test_the_probe_is_tried_again_and_then_says_what_it_waited_for(late):
    """The limit of a generation passes when its process is stopped for so long."""
    tries = []

    def run(coroutine, limit_s):
        coroutine.close()
        tries.append(limit_s)
        if len(tries) <= late:
            raise TimeoutError
        return []

    cfg = types.SimpleNamespace(
        env=types.SimpleNamespace(turn_tokens=4, context_tokens=100),
        engine=types.SimpleNamespace(request_timeout_s=7.0),
    )
    parts = types.SimpleNamespace(
        cfg=cfg, tokenizer=types.SimpleNamespace(vocab_size=512), workers=types.SimpleNamespace(run=run)
    )
    if late == 1:
        assert probe.probe(parts, None).tokens == () and tries == [14.0, 14.0]
    else:
        with pytest.raises(WaitedInVainError, match=r"waited 2 times 7 s .* for 4 turns of this process's engine"):
            probe.probe(parts, None)
