"""What Gymnasium's environments give, and what goes wrong in them, as an episode shows it: played by the rollout.

The witness of every reward is a wrapper around a real environment: what the package returned from `step`, summed.
"""

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxagent.config import ConfigError, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Opening
from jaxagent.envs.gymnasium.environment import Gymnasium
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task
from tests.envs.gymnasium_worlds import Broken, Summed
from tests.rollout.scripted import ScriptedPolicy

HERE = "tests.envs.gymnasium_worlds"
RIGHT, DOWN, LEFT = (f"<action>{number}</action>" for number in (2, 1, 0))
TOKENIZER = Tokenizer.train([f"{RIGHT} {DOWN} a whole number from 0 to 3"] * 20, 400, ["<action>", "</action>"])
OPENING = Opening(None, (), lambda coroutine, timeout_s: asyncio.run(coroutine), lambda line: None)


def play(config, *script, seed=3):
    """The episode that the rollout makes of an attempt whose turns are `script`."""
    policy = ScriptedPolicy(TOKENIZER, lambda task, sample: [*script, *["nothing"] * 20])
    with config.open(OPENING) as attempt_at:
        rollout = MultiTurn(attempt_at, policy, TOKENIZER, Plain(), config, SamplingConfig(1.0, 1.0, 0, 0.0), 30.0)
        return asyncio.run(rollout(Task("t", "Go.", (), metadata={"seed": seed}), 0))


def settings(make="lake", **changes):
    usual = {"max_turns": 12, "turn_tokens": 40, "context_tokens": 2_000, "observation_tokens": 100}
    return Gymnasium(make=f"{HERE}:{make}", **{**usual, **changes})


TO_THE_GOAL = (DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT)
ENDINGS = {
    "its goal": ({}, TO_THE_GOAL, StopReason.ANSWER, 6),
    "a hole": ({}, (RIGHT, DOWN), StopReason.ANSWER, 2),
    "its own limit": ({"arguments": '{"max_episode_steps": 3}'}, TO_THE_GOAL, StopReason.TURN_LIMIT, 3),
    "our limit": ({"max_turns": 3}, TO_THE_GOAL, StopReason.TURN_LIMIT, 3),
    "our limit at a mistake": ({"max_turns": 3}, (DOWN, DOWN, "nothing"), StopReason.TURN_LIMIT, 2),
    "mistakes on the way": ({}, ("nothing", "<action>7</action>", RIGHT, DOWN), StopReason.ANSWER, 2),
    "a message cut": ({"turn_tokens": 12}, (DOWN, DOWN, f"{'no ' * 30}{RIGHT}"), StopReason.TOKEN_LIMIT, 2),
    "no room for what it shows": ({"context_tokens": 90}, [LEFT] * 30, StopReason.TOKEN_LIMIT, None),
}


