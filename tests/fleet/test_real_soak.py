"""Every process of a real run with remote sandboxes is killed once; benchmarks/real_soak.py does it at length."""

import sys

import pytest

from benchmarks import real_soak

ROLES = ("worker", "engine-0", "coordinator", "trainer", "launcher")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the processes of a killed command end by its death signal")
def test_a_kill_of_each_process_changes_nothing(tmp_path, sandbox, monkeypatch):
    roles = iter(ROLES)
    monkeypatch.setattr(real_soak.Run, "victim", lambda self, chance: next(roles))
    own = {"A_RUN": len(ROLES), "DUE_S": 5.0, "PAUSE_S": 0.3, "AT_WORK": 0.0}  # soon, before the steps are over
    for name, value in own.items():
        monkeypatch.setattr(real_soak, name, value)
    found = real_soak.soak(tmp_path, len(ROLES), 7, 0, more=["--config.warm_start.max_steps=100"])
    assert found["kills_of"] == {"coordinator": 1, "engine": 1, "launcher": 1, "trainer": 1, "worker": 1}
    assert found["lost"] == found["doubled"] == 0 and not found["restarts_not_by_kill"]
    assert (found["verdict"], found["certificate"]) == ("as undisturbed", "PASSED"), found
    assert (found["versions"], found["episodes"]) == (8 * found["runs"], 56 * found["runs"])  # mostly one
    assert found["attempts_played_again"] > 0  # else no sandbox was in use when its worker was killed
