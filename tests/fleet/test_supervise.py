"""The supervisor over small programs: it starts again what dies or hangs, ends as it should, and leaves none behind."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxagent.config import flags
from jaxagent.config.command import bound_socket
from jaxagent.fleet import child, local, restarts, supervise, vitals
from jaxagent.fleet.child import Program
from jaxagent.fleet.client import Client
from jaxagent.fleet.plan import Plan
from jaxagent.fleet.supervise import Gang, Supervisor
from tests import tiny_run
from tests.fleet import served
from tests.fleet.tiny_fleet import alive

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
# What every program begins with. `turn` counts its starts.
HEAD = """
import os, pathlib, signal, subprocess, sys, time
from jaxagent.fleet import vitals
folder, name = pathlib.Path(os.environ["FOLDER"]), sys.argv[1]
path = pathlib.Path(os.environ["JAXAGENT_VITALS"])
vitals.register_stacks(os.environ["JAXAGENT_STACKS"])
signs = vitals.Vitals(path)
mine = folder / f"{name}.starts"
with open(mine, "a") as file:
    file.write(f"{os.getpid()}\\n")
turn = len(mine.read_text().splitlines())
def until(*names):
    while not all((folder / n).exists() for n in names):
        time.sleep(0.01)
"""
FOREVER = "signs.phase('waits', 60.0)\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def started(tmp_path):
    """`pid`s of a program's starts."""

    def pids(name: str) -> list[int]:
        file = tmp_path / f"{name}.starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    return pids


def gang(name: str, *bodies: str, **options) -> Gang:
    """A gang whose processes run these programs: NAME, or NAME-0, NAME-1."""
    names = [name] if len(bodies) == 1 else [f"{name}-{i}" for i in range(len(bodies))]
    programs = [
        Program(one, (sys.executable, "-c", HEAD + body, one), on_console=options.get("leads", False))
        for one, body in zip(names, bodies, strict=True)
    ]
    return Gang(name, lambda start: programs, **options)


def supervisor(tmp_path: pathlib.Path, *gangs: Gang, restarts: int = 9, gone=lambda name: None) -> Supervisor:
    environment = {"FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}
    return Supervisor(gangs, tmp_path / "fleet", environment, restarts, DEADLINE_S, gone)


def test_what_dies_is_started_again_and_the_end_of_the_leader_is_the_end(tmp_path, started, capfd):
    gone = []
    worker = "signs.phase('plays', 60.0)\nif turn < 3: os.kill(os.getpid(), signal.SIGKILL)\n"
    worker += "(folder / 'enough').touch()\n" + FOREVER
    leader = "print('it trains', flush=True)\nuntil('enough')\n"
    gangs = gang("engine", worker), gang("trainer", leader, leads=True)
    assert supervisor(tmp_path, *gangs, gone=gone.append).run() == 0
    assert len(started("engine")) == 3 and not any(map(alive, started("engine")))
    assert gone == ["engine"] * 3 + ["trainer"] or gone == ["engine"] * 2 + ["trainer", "engine"]
    told = restarts.summary(tmp_path / "fleet")
    assert told["restarts"] == {"engine": 2}
    assert told["first_reasons"] == {"engine": "engine was ended by SIGKILL"}
    captured = capfd.readouterr()
    assert captured.out == "it trains\n"
    assert "engine was ended by SIGKILL: engine starts again (1 of 9 times)." in captured.err
    assert (tmp_path / "fleet/logs/trainer.log").read_text() == "it trains\n"


def test_one_dead_process_of_a_gang_ends_the_others_at_once(tmp_path, started):
    first = "until('stuck')\nif turn == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    second = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(folder / 'stuck').touch()\nif turn == 1:\n    time.sleep(99)"
    )
    assert supervisor(tmp_path, gang("trainer", first, second, leads=True)).run() == 0
    assert len(started("trainer-0")) == len(started("trainer-1")) == 2


