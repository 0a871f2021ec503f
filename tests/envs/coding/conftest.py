"""What tests of software tasks share."""

import pytest

from jaxagent.config import ConfigError
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox.of_config import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Sandboxes
from tests.envs.coding import tiny


@pytest.fixture(scope="module")
def play():
    """Plays attempts; skips, with the reason, where no sandbox works."""
    with Workers(2) as workers:
        sandboxes = Sandboxes(tiny.make_config().sandbox, "env.sandbox")
        try:
            try:
                workers.run(sandboxes.open(), OPEN_TIMEOUT_S)
            except ConfigError as failure:
                pytest.skip(str(failure))
            yield tiny.Player(workers, sandboxes)
        finally:
            workers.run(sandboxes.close(), CLOSE_TIMEOUT_S)


@pytest.fixture(scope="session")
def tools(tmp_path_factory):
    """A tar with pytest."""
    path = tmp_path_factory.mktemp("tools") / "tools.tar"
    path.write_bytes(tiny.packed_pytest())
    return path
