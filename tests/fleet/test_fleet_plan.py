"""Plans that cannot be, and the lines of the log."""

import json
import types

import pytest

from jaxagent.config import ConfigError, OversampleConfig, RefillConfig, RLConfig
from jaxagent.config.fleet import FleetConfig
from jaxagent.config.model import MeshConfig
from jaxagent.fleet import events
from jaxagent.fleet.plan import GroupId, Plan
from jaxagent.fleet.settings import plan_of


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"window": 2}, "in_flight"),
        ({"window": 2, "rule": "in_flight", "rounds": 2}, "dynamic sampling"),
        ({"window": 3, "rule": "in_flight"}, "at most"),
        ({"groups_per_round": 2}, "rounds"),
    ],
)
def test_plans_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Plan(**{"steps": 3, "groups_per_step": 2, "attempts": 1, **settings})


def test_lines_of_the_log_can_be_read_again():
    group = GroupId(1, 0, 2)
    for event in (
        events.EpisodeStored(group, 3, "d", 1, "0-7"),
        events.GroupClosed(group, False),
        events.BatchFormed(1, (group,), (GroupId(1, 1, 0),)),
        events.VersionPublished(2, "d"),
        events.StateKept(1),
    ):
        assert events.from_line(json.loads(json.dumps(events.to_line(event)))) == event
    for line in ({}, {"kind": "kept"}, {"kind": "other", "step": 1}, {"kind": "kept", "step": 1, "more": 1}):
        with pytest.raises(ValueError, match="no line of the coordinator"):
            events.from_line(line)


def test_the_plan_of_a_runs_settings():
    rl = RLConfig.__new__(RLConfig)
    values = {"steps": 7, "tasks_per_step": 3, "group_size": 4, "staleness": 2, "refill": None, "oversample": None}
    for name, value in values.items():
        object.__setattr__(rl, name, value)
    cfg = types.SimpleNamespace(rl=rl, fleet=FleetConfig(lease_s=5.0), mesh=MeshConfig(1, 1, 1, 1))
    assert plan_of(cfg) == Plan(7, 3, 4, staleness=2, lease_s=5.0)
    object.__setattr__(rl, "refill", RefillConfig(max_rounds=3, tasks_per_round=5))
    assert plan_of(cfg) == Plan(7, 3, 4, staleness=2, rounds=3, groups_per_round=5, lease_s=5.0)
    cfg.mesh, cfg.fleet = MeshConfig(3, 1, 1, 1), FleetConfig(trainers=2)
    with pytest.raises(ConfigError, match=r"fleet.trainers \(2\) must divide"):
        plan_of(cfg)
    object.__setattr__(rl, "oversample", OversampleConfig(extra_tasks=1))
    with pytest.raises(ConfigError, match="oversample"):
        plan_of(cfg)
    with pytest.raises(ConfigError, match="a run of many processes needs"):
        plan_of(types.SimpleNamespace(rl=rl, fleet=None))
