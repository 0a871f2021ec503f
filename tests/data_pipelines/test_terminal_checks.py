"""The functions of which final tests are made, on what an agent may leave to steer, stop or break them."""

import bz2
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
import tracemalloc

import pytest

from data_pipelines.terminal_templates import checks

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")
BOMB = 64 * 2**20
ROOM = 24 * 2**20  # of memory, for a check


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Tests run in the home directory of the task."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sh(script):
    subprocess.run(["sh", "-ec", script], check=True, capture_output=True, timeout=60)


REPOSITORY = """
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
git init -q -b main fig && cd fig && git config user.name lime && git config user.email lime@example.com
echo 1 > a.txt && git add -A && git commit -q -m one
printf '#!/bin/sh\\ntouch "$(dirname "$0")/../ran"\\ncat\\n' > .git/steer && chmod 755 .git/steer
"""
FILTER = "git config filter.x.clean '{}' && git config filter.x.process '{}' && echo '* filter=x' > .gitattributes"
STEERS = {
    "a program that verifies signatures": (
        "git config log.showSignature true && git config gpg.program $PWD/.git/steer\n"
        "c=$(git cat-file commit HEAD | sed '0,/^$/s/^$/gpgsig -----BEGIN PGP SIGNATURE-----\\n \\n x\\n "
        "-----END PGP SIGNATURE-----\\n/' | git hash-object -t commit -w --stdin) && git update-ref HEAD $c"
    ),
    "a filter": f"{FILTER.format('$PWD/.git/steer', '')} && sleep 0.01 && touch a.txt && echo 2 > b.txt && rm a.txt",
    "a configuration in the home directory": (
        "git config -f ~/.gitconfig core.fsmonitor $PWD/.git/steer && mkdir -p ~/.config/git && "
        "cp ~/.gitconfig ~/.config/git/config"
    ),
    "a monitor": "git config core.fsmonitor $PWD/.git/steer",
    "a hook": "cp .git/steer .git/hooks/post-index-change; touch a.txt",
    "a repository inside": (
        "git init -q b && cd b && git config user.name x && git config user.email x && echo 1 > c && git add c && "
        "git commit -q -m x && git config filter.x.clean $PWD/../.git/steer && echo '* filter=x' > .gitattributes && "
        "echo 2 > c && cd .. && git -c protocol.file.allow=always submodule add ./b b && "
        "git config -f .gitmodules submodule.b.ignore none && git add -A && git commit -q -m one"
    ),
}


@needs_git
@pytest.mark.parametrize("how", STEERS)
def test_git_runs_nothing_of_the_agents(at_home, how):
    sh(f"{REPOSITORY}{STEERS[how]}")
    (at_home / "fig/ran").unlink(missing_ok=True)
    for arguments in (["log", "-1", "--format=%s|%an"], ["status", "--porcelain"], ["show", "HEAD:a.txt"]):
        said = checks.git("fig", *arguments)
        assert not (at_home / "fig/ran").exists()
        assert arguments[0] == "status" or said == {"log": "one|lime", "show": "1"}[arguments[0]]
    origins = checks.git("fig", "config", "--list", "--show-origin").splitlines()
    assert origins and all(line.startswith("file:/") and "/git/config" in line for line in origins)
    assert not any(str(at_home) + "/fig" in line or line.startswith(f"file:{at_home}/.") for line in origins)


@needs_git
def test_git_sees_what_is_there():
    sh(REPOSITORY)
    sh("cd fig && git replace $(git rev-parse HEAD:a.txt) $(echo 2 | git hash-object -w --stdin)")
    sh("cd fig && echo b.txt > .git/info/exclude && touch b.txt && echo 3 > a.txt")
    checks.git_says("fig", ["show", "HEAD:a.txt"], "1")
    checks.git_says("fig", ["status", "--porcelain"], " M a.txt\n?? b.txt")
    for arguments in (["show", "HEAD:b.txt"], ["log", "other"]):
        with pytest.raises(SystemExit) as ended:
            checks.git("fig", *arguments)
        assert ended.value.code == 1


@needs_git
@pytest.mark.parametrize(
    "how",
    [
        "rm -rf .git",
        "mv .git ../x; ln -s ../x .git",
        "mv .git ../x; echo gitdir: ../x > .git",
        "rm -rf .git/objects; ln -s /proc/self .git/objects",
        "mv .git/objects ../x; mkdir -p .git/objects/info; echo $PWD/../x > .git/objects/info/alternates",
        "rm .git/HEAD; mkfifo .git/HEAD",
        "rm .git/config; mkfifo .git/config",
        "mkdir -p .git/refs/a; cd .git/refs/a; i=0; while [ $((i += 1)) -lt 2100 ]; do echo $i; done | xargs mkdir",
        "truncate -s 40M .git/objects/big",
        "head -c 3000000 /dev/zero > a.txt; git add a.txt; git commit -q -m one",  # longer than any answer
        "rm -f .gitignore; mkfifo .gitignore",
    ],
)
def test_a_repository_that_is_none_is_not_done(how, monkeypatch, capsys):
    """It never stops the test, nor ends it other than a test that failed."""
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: run(*a, **{**k, "timeout": min(k["timeout"], 1.0)}))
    run(["sh", "-ec", f"{REPOSITORY}{how}"], check=True, capture_output=True, timeout=60)
    with pytest.raises(SystemExit) as ended:
        checks.git_says("fig", ["show", "HEAD:a.txt"], "1")
        checks.git_says("fig", ["status", "--porcelain"], "")
    assert ended.value.code == 1 and capsys.readouterr().out.startswith("FAILED: ")


