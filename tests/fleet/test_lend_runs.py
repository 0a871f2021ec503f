"""The whole command with a trainer that plays while it waits: the weights and metrics of a run of one process."""

import os
import pathlib
import signal
import time

import pytest

from jaxagent.fleet import local, settings, vitals
from jaxagent.observe import jsonl
from tests.fleet.test_fleet_runs import expected  # noqa: F401  a fixture
from tests.fleet.tiny_fleet import DEADLINE_S, compare, ended, fleet

pytestmark = pytest.mark.slow

# Fewer places than a step has episodes: an engine leaves some for the trainer.
FLAGS = ("--config.fleet.lend=true", "--config.env.concurrent_episodes=4")
SLOW = (
    "--config.env=tests.fleet.slow_search:SlowSearch",
    "--config.env.prompt=plain",
    "--config.env.episode_timeout_s=60",
)


def wait_for(process, workdir, condition):
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None and time.monotonic() < until, text_of(workdir)[-4000:]
        time.sleep(0.01)


def text_of(workdir):
    return pathlib.Path(f"{workdir}.log").read_text()


def sign_of(workdir, name):
    return vitals.read(workdir / settings.FOLDER / vitals.FOLDER / f"{name}.json")


def phase_of(workdir, name):
    sign = sign_of(workdir, name)
    return "" if sign is None else sign.phase


def let_the_engine_be_ready(process, workdir):
    """Stops the trainer until engine-0 asks for episodes: else it would have played all of them before."""
    wait_for(process, workdir, lambda: phase_of(workdir, "trainer") not in ("", local.OPENING))
    os.kill(sign_of(workdir, "trainer").pid, signal.SIGSTOP)
    try:
        wait_for(process, workdir, lambda: phase_of(workdir, "engine-0") == "is asking for episodes")
    finally:
        os.kill(sign_of(workdir, "trainer").pid, signal.SIGCONT)


@pytest.mark.parametrize(("staleness", "engines"), [(0, 1), pytest.param(1, 1, marks=pytest.mark.nightly), (1, 0)])
def test_a_trainer_that_plays_while_it_waits_changes_nothing(tmp_path, expected, staleness, engines):  # noqa: F811
    """Without engines it plays everything, with staleness under a version that its driver has to take back."""
    workdir = tmp_path / "run"
    # With an engine episodes take longer than an update, also on a slow machine: else the trainer never waits.
    longer = ("--config.env.wait_s=1.5",) if engines else ()
    process = fleet(workdir, engines, f"--config.rl.staleness={staleness}", *FLAGS, *SLOW, *longer)
    if engines:
        let_the_engine_be_ready(process, workdir)
    said = ended(process, workdir)
    compare(workdir, expected(staleness))
    steps = [record for record in jsonl.read(workdir / "metrics.jsonl") if "fleet/lent_s" in record]
    played = [record["fleet/lent_episodes"] for record in steps]
    assert len(steps) == 5 and all(record["fleet/engines"] == engines for record in steps)
    assert 0 < sum(played) < 40 if engines else played == [8.0] * 5
    for record in steps:
        assert record["fleet/trainer_wait_s"] >= record["fleet/lent_s"] >= record["fleet/lent_idle_s"] >= 0
    lent = [line for line in said.splitlines() if "the trainer lends its devices" in line]
    back = [line for line in said.splitlines() if "the trainer takes its devices back" in line]
    assert len(lent) == len(back) == sum(record["fleet/lent_s"] > 0 for record in steps)
    assert all(line.endswith(" 0 given back") for line in back)


def test_who_dies_while_the_trainer_plays_changes_nothing(tmp_path, expected):  # noqa: F811
    """Nobody else plays: what the trainer had in hand is played again, or goes on with the next coordinator."""
    workdir = tmp_path / "run"
    flags = (*FLAGS, *SLOW, "--config.env.wait_s=1")
    process = fleet(workdir, 0, *flags)
    for step, name in enumerate(("trainer", "coordinator", ""), 1):
        wait_for(process, workdir, lambda step=step: f"step {step} is not complete" in text_of(workdir))
        time.sleep(0.5)
        if name:
            os.kill(sign_of(workdir, name).pid, signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert "interrupted: saved at step 4; the same command continues." in text_of(workdir)
    said = ended(fleet(workdir, 0, *flags), workdir)
    compare(workdir, expected(0))
    for name in ("trainer", "coordinator"):
        assert f"fleet: {name} was ended by SIGKILL: {name} starts again" in said
