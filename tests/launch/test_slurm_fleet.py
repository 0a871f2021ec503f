"""The Slurm script, run by a Slurm of one machine (fake_slurm.py) that starts the real processes of a tiny run."""

import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxagent.config.command import bound_socket
from jaxagent.fleet import vitals
from launch import slurm_fleet
from tests import tiny_run
from tests.fleet import tiny_fleet
from tests.tiny_run import ROOT

FAKE = ROOT / "tests" / "launch" / "fake_slurm.py"
SCRIPT = ROOT / "launch" / "slurm_fleet.sh"
RECIPE = "--config=configs/search_r1.py"


def script(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *words]
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_it_shows_what_it_would_start():
    done = script(
        "--print", RECIPE, "--config.workdir=/shared/my runs", "--config.mesh.fsdp=2", TRAINERS="2", PORT="9000"
    )
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 3
    assert {"--role=coordinator", "--listen=0.0.0.0:9000", "--config.workdir=/shared/my runs"} <= set(lines[0])
    for line, own, wanted in (
        (lines[1], {"--nodes=2", "--kill-on-bad-exit=1"}, "--meet=NODE0:9001"),
        (lines[2], {"--nodelist=NODE2", "--kill-on-bad-exit=0"}, "--role=engine"),
    ):
        assert line[0] == "srun" and own <= set(line)
        words = shlex.split(line[-1])  # of the shell on the node
        assert {wanted, "--coordinator=http://NODE0:9000", "--config.workdir=/shared/my runs"} <= set(words)


def test_of_a_heterogeneous_job_the_first_part_trains(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$3" | tr , "\\n"\n')
    scontrol.chmod(0o755)
    parts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "a1,a2", "SLURM_JOB_NODELIST_HET_GROUP_1": "b1"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = script(
        "--print", RECIPE, "--config.workdir=w", "--config.mesh.fsdp=2", SLURM_HET_SIZE="2", PATH=path, **parts
    )
    trainers, engines = (line for line in done.stdout.splitlines() if line.startswith("srun"))
    assert trainers.startswith("srun --cpu-bind=none --het-group=0 --nodes=2") and "--nodelist=a1,a2" in trainers
    assert engines.startswith("srun --cpu-bind=none --het-group=1 --nodes=1") and "--nodelist=b1" in engines
    assert "--processes=2 --meet=a1:8501" in trainers and "--coordinator=http://a1:8500" in engines
    done = script("--print", RECIPE, "--config.workdir=w", SLURM_HET_SIZE="3")
    assert done.returncode == 2 and "must have two parts" in done.stderr


def test_a_slurm_that_does_not_answer_is_a_failure_for_now(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho slurm_load_node: Unable to contact slurm controller >&2; exit 1\n")
    scontrol.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a[1-2]"}
    done = script("--print", RECIPE, "--config.workdir=w", **path)
    assert done.returncode == 75 and "Unable to contact slurm controller" in done.stderr
    assert "Traceback" not in done.stderr and "scontrol show hostnames a[1-2]" in done.stderr


def test_help_says_what_can_be_set():
    done = script("--help")
    assert done.returncode == 0 and "TRAINERS=1" in done.stdout


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ("--config.workdir=w --prin", {}, "Unknown flag '--prin'"),
        ("--config.workdir=w", {}, "This is not a Slurm job"),
        ("", {}, "--config.workdir=DIR is missing"),
        ("--config.workdir=w --print", {"TRAINERS": "two"}, "TRAINERS must be a whole number from 1, got 'two'"),
        ("--config.workdir=w --print", {"ENGINES_PER_NODE": "0"}, "must be a whole number from 1, got '0'"),
        ("--config.workdir=w --print --config.fleet.trainers=2", {}, "=2 and TRAINERS=1 (environment) differ"),
        ("--config.workdir=w --print --config.rl.stepz=2", {}, "stepz"),
        (
            "--config.workdir=w --print --config.mesh.fsdp=4",
            {"SLURM_GPUS_ON_NODE": "2"},
            "Each trainer process needs 4 devices (config.mesh), and would have 2",
        ),
    ],
)
def test_a_mistake_is_one_line(words, environment, message):
    done = script(RECIPE, *words.split(), **environment)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_recipe_must_be_named():
    done = script("--config.workdir=w")
    assert done.returncode == 2 and done.stderr.startswith("error: --config=FILE is missing")


def test_what_an_srun_means_is_what_its_tasks_have_said(tmp_path):
    """It tells the highest code of all, those that it killed itself included, and its own where a node is lost."""
    cfg = SimpleNamespace(workdir=str(tmp_path))
    job = slurm_fleet.Job(None, cfg, ["a", "b"], ["c"], {"PORT": "8500"})
    job._ends.mkdir(parents=True)
    cases = [
        ({}, 1, 75), ({}, 137, 75), ({}, 143, 143),  # a node that is lost; a job that is to end
        ({0: 2, 1: 143}, 143, 2), ({0: 143, 1: 1}, 143, 1), ({0: 70, 1: 137}, 137, 70), ({0: 75, 1: 143}, 143, 75),
    ]  # fmt: skip
    for said, srun, meant in cases:
        for path in job._ends.iterdir():
            path.unlink()
        for rank, code in said.items():
            (job._ends / str(rank)).write_text(f"{code}\n")
        assert job.code(srun) == meant, (said, srun)


@pytest.mark.slow
def test_a_new_workdir_first_try_and_a_job_that_goes_back_into_the_queue(tmp_path):
    """A trainer of two devices, an engine of one; SIGTERM after a version, and the same job again to the end."""
    workdir, log, programs = tmp_path / "my run", tmp_path / "slurm.log", tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "sbatch", "scontrol"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {name} "$@"\n')
        (programs / name).chmod(0o755)
    with bound_socket("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    env |= {"PATH": f"{programs}:{env['PATH']}", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "PORT": port}
    env |= {"FAKE_NODES": "localhost,n1", "FAKE_SLURM_LOG": str(log)}
    extra = ("--config.rl.staleness=1", "--config.mesh.fsdp=2", "--config.fleet.engine=on", "--config.fleet=on")
    words = ["sbatch", "--nodes=2", str(SCRIPT), *tiny_run.argv(workdir, *tiny_fleet.FLAGS, *extra)[1:]]
    pids: set[int] = set()

    def note() -> None:
        signs = [vitals.read(path) for path in (workdir / "fleet" / "vitals").glob("*.json")]
        pids.update(sign.pid for sign in signs if sign is not None)

    for last in (False, True):
        with open(tmp_path / "job.log", "ab") as out:
            job = subprocess.Popen(words, env=env, cwd=ROOT, stdout=out, stderr=out)
        try:
            until = time.monotonic() + 400
            while job.poll() is None and time.monotonic() < until:
                note()
                if not last and (workdir / "fleet" / "weights").is_dir() and len(tiny_fleet.digests(workdir)) > 1:
                    job.send_signal(signal.SIGTERM)
                    job.wait(120)
                time.sleep(0.1)
        finally:
            job.kill()
        told = (tmp_path / "job.log").read_text()
        assert job.wait() == (0 if last else 143), told[-4000:]
        assert ("scontrol requeue 7" in log.read_text()) and not any(map(tiny_fleet.alive, pids)), told[-4000:]
    assert len(tiny_fleet.digests(workdir)) == 6 and (workdir / "summary.json").exists()
    token = workdir / "fleet" / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and token.read_text() not in log.read_text() + told
    assert (workdir / "fleet" / "logs" / "engine-n1-0.log").exists()
