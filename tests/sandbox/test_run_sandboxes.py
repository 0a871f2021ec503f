"""A run's sandboxes end together, whatever fails of them."""

import asyncio

import pytest

from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.sandbox.base import SandboxError, Spec
from jaxagent.sandbox.of_config import Sandboxes
from jaxagent.sandbox.pool import Pool


class Part:
    """Something that is closed, perhaps with an error. As a back end, it starts what it is given in turn."""

    def __init__(self, log, name, error=None, starts=()):
        self.log, self.name, self.error, self.starts = log, name, error, iter(starts)

    async def start(self, spec):
        made = next(self.starts)
        if isinstance(made, Exception):
            raise made
        return made

    async def close(self):
        self.log.append(self.name)
        if self.error:
            raise self.error


class Owner(Part):
    def close(self):
        self.log.append(self.name)


@pytest.mark.parametrize("failure", [OSError("no file descriptors"), ConfigError("no such layer"), SandboxError("no")])
@pytest.mark.parametrize("error", [None, OSError("stuck")])
def test_everything_ends(failure, error):
    """A warm start that failed is nobody's error; what fails to end is told when the rest has ended."""
    log = []
    sandboxes = Sandboxes(SandboxConfig(), "env.sandbox")

    async def main():
        backend = Part(log, "backend", error, [failure, Part(log, "sandbox")])
        sandboxes._owner, sandboxes._backend, sandboxes._images = (
            Owner(log, "owner"),
            backend,
            Part(log, "images", error),
        )
        sandboxes._pool = Pool(backend, Spec(), 2)
        sandboxes._pool.fill()
        await sandboxes.close()

    if error is None:
        asyncio.run(main())
    else:
        with pytest.raises(OSError, match="stuck"):
            asyncio.run(main())
    assert log == ["images", "sandbox", "backend", "owner"]
