"""What tests of software tasks share."""

import pytest

from tests.envs.coding import tiny
from tests.envs.opened import opened_sandboxes


@pytest.fixture(scope="module")
def play():
    """Plays attempts; skips, with the reason, where no sandbox works."""
    with opened_sandboxes(tiny.make_config().sandbox) as (sandboxes, workers):
        yield tiny.Player(workers, sandboxes)


@pytest.fixture(scope="session")
def tools(tmp_path_factory):
    """A tar with pytest."""
    path = tmp_path_factory.mktemp("tools") / "tools.tar"
    path.write_bytes(tiny.packed_pytest())
    return path
