"""Sandboxes as a run opens them, for tests of attempts in real ones."""

import contextlib

import pytest

from jaxagent.config import ConfigError
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox.of_config import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Sandboxes


@contextlib.contextmanager
def opened_sandboxes(config, jobs=2):
    """The sandboxes, and the loop on which they are. Skips, with the reason, where none works."""
    with Workers(jobs) as workers:
        sandboxes = Sandboxes(config, "env.sandbox")
        try:
            try:
                workers.run(sandboxes.open(), OPEN_TIMEOUT_S)
            except ConfigError as failure:
                pytest.skip(str(failure))
            yield sandboxes, workers
        finally:
            workers.run(sandboxes.close(), CLOSE_TIMEOUT_S)
