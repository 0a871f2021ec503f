"""The code of docs/add_an_environment.md runs, and its environment plays a whole episode."""

import asyncio
import re
from pathlib import Path

from scripted import ScriptedPolicy
from test_multi_turn import SAMPLING

from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task

PAGE = Path(__file__).resolve().parents[2] / "docs/add_an_environment.md"


def test_the_page(trained):
    names = {"__name__": "guess"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    policy = ScriptedPolicy(trained, lambda task, sample: ["<guess>5", "<guess> 9 </guess>", "<guess>7</guess>"])
    settings = names["Guess"](turn_tokens=60, observation_tokens=300, context_tokens=1000)
    with settings.open(None) as begin:
        rollout = MultiTurn(begin, policy, trained, Plain(), settings, SAMPLING, 1.0)
        episode = asyncio.run(rollout(Task("t", "I think of a number below 10.\n", ("7",)), 0))
    assert (episode.stop_reason, episode.reward, episode.turns) == (StopReason.ANSWER, 1.0, 3)
    assert episode.metrics["guesses"] == 2 and episode.metrics["invalid_actions"] == 1
    assert "<guess>5\nWrite <guess>number</guess>.\n<guess> 9 </guess>\nlower\n<guess>7</guess>" in episode.text
