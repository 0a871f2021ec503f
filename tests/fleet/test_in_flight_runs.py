"""The whole command with an engine that chooses how many episodes it plays at once: the weights of one process."""

import pytest

from jaxagent.fleet import settings
from jaxagent.fleet.child import LOGS
from jaxagent.observe import jsonl
from tests.fleet.test_fleet_runs import expected  # noqa: F401  a fixture
from tests.fleet.test_lend_runs import SLOW
from tests.fleet.tiny_fleet import compare, ended, fleet

pytestmark = pytest.mark.slow


def test_an_engine_that_chooses_how_many_it_plays_changes_nothing(tmp_path, expected):  # noqa: F811
    """One slot, and environments that wait: it begins with one episode, and finds that its slot is free."""
    workdir = tmp_path / "run"
    flags = ("--config.fleet.in_flight=auto", "--config.engine.slots=1", "--config.env.concurrent_episodes=6")
    ended(fleet(workdir, 1, "--config.rl.staleness=1", *flags, *SLOW), workdir)
    compare(workdir, expected(1))
    said = (workdir / settings.FOLDER / LOGS / "engine-0.log").read_text()
    # A look at the probe's turns alone, before the first episode, changes nothing.
    told = [line for line in said.splitlines() if "episodes in flight: " in line and " stay. " not in line]
    assert "episodes in flight: 1 -> 2. In " in told[0] and "% of the time with a free slot" in told[0], said
    # An engine tells its limit with its beats, the first one perhaps after the first step.
    found = [row["fleet/in_flight"] for row in jsonl.read(workdir / "metrics.jsonl") if "fleet/in_flight" in row]
    assert len(found) >= 3 and found[-1] > 1 and all(1 <= limit <= 6 for limit in found), found
