"""Snapshots are layers: what was written, removed and replaced is seen by sandboxes that start from there."""

import os
import stat

import pytest

from jaxagent.config import ConfigError
from jaxagent.sandbox.base import SandboxError, Spec

NAMES = ("namespaces", "namespaces-python")


@pytest.mark.parametrize("name", NAMES)
def test_snapshot_and_start_from_it(places, name, tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:  # the sandboxes' user must reach the layers
        if not parent.stat().st_mode & 0o001 and str(parent) != "/tmp":
            parent.chmod(parent.stat().st_mode | 0o011)

    async def main(backend):
        base = backend.roots.root((), 1000)
        plain = Spec()
        async with await backend.start(plain) as sandbox:
            await sandbox.run("echo one > file; mkdir -p d/e; echo x > d/e/x; ln -s file link; chmod 600 file", 10, 100)
            await sandbox.run("rm /etc/hosts; rm -r /opt; mkdir /opt; sleep 1000 &", 10, 100)
            layer = await sandbox.snapshot(str(tmp_path / "layer"))
            assert (await sandbox.run("cat file", 10, 100)).output == b"one\n"  # it goes on
            await sandbox.run("echo two > file", 10, 100)
            with pytest.raises(SandboxError, match="exists"):
                await sandbox.snapshot(str(tmp_path / "layer"))
            again = await sandbox.snapshot(str(tmp_path / "again"))
        assert sorted(os.listdir(tmp_path)) == ["again", "layer"]
        assert stat.S_ISCHR(os.lstat(f"{layer}/etc/hosts").st_mode)
        spec = Spec(layers=(*base.layers[:1], layer))
        return spec, Spec(layers=(*base.layers[:1], again)), base

    backend = places.backend(name)
    first, second, _ = places.run(main(backend))
    del second

    async def files(spec):
        async with await backend.start(spec) as sandbox:
            return await sandbox.read("/home/user/file"), [e.path for e in await sandbox.list("/home/user")]

    # A root without programs still holds files; programs come with a real base layer.
    content, names = places.run(files(first))
    assert content == b"one\n" and sorted(names) == ["d", "d/e", "d/e/x", "file", "link"]


def test_wrong_layers(places):
    async def main(backend):
        for spec in (Spec(layers=("/nonexistent",)), Spec(image="debian")):
            with pytest.raises(ConfigError):
                await backend.start(spec)

    places.run(main(places.backend("namespaces")))
