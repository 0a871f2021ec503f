"""Every role of a real fleet is killed and stopped a few times; benchmarks/fleet_soak.py does the same at length."""

import sys

import pytest

from benchmarks import fleet_soak
from jaxagent.config import flags
from jaxagent.fleet.settings import plan_of


@pytest.mark.slow
@pytest.mark.nightly  # test_coordinator_kills.py, test_ledger_kills.py and test_supervise.py kill and stop each alone
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_kills_and_stops_change_nothing(tmp_path):
    found = fleet_soak.run(tmp_path, kills=12, stops=2, steps=6, seed=1)
    assert found["kills"] == 12 and found["stops"] == 2 and found["restarts"] >= 12
    assert found["lost"] == found["doubled"] == 0
    assert found["as_undisturbed"] and found["versions"] == 7
    assert set(found["kills_of"]) == {"coordinator", "engine", "trainer"}
    assert len(found["recovery_s"]) >= 2 and found["hangs_told"] >= 1


def test_its_command_is_one_of_a_fleet(tmp_path):
    assert plan_of(flags.parse_argv(["main", *fleet_soak.config(tmp_path, 6)]).config).steps == 6
