"""Podman with a small root of our own, where it works; what docker and apptainer would be told, everywhere."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.sandbox import choose
from jaxagent.sandbox.apptainer import Apptainer
from jaxagent.sandbox.base import Limits, SandboxError, Spec
from jaxagent.sandbox.container_engine import ContainerEngine
from jaxagent.sandbox.owner import Owner
from tests.sandbox.hostile.host import leftovers

PROGRAMS = ("bash", "ls", "sleep", "cat", "id", "head", "env", "rm")


@pytest.fixture(scope="module")
def small_root(tmp_path_factory):
    """bash, a few programs and their libraries."""
    root = tmp_path_factory.mktemp("engine") / "root"
    for name in ("bin", "proc", "dev", "sys", "tmp", "etc", "home/user", "run"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "home/user"):
        (root / name).chmod(0o1777)
    for name in PROGRAMS:
        program = shutil.which(name)
        shutil.copy(program, root / "bin" / name)
        for library in re.findall(r"(/\S+)", subprocess.run(["ldd", program], capture_output=True, text=True).stdout):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    (root / "bin" / "sh").symlink_to("bash")
    for path in root.parents:
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    return str(root)


@pytest.fixture(scope="module")
def podman(backends, small_root):
    owner = Owner()
    for name in ("podman", "podman-cgroupfs"):
        try:
            backend = backends.run(choose.probe(choose.SAFE[name], owner, Spec(root=small_root)))
            break
        except SandboxError as failure:
            reason = str(failure)
    else:
        owner.close()
        pytest.skip(f"podman does not work here: {reason}")
    yield backend
    backends.run(backend.close())
    owner.close()


async def test_podman(podman, small_root):
    spec = Spec(root=small_root, limits=Limits(processes=40, disk_bytes=2**24))
    async with await podman.start(spec) as sandbox:
        assert (await sandbox.run("X=5; cd /tmp; id -u", 20, 100)).output == b"1000\n"
        assert (await sandbox.run("while :; do :; done", 0.5, 100)).timed_out
        assert (await sandbox.run("echo $X; pwd; (exit 7)", 20, 100)).exit_code == 7
        full = await sandbox.run("head -c 100000000 /dev/zero > /tmp/big; ls /tmp/../work /root 2>&1", 20, 1000)
        assert b"No space left" in full.output or b"File size limit" in full.output or full.exit_code != 0
        forks = "n=0; while [ $n -lt 100 ]; do sleep 20 & n=$((n + 1)); done 2>/dev/null; echo $n"
        await sandbox.run(forks, 20, 1000)
        seen = await sandbox.execute(["sh", "-c", "echo /proc/[0-9]*"], 20, 10_000)
        assert len(seen.output.split()) < 60
        await sandbox.stop_processes()
        await sandbox.execute(["rm", "-f", "/tmp/big"], 20, 100)
        await sandbox.write("/tmp/x", b"y")
        assert await sandbox.read("/tmp/x") == b"y"
        root = await sandbox.execute(["sh", "-c", ": > /etc/new; : > /bin/new"], 20, 1000)
        assert root.exit_code != 0  # its files belong to another user
    assert not (Path(small_root) / "etc" / "new").exists()
    with pytest.raises(ConfigError, match="uid"):
        await podman.start(Spec(root=small_root, uid=0))


CRASH = """
import asyncio, sys
from jaxagent.sandbox.base import Spec
from jaxagent.sandbox.container_engine import ContainerEngine
from jaxagent.sandbox.owner import Owner

async def main():
    owner = Owner()
    backend = ContainerEngine(owner, tuple(sys.argv[2:]))
    for _ in range(2):
        sandbox = await backend.start(Spec(root=sys.argv[1]))
        task = asyncio.create_task(sandbox.run("while :; do sleep 0.1; done", 600, 100))
    print(owner.id, flush=True)
    await task

asyncio.run(main())
"""


def test_kill_9_with_podman(backends, podman, small_root):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CRASH, small_root, *podman._command]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        run = process.stdout.readline().strip()
        time.sleep(0.3)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    after = Owner()
    try:
        assert run in after.swept and leftovers(run) == []
        listed = podman.call("ps", "-aq", "--filter", f"label=jaxagent.runs.workdir={run}")
        assert listed == ""
    finally:
        after.close()


def test_what_engines_are_told(tmp_path, monkeypatch):
    """The command lines, with an engine that only answers `info`: what protects must be in them."""
    for name in ("docker", "apptainer"):
        (tmp_path / name).write_text("#!/bin/sh\necho ''\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    owner = Owner()
    try:
        engine = ContainerEngine(owner, ("docker",))
        spec = Spec(image="debian:12", uid=77, limits=Limits(processes=9, memory_bytes=2**20, disk_bytes=2**20))
        words = engine.arguments(spec)
        line = " ".join(words)
        for part in (
            "--network none",
            "--cap-drop ALL",
            "--security-opt no-new-privileges",
            "--user 77:77",
            f"--memory {2**21}",
            f"--memory-swap {2**21}",
            "--pids-limit 10",
            f"--label jaxagent.runs.workdir={owner.id}",
        ):
            assert part in line, part
        assert words[-4:-2] == ["debian:12", "/.jaxagent-init"]
        with pytest.raises(ConfigError, match="uid"):
            asyncio.run(engine.start(Spec(image="debian:12", uid=0)))
        for wrong in (Spec(), Spec(root="/r"), Spec(image="a", root="/r"), Spec(image="a", layers=("/l",))):
            with pytest.raises(ConfigError):
                asyncio.run(engine.start(wrong))
        if os.geteuid() == 0:
            with pytest.raises(SandboxError, match="root"):
                Apptainer(owner)
            monkeypatch.setattr(os, "geteuid", lambda: 1000)
        line = " ".join(Apptainer(owner).arguments(Spec(image="/images/a.sif")))
        for part in ("exec --containall --cleanenv --writable-tmpfs --no-home --no-privs", "--net --network none"):
            assert part in line, part
        assert "/images/a.sif" in line
    finally:
        monkeypatch.undo()
        owner.close()
