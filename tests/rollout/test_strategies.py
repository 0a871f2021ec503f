"""What the checks refuse, and that the config files leave every strategy off."""

import dataclasses

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms.objectives import SoftGate
from jaxagent.config import ConfigError, overrides
from jaxagent.rollout import selection


def rl(**changes):
    given = [(f"rl.{name.replace('__', '.')}", str(value)) for name, value in changes.items()]
    return config.parse(overrides.apply(get_config().to_dict(), given)).rl


@pytest.mark.parametrize("preset", ["laptop", "laptop-ppo", "laptop-echo", "qwen2.5-3b"])
def test_off_by_default(preset):
    found = config.parse(get_config(preset)).rl
    selection.check(found)
    assert not selection.selects(found) and found.tool_epsilon == 0.0
    assert found.curriculum is found.replay is found.temperature is None


def test_a_curriculum_of_ones_own_draws_by_success():
    with pytest.raises(ConfigError, match=r"rl.curriculum='.*:SoftGate' must extend BySuccess of "):
        selection.check(dataclasses.replace(rl(), curriculum=SoftGate()))


REFUSED = [  # changes of rl, and what is said of them
    (dict(keep_groups_frac=0.5, group_size=1), "need rl.group_size of 2"),
    (dict(oversample__extra_attempts=1, oversample__min_group=9), r"rl.group_size \(8\)"),
    (dict(oversample="on"), "rl.oversample must have extra_tasks or extra_attempts"),
    (dict(curriculum="learnabilty"), "Did you mean 'learnability'"),
    (dict(replay__per_step=4, replay__use="policy"), "needs rl.correction of 'truncate'"),
    (
        dict(replay__per_step=4, replay__use="policy", correction="truncate", advantage__multi_trajectory="divide"),
        "rl.advantage.multi_trajectory='full'",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        selection.check(rl(**changes))


def test_accepted():
    selection.check(rl(replay__per_step=4, replay__use="policy", correction="truncate"))
    selection.check(rl(refill__max_rounds=10, oversample__extra_attempts=2, keep_groups_frac=0.25))
