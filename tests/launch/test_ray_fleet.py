"""A tiny run's real processes on a real Ray cluster of two nodes on this machine."""

import importlib.util
import signal
import subprocess
import sys
import time

import pytest

from jaxagent.config import ConfigError
from jaxagent.fleet import vitals
from launch import ray_fleet
from tests import tiny_run
from tests.fleet import tiny_fleet
from tests.tiny_run import ROOT

RECIPE = "--config=configs/search_r1.py"
NO_RAY = importlib.util.find_spec("ray") is None


def test_it_shows_what_it_would_start(capsys):
    flags = "--engines=2 --print --engine_resources=CPU=2,GPU=1,TPU=4 --config.fleet=on --config.fleet.trainers=2 "
    flags += "--config.mesh.fsdp=2 --config.fleet.engine=on"
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
        (
            ["--print", "--config.mesh.fsdp=4", "--trainer_resources=GPU=4", "--engine_resources=GPU=1"],
            "Each engine process needs 4 devices (config.mesh; --config.fleet.engine=on makes engines smaller)",
        ),
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


@pytest.mark.slow
@pytest.mark.skipif(NO_RAY, reason="Ray is not installed: pip install 'jaxagent[ray]'")
def test_a_new_workdir_first_try_and_a_node_that_goes(tmp_path, monkeypatch):
    """A trainer of two devices, engines of one; before that, Ctrl-C of a run that finds no room."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("XLA_FLAGS", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    small = {"object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, **small})
    node, workdir, log = cluster.add_node(num_cpus=1, **small), tmp_path / "run", tmp_path / "log.txt"
    flags = ["--config.rl.staleness=1", "--config.mesh.fsdp=2", "--config.fleet.engine=on", "--config.fleet=on"]
    command = [sys.executable, "-m", "launch.ray_fleet", f"--address={cluster.address}", "--engines=2"]
    command += tiny_run.argv(workdir, *tiny_fleet.FLAGS, *flags)[1:]
    pids: set[int] = set()

    def start(*more: str) -> subprocess.Popen:
        with open(log, "ab") as out:
            return subprocess.Popen([*command, *more], cwd=ROOT, stderr=out, stdout=out)

    def until(what, run: subprocess.Popen) -> None:
        deadline = time.monotonic() + 300
        while not what():
            assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            signs = [vitals.read(path) for path in (workdir / "fleet" / "vitals").glob("*.json")]
            pids.update(sign.pid for sign in signs if sign is not None)
            time.sleep(0.1)

    run = start("--trainer_resources=CPU=100")
    try:
        until(lambda: "Connected to Ray" in log.read_text(), run)
        time.sleep(2.0)
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130, log.read_text()
        run = start()
        until(lambda: (workdir / "fleet/weights").is_dir() and len(tiny_fleet.digests(workdir)) > 1, run)
        cluster.remove_node(node)
        assert run.wait(300) == 0, log.read_text()[-4000:]
    finally:
        run.kill()
        cluster.shutdown()
    assert len(tiny_fleet.digests(workdir)) == 6 and len(pids) >= 4
    told = log.read_text()
    assert told.count("runs on ") >= 4 and ("is lost: " in told) and "cannot work" not in told
    assert not any(map(tiny_fleet.alive, pids))
