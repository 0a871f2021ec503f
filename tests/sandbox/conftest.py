"""Every back end that works on this host, each probed once; tests skip, with the reason, where one does not."""

import asyncio
import contextlib

import pytest

from jaxagent.sandbox import choose
from jaxagent.sandbox.base import Limits, SandboxError, Spec
from jaxagent.sandbox.owner import Owner

MIB = 2**20
SMALL = Spec(limits=Limits(memory_bytes=192 * MIB, disk_bytes=32 * MIB, inodes=4000, processes=48, flood_bytes=4 * MIB))
ISOLATING = tuple(choose.SAFE)
_reasons: dict[str, str] = {}


def _reason(name):
    """Why a back end does not work here; empty where it does."""
    if name not in _reasons:

        async def probe():
            owner = Owner()
            try:
                await (await choose.probe({**choose.SAFE, **choose.UNSAFE}[name], owner)).close()
                return ""
            except SandboxError as failure:
                return f"{name} does not work here: {failure}"
            finally:
                owner.close()

        _reasons[name] = asyncio.run(probe())
    return _reasons[name]


@contextlib.asynccontextmanager
async def _opened(name):
    owner = Owner()
    backend = {**choose.SAFE, **choose.UNSAFE}[name](owner)
    try:
        yield backend
    finally:
        await backend.close()
        owner.close()


@pytest.fixture
def opened():
    """opened(name): an asynchronous context with the back end of that name; skips where it does not work."""

    def use(name):
        if reason := _reason(name):
            pytest.skip(reason)
        return _opened(name)

    return use


@pytest.fixture(params=ISOLATING)
def in_sandbox(request, opened):
    """in_sandbox(test): runs an async function of (sandbox) in each isolating back end."""

    def run(function, spec=SMALL):
        context = opened(request.param)

        async def main():
            async with context as backend, await backend.start(spec) as sandbox:
                return await function(sandbox)

        return asyncio.run(asyncio.wait_for(main(), 120))

    run.name = request.param
    return run
