"""Every back end that works on this host, probed once and kept; tests skip, with the reason, where one does not."""

import asyncio
import inspect
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from jaxagent.sandbox import cgroups, choose
from jaxagent.sandbox.base import SandboxError
from jaxagent.sandbox.owner import Owner

KINDS = {**choose.SAFE, **choose.UNSAFE}
ISOLATING = ("namespaces", "bubblewrap", "podman")  # the others need an image: test_container_engine.py
WITH_PORTS = ("namespaces", "bubblewrap")  # podman is reached through a pipe, which carries no socket


class Backends:
    """Back ends by name, on one event loop."""

    def __init__(self):
        self._runner = asyncio.Runner()
        self._open, self._reasons, self._owners = {}, {}, []

    def backend(self, name, control_groups=True):
        """A back end, or the test is skipped. Without `control_groups` as on a host where none can be made."""
        key = name, control_groups
        if key not in self._open and key not in self._reasons:
            owner = Owner()
            if not control_groups:
                owner.cgroups.close()
                owner.cgroups = cgroups.Cgroups(owner.id, "", "")
            try:
                self._open[key] = self._runner.run(choose.probe(KINDS[name], owner))
                self._owners.append(owner)
            except SandboxError as failure:
                self._reasons[key] = f"{name} does not work here: {failure}"
                owner.close()
        if key in self._reasons:
            pytest.skip(self._reasons[key])
        return self._open[key]

    def run(self, coroutine, timeout_s=120):
        return self._runner.run(asyncio.wait_for(coroutine, timeout_s))

    def close(self):
        for backend in self._open.values():
            self._runner.run(backend.close())
        for owner in self._owners:
            owner.close()
        self._runner.close()


@pytest.fixture(scope="session")
def backends():
    made = Backends()
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests that are coroutines run on the loop of the back ends."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    pyfuncitem._request.getfixturevalue("backends").run(pyfuncitem.obj(**arguments))
    return True


class InSandbox:
    """One back end: starts sandboxes, and calls an async function with a new one."""

    def __init__(self, backends, name):
        self.name, self._backends = name, backends
        self.backend = backends.backend(name)

    def start(self, spec=None):
        return self.backend.start(spec or choose.Spec())

    def __call__(self, function, spec=None):
        async def main():
            async with await self.start(spec) as sandbox:
                return await function(sandbox)

        return self._backends.run(main())


@pytest.fixture
def reachable(tmp_path):
    """The test's folder, opened for the sandboxes' user."""
    for path in [tmp_path, *tmp_path.parents]:
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    return tmp_path


@pytest.fixture(scope="module")
def open_folder():
    """A folder that the sandboxes' user can reach, which pytest's own (closed again by every session) is not."""
    folder = Path(tempfile.mkdtemp(prefix="jaxagent-test-images-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def local(backends):
    return backends.backend("namespaces")


@pytest.fixture(params=WITH_PORTS)
def backend(request, backends):
    return backends.backend(request.param)


@pytest.fixture(params=[*ISOLATING, "plain"])
def anywhere(request, backends):
    return InSandbox(backends, request.param)


@pytest.fixture(params=[*WITH_PORTS, "plain"])
def anywhere_with_ports(request, backends):
    return InSandbox(backends, request.param)


@pytest.fixture(params=WITH_PORTS)
def isolated_with_ports(request, backends):
    return InSandbox(backends, request.param)


@pytest.fixture(params=ISOLATING)
def isolated(request, backends):
    return InSandbox(backends, request.param)
