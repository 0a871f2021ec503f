"""Runs that commit one sin each: the alarm says so while they run, and no other alarm does."""

import hashlib
import json
import shutil

import pytest

from jaxagent import main as cli
from jaxagent.envs.base import Step, Verdict
from jaxagent.envs.search.environment import SearchAttempt
from jaxagent.types import StopReason
from tests import tiny_run

LETTERS = tuple("aeinorst")  # nearly every token has one of them: turns are short
FLAGS = tuple(
    f"--config.{flag}"
    for flag in (
        "stages=rl", "eval.every=0", "eval.sampled=false", "data.num_eval=2", "checkpoint.every=0", "rl.steps=12",
        "rl.tasks_per_step=2", "rl.group_size=8", "env.turn_tokens=16", "engine.slots=16", "engine.pages=160",
        "rl.optimizer.warmup_steps=0", "rl.optimizer.learning_rate=1e-5", "checkpoint.replay=none",
    )
)  # fmt: skip


async def step(self, action):
    """Two searches, then the answer."""
    self._turns_left -= 1
    self.counters["searches"] += 1
    if self._turns_left <= 0:
        return Step(stop_reason=StopReason.ANSWER)
    return Step(self._config.observed(True, "a place"))


async def finds_nothing(self, action):
    self.counters["empty_searches"] += 1
    return await step(self, action)


async def by_chance(self, transcript):
    """Groups have signal, and there is nothing to learn."""
    reward = float(hashlib.sha256(transcript.response.encode()).digest()[0] % 2)
    return Verdict(reward, {"em": reward})


async def always_right(self, transcript):
    return Verdict(1.0, {"em": 1.0})


# What is wrong -> (flags, methods of the attempt, the alarm).
SINS = {
    "nothing": ((), {}, []),
    "a learning rate far too high": (("rl.optimizer.learning_rate=0.04",), {}, ["policy_leaps"]),
    "the same with one update in a step": (
        ("rl.optimizer.learning_rate=1", "rl.updates_per_step=1"),
        {},
        ["entropy_falls"],
    ),
    "turns of one token": (("env.turn_tokens=1",), {"stop_strings": ("\x00",)}, ["truncation"]),
    "a search engine without an index": ((), {"step": finds_nothing}, ["tools_fail"]),
    "a reward that is always the same": ((), {"verify": always_right}, ["no_signal"]),
    "rollouts six steps old": (("rl.staleness=6",), {}, ["stale_share"]),
}


def spoil(monkeypatch, **methods):
    """Attempts that are played and judged otherwise."""
    strings, init = methods.pop("stop_strings", LETTERS), SearchAttempt.__init__

    def begin(self, *about):
        init(self, *about)
        self.stop_strings = strings

    for name, method in {"__init__": begin, "step": step, "verify": by_chance, **methods}.items():
        monkeypatch.setattr(SearchAttempt, name, method)


def run(workdir, capsys, *flags):
    """(alarms of the summary, the console's lines about alarms)."""
    assert cli.main(tiny_run.argv(workdir, *FLAGS, *(f"--config.{flag}" for flag in flags))) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("alarm ")]
    return json.loads((workdir / "summary.json").read_text())["alarms"], lines


@pytest.mark.slow
@pytest.mark.parametrize("sin", SINS)
def test_a_run_says_what_is_wrong_with_it_and_nothing_else(sin, tmp_path, monkeypatch, capsys):
    flags, methods, names = SINS[sin]
    spoil(monkeypatch, **methods)
    alarms, lines = run(tmp_path / "run", capsys, *flags)
    assert [alarm["name"] for alarm in alarms] == names
    assert [line.split()[1] for line in lines if ": over after" not in line] == [f"{name}," for name in names]
    page = (tmp_path / "run/report.html").read_text()
    assert all(f'"name":"{name}"' in page for name in names)


@pytest.mark.slow
def test_a_run_that_goes_on_says_no_alarm_again_and_does_without_its_index(tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, stop_strings=("\x00",))
    flags = ("env.turn_tokens=1", "checkpoint.every=1", "checkpoint.keep=99")
    whole, lines = run(tmp_path / "run", capsys, *flags)
    assert [(alarm["name"], alarm["step"], alarm["last"]) for alarm in whole] == [("truncation", 5, None)]
    index = tmp_path / "run/episodes/rl.index"
    lines_of_index = index.read_bytes().splitlines()
    for kept, times in ((8, 0), (3, 1)):  # killed after the alarm began, and before
        index.unlink() if kept == 8 else index.write_bytes(b"?" + index.read_bytes())
        for bundle in (tmp_path / "run/checkpoints").iterdir():
            if bundle.name.isdigit() and int(bundle.name) > kept:
                shutil.rmtree(bundle)
        shutil.rmtree(tmp_path / "run/policy")
        assert run(tmp_path / "run", capsys, *flags) == (whole, lines * times)
        assert index.read_bytes().splitlines()[:kept] == lines_of_index[:kept], "made anew from the blocks"
