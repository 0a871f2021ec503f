"""Ragged trajectories, groups and configs for the algorithm tests."""

import dataclasses

import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
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


@pytest.fixture(scope="session")
def rl():
    """Returns a GRPO config with some fields replaced; `kl=dict(...)` replaces inside a section."""
    # Said here, not read from the recipe: a recipe may change its numbers without breaking a test.
    base = dataclasses.replace(
        config.parse(get_config()).rl,
        advantage="group_mean_std",
        multi_trajectory="full",
        whiten_advantages=False,
        objective="ppo_clip",
        aggregation="token_mean",
        drop_zero_signal=True,
        entropy_coefficient=0.0,
        updates_per_step=2,
        epochs=1,
        correction=config.CorrectionConfig("none", "token", 0.0, 2.0, veto=0.0, normalise=False, opsm_delta=1e-4),
        kl=config.KLConfig(coefficient=0.0, estimator="k3", where="loss", refresh_every=0),
        echo=config.EchoConfig(0.0, "constant", "env_only", "full_observation", max_tokens=0),
        positive_nll=config.PositiveNLLConfig(coefficient=0.0, min_reward=1.0),
    )

    def make(**changes):
        changes = {
            name: dataclasses.replace(getattr(base, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return dataclasses.replace(base, **changes)

    return make
