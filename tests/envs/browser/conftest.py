"""One Chromium for all tests of a process; they are skipped, with the reason, where there is none."""

import os

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.browser.chromium import Browsers
from jaxagent.rollout.workers import Workers


def program() -> str:
    """The Chromium that CHROMIUM names; "" = the one on the path."""
    return os.environ.get("CHROMIUM", "")


@pytest.fixture(scope="session")
def browsers():
    """(the processes, the loop on which they are)."""
    with Workers(8) as workers:
        opened = Browsers(program(), 1_000, 2_048, 60.0)
        try:
            try:
                workers.run(opened.start(), 100)
            except ConfigError as missing:
                pytest.skip(str(missing))
            yield opened, workers
        finally:
            workers.run(opened.close(), 60)
