"""A run on a real Ray cluster of two nodes on this machine, with stand-ins for the roles (fake_join.py)."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxagent.config import ConfigError
from launch import ray_fleet
from tests.tiny_run import ROOT

RECIPE = "--config=configs/search_r1.py"
NO_RAY = importlib.util.find_spec("ray") is None


def test_it_shows_what_it_would_start(capsys):
    flags = "--engines=2 --print --engine_resources=CPU=2,GPU=1,TPU=4 --config.fleet=on --config.fleet.trainers=2"
    assert ray_fleet.main([RECIPE, *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["coordinator", "trainer-0", "trainer-1", "engine-0", "engine-1"]
    assert "--role=trainer" in lines[2] and "--rank=1 --processes=2 --meet=TRAINER0:PORT" in lines[2]
    assert "{'num_cpus': 2.0, 'num_gpus': 1.0, 'resources': {'TPU': 4.0}}" in lines[4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine_resources=8"], "must look like CPU=8,GPU=1, got '8'"),
        (["--engines=2", "--max_engines=1"], "--min_engines <= --engines <= --max_engines does not hold"),
        (["--engin=2"], "Unknown flag '--engin=2'. Did you mean '--engines'?"),
        (["--config.rl.stepz=2"], "stepz"),
    ],
)
def test_a_mistake_is_one_line(flags, message, capsys):
    assert ray_fleet.main([RECIPE, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "jaxagent.launch.ray_cluster", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'jaxagent\[ray\]'"):
        ray_fleet._main([RECIPE, "--engines=1"])


def until(what, run: subprocess.Popen, timeout_s: float = 180):
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert run.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Started:
    """What the stand-ins have written of their starts."""

    def __init__(self, workdir: pathlib.Path):
        self.workdir = workdir

    def pids(self, role: str = "") -> list[int]:
        file = self.workdir / "started.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(role)]

    def living(self, role: str = "") -> list[int]:
        return [pid for pid in self.pids(role) if alive(pid)]

    def steps(self) -> int:
        file = self.workdir / "versions.json"
        return len(json.loads(file.read_text())) - 1 if file.exists() else 0


@pytest.fixture
def cluster(monkeypatch):
    """A head that has room for coordinator, two trainers and one engine, and a node for two engines."""
    if NO_RAY:
        pytest.skip("Ray is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_STEPS", "40")
    monkeypatch.setenv("FAKE_HOLD", "30")
    monkeypatch.setenv("FAKE_EPISODE_S", "0.05")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"object_store_memory": 80_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"head": 3}, **small})
    made.small = {"object_store_memory": 80_000_000, "num_cpus": 2}
    yield made
    made.shutdown()


@pytest.mark.slow
def test_a_run_survives_kills_a_node_that_goes_and_one_that_comes(cluster, tmp_path):
    """Kill -9 of every role and of an actor, one node removed, one added: the same versions as without."""
    node = cluster.add_node(**cluster.small)
    started = Started(tmp_path / "run")
    command = [sys.executable, "-m", "launch.ray_fleet", f"--address={cluster.address}", RECIPE]
    command += [f"--config.workdir={started.workdir}", "--config.fleet=on", "--config.fleet.trainers=2"]
    command += [f"--join={sys.executable} -m tests.launch.fake_join", "--engines=2", "--max_engines=3"]
    command += ["--trainer_resources=CPU=1,head=1", "--coordinator_resources=CPU=1,head=1"]
    errors = open(tmp_path / "errors.txt", "w")  # noqa: SIM115
    run = subprocess.Popen(command, cwd=ROOT, stderr=errors, stdout=errors)
    try:
        until(lambda: started.steps() > 2 and len(started.living("engine")) == 3, run)  # the third came with the room
        for role in ("engine", "coordinator", "trainer"):
            before = len(started.pids(role))
            os.kill(started.living(role)[-1], signal.SIGKILL)
            until(lambda role=role, before=before: len(started.pids(role)) > before, run)
        keep = int(pathlib.Path(f"/proc/{started.living('engine')[0]}/stat").read_text().rpartition(")")[2].split()[1])
        actor = int(pathlib.Path(f"/proc/{keep}/stat").read_text().rpartition(")")[2].split()[1])
        was, before = started.living("engine")[0], len(started.pids("engine"))
        os.kill(actor, signal.SIGKILL)  # as when Ray takes its worker away
        until(lambda: not alive(was) and len(started.pids("engine")) > before, run)
        cluster.remove_node(node)
        until(lambda: len(started.living("engine")) == 1, run)  # what the head has room for
        cluster.add_node(**cluster.small)
        until(lambda: len(started.living("engine")) >= 2, run)
        (started.workdir / "finish").touch()
        assert run.wait(timeout=300) == 0
    finally:
        run.send_signal(signal.SIGTERM)
        try:
            run.wait(timeout=60)
        except subprocess.TimeoutExpired:
            run.kill()
        errors.close()
        print((tmp_path / "errors.txt").read_text()[-6000:])
        deadline = time.monotonic() + 10
        while (left := started.living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left
    assert started.steps() == 40
    program = "from tests.launch import fake_join; print(*fake_join.expected())"
    oracle = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads((started.workdir / "versions.json").read_text()) == oracle.stdout.split()
