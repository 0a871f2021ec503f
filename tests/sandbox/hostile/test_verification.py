"""A verifier that the agent prepared for: tests touched before they run, rewards forged, paths that lead elsewhere."""

import os

import pytest

from jaxagent.sandbox.base import FileError

TEST = b'[ "$(cat /tmp/answer)" = 42 ] && mkdir -p /tmp/logs && echo 1 > /tmp/logs/reward || exit 1\n'
WATCHER = (
    'setsid sh -c \'trap "" HUP TERM; while :; do for f in /tmp/tests/*; do echo "exit 0" > $f;'
    " mkdir -p /tmp/logs; echo 1 > /tmp/logs/reward; done; sleep 0.01; done' >/dev/null 2>&1 &"
)


CLEAR = 'chmod -R u+rwx "$@" 2>/dev/null; rm -rf "$@"'


async def verify(sandbox, tests):
    """What a caller does: stop everything, clear, copy the tests in, run them in a fresh process, read the reward."""
    await sandbox.stop_processes()
    await sandbox.execute(["sh", "-c", CLEAR, "sh", "/tmp/tests", "/tmp/logs"], 10, 1000)
    for path in tests.rglob("*"):
        if path.is_file():
            await sandbox.write(f"/tmp/tests/{path.relative_to(tests)}", path.read_bytes())
    result = await sandbox.execute(["sh", "/tmp/tests/test.sh"], 10, 1000)
    try:
        return result.exit_code, float(await sandbox.read("/tmp/logs/reward", 100))
    except (FileError, ValueError):
        return result.exit_code, None


@pytest.fixture
def tests_directory(tmp_path):
    (tmp_path / "tests" / "below").mkdir(parents=True)
    (tmp_path / "tests" / "test.sh").write_bytes(TEST)
    (tmp_path / "tests" / "below" / "data").write_bytes(b"\0\xff")
    return tmp_path / "tests"


PREPARATIONS = {
    "nothing": ":",
    "forged reward": "mkdir -p /tmp/logs; echo 1 > /tmp/logs/reward",
    "tests already there": "mkdir -p /tmp/tests; echo 'exit 0' > /tmp/tests/test.sh; chmod 444 /tmp/tests/*",
    "tests rewritten by a daemon": WATCHER,
    "reward is a link": "mkdir -p /tmp/logs; ln -s /etc/hostname /tmp/logs/reward; echo 1 > /tmp/one",
    "reward is a pipe": "mkdir -p /tmp/logs; mkfifo /tmp/logs/reward",
    "tests are a link": "mkdir -p ~/mine; ln -s ~/mine /tmp/tests",
    "shell prepared": "sh() { exit 0; }; alias sh=true; export ENV=~/env BASH_ENV=~/env; echo 'exit 0' > ~/env",
    "profile prepared": "for f in ~/.bashrc ~/.profile ~/.bash_profile; do echo 'exit 0' > $f; done",
}


@pytest.mark.parametrize("preparation", PREPARATIONS)
async def test_reward_is_earned(isolated, tests_directory, preparation):
    async with await isolated.start() as sandbox:
        await sandbox.run(PREPARATIONS[preparation], 10, 1000)
        status, reward = await verify(sandbox, tests_directory)
        assert status == 1 and reward is None
        await sandbox.run("echo 42 > /tmp/answer; " + PREPARATIONS[preparation], 10, 1000)
        assert await verify(sandbox, tests_directory) == (0, 1.0)
        assert await sandbox.read("/tmp/tests/below/data") == b"\0\xff"


async def test_reading_and_writing_stay_inside(isolated, tmp_path):
    async with await isolated.start() as sandbox:
        (tmp_path / "secret").write_text("of the host")
        tmp_path.chmod(0o777)
        await sandbox.run(
            f"ln -s {tmp_path}/secret /tmp/a; ln -s {tmp_path} /tmp/b; ln -s /proc/1/root /tmp/c", 10, 1000
        )
        await sandbox.run("ln -s loop /tmp/loop; ln -s /proc/self/fd /tmp/d; ln -s /dev/zero /tmp/z", 10, 1000)
        up = "/tmp/" + "../" * 30 + str(tmp_path).lstrip("/")
        for path in ("/tmp/a", "/tmp/b/secret", f"/tmp/c{tmp_path}/secret", up + "/secret", "/tmp/loop", "/tmp/z"):
            with pytest.raises(FileError):
                await sandbox.read(path)
        for path in ("/proc/self/mem", "/proc/1/environ", "/proc/self/status", "/dev/stdin", "/tmp/d/0"):
            with pytest.raises(FileError):
                await sandbox.read(path)
        for path in ("/tmp/b/new", up + "/new"):
            try:
                await sandbox.write(path, b"x")  # makes a directory of that name inside, where it may
            except FileError:
                continue
            assert await sandbox.read(path) == b"x"
        assert sorted(os.listdir(tmp_path)) == ["secret"] and (tmp_path / "secret").read_text() == "of the host"
        await sandbox.write("/tmp/a", b"mine")  # the link itself is replaced
        assert await sandbox.read("/tmp/a") == b"mine" and (tmp_path / "secret").read_text() == "of the host"
        for path in (
            "/proc/sys/kernel/core_pattern",
            "/proc/self/oom_score_adj",
            "/usr/bin/env",
            "/proc/x",
            "/dev/null",
        ):
            with pytest.raises(FileError):
                await sandbox.write(path, b"x")
        await sandbox.run("head -c 3000000 /dev/zero > /tmp/large", 10, 1000)
        with pytest.raises(FileError):
            await sandbox.read("/tmp/large", 2_999_999)
        assert len(await sandbox.read("/tmp/large", 3_000_000)) == 3_000_000


async def test_a_listing_names_links_and_does_not_follow_them(isolated):
    async with await isolated.start() as sandbox:
        await sandbox.run(
            "mkdir -p /tmp/t/sub; cd /tmp/t; echo a > sub/a; ln -s /etc/passwd link; ln -s .. up; mkfifo pipe;"
            "ln -s sub also; printf b > '..b'; printf c > 'c\nd'; mkdir ...; printf x > .../x; chmod 4755 sub/a",
            10,
            1000,
        )
        kinds = {e.path: e.kind for e in await sandbox.list("/tmp/t")}
        files = dict.fromkeys(["sub/a", "..b", "c\nd", ".../x"], "file")
        links = dict.fromkeys(["link", "up", "also"], "link")
        assert kinds == {**files, **links, "pipe": "other", "sub": "directory", "...": "directory"}