@pytest.mark.parametrize("how", ["sleeps", "stopped"])
def test_a_hang_is_found_by_progress_and_stacks_are_written(tmp_path, started, how, capfd):
    stuck = "os.kill(os.getpid(), signal.SIGSTOP)" if how == "stopped" else "time.sleep(99)"
    leader = f"def in_a_collective():\n    {stuck}\n    time.sleep(99)\n"
    # The budget is for the first turn alone: a busy machine may need longer to end the second.
    leader += "if turn == 1:\n    signs.phase('trains step 3', 0.3)\n    in_a_collective()\n"
    gangs = gang("engine", FOREVER), gang("trainer", leader, leads=True)
    assert supervisor(tmp_path, *gangs).run() == 0
    assert len(started("trainer")) == 2
    (reason,) = restarts.summary(tmp_path / "fleet")["first_reasons"].values()
    assert reason.startswith("trainer hangs: it trains step 3, without progress for ")
    assert "in in_a_collective" in (tmp_path / "fleet/logs/trainer.stacks").read_text()
    assert "File" in (tmp_path / "fleet/logs/engine.stacks").read_text()
    assert "stacks of all processes" in capfd.readouterr().err


def test_stacks_are_waited_for_as_long_as_they_may_still_come(tmp_path, started, capfd, monkeypatch):
    """A process that gets no processor time writes late; one that never can is named."""
    monkeypatch.setattr(supervise, "STACKS_S", 5.0)
    late = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    late += "def starves():\n    time.sleep(3.0)\n    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])\n"
    late += "    time.sleep(99)\nif turn == 1:\n    signs.phase('trains step 3', 0.3)\n    starves()\n"
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n" + FOREVER
    assert supervisor(tmp_path, gang("engine", deaf), gang("trainer", late, leads=True)).run() == 0
    assert len(started("trainer")) == 2
    assert "in starves" in (tmp_path / "fleet/logs/trainer.stacks").read_text()
    said = capfd.readouterr().err
    assert "engine has written no stacks within 5 s; the system says that it " in said
    assert "trainer has written no stacks" not in said


def test_who_waited_in_vain_starts_again_with_its_own_line(tmp_path, started, capfd):
    leader = "if turn == 1:\n    print('error: it waited 9 s for process 1.')\n    sys.exit(75)\n"
    assert supervisor(tmp_path, gang("trainer", leader, leads=True)).run() == 0
    told = restarts.summary(tmp_path / "fleet")
    assert told["first_reasons"] == {"trainer": "trainer: error: it waited 9 s for process 1."}


def test_who_is_silent_is_told_before_it_counts_as_hanging(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervise, "SILENT_S", 0.3)
    quiet = "signs.phase('plays', 3.0)\ntime.sleep(1)\nsigns.tick()\n(folder / 'enough').touch()\n" + FOREVER
    gangs = gang("engine", quiet), gang("trainer", "until('enough')", leads=True)
    assert supervisor(tmp_path, *gangs).run() == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "silent" in line]
    assert len(said) == 1 and "engine has been silent for 0 s (it plays); without progress for 3 s" in said[0]


def test_progress_within_a_phase_is_no_hang(tmp_path, started):
    leader = "signs.phase('waits for step 3', 0.4)\nfor i in range(30):\n    time.sleep(0.03)\n    signs.tick()\n"
    assert supervisor(tmp_path, gang("trainer", leader, leads=True)).run() == 0
    assert len(started("trainer")) == 1


@pytest.mark.parametrize("code", [1, 2, 143])
def test_who_says_why_it_ends_is_not_started_again(tmp_path, started, code):
    gangs = gang("engine", FOREVER), gang("trainer", f"until('engine.starts'); sys.exit({code})", leads=True)
    assert supervisor(tmp_path, *gangs).run() == code
    assert len(started("trainer")) == 1 and not any(map(alive, started("engine")))


def test_a_trainer_that_fails_at_one_place_is_given_up(tmp_path, started, capfd):
    crash = f"signs.phase('trains', 9.0, done=min(turn, 3))\nsys.exit({restarts.CRASHED})"
    assert supervisor(tmp_path, gang("trainer", crash, leads=True)).run() == 1
    assert len(started("trainer")) == 2 + restarts.CRASHES_AT_ONE_PLACE  # it got further twice
    assert "3 times in a row at one place" in capfd.readouterr().err


@pytest.mark.parametrize(("good_s", "starts"), [(0.0, 6), (60.0, restarts.CRASHES_AT_ONE_PLACE)])
def test_an_engine_that_worked_for_long_before_every_crash_starts_again(tmp_path, started, monkeypatch, good_s, starts):
    """Each of its lives counts episodes from its own start, and none of them comes further than the first."""
    monkeypatch.setattr(restarts, "GOOD_S", good_s)
    worker = f"signs.phase('plays', 60.0, done=9 - turn)\nif turn < 6: sys.exit({restarts.CRASHED})\n"
    worker += "(folder / 'enough').touch()\n" + FOREVER
    gangs = gang("engine", worker), gang("trainer", "until('enough')", leads=True)
    assert supervisor(tmp_path, *gangs).run() == (0 if good_s == 0.0 else 1)
    assert len(started("engine")) == starts