@needs_git
def test_git_reads_a_repository_of_another_object_format():
    sh(f"{REPOSITORY.replace('git init -q', 'git init -q --object-format=sha256')}git gc -q")
    assert len(checks.git("fig", "rev-parse", "HEAD")) == 64
    checks.git_says("fig", ["log", "--format=%s"], "one")


def zeros(size):
    return io.BytesIO(bytes(size))


def tar_of(members, pack):
    """A packed archive of (TarInfo changes, data)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, size, changes in members:
            info = tarfile.TarInfo(name)
            info.size = size
            for field, value in changes.items():
                setattr(info, field, value)
            archive.addfile(info, zeros(size))
    return pack(raw.getvalue())


def sparse():
    """A member of a few bytes that says it is a terabyte of zeros."""
    info = tarfile.TarInfo("a")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 0
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o\0" % 2**32  # the size it unpacks to
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(1024)


def less_than_nothing():
    """A member whose size is negative, so that those of all members add up to little."""
    pax = [("n", -BOMB, 0), ("a", BOMB, BOMB)]  # name, size it unpacks to, where its only piece of data is
    headers = [{"GNU.sparse.size": str(size), "GNU.sparse.map": f"{max(at, 0)},0"} for _, size, at in pax]
    return tar_of([(name, 0, {"pax_headers": h}) for (name, _, _), h in zip(pax, headers, strict=True)], gzip.compress)


BOMBS = {
    "negative sizes": less_than_nothing,
    "a member": lambda: tar_of([("a", BOMB, {})], lambda b: gzip.compress(b, 1)),
    "a header": lambda: tar_of([("a", 0, {"pax_headers": {"comment": "x" * BOMB}})], lambda b: gzip.compress(b, 1)),
    "many members": lambda: gzip.compress(tar_of([("a", 0, {})], bytes)[:512] * (BOMB // 512), 1),
    "many sparse members": lambda: sparse()[:512] * 1500,
    "bzip2": lambda: tar_of([("a", BOMB, {})], bz2.compress),
    "xz": lambda: tar_of([("a", BOMB, {})], lambda b: lzma.compress(b, preset=0)),
}


@pytest.mark.parametrize("what", ["gzipped", *BOMBS])
def test_an_archive_takes_no_memory(at_home, what, capsys):
    packed = gzip.compress(bytes(BOMB), 1) if what == "gzipped" else BOMBS[what]()
    assert len(packed) < 1_000_000
    (at_home / "b").write_bytes(packed)
    del packed
    tracemalloc.start()
    try:
        with pytest.raises(SystemExit) as ended:
            checks.gzipped("b", "fig\n") if what == "gzipped" else checks.tar("b", {"a": "fig\n"})
        assert ended.value.code == 1 and tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()
    assert capsys.readouterr().out.startswith("FAILED: b ")


@pytest.mark.parametrize("how", ["", "gz", "bz2", "xz"])
def test_an_honest_archive_is_read(at_home, how):
    with tarfile.open("b", f"w:{how}") as archive:
        for name, text in (("./c/a.txt", b"fig\n"), ("c/b.txt", b"")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    files = {"c/a.txt": "fig\n", "c/b.txt": ""}
    checks.tar("b", files)
    for other in ({"c/a.txt": "fig\n"}, {**files, "c/b.txt": "lime"}, {**files, "d": ""}):
        with pytest.raises(SystemExit):
            checks.tar("b", other)


def test_gzip_files_that_are_not_whole_or_say_something_else(at_home):
    whole = gzip.compress(b"fig\nlime\n")
    for content in (whole, gzip.compress(b"fig\n") + gzip.compress(b"lime\n"), whole + bytes(512)):
        (at_home / "b").write_bytes(content)
        checks.gzipped("b", "fig\nlime\n")
    others = (
        gzip.compress(b"") + b"fig\nlime\n",
        whole + gzip.compress(b"x"),
        whole[:-1],
        whole[:-8],
        b"",
        b"fig\nlime\n",
        bz2.compress(b"fig\nlime\n"),
    )
    for content in (*others, gzip.compress(b"fig\nlime\n\n"), gzip.compress(b"fig\n")):
        (at_home / "b").write_bytes(content)
        with pytest.raises(SystemExit):
            checks.gzipped("b", "fig\nlime\n")
