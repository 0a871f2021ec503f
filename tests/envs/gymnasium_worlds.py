"""Environments of the Gymnasium interface for tests: real ones that are watched, and ones that fail."""

import math
import sys
import time
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium.wrappers import RecordEpisodeStatistics, TransformObservation, TransformReward


class Summed(gymnasium.Wrapper):
    """Keeps what the package's environments gave since they were last reset."""

    sums: ClassVar[list[float]] = []  # of each environment, the newest last

    def reset(self, **named):
        self.sums.append(0.0)
        return self.env.reset(**named)

    def step(self, action):
        result = self.env.step(action)
        self.sums[-1] += result[1]
        return result


def lake(**arguments):
    """The package's frozen lake, within four of its wrappers; each step earns a quarter more."""
    env = gymnasium.make("FrozenLake-v1", is_slippery=False, **arguments)
    env = TransformReward(RecordEpisodeStatistics(env), lambda reward: reward + 0.25)
    return Summed(TransformObservation(env, lambda seen: seen, env.observation_space))


class Broken(gymnasium.Env):
    """Fails in the way that its only argument says."""

    action_space = gymnasium.spaces.Discrete(4)
    observation_space = gymnasium.spaces.Discrete(4)

    def __init__(self, how):
        self.how = how

    def reset(self, *, seed=None, options=None):
        if self.how == "reset":
            raise RuntimeError("out of ice")
        if self.how == "old reset":
            return "ab"
        return 0, {}

    def step(self, action):
        if self.how == "raise":
            raise RuntimeError("out of ice")
        if self.how == "exit":
            sys.exit("out of ice")
        if self.how == "stop":
            raise StopIteration
        if self.how == "hang":
            time.sleep(1)
        answers = {
            "nan": (0, math.nan, False, False, {}),
            "infinite": (0, np.float32("inf"), False, False, {}),
            "text": (0, "1", False, False, {}),
            "none": (0, None, False, False, {}),
            "array": (0, np.asarray([1.0, 2.0]), False, False, {}),
            "ends": (0, 0.0, "no", False, {}),
            "many ends": (0, 0.0, np.asarray([True, False]), False, {}),
            "info": (0, 0.0, False, False, None),
            "old step": (0, 0.0, False, {}),
        }
        return answers.get(self.how, (0, 0.5, False, False, {}))

    def render(self):
        return None


def many(**arguments):
    return gymnasium.make_vec("FrozenLake-v1", num_envs=2)


class Agents(Broken):
    possible_agents = ("a", "b")


def slow(**arguments):
    time.sleep(0.5)


def nothing(**arguments):
    return object()


class Choosing(gymnasium.Env):
    """Shows what it was reset with."""

    action_space = gymnasium.spaces.Discrete(4)
    observation_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options="none"):
        super().reset(seed=seed)
        return f"{options} {self.np_random.integers(10**6)}", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Spaces(gymnasium.Env):
    """Shows what its action space samples, and pays for an action that is in it. `of`: a space, as Python writes it."""

    def __init__(self, of):
        self.action_space = self.observation_space = eval(of, vars(gymnasium.spaces) | {"np": np})

    def reset(self, *, seed=None, options=None):
        self.action_space.seed(seed)
        return self.action_space.sample(), {}

    def step(self, action):
        return self.action_space.sample(), float(action in self.action_space), False, False, {}
