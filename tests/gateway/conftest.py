"""Places for agent programs, and scenes in which they play."""

import asyncio

import pytest

from jaxagent.sandbox import choose
from jaxagent.sandbox.base import SandboxError
from jaxagent.sandbox.owner import Owner
from tests.gateway.episodes import Scene


@pytest.fixture(scope="module")
def machines():
    """(a loop, a back end that works here)."""
    with asyncio.Runner() as runner:
        owner = Owner()
        try:
            backend = runner.run(choose.choose_backend(owner))
        except SandboxError as failure:
            owner.close()
            pytest.skip(f"no sandbox works here: {failure}")
        yield runner, backend
        runner.run(backend.close())
        owner.close()


@pytest.fixture
def scene(machines):
    return Scene(machines)
