"""The Slurm script, run by a Slurm of one machine, with stand-ins for the roles (fake_join.py)."""

import json
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest

from tests.launch import fake_join
from tests.tiny_run import ROOT

SCRIPT = ROOT / "launch" / "slurm_fleet.sh"
RECIPE = "--config=configs/search_r1.py"


def script(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *words]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_it_shows_what_it_would_start():
    done = script("--print", RECIPE, "--config.workdir=/shared/my runs", TRAINERS="2", PORT="9000")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 3
    assert "--role=coordinator --listen=0.0.0.0:9000" in lines[0]
    assert "srun --nodes=2" in lines[1] and "--kill-on-bad-exit=1" in lines[1] and "--meet=NODE0:9001" in lines[1]
    assert "--kill-on-bad-exit=0" in lines[2] and "--nodelist=NODE2" in lines[2]
    assert all("--coordinator=http://NODE0:9000" in line for line in lines[1:])
    assert all(r"--config.workdir=/shared/my\ runs" in line for line in lines)


def test_of_a_heterogeneous_job_the_first_part_trains(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$3" | tr , "\\n"\n')
    scontrol.chmod(0o755)
    parts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "a1,a2", "SLURM_JOB_NODELIST_HET_GROUP_1": "b1"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = script("--print", RECIPE, "--config.workdir=w", SLURM_HET_SIZE="2", PATH=path, **parts)
    trainers, engines = (line for line in done.stdout.splitlines() if line.startswith("srun"))
    assert trainers.startswith("srun --het-group=0 --nodes=2") and "--nodelist=a1,a2" in trainers
    assert engines.startswith("srun --het-group=1 --nodes=1") and "--nodelist=b1" in engines
    assert "--processes=2 --meet=a1:8501" in trainers and "--coordinator=http://a1:8500" in engines
    done = script("--print", RECIPE, "--config.workdir=w", SLURM_HET_SIZE="3")
    assert done.returncode == 2 and "must have two parts" in done.stderr


def test_help_is_the_head_of_the_script():
    done = script("--help")
    assert done.returncode == 0 and "TRAINERS=1" in done.stdout and "#SBATCH" not in done.stdout


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([RECIPE, "--config.workdir=w", "--prin"], {}, "Unknown flag '--prin'"),
        (["--config.workdir=w"], {}, "--config=FILE is missing"),
        ([RECIPE], {}, "--config.workdir=DIR is missing"),
        ([RECIPE, "--config.workdir=w"], {}, "This is not a Slurm job"),
        ([RECIPE, "--config.workdir=w", "--print"], {"TRAINERS": "two"}, "TRAINERS must be a whole number, got 'two'"),
    ],
)
def test_a_mistake_is_one_line(words, environment, message):
    done = script(*words, **environment)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


class Job:
    """`sbatch` with a fake Slurm on the path."""

    def __init__(self, request, tmp: pathlib.Path, nodes: str = "localhost,n1,n2,n3", **environment: str):
        self.workdir, self.log = tmp / "run", tmp / "slurm.log"
        self.bin = tmp / "bin"
        self.bin.mkdir(exist_ok=True)
        for name in ("srun", "sbatch", "scontrol"):
            program = ROOT / "tests" / "launch" / "fake_slurm.py"
            text = f'#!/bin/sh\nexec {sys.executable} {program} {name} "$@"\n'
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.env = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "JOIN": f"{sys.executable} -m tests.launch.fake_join",
            "FAKE_NODES": nodes,
            "FAKE_SLURM_LOG": str(self.log),
            "PORT": str(port),
            "TRAINERS": "2",
            **environment,
        }
        words = ["sbatch", "--nodes=4", str(SCRIPT), RECIPE, f"--config.workdir={self.workdir}"]
        self.process = subprocess.Popen(
            words, env=self.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        request.addfinalizer(self.kill)

    def kill(self) -> list[str]:
        """Whatever is left of the job: nothing, where all is well."""
        self.process.kill()
        deadline = time.monotonic() + 10
        while (
            left := [line for line in self.started() if alive(int(line.split()[1]))]
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        for line in left:
            os.kill(int(line.split()[1]), signal.SIGKILL)
        return left

    def end(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit code and stderr; no process of the job may be left."""
        try:
            _, errors = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
            errors += "\nTIMEOUT"
        left = self.kill()
        assert not left, (left, errors)
        return self.process.returncode, errors

    def started(self, role: str = "") -> list[str]:
        file = self.workdir / "started.txt"
        return [line for line in file.read_text().splitlines() if line.startswith(role)] if file.exists() else []

    def versions(self) -> list[str]:
        file = self.workdir / "versions.json"
        return json.loads(file.read_text()) if file.exists() else []

    def asked(self, name: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(name)]


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(what, timeout_s: float = 120):
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_a_run_survives_what_happens_to_its_processes(request, tmp_path):
    """A crash of a trainer, one of an engine, a kill -9 of the coordinator: the same versions as without."""
    job = Job(request, tmp_path, FAKE_FAULT="trainer:exit70", FAKE_STEPS="40", FAKE_EPISODE_S="0.03")
    until(lambda: len(job.versions()) > 4)
    os.kill(int(job.started("coordinator")[-1].split()[1]), signal.SIGKILL)
    os.kill(int(job.started("engine")[0].split()[1]), signal.SIGKILL)
    code, errors = job.end()
    assert code == 0, errors
    with_steps = os.environ | {"FAKE_STEPS": "40", "PYTHONPATH": str(ROOT)}
    program = "from tests.launch import fake_join; print(*fake_join.expected())"
    oracle = subprocess.run(
        [sys.executable, "-c", program], env=with_steps, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert job.versions() == oracle.stdout.split()
    assert [len(job.started(role)) for role in ("coordinator", "trainer", "engine")] == [2, 4, 3]
    assert len({re.search(r"--meet=(\S+)", line)[1] for line in job.started("trainer")}) == 2  # a new port
    assert not job.asked("scontrol requeue")
    token = job.workdir / "fleet" / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    assert token.read_text() not in job.log.read_text() + errors + "".join(job.started())


@pytest.mark.slow
def test_sigterm_saves_and_puts_the_job_back_into_the_queue(request, tmp_path):
    job = Job(request, tmp_path, FAKE_STEPS="30", TRAINERS="1", nodes="localhost,n1")
    until(lambda: len(job.versions()) > 2)
    job.process.send_signal(signal.SIGTERM)
    code, errors = job.end()
    assert code == 143 and job.asked("scontrol requeue 7"), errors
    assert 2 < len(before := job.versions()) < 31
    code, errors = Job(request, tmp_path, FAKE_STEPS="30", TRAINERS="1", nodes="localhost,n1").end()
    assert code == 0, errors
    assert len(job.versions()) == 31 and job.versions()[: len(before)] == before


@pytest.mark.slow
def test_a_mistake_of_the_users_is_not_repeated(request, tmp_path):
    job = Job(request, tmp_path, FAKE_FAULT="trainer:exit2")
    code, errors = job.end()
    assert code == 2 and len(job.started("trainer")) == 2, errors


@pytest.mark.slow
def test_a_trainer_that_hangs_is_found_by_its_progress(request, tmp_path):
    job = Job(request, tmp_path, FAKE_FAULT="trainer:hang")
    code, errors = job.end()
    assert code == 0 and job.versions() == fake_join.expected(), errors
    assert "it hangs: no progress for" in errors and len(job.started("trainer")) == 4