@pytest.mark.parametrize("pay", ["episode", "turn"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_rewards_are_the_environments_at_each_end(ending, pay):
    changes, script, reason, steps = ENDINGS[ending]
    episode = play(settings(pay=pay, **changes), *script)
    assert episode.stop_reason == reason, episode.error
    assert episode.reward + sum(episode.turn_rewards) == Summed.sums[-1] == episode.rewards["return"] > 0
    assert len(episode.turn_rewards) == (episode.turns if pay == "turn" else 0)
    if steps is not None:
        assert episode.metrics["actions"] == steps and Summed.sums[-1] == 0.25 * steps + (ending == "its goal")
    assert episode.rewards["solved"] == float(Summed.sums[-1] >= 1)


@pytest.mark.parametrize(
    ("how", "reason", "told"),
    [
        ("reset", StopReason.ENV_ERROR, "out of ice"),
        ("old reset", StopReason.ENV_ERROR, "reset must return (observation, info), got 'ab'"),
        ("raise", StopReason.ENV_ERROR, "out of ice"),
        ("exit", StopReason.ENV_ERROR, "SystemExit: out of ice"),
        ("stop", StopReason.ENV_ERROR, "StopIteration"),
        ("hang", StopReason.TIMEOUT, "the environment's step takes longer than 0.2 s"),
        ("nan", StopReason.ENV_ERROR, "step must return a finite reward, got nan"),
        ("infinite", StopReason.ENV_ERROR, "step must return a finite reward"),
        ("text", StopReason.ENV_ERROR, "step must return a number as reward, got str: '1'"),
        ("none", StopReason.ENV_ERROR, "step must return a number as reward, got NoneType"),
        ("array", StopReason.ENV_ERROR, "step must return a number as reward, got ndarray"),
        ("ends", StopReason.ENV_ERROR, "terminated and truncated as True or False, got ['no', False]"),
        ("many ends", StopReason.ENV_ERROR, "terminated and truncated as True or False"),
        ("info", StopReason.ENV_ERROR, "info as a mapping, got NoneType"),
        ("old step", StopReason.ENV_ERROR, "got tuple of 4"),
    ],
)
def test_the_first_thing_that_goes_wrong_is_the_episodes_error(how, reason, told):
    limit_s = 0.2 if how == "hang" else 20.0
    config = settings("Broken", arguments=f'{{"how": "{how}"}}', step_timeout_s=limit_s)
    episode = play(config, RIGHT, RIGHT)
    assert episode.stop_reason == reason and episode.reward == 0.0 and told in episode.error


def test_an_environment_that_hangs_does_not_keep_the_program_from_ending():
    code = (
        "import asyncio, time\n"
        "from jaxagent.envs.own_thread import OwnThread\n"
        "async def main():\n"
        "    thread = OwnThread('x', 0.1)\n"
        "    try:\n        await thread.call('it', lambda: time.sleep(60))\n"
        "    except TimeoutError as error:\n        print(error)\n"
        "    thread.end(lambda: None)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout == "it takes longer than 0.1 s\n" and done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"make": "many"}, "makes a vector environment: give one of a single game"),
        ({"make": "Agents", "arguments": '{"how": ""}'}, "an environment of many agents"),
        ({"make": "nothing"}, "makes object, which has no reset, step, action_space"),
        ({"arguments": '{"colour": "red"}'}, "colour"),
        ({"make": "slow", "step_timeout_s": 0.1}, "making the environment takes longer than 0.1 s"),
        ({"arguments": "[1]"}, r"arguments must be a JSON object"),
        ({"arguments": "{"}, r"config\.env\.arguments is no JSON"),
        ({"show": "render"}, r"show='render' needs render_mode='ansi', and .* has 'None'"),
        ({"show": "both", "arguments": '{"render_mode": "rgb_array"}'}, "has 'rgb_array'"),
    ],
)
def test_what_cannot_be_played_is_refused_at_start(changes, told):
    with pytest.raises(ConfigError, match=told), settings(**changes).open(OPENING):
        pass


def test_the_text_of_render_is_shown(monkeypatch):
    """FrozenLake marks in colour where one stands, which becomes brackets."""
    both = Gymnasium(make="FrozenLake-v1", arguments='{"is_slippery": false}', show="both", max_turns=3)
    text = play(both, RIGHT).text
    assert "\n0\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n" in text and "\n1\n  (Right)\nS[F]FF\n" in text
    render = Gymnasium(make="FrozenLake-v1", arguments='{"is_slippery": false}', show="render", max_turns=3)
    text = play(render, RIGHT).text
    assert "[S]FFF\nFHFH" in text and "\n0\n" not in text
    monkeypatch.setattr(Broken, "render_mode", "ansi")
    assert (
        "render must return a text, got NoneType"
        in play(settings("Broken", arguments='{"how": ""}', show="both"), RIGHT).error
    )


def test_seeds_and_options_of_a_task_reach_reset():
    def prompt(**metadata):
        async def start(attempt):
            (message,) = await attempt.start()
            await attempt.close()
            return message.content

        with settings("Choosing").open(OPENING) as attempt_at:
            return asyncio.run(start(attempt_at(Task("t", "", (), metadata=metadata))))

    assert prompt(seed=1) == prompt(seed=1) != prompt(seed=2)
    assert f"none {np.random.default_rng(1).integers(10**6)}" in prompt(seed=1)
    assert "{'size': 4} " in prompt(seed=1, options={"size": 4}) and "None " in prompt(seed=1, options=None)


def test_the_prompt_says_what_an_action_is():
    (message,) = settings("Choosing").messages("Begin.")
    assert message.content == "Write your action as <action>...</action>: a whole number from 0 to 3.\nBegin.\n"
    named = settings("Choosing", actions=("a", "b", "c", "d"), instructions="Choose {actions}!")
    assert named.messages("")[0].content == "Choose one of a, b, c, d!\n"
    assert settings("nothing", instructions="Choose.").messages("")[0].content == "Choose.\n"  # without making it
