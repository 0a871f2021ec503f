"""The page that is the loop: two steps of examples/rl_loop.py are two steps of `jaxagent.main`, to the last bit."""

import dataclasses
import json
import runpy

import pytest

from jaxagent import main
from tests.tiny_run import ROOT, argv

# What lies in the cache already: `jaxagent.main` evaluates before its first step.
CACHED = "episode/cached_tokens"


@dataclasses.dataclass(frozen=True)
class Letters:
    """A reward that a random policy gets some of: how much of what it wrote is the letter e."""

    def __call__(self, view):
        return view.actions.count("e") / max(1, len(view.actions))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["laptop", "laptop-ppo"])
def test_a_step_of_the_page_is_a_step_of_the_command(preset, tmp_path, capsys):
    steps = ["--config.stages=rl", "--config.rl.steps=2", "--config.env.reward=tests.test_rl_loop:Letters"]
    assert main.main(argv(tmp_path / "run", *steps, preset=preset)) == 0
    recorded = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    recorded = [metrics for metrics in recorded if metrics["step"] > 0]
    capsys.readouterr()
    runpy.run_path(str(ROOT / "examples/rl_loop.py"))["main"](argv(tmp_path / "page", *steps, preset=preset)[1:])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(printed) == len(recorded) == 2
    for ours, theirs in zip(printed, recorded, strict=True):
        names = {name for name in ours.keys() & theirs.keys() if name != CACHED and not name.endswith("_s")}
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
        updated = "critic/grad_norm" if preset == "laptop-ppo" else "policy/grad_norm"  # PPO's critic learns first
        assert len(names) > 30 and ours[updated] > 0  # so the second step's numbers are of changed weights