def test_restarts_are_limited(tmp_path, started):
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    assert supervisor(tmp_path, gang("trainer", killed, leads=True), restarts=2).run() == 1
    assert len(started("trainer")) == 3
    assert supervisor(tmp_path, gang("trainer", killed, leads=True), restarts=0).run() == 1
    assert len(started("trainer")) == 4


@pytest.mark.parametrize("done", [0, 1])
def test_only_who_dies_before_it_works_is_made_to_wait(tmp_path, started, capfd, done):
    worker = f"signs.phase('plays', 60.0, done={done})\nif turn < 5: os.kill(os.getpid(), signal.SIGKILL)\n"
    worker += "(folder / 'enough').touch()\n" + FOREVER
    gangs = gang("engine", worker), gang("trainer", "until('enough')", leads=True)
    assert supervisor(tmp_path, *gangs).run() == 0
    assert len(started("engine")) == 5
    assert (" starts again in " in capfd.readouterr().err) == (done == 0)


def test_engines_that_are_all_refused_end_the_run(tmp_path, started, capfd):
    refused = "print('error: another jaxlib')\nsys.exit(2)"
    gangs = gang("engine-0", refused), gang("engine-1", refused), gang("trainer", FOREVER, leads=True)
    assert supervisor(tmp_path, *gangs).run() == 2
    assert "engine-0 cannot work, and is not started again: error: another jaxlib" in capfd.readouterr().err


def test_the_coordinator_must_be_there(tmp_path, started):
    body = "until('trainer.starts')\nif turn == 3: (folder / 'third').touch()\nelse: sys.exit(0)\n" + FOREVER
    gangs = gang("coordinator", body, needed=True), gang("trainer", "until('third')", leads=True)
    assert supervisor(tmp_path, *gangs).run() == 0
    assert len(started("coordinator")) == 3
    bad = gang("coordinator", "print('error: line 3 is damaged'); sys.exit(2)", needed=True)
    assert supervisor(tmp_path, bad, gang("trainer", FOREVER, leads=True)).run() == 2


def test_nothing_starts_before_it_may(tmp_path, started):
    late = gang("engine", "(folder / 'late').touch()\n" + FOREVER, ready=(tmp_path / "data").exists)
    leader = "assert not (folder / 'engine.starts').exists()\n(folder / 'data').touch()\nuntil('late')"
    assert supervisor(tmp_path, late, gang("trainer", leader, leads=True)).run() == 0


# ---------------------------------------------------------------- signals: the supervisor as a process of its own

