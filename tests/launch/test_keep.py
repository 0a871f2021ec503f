"""`launch.keep` starts again what fails, kills what is stuck, leaves nothing behind; `launch.progress` tells which."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch import keep, progress
from tests.tiny_run import ROOT


def sign(path: pathlib.Path, pid: int = 7, budget_s: float = 10.0, at: float = 100.0) -> None:
    path.write_text(json.dumps({"pid": pid, "phase": "waits", "budget_s": budget_s, "at": at, "done": 0}))


def test_progress_is_judged_by_the_budget_of_the_phase(tmp_path):
    file = tmp_path / "vitals"
    assert progress.overdue(file, 0.0) is None
    sign(file)
    assert progress.overdue(file, 110.0) == progress.overdue(file, 110.0, pid=7) == ""
    assert progress.overdue(file, 111.0) == "it waits: no progress for 11 s of 10"
    assert progress.overdue(file, 111.0, pid=8) is None  # what an earlier process left there
    file.write_text("[]")
    assert progress.overdue(file, 0.0) is None, "a power cut may leave anything there"


def test_the_probe_says_it_by_its_exit_code(tmp_path, capsys):
    file = tmp_path / "vitals"
    assert (progress.main([str(file)]), progress.main([str(file), "--begun"])) == (0, 1)
    sign(file, at=time.monotonic())
    assert (progress.main([str(file)]), progress.main([str(file), "--begun"])) == (0, 0)
    sign(file, at=time.monotonic() - 60)
    capsys.readouterr()
    assert progress.main([str(file)]) == 1 and capsys.readouterr().out == "it waits: no progress for 60 s of 10\n"


def test_waits_double_and_begin_anew():
    backoff = keep.Backoff(10)
    assert [backoff.after(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.after(100.0) == 1 and backoff.after(0.0) == 2
    assert backoff.after(0.0) is None  # that were ten


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--restarts=1"], "No command"),
        (["--restarts=x", "--", "true"], "must be a whole number"),
        (["--", "/no/such/program"], "Cannot start '/no/such/program'"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    assert keep.main(words) == 2
    assert message in capsys.readouterr().err


def test_it_shows_what_it_would_start(capsys):
    assert keep.main(["--print", "--restarts=3", "--", "sleep", "a b"]) == 0
    assert capsys.readouterr().out == "sleep 'a b'\nwatched by its exit alone, started again 3 times at most\n"


def start(*words: str, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.keep", *words]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **more)


@pytest.mark.slow
def test_what_fails_is_started_again_and_the_end_is_handed_on(tmp_path):
    program = f'echo x >> "{tmp_path}/starts"; [ $(wc -l < "{tmp_path}/starts") = 2 ] && exit 0; exit 3'
    kept = start(f"--said={tmp_path}/said", "--name=it", "--", "bash", "-c", program)
    assert kept.communicate(timeout=60)[1].startswith("it ended with 3 after")
    assert kept.returncode == 0 and (tmp_path / "said").read_text() == "0\n"
    kept = start("--", "bash", "-c", "exit 2")  # a mistake
    assert (kept.communicate(timeout=60)[1], kept.returncode) == ("", 2)


@pytest.mark.slow
def test_what_makes_no_progress_is_killed_after_it_wrote_its_stacks(tmp_path):
    program = (
        "import faulthandler, json, os, signal, time\n"
        "faulthandler.register(signal.SIGUSR1, open(os.environ['JAXAGENT_STACKS'], 'w'))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sign = {'pid': os.getpid(), 'phase': 'naps', 'budget_s': 0.1, 'at': time.monotonic(), 'done': 0}\n"
        "json.dump(sign, open(os.environ['JAXAGENT_VITALS'], 'w'))\n"
        "time.sleep(600)"
    )
    kept = start("--restarts=0", f"--vitals={tmp_path}/vitals", "--", sys.executable, "-c", program)
    assert "was stuck (it naps: no progress for" in kept.communicate(timeout=60)[1]
    assert kept.returncode == keep.STUCK and "line 6" in (tmp_path / "vitals.stacks").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "end of its owner", "SIGKILL"])
def test_nothing_is_left_of_it(how, tmp_path):
    """Neither the process nor what it has started; after a SIGKILL the system itself ends the former."""
    program = f"sleep 600 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; wait"
    kept = start("--until_eof", "--grace_s=5", "--", "bash", "-c", program, stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    if how == "end of its owner":
        kept.stdin.close()
    else:
        kept.send_signal(getattr(signal, how))
    kept.wait(timeout=60)
    watched = pids[:1] if how == "SIGKILL" else pids
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in watched) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in watched if pathlib.Path(f"/proc/{pid}").exists()]
    if how == "SIGKILL":
        os.kill(pids[1], signal.SIGKILL)
    assert not left
    assert kept.returncode == {"SIGTERM": 143, "SIGKILL": -9}.get(how, 143)
