"""When the policy moves, how long schedules are, and what a critic's warm-up reports: no model is compiled here."""

import types

import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import MeshConfig
from jaxagent.learner import programs
from jaxagent.learner.programs import Programs
from jaxagent.learner.state import TrainState
from jaxagent.learner.update import Update
from jaxagent.models import sharding


def ppo(**changes: int) -> config.RLConfig:
    raw = get_config("laptop-ppo")
    raw.rl.steps, raw.rl.updates_per_step, raw.rl.epochs = (changes[name] for name in ("steps", "per_step", "epochs"))
    raw.rl.advantage.critic.update(warmup_updates=changes["warmup"], warmup_epochs=3)
    return config.parse(raw).rl


@pytest.mark.parametrize(
    ("warmup", "epochs", "moves"),
    [
        (0, 1, [True] * 4),
        (4, 1, [False, False, True, True]),  # two updates a step: at the third step four are made
        (5, 1, [False, False, False, True]),  # the step in which it is reached stays whole
        (8, 2, [False, False, True, True]),  # four updates a step
    ],
)
def test_the_policy_moves_from_the_step_on_at_which_the_warm_ups_updates_are_made(warmup, epochs, moves):
    rl = ppo(steps=4, per_step=2, epochs=epochs, warmup=warmup)
    packer = types.SimpleNamespace(pack=lambda streams, step: ["a batch"])
    made = Programs(rl, packer, lambda state, batches, train_policy, temperature, teacher: (state, train_policy))
    assert [made.train(None, [], 1.0, step)[1] for step in range(4)] == moves


def test_schedules_are_as_long_as_the_stage_has_updates(monkeypatch):
    lengths = []
    monkeypatch.setattr(programs, "make_optimizer", lambda optimizer, updates: lengths.append(updates))
    programs.optimizers(ppo(steps=5, per_step=2, epochs=4, warmup=6))
    assert lengths == [5 * 2 * 4 + 6 * (3 - 1), 5 * 2 * 4]  # the critic's, three passes over its warm-up; the policy's


def test_a_warm_ups_metrics_are_of_data_that_the_critic_has_not_seen():
    passes = []

    def step(params, opt_state, step, batches, temperature):
        passes.append(params)
        return params + 1, opt_state, step, {"pass": len(passes)}

    critic = types.SimpleNamespace(step=step, metrics=lambda pending, prefix: {f"{prefix}/pass": pending["pass"]})
    state = TrainState(params=0, opt_state=(), step=0, critic=10, critic_opt_state=())
    update = Update(sharding.make_mesh(MeshConfig(1, 1, 1, 1)), None, critic, 3, 1.0)
    state, metrics = update(state, [np.zeros((1, 1), np.float32)], train_policy=False)
    assert (passes, state.critic, metrics) == ([10, 11, 12], 13, {"critic/pass": 1})


@pytest.mark.parametrize(("echo", "targets"), [(None, 36), (0, 256), (64, 100)])
def test_how_many_targets_the_longest_trajectory_can_have(echo, targets):
    """Those that the policy samples, and with ECHO as many observed ones as it takes of a sequence; 0 = all."""
    rl = types.SimpleNamespace(echo=echo if echo is None else types.SimpleNamespace(max_tokens=echo))
    env = types.SimpleNamespace(most_turns=3, turn_tokens=12, context_tokens=256)
    assert programs.longest_targets(types.SimpleNamespace(rl=rl, env=env)) == targets
