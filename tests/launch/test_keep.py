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
    assert capsys.readouterr().out == "sleep 'a b'\nstarted again 3 times at most\n"


def start(*words: str, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.keep", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **more)


HANG = """
import os, pathlib, signal, time
from jaxagent.fleet import vitals
vitals.register_stacks(os.environ["JAXAGENT_STACKS"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
vitals.Vitals(pathlib.Path(os.environ["JAXAGENT_VITALS"])).phase("naps", 0.3)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "command", "code", "message"),
    [
        ([], ["bash", "-c", "echo >> starts; [ $(wc -l < starts) = 2 ] || exit 3"], 0, "ended with exit code 3"),
        ([], ["bash", "-c", "exit 2"], 2, ""),  # a mistake, of which it has told
        (["--restarts=0"], ["bash", "-c", "exit 75"], 75, "after 0 restarts"),
        (["--restarts=0"], ["bash", "-c", "kill -9 $$"], 137, "was ended by SIGKILL"),
        (["--restarts=0", "--folder=here"], [sys.executable, "-c", HANG], 75, "hangs: it naps, without progress for"),
    ],
)  # fmt: skip
def test_it_hands_on_how_its_process_ended(words, command, code, message, tmp_path):
    kept = start(f"--said={tmp_path}/said", *words, "--", *command, cwd=tmp_path)
    told = kept.communicate(timeout=60)[1]
    assert kept.returncode == code and message in told, told
    assert (tmp_path / "said").read_text() == f"{code}\n"
    if "--folder=here" in words:
        assert "line 7" in (tmp_path / "here" / "logs" / "process.stacks").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_it(how, tmp_path):
    """Neither the process nor what it has started; after a SIGKILL the system itself ends the former."""
    program = f"sleep 600 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; wait"
    kept = start("--grace_s=5", f"--said={tmp_path}/said", "--", "bash", "-c", program)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    kept.send_signal(how)
    kept.wait(timeout=60)
    watched = pids[:1] if how == signal.SIGKILL else pids
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in watched) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in watched if pathlib.Path(f"/proc/{pid}").exists()]
    if how == signal.SIGKILL:
        os.kill(pids[1], signal.SIGKILL)
    assert not left and not (tmp_path / "said").exists()
    assert kept.returncode == (143 if how == signal.SIGTERM else -9)
