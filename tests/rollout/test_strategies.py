"""What the checks refuse, and that the config files leave every strategy off."""

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import ConfigError
from jaxagent.rollout import strategies


def rl(**changes):
    raw = get_config()
    raw.rl.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config.parse(raw).rl


@pytest.mark.parametrize("preset", ["laptop", "laptop-ppo", "laptop-echo", "qwen2.5-3b"])
def test_off_by_default(preset):
    found = config.parse(get_config(preset)).rl
    strategies.check(found)
    assert not strategies.selects(found) and not strategies.oversamples(found)
    assert (found.curriculum.name, found.replay.per_step, found.tool_epsilon) == ("off", 0, 0.0)
    assert found.temperature.schedule == "constant"


REFUSED = [  # changes of rl, and what is said of them
    (dict(keep_groups_frac=0.5, group_size=1), "need rl.group_size of 2"),
    (dict(oversample__extra_attempts=1, oversample__min_group=9), r"rl.group_size \(8\)"),
    (dict(curriculum__name="learnabilty"), "Did you mean 'learnability'"),
    (dict(replay__per_step=4, replay__coefficient=0.0), "rl.replay.coefficient"),
    (dict(replay__per_step=4, replay__use="policy"), "needs rl.correction.name of 'truncate'"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        strategies.check(rl(**changes))


def test_accepted():
    strategies.check(rl(replay__per_step=4, replay__use="policy", correction__name="truncate"))
    strategies.check(rl(refill__max_rounds=10, oversample__extra_attempts=2, keep_groups_frac=0.25))
