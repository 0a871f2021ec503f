"""The code of docs/add_an_environment.md runs, and its environment plays a whole episode."""

import asyncio
import re
import types
from pathlib import Path

from scripted import ScriptedPolicy
from test_multi_turn import SAMPLING, config

from jaxagent.families.family import Family
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task

PAGE = Path(__file__).resolve().parents[2] / "docs/add_an_environment.md"


def test_the_page(trained):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    policy = ScriptedPolicy(trained, lambda task, sample: ["<guess>5", "<guess> 9 </guess>", "<guess>7</guess>"])
    family = names["GuessFamily"](types.SimpleNamespace(env=config(max_turns=3)))
    methods = {name for name in vars(Family) if not name.startswith("_")}
    assert all(hasattr(family, name) for name in {*Family.__annotations__, *methods})
    rollout = MultiTurn(family.environment, policy, trained, Plain(), config(), SAMPLING, 1.0)
    episode = asyncio.run(rollout(Task("t", "I think of a number below 10.\n", ("7",)), 0))
    assert (episode.stop_reason, episode.reward, episode.turns) == (StopReason.ANSWER, 1.0, 3)
    assert episode.metrics["guesses"] == 2 and episode.metrics["invalid_actions"] == 1
    assert "<guess>5\nWrite <guess>number</guess>.\n<guess> 9 </guess>\nlower\n<guess>7</guess>" in episode.text
