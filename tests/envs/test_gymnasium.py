"""Gymnasium's environments as ours: beside the real thing; wrong actions, hanging ones, wrong settings."""

import asyncio
import time

import gymnasium
import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.gymnasium.environment import Gymnasium, InvalidAction, as_action, as_text, seed_of
from jaxagent.types import StopReason, Task, TokenKind


class Counting(gymnasium.Env):
    """Text in, text out: counts to three."""

    action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return "count is 0", {}

    def step(self, action):
        if action == "hang":
            time.sleep(1)
        self.count += action == "add"
        return f"count is {self.count}", 0.25, self.count == 3, False, {"success": self.count == 3}


def opened(environment):
    here = Opening(None, (), lambda coroutine, timeout_s: asyncio.run(coroutine), lambda line: None)
    with environment.open(here) as attempt_at:
        return attempt_at


TASK = Task("t", "", (), metadata={"seed": 5})


def play(environment, actions, task=TASK):
    """(prompt, steps, verdict) of one attempt."""

    async def run():
        attempt = opened(environment)(task)
        try:
            (prompt,) = await attempt.start()
            steps = [await attempt.step(action) for action in actions]
            turns = tuple((action, "") for action in actions)
            return prompt.content, steps, await attempt.verify(Transcript(prompt.content, turns))
        finally:
            await attempt.close()

    return asyncio.run(run())


def test_it_is_the_same_world_as_gymnasiums():
    real = gymnasium.make("FrozenLake-v1", is_slippery=True)
    shown, _ = real.reset(seed=5)
    actions, seen, rewards = [2, 2, 1, 1, 1, 2], [], []
    for action in actions:
        shown, reward, ended, _, _ = real.step(action)
        seen.append(shown)
        rewards.append(reward)
        if ended:
            break
    texts = [f"<action>{a}</action>" for a in actions[: len(seen)]]
    _, steps, verdict = play(Gymnasium(make="FrozenLake-v1", max_turns=50), texts)
    for step, shown in zip(steps, seen, strict=True):
        assert step.stop_reason == StopReason.ANSWER or step.observation.text.strip() == str(shown)
    assert verdict.reward == sum(rewards)


def test_texts_and_success():
    environment = Gymnasium(make="tests.envs.test_gymnasium:Counting", max_turns=6, pay="turn")
    prompt, steps, verdict = play(environment, ["<action>add</action>", "nothing", *["x<action>add</action>"] * 2])
    assert prompt.endswith("count is 0\n")
    assert [s.stop_reason for s in steps] == [None, None, None, StopReason.ANSWER]
    assert steps[0].observation.text.strip() == "count is 1"
    assert steps[1].observation.parts[0][1] == TokenKind.WARNING
    assert verdict.turn_rewards == (0.25, 0.0, 0.25, 0.25) and verdict.reward == 0.0
    assert verdict.components == {"solved": 1.0, "return": 0.75}


def test_the_last_turn_ends_it():
    _, steps, verdict = play(Gymnasium(make="tests.envs.test_gymnasium:Counting", max_turns=1), ["nothing"])
    assert steps[0].stop_reason == StopReason.TURN_LIMIT and verdict.components["solved"] == 0.0


def test_one_that_hangs_is_a_timeout():
    environment = Gymnasium(make="tests.envs.test_gymnasium:Counting", step_timeout_s=0.1)
    with pytest.raises(TimeoutError):
        play(environment, ["<action>hang</action>"])


DISCRETE, BOX = gymnasium.spaces.Discrete(3, start=1), gymnasium.spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "names", "word", "action"),
    [
        (DISCRETE, (), "3", 3),
        (DISCRETE, ("left", "stay", "right"), "right", 3),
        (BOX, (), "[0.5, -1]", np.asarray([0.5, -1], np.float32)),
        (gymnasium.spaces.MultiDiscrete([3, 3]), (), "[2, 0]", np.asarray([2, 0])),
    ],
)
def test_actions(space, names, word, action):
    np.testing.assert_array_equal(as_action(space, names, f"so: <action> {word} </action>"), action)


@pytest.mark.parametrize("word", ["0", "4", "left", "1.5", "[1]", "true", "null", '{"a": 1}', "9" * 400, "[" * 9000])
def test_what_is_no_action_is_told(word):
    with pytest.raises(ValueError, match="Actions are"):
        as_action(DISCRETE, (), f"<action>{word}</action>")


def test_a_space_that_fails_is_no_mistake_of_the_policys():
    class Broken(gymnasium.spaces.Discrete):
        def contains(self, x):
            raise ValueError("the space's own mistake")

    with pytest.raises(ValueError, match="own mistake") as caught:
        as_action(Broken(3), (), "<action>1</action>")
    assert not isinstance(caught.value, InvalidAction)


def test_observations_as_text():
    assert as_text({"at": np.asarray([1, 2]), "says": "hello"}) == "at: [1, 2]\nsays: hello"


def test_seeds():
    assert seed_of(Task("a", "", (), metadata={"seed": 7})) == 7
    assert seed_of(Task("a", "", ())) == seed_of(Task("a", "", ())) != seed_of(Task("b", "", ()))
    with pytest.raises(ValueError, match="seed"):
        seed_of(Task("a", "", (), metadata={"seed": -1}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"make": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"make": "tests.envs.test_gymnasium:Missing"}, "Missing"),
        ({"make": "FrozenLake-v1", "actions": ("left", "right")}, "2 names"),
    ],
)
def test_what_cannot_be_made_is_refused_at_start(settings, told):
    with pytest.raises(ConfigError, match=told):
        opened(Gymnasium(**settings))


def test_an_environment_must_be_named():
    with pytest.raises(ConfigError, match="FrozenLake"):
        Gymnasium()
