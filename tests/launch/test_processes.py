"""The command lines that launchers start are those that `jaxagent.join` reads."""

import argparse
import re
from types import SimpleNamespace

import jax
import pytest

from jaxagent import main as cli
from jaxagent.config import ConfigError, flags
from jaxagent.fleet import local, settings
from jaxagent.models import sharding
from jaxagent.runs import devices
from launch import processes

URL = "http://host:8500"


def read(*overrides: str, config: str = "configs/search_r1.py") -> processes.Run:
    return processes.read(config, overrides, argparse.Namespace(engines=1))[0]


def test_a_launcher_turns_the_fleet_on_and_keeps_what_was_said_of_it():
    assert read().overrides == ("--config.fleet=on",)
    said = ("--config.fleet=on", "--config.fleet.trainers=2", "--config.mesh.fsdp=2")
    assert read(*said).overrides == said
    _, config = processes.read("configs/search_r1.py", said, argparse.Namespace())
    assert config.fleet is not None and config.fleet.trainers == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["--engine=2"], "Did you mean '--engines'"), (["--config.rl.steps"], "Unknown flag"), (["--config.rl.x=1"], "x")],
)
def test_what_is_no_override_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        read(*overrides)


@pytest.mark.slow  # the program's own imports take seconds
@pytest.mark.parametrize("processes_of_trainer", [1, 2])
def test_join_reads_them(processes_of_trainer):
    join = pytest.importorskip("jaxagent.join", reason="jaxagent.join is not there yet")
    run = read("--config.rl.steps=7")
    commands = {
        "coordinator": run.coordinator("0.0.0.0:8500"),
        "trainer": run.trainer(URL, "node-1", 1, processes_of_trainer, "node-0:8501"),
        "engine": run.engine(URL, "node-2", "engine-5"),
    }
    for role, command in commands.items():
        assert command[:3] == ("python", "-m", "jaxagent.join")
        options, rest = join._parser().parse_known_args(command[3:])
        config = flags.parse_argv(["join", *rest]).config
        assert config.fleet is not None and config.rl.steps == 7
        assert options.role == role and options.coordinator == ("" if role == "coordinator" else URL)
        if role == "trainer" and processes_of_trainer > 1:
            assert (options.rank, options.processes, options.meet) == (1, 2, "node-0:8501")
        if role != "coordinator":
            assert options.host == {"trainer": "node-1", "engine": "node-2"}[role]


