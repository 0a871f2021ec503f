"""Ragged trajectories, groups and configs for the algorithm tests."""

import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config.parse import build
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

KINDS = {"p": TokenKind.PROMPT, "a": TokenKind.ACTION, "o": TokenKind.OBSERVATION, "w": TokenKind.WARNING}


def _trajectory(kinds: str, logprob: float = -1.0) -> Trajectory:
    """A trajectory spelled by its token kinds, e.g. "ppaaooa"."""
    codes = np.array([KINDS[k] for k in kinds], np.uint8)
    actions = codes == TokenKind.ACTION
    return Trajectory(
        tokens=np.arange(len(kinds), dtype=np.int32) % 13,
        kinds=codes,
        logprobs=np.where(actions, logprob, 0).astype(np.float32),
        policy_versions=np.where(actions, 0, -1).astype(np.int32),
        turns=np.zeros(len(kinds), np.int32),
    )


def _group(*attempts, stop=StopReason.ANSWER) -> Group:
    """A group of (kinds, reward) or (kinds, reward, stop reason) attempts."""
    task = Task(id="t", prompt="q", answers=("x",))
    episodes = []
    for i, (kinds, reward, *reason) in enumerate(attempts):
        trajectories = [_trajectory(k) for k in kinds.split()]
        episodes.append(Episode(task, i, trajectories, reward, {"em": reward}, reason[0] if reason else stop, turns=1))
    return Group(task, episodes)


@pytest.fixture(scope="session")
def make_trajectory():
    return _trajectory


@pytest.fixture(scope="session")
def make_group():
    return _group


GRPO = {"name": "group_mean_std", "drop_zero_signal": True}


@pytest.fixture(scope="session")
def rl():
    """Returns a GRPO config with some fields replaced by what a config file may say of them.

    `advantage="gae"` and `correction=dict(name="mask", low=0.1)` are choices, `kl=dict(coefficient=0.1)` opens a
    section, and `batch=dict(row_tokens=4)` changes one.
    """
    # Said here, not read from the recipe: a recipe may change its numbers without breaking a test.
    laptop = config.to_dict(config.parse(get_config()))["rl"]
    given = dict(
        advantage=GRPO,
        whiten_advantages=False,
        objective=dict(name="ppo_clip", clip_low=0.2, clip_high=0.28),
        aggregation="token_mean",
        entropy_coefficient=0.0,
        updates_per_step=2,
        epochs=1,
    )
    base = laptop | given

    def make(**changes):
        sections = {
            name: laptop[name] | value
            for name, value in changes.items()
            if isinstance(value, dict) and isinstance(laptop[name], dict) and "name" not in laptop[name]
        }
        return build(config.RLConfig, base | changes | sections, "config.rl")

    return make
