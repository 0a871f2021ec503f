"""Snapshots are layers: what was written, removed and replaced is seen by sandboxes that start from there."""

import asyncio
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.sandbox import connection, snapshot
from jaxagent.sandbox.base import MIB, Limits, SandboxError, Spec


async def test_snapshot_and_start_from_it(local, reachable):
    tmp_path = reachable
    # User 0, since others cannot change /etc; those see what it changed.
    async with await local.start(Spec(uid=0)) as sandbox:
        await sandbox.run("echo one > file; mkdir -p d/e; echo x > d/e/x; ln -s file link; chmod 640 file", 10, 100)
        await sandbox.run("rm /etc/hosts; rm -r /opt; mkdir /opt; mkfifo pipe; sleep 1000 &", 10, 100)
        layer = await sandbox.snapshot(str(tmp_path / "layer"))
        assert (await sandbox.run("cat file", 10, 100)).output == b"one\n"  # it goes on
        await sandbox.run("echo two > file; rm link", 10, 100)
        with pytest.raises(SandboxError, match="exists"):
            await sandbox.snapshot(str(tmp_path / "layer"))
    assert os.listdir(tmp_path) == ["layer"] and stat.S_ISCHR(os.lstat(f"{layer}/etc/hosts").st_mode)
    async with await local.start(Spec(layers=(layer,), uid=0)) as sandbox:
        said = await sandbox.run("cat file d/e/x; stat -c %a file; readlink link; ls -1; ls /etc/hosts", 10, 1000)
        assert said.output.startswith(b"one\nx\n640\nfile\nd\nfile\nlink\nls:")
        await sandbox.run("echo three > file; rm d/e/x; touch /opt/new", 10, 100)
        second = await sandbox.snapshot(str(tmp_path / "second"))
    for layers, expected in (((layer, second), b"three\nd\nd/e\nnew\n"), ((layer,), b"one\nd\nd/e\nd/e/x\n")):
        async with await local.start(Spec(layers=layers)) as sandbox:
            assert (await sandbox.run("cat file; find d; ls -1 /opt", 10, 1000)).output == expected
    async with await local.start(Spec()) as sandbox:
        assert (await sandbox.run("ls; cat /etc/hosts | wc -l", 10, 100)).output == b"2\n"


async def test_a_snapshot_takes_what_the_sandbox_took(local, tmp_path):
    """Sparse files and hard links are free inside; a copy byte by byte made 64 MiB of these."""

    async with await local.start(Spec(limits=Limits(disk_bytes=4 * MIB))) as sandbox:
        make = "for i in 1 2 3 4 5 6 7 8; do truncate -s 4M s$i; ln s1 l$i; done; ls | wc -l"
        assert (await sandbox.run(make, 10, 100)).output == b"16\n"
        layer = await sandbox.snapshot(str(tmp_path / "layer"))
    files = list(Path(layer, "home/user").iterdir())
    assert len(files) == 16 and {p.stat().st_size for p in files} == {4 * MIB}
    assert sum(512 * p.stat().st_blocks for p in files) <= MIB
    assert (tmp_path / "layer/home/user/l8").stat().st_nlink == 9


async def test_a_snapshot_that_nobody_waits_for_ends(local, tmp_path, monkeypatch):
    """As where a build's deadline passes: the thread ends, and what it made is gone when the waiter returns."""
    begun = threading.Event()

    def slow(fd, *arguments):
        begun.set()
        time.sleep(0.3)  # so that it is cancelled before it copies
        return save(fd, *arguments)

    save = snapshot.save
    monkeypatch.setattr(snapshot, "save", slow)
    async with await local.start(Spec()) as sandbox:
        await sandbox.run("echo x > file", 10, 100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await sandbox.snapshot(str(tmp_path / "layer"))
        assert begun.is_set() and os.listdir(tmp_path) == []
        monkeypatch.setattr(connection, "SNAPSHOT_TIMEOUT_S", 0.1)
        with pytest.raises(SandboxError, match=r"not be kept in 0\.1 s"):
            await sandbox.snapshot(str(tmp_path / "layer"))
        assert os.listdir(tmp_path) == []


async def test_a_given_root(backend, reachable):
    """A root that is nothing but a static program: no file of the host is in it."""
    root = reachable / "root"
    for directory in ("bin", "proc", "dev", "tmp", "run", "var/tmp", "home/user"):
        (root / directory).mkdir(parents=True)
    shutil.copy(backend.program, root / "bin" / "program")
    (root / "mine").write_text("of the root")

    async with await backend.start(Spec(root=str(root))) as sandbox:
        assert await sandbox.read("/mine") == b"of the root"
        assert {e.path for e in await sandbox.list("/bin")} == {"program"}
        names = {e.path.split("/")[0] for e in await sandbox.list("/", 10**6) if e.path.count("/") == 0}
        assert "usr" not in names
        assert (await sandbox.execute(["/bin/program"], 10, 100)).exit_code == 0  # standard input is empty


async def test_wrong_layers(local):
    for spec in (Spec(layers=("/nonexistent",)), Spec(root="/nonexistent"), Spec(image="debian")):
        with pytest.raises(ConfigError):
            await local.start(spec)