@pytest.mark.parametrize(
    ("flags", "at_hand", "told"),
    [
        ("", {"trainer": 4, "engine": 4}, []),
        ("", {}, []),  # a launcher that does not know
        ("", {"trainer": 8, "engine": 4}, ["Each trainer process uses 4 of its 8 devices: 4 stay idle (config.mesh)."]),
        ("", {"trainer": 4, "engine": 1}, "Each engine process needs 4 devices (config.mesh; --config.fleet.engine=on"),
        ("", {"trainer": 2, "engine": 4}, "Each trainer process needs 4 devices (config.mesh), and would have 2."),
        ("engine=on", {"trainer": 4, "engine": 1}, []),
        (
            "engine=on engine.tensor=2",
            {"trainer": 4, "engine": 1},
            "Each engine process needs 2 devices (fleet.engine)",
        ),
        ("engine=on trainers=2", {"trainer": 2, "engine": 2}, ["Each engine process uses 1 of its 2 devices: 1 stay"]),
        ("trainers=2", {"trainer": 1, "engine": 4}, "needs 2 devices (config.mesh over 2 processes), and would have 1"),
    ],
)
def test_every_role_gets_the_devices_that_it_needs_or_the_run_is_refused_before_it_starts(flags, at_hand, told):
    overrides = [f"--config.fleet.{flag}" for flag in flags.split()]
    _, config = processes.read("search_r1", ["--config.fleet=on", "--config.mesh.fsdp=4", *overrides], None)
    if isinstance(told, str):
        with pytest.raises(ConfigError) as refused:
            list(processes.idle_devices(config, at_hand))
        assert told in str(refused.value)
    else:
        lines = list(processes.idle_devices(config, at_hand))
        assert len(lines) == len(told) and all(line.startswith(start) for line, start in zip(lines, told, strict=True))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("fsdp=4 trainers=3", r"fleet.trainers \(3\) must divide the devices of config.mesh \(4\)"),
        (
            "tensor=4 trainers=2",
            r"config.mesh.tensor \(4\) must divide the devices of each trainer process: with fleet.trainers=2 these",
        ),
    ],
)
def test_trainers_that_cannot_share_the_mesh_are_refused_before_anything_starts(flags, told, capsys, tmp_path):
    mesh, trainers = flags.split()
    overrides = ["--config.fleet=on", f"--config.mesh.{mesh}", f"--config.fleet.{trainers}"]
    with pytest.raises(ConfigError, match=told):
        processes.read("search_r1", overrides, None)
    assert cli.main(["main", "--config=search_r1", "--dry_run", *overrides]) == 2
    assert re.search(told, capsys.readouterr().err)
    assert cli.main(["main", "--config=search_r1", f"--config.workdir={tmp_path}/run", *overrides]) == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "size", "mesh"), [("wk", 3, (1, 1, 1, 1, 2)), ("embed", 5, (1, 2, 1, 1, 1))], ids=["tensor", "fsdp"]
)
def test_what_an_engines_own_mesh_cannot_split_names_its_section(name, size, mesh):
    _, config = processes.read("search_r1", ["--config.fleet=on", "--config.fleet.engine=on"], None)
    axis = "kv_heads" if name == "wk" else "embed"
    shape = jax.sharding.AbstractMesh(mesh, sharding.AXES)
    with (
        pytest.raises(ConfigError, match=r"^config.fleet.engine.\w+=2 does not divide"),
        local.errors_of_engine(config),
    ):
        sharding.check_divisible(name, (size,), (axis,), sharding.TRAIN, shape)


@pytest.mark.parametrize(("flag", "told"), [("slots=9", "9 slots are no multiple"), ("pages=7", "7 pages are no")])
def test_an_engine_whose_mesh_does_not_divide_it_is_refused_before_it_starts(flag, told):
    overrides = ["--config.fleet=on", "--config.fleet.engine=on", "--config.fleet.engine.data=2"]
    with pytest.raises(ConfigError, match=told):
        processes.read("search_r1", [*overrides, f"--config.fleet.engine.{flag}"], None)


def test_an_engine_of_one_gpu_starts_beside_a_trainer_of_four(monkeypatch):
    """On a machine with one GPU, as jax sees it; both are of one run, whose digest does not know the engine's mesh."""
    overrides = [
        "--config.fleet=on",
        "--config.mesh.fsdp=4",
        "--config.fleet.engine=on",
        "--config.fleet.engine.slots=4",
    ]
    _, config = processes.read("search_r1", overrides, None)
    own = local.of_engine(config)
    one = [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")]
    monkeypatch.setattr(devices, "available", lambda: one)
    monkeypatch.setattr(devices, "_split_cpu", lambda *_: None)
    devices.provide(own.mesh)
    with pytest.raises(ConfigError, match=r"^config.mesh needs 4 devices"):
        devices.provide(config.mesh)
    with pytest.raises(ConfigError, match=r"^config.fleet.engine needs 4 devices"), local.errors_of_engine(config):
        devices.provide(config.mesh)
    assert own.engine.slots == 4 and own.engine.pages == config.engine.pages and own.mesh.devices == 1
    _, without = processes.read("search_r1", overrides[:2], None)
    assert settings.digest_of(config) == settings.digest_of(without)
    assert list(local.devices_of(config, list("012345")).values()) == [
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"},
    ]  # fmt: skip
    assert not list(local.sharing(config, list("012345")))
    assert "2 stay idle" in "".join(local.sharing(config, list("01234567")))