COMMAND = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.fleet import test_supervise as t
folder = pathlib.Path({folder!r})
sys.exit(t.supervisor(folder, t.gang("engine", t.GRANDCHILD), t.gang("trainer", {leader!r}, leads=True)).run())
"""
GRANDCHILD = (
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    "(folder / 'grandchild').write_text(str(child.pid))\n" + FOREVER
)
SAVES = (
    "def save(signum, frame):\n    print('saves', flush=True)\n    time.sleep(0.2)\n    sys.exit(128 + signum)\n"
    "signal.signal(signal.SIGINT, save); signal.signal(signal.SIGTERM, save)\n" + FOREVER
)
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER


@pytest.fixture
def command(tmp_path, started):
    """Starts a supervisor with an engine and a trainer, and returns it when both are under way."""
    running = []

    def start(leader: str) -> subprocess.Popen:
        code = COMMAND.format(root=str(ROOT), folder=str(tmp_path), leader=leader)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append(process)
        served.until(lambda: all((tmp_path / f"fleet/vitals/{name}.json").exists() for name in ("engine", "trainer")))
        return process

    yield start
    for process in running:
        process.kill()
        process.wait(DEADLINE_S)


def left(tmp_path: pathlib.Path, started) -> list[int]:
    """Processes that still run."""
    pids = [*started("engine"), *started("trainer"), int((tmp_path / "grandchild").read_text())]
    return [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_trainer_save_and_ends_all(tmp_path, started, command, signum):
    process = command(SAVES)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signum
    assert said == "saves\n"
    assert not left(tmp_path, started)


@pytest.mark.parametrize("when", ["while it is started", "before its first sign of life"])
def test_a_signal_before_the_trainer_has_begun_ends_the_run_as_asked(tmp_path, when, capfd):
    """Python that is just starting ends by a traceback and exit code 1, which would be final."""
    asks = f"os.kill(os.getppid(), {int(signal.SIGINT)})\n" * (when != "while it is started")
    trainer = gang("trainer", f"signal.signal(signal.SIGINT, lambda *_: os._exit(1))\n{asks}time.sleep(3)", leads=True)

    def programs(start: int):
        if not asks:
            os.kill(os.getpid(), signal.SIGINT)
        return trainer.programs(start)

    assert supervisor(tmp_path, Gang("trainer", programs, leads=True)).run() == 130
    assert "interrupted before trainer had begun" in capfd.readouterr().err


def test_a_second_ctrl_c_ends_at_once(tmp_path, started, command):
    process = command(DEAF)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None and left(tmp_path, started)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "interrupted twice" in said
    assert not left(tmp_path, started)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a parent-death signal")
def test_kill_9_of_the_supervisor_leaves_no_role_behind(tmp_path, started, command):
    process = command(DEAF)
    process.kill()
    process.wait(DEADLINE_S)
    served.until(lambda: not any(alive(pid) for pid in (*started("engine"), *started("trainer"))))
    os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)  # what an engine starts ends with its pipe


def test_a_full_disk_under_the_logs_ends_nothing(tmp_path, capfd):
    logs = tmp_path / "fleet/logs"
    logs.mkdir(parents=True)
    (logs / "trainer.log").symlink_to("/dev/full")
    assert supervisor(tmp_path, gang("trainer", "print('it trains', flush=True)\n", leads=True)).run() == 0
    assert capfd.readouterr().out == "it trains\n"


def test_what_a_full_disk_swallows_is_told_by_the_supervisor(tmp_path, capfd, monkeypatch):
    """A process writes its last line to a log for which there is no room; that of a process before is not its own."""
    logs = tmp_path / "fleet/logs"
    logs.mkdir(parents=True)
    (logs / "coordinator.log").write_text("an earlier line\n")
    monkeypatch.setattr(child.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    silent = gang("coordinator", "sys.exit(1)", needed=True)
    assert supervisor(tmp_path, silent, gang("trainer", FOREVER, leads=True)).run() == 1
    said = capfd.readouterr().err
    assert "coordinator: it said nothing, and the disk of " in said and "is full: make room, and the same" in said
    assert "an earlier line" not in said


def test_the_summary_has_counts_and_first_reasons_and_what_a_power_cut_leaves_is_no_reason_to_end(tmp_path):
    assert restarts.summary(tmp_path) == {"restarts": {}, "first_reasons": {}}
    first, second = (
        json.dumps({"time": "", "process": "engine-0", "reason": reason}) for reason in ("first", "second")
    )
    (tmp_path / restarts.FILE).write_text(f"{first}\n{second}\n{first[:20]}\n[]\n")
    assert restarts.summary(tmp_path) == {"restarts": {"engine-0": 2}, "first_reasons": {"engine-0": "first"}}
    for text in ("", "{", "[]", "{}"):
        (tmp_path / "sign.json").write_text(text)
        assert vitals.read(tmp_path / "sign.json") is None


# ---------------------------------------------------------------- what is final, and what is not


CODES = [0, 1, 2, 70, 75, 129, 130, 143, -9, restarts.HANGS]


@pytest.mark.parametrize("leads", [True, False])
def test_only_a_mistake_at_the_beginning_and_what_a_trainer_has_told_are_final(leads):
    """Every code, before and after the process has worked once: what worked yesterday is no mistake of the user's."""
    for worked in (False, True):
        lives = restarts.Lives(100, leads, starts=1)
        if worked:
            assert lives.next_start(-9, lived_s=1.0, progress=1) == (0.0, "")
        told = {1, 129, 130, 143} if leads else set()
        assert {code for code in CODES if lives.final(code)} == told | (set() if worked else {2})


