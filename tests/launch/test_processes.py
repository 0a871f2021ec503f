"""The command lines that launchers start are those that `jaxagent.join` reads."""

import argparse

import pytest

from jaxagent.config import ConfigError, flags
from launch import processes

URL = "http://host:8500"


def read(*overrides: str, config: str = "configs/search_r1.py") -> processes.Run:
    return processes.read(config, overrides, argparse.Namespace(engines=1))[0]


def test_a_launcher_turns_the_fleet_on_and_keeps_what_was_said_of_it():
    assert read().overrides == ("--config.fleet=on",)
    said = ("--config.fleet=on", "--config.fleet.trainers=2")
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
