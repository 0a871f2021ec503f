"""A base root from a mirror of Debian packages: what can be seen without one, and the real thing where there is one."""

import asyncio
import os
import shutil
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jaxagent.sandbox import choose
from jaxagent.sandbox.base import Limits
from jaxagent.sandbox.images import bases, debootstrap
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.owner import Owner, sandbox_uid

MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"


def fake(folder: Path, script: str) -> None:
    """A program of that name, to see deadline, failure and cleaning up; what it makes is no root."""
    program = folder / "debootstrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def store(open_folder):
    return Store(open_folder / "images")


def test_without_debootstrap(store, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(BuildError, match=r"debootstrap:bookworm: needs debootstrap.*apt-get install debootstrap"):
        asyncio.run(debootstrap.make(store, SUITE))
    with pytest.raises(BuildError, match="needs debootstrap"):
        asyncio.run(bases.resolve(bases.parse(("a=debootstrap:bookworm",)), "a", "img", store))


@pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root")
def test_failure_deadline_and_cache(store, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake(tmp_path, "echo I: looking; echo E: no such suite; exit 1")
    with pytest.raises(
        BuildError, match=r"status 1 \(is the mirror of packages reached\?\)\. It printed: I: looking\nE: no"
    ):
        asyncio.run(debootstrap.make(store, "nosuch"))
    fake(tmp_path, "echo I: begun; sleep 60 & sleep 60")
    with pytest.raises(BuildError, match=r"ran past 3 s\. It printed: I: begun"):
        asyncio.run(debootstrap.make(store, SUITE, timeout_s=3.0))
    assert os.listdir(store.folder / "work") == [] and store.listing() == []
    # The fourth word is the folder: variant, suite, folder.
    fake(
        tmp_path,
        "mkdir -p $3/etc/apt/apt.conf.d $3/dev $3/var/cache/apt/archives; mknod $3/dev/null c 1 3; echo x > "
        '$3/var/cache/apt/archives/a.deb; echo "$@" > $3/said; ln -s /etc/shadow $3/link; echo I: done',
    )
    said = []
    record = asyncio.run(debootstrap.make(store, SUITE, progress=said.append))
    tree = Path(record["tree"])
    assert (
        not record["cached"]
        and said == ["debootstrap --variant=minbase bookworm (some minutes)"]
        and (tree / "said").read_text().startswith("--variant=minbase bookworm ")
    )
    assert (tree / "said").stat().st_uid == sandbox_uid() and os.lstat(tree / "link").st_uid == sandbox_uid()
    assert (
        os.stat("/etc/shadow").st_uid == 0
        and os.listdir(tree / "dev") == os.listdir(tree / "var/cache/apt/archives") == []
    )
    assert "APT::Sandbox::User" in (tree / "etc/apt/apt.conf.d/99jaxagent").read_text()
    fake(tmp_path, "exit 1")
    again = asyncio.run(debootstrap.make(store, SUITE))
    assert again["cached"] and again["tree"] == record["tree"]
    with pytest.raises(BuildError):  # another mirror is another base
        asyncio.run(debootstrap.make(store, SUITE, "http://elsewhere"))


@pytest.mark.slow
@pytest.mark.skipif(
    "JAXAGENT_TEST_DEBOOTSTRAP" not in os.environ, reason="JAXAGENT_TEST_DEBOOTSTRAP is not set: minutes"
)
def test_a_real_base(store):
    if os.geteuid() != 0 or not shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("debootstrap is not installed here, or this is not root")
    try:
        urllib.request.urlopen(f"{MIRROR}/dists/{SUITE}/InRelease", timeout=20).close()
    except (OSError, urllib.error.URLError) as error:
        pytest.skip(f"no mirror of packages is reached: {error}")

    async def main():
        built = await bases.resolve(bases.parse((f"debian:*=debootstrap:{SUITE}@{MIRROR}",)), "debian:12", "img", store)
        owner = Owner()
        try:
            backend = await choose.choose_backend(owner, ("namespaces",))
            async with await backend.start(built.spec(Limits())) as sandbox:
                said = await sandbox.execute(
                    ("sh", "-c", "cat /etc/debian_version; apt-get --version; touch /usr/x"), 60, 10_000
                )
                assert said.exit_code == 0 and said.output.startswith(b"12.")
            await backend.close()
        finally:
            owner.close()
        assert stat.S_ISDIR(os.stat(f"{built.root}/usr").st_mode)

    asyncio.run(main())