def test_a_failure_for_now_is_tried_again_for_minutes_and_a_crash_three_times():
    for code, least_s in ((75, restarts.VAIN_S), (2, restarts.VAIN_S), (70, 0.0), (1, 0.0)):
        lives, waited_s, pauses = restarts.Lives(100, starts=1), 0.0, []
        while not (answer := lives.next_start(code, lived_s=1.0, progress=0))[1]:
            pauses.append(answer[0])
            waited_s += 1.0 + answer[0]
        assert waited_s + 40 > least_s and (least_s or len(pauses) == restarts.CRASHES_AT_ONE_PLACE - 1), pauses
        assert pauses == sorted(pauses) and max(pauses) <= restarts.LONGEST_DELAY_S
    for done, leads in ((1, False), (None, True), (None, False)):  # it works for long before each end
        lives = restarts.Lives(100, leads, starts=1)
        assert not any(lives.next_start(code, restarts.GOOD_S + 1, done)[1] for code in (70, 75) for _ in range(50))
    lives = restarts.Lives(3)
    for lives.starts in (1, 2, 3):
        assert not lives.next_start(-9, 1.0, 0)[1]
    lives.starts = 4
    assert lives.next_start(-9, 1.0, 0) == (0.0, "after 3 restarts")


@pytest.mark.parametrize("code", [2, 75])
def test_what_a_process_that_has_worked_cannot_do_for_a_moment_does_not_end_the_run(tmp_path, started, capfd, code):
    """A port that another one has, a header that was lost on the way, a file that is not there yet."""
    body = "if turn == 1:\n    signs.phase('serves', 60.0, done=1)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    body += (
        f"if turn < 4:\n    print('error: Cannot listen')\n    sys.exit({code})\n(folder / 'there').touch()\n" + FOREVER
    )
    gangs = gang("coordinator", body, needed=True), gang("trainer", "until('there')", leads=True)
    assert supervisor(tmp_path, *gangs).run() == 0
    assert len(started("coordinator")) == 4
    assert "coordinator: error: Cannot listen: coordinator starts again" in capfd.readouterr().err


def test_a_coordinator_whose_port_is_taken_moves_and_those_who_wait_for_it_follow(tmp_path, monkeypatch, capfd):
    """The real coordinator, started by the command line that the supervisor makes; a client of before gets through."""
    monkeypatch.setenv("JAXAGENT_FLEET_TOKEN", "a secret of the tests")
    argv = tiny_run.argv(tmp_path, "--config.fleet=on")
    folder = tmp_path / "fleet"
    folder.mkdir()
    here = local._LocalPrograms(flags.parse_argv(argv).config, argv, folder, "jaxagent.join")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(number: int) -> subprocess.Popen:
        return subprocess.Popen(here.coordinator(number)[0].command, env=environment, stderr=subprocess.DEVNULL)

    first = start(0)
    served.until(lambda: bool(here.url()))
    link = Client(here.url(), "a secret of the tests", 30.0, folder / local.ADDRESS_FILE)
    run, before = link.status()["run"], link.url
    here.trainers(0)
    told = capfd.readouterr().err  # where to look, and how to join
    assert all(part in told for part in (f"{before}/v1/status", f"--coordinator={before}", str(folder / "logs")))
    first.kill()
    first.wait()
    with bound_socket("127.0.0.1", int(before.rpartition(":")[2])) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # an outgoing connection has its port for itself
        second = start(1)
        try:
            assert link.status()["run"] == run and link.url != before
        finally:
            second.kill()
            second.wait()
    in_vain = [sys.executable, "-m", "jaxagent.join", "--role=coordinator", *argv[1:]]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"--listen=127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run([*in_vain, where], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 75 and done.stderr.startswith("error: Cannot listen on 127.0.0.1"), done.stderr


def test_an_engine_whose_end_was_seen_has_left_at_once_and_a_coordinator_that_is_away_holds_nobody_up(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("JAXAGENT_FLEET_TOKEN", served.TOKEN)
    argv = tiny_run.argv(tmp_path, "--config.fleet=on")
    plan = Plan(steps=2, groups_per_step=2, attempts=2, staleness=1, lease_s=600.0)
    with served.Served(tmp_path, plan) as coordinator:
        here = local._LocalPrograms(flags.parse_argv(argv).config, argv, tmp_path, "jaxagent.join")
        coordinator.stop()
        coordinator.start()  # the command has removed what an earlier one wrote
        link = coordinator.client()
        for name, host in (("engine-0", "127.0.0.1"), ("engine-1", "127.0.0.1"), ("engine-0", "elsewhere")):
            coordinator.client().join("engine", {**served.FACTS, "process": name, "host": host})
        here.report_end("engine-0")
        here.report_end("trainer")
        left = [(row["process"], row["host"]) for row in link.status()["members"]["engine"].values()]
        assert left == [("engine-1", "127.0.0.1"), ("engine-0", "elsewhere")]
    before = time.monotonic()
    here.report_end("engine-1")
    assert time.monotonic() - before < 10
