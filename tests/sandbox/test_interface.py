"""What every back end promises, on each one that works here: commands, fresh processes, files, deadlines, the end."""

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import time
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.sandbox import __main__ as sandbox_command
from jaxagent.sandbox import choose, local
from jaxagent.sandbox.base import FileError, Limits, SandboxClosed, SandboxError, Spec
from jaxagent.sandbox.namespaces import Namespaces
from jaxagent.sandbox.owner import Owner, layer_owner, sandbox_uid
from jaxagent.sandbox.pool import Pool


async def test_one_shell_through_the_episode(anywhere):
    async with await anywhere.start() as sandbox:

        async def said(command):
            result = await sandbox.run(command, 10, 10_000)
            return result.output.decode(), result.exit_code

        assert await said("cd /tmp; X=5; f() { echo f$1; }; export Y=6") == ("", 0)
        assert await said("echo $X $Y; pwd; f 7") == ("5 6\n/tmp\nf7\n", 0)
        assert await said("false") == ("", 1)
        assert await said("echo $?") == ("1\n", 0)  # as a person at a terminal would see it
        assert await said("(exit 7)") == ("", 7)
        assert await said("kill -9 $BASHPID & wait $!") != ("", 0)
        assert await said("echo 'it'\"'\"'s' \"a\\b\" $((6 * 7)) !x") == ("it's a\\b 42 !x\n", 0)
        assert await said("cat <<'END'\none $X\n\ttwo\nEND") == ("one $X\n\ttwo\n", 0)
        assert await said("printf 'a\n\nb'") == ("a\n\nb", 0)
        assert await said("printf '\\r\\n\\003x' | od -An -c | tr -s ' '") == (" \\r \\n 003 x\n", 0)
        assert await said("printf 'a\x03b' | od -An -c | tr -s ' '") == (" a 003 b\n", 0)
        assert await said("printf '%s' 'é\u20ac' | od -An -tx1 | tr -d ' '") == ("c3a9e282ac\n", 0)
        out, status = await said("if")
        assert "syntax error" in out and status == 2
        out, status = await said("echo 'abc")
        assert "unexpected EOF" in out and status != 0
        out, status = await said("nosuchprogram")
        assert "not found" in out and status == 127
        assert await said("cat; read line; echo end") == ("end\n", 0)  # standard input is empty, nothing waits
        assert await said("[ -t 1 ] && [ -t 0 ] || echo $?") == ("1\n", 0)  # a terminal to print on, not to read from
        assert await said(": " + "x" * 200_000) == ("", 0)


async def test_output_is_capped_in_the_middle_and_counted(anywhere):
    async with await anywhere.start() as sandbox:
        result = await sandbox.run("seq 1 100000", 10, 100)
        whole = "".join(f"{i}\n" for i in range(1, 100001)).encode()
        assert result.output_total_bytes == len(whole) and result.truncated
        assert result.output == whole[:50] + whole[-50:]
        result = await sandbox.run("seq 1 20", 10, 51)
        assert result.output == b"".join(b"%d\n" % i for i in range(1, 21)) and not result.truncated
        assert (await sandbox.run("printf abcdefghij", 10, 5)).output == b"abhij"  # 5 // 2 first, the rest last
        assert (await sandbox.run("printf abc", 10, 0)).output == b""
        fresh = await sandbox.execute(["seq", "1", "100000"], 10, 100)
        assert fresh.output == whole[:50] + whole[-50:] and fresh.output_total_bytes == len(whole)


async def test_deadlines(anywhere):
    async with await anywhere.start() as sandbox:

        async def timed(command, deadline_s=0.4):
            begin = time.monotonic()
            result = await sandbox.run(command, deadline_s, 1000)
            assert time.monotonic() - begin < 15
            return result

        await timed("X=5; cd /tmp", 10)
        late = await timed("echo partial; sleep 100")
        assert late.timed_out and late.output == b"partial\n" and late.exit_code == 130 and not late.shell_lost
        assert (await timed("while :; do :; done")).timed_out  # the shell itself is busy
        assert (await timed("echo $X; pwd", 10)).output == b"5\n/tmp\n"  # ^C was enough, so the shell is the same
        assert (await timed("sh -c 'trap \"\" INT; sleep 100 & wait; sleep 100'")).timed_out
        assert (await timed("echo $X", 10)).output == b"5\n"  # the foreground was killed, the shell was not
        late = await timed("trap '' INT; while :; do :; done")
        assert late.timed_out and late.shell_lost
        assert (await timed("echo new $X", 10)).output == b"new\n"
        fresh = await sandbox.execute(["sleep", "100"], 0.3, 100)
        assert fresh.timed_out and fresh.exit_code == 137


async def test_a_flood_is_stopped(anywhere):
    async with await anywhere.start(Spec(limits=Limits(flood_bytes=2**20))) as sandbox:
        await sandbox.run("X=5", 10, 100)
        for result in (await sandbox.run("yes", 60, 100), await sandbox.execute(["yes"], 60, 100)):
            assert result.flooded and not result.timed_out and result.output_total_bytes > 2**20
            assert result.output == b"y\n" * 50
        assert (await sandbox.run("echo $X", 10, 100)).output == b"5\n"


async def test_each_command_has_its_own_output(anywhere):
    async with await anywhere.start() as sandbox:
        await sandbox.run("(for i in 1 2 3 4 5 6 7 8; do sleep 0.05; echo late; done; touch done) &", 10, 1000)
        for i in range(10):
            result = await sandbox.run(f"sleep 0.05; echo {i}", 10, 1000)
            assert b"late" not in result.output.replace(b"echo late", b"") and result.output.endswith(b"%d\n" % i)
        assert (await sandbox.run("sleep 0.3; ls done", 10, 1000)).exit_code == 0  # and its writer lived on


def test_kills_for_memory_are_counted(anywhere):
    """Of this sandbox, while it lives and afterwards; not of the one that had its control group before."""
    counts = "memory" in anywhere.backend.owner.cgroups.controllers and anywhere.name != "podman"
    seen = []

    async def check(sandbox):
        seen.append(sandbox)
        assert await sandbox.oom_kills() == (0 if counts else None)
        await sandbox.execute(["sh", "-c", "kill -9 $$"], 10, 100)  # killed, but not for memory
        assert not await sandbox.oom_kills()
        if counts:
            killed = await sandbox.execute(["sh", "-c", "head -c 200M /dev/zero | tail -n 1 | wc -c"], 30, 100)
            assert b"0" in killed.output.split() and await sandbox.oom_kills() >= 1

    async def closed(_):
        return await seen[0].oom_kills()

    limits = Limits(memory_bytes=64 * 2**20, disk_bytes=16 * 2**20)
    for _ in range(2):
        anywhere(check, Spec(limits=limits))
    assert bool(anywhere(closed)) == counts


async def test_fresh_processes(anywhere):
    async with await anywhere.start() as sandbox:
        await sandbox.run("X=5; export Y=6; cd /", 10, 100)
        result = await sandbox.execute(["sh", "-c", 'echo "$X$Y$Z"; exit 9'], 10, 100, {"Z": "z"})
        assert (result.output, result.exit_code) == (b"z\n", 9)
        result = await sandbox.execute(["sh", "-c", "pwd; kill -15 $$"], 10, 100, directory="/tmp")
        assert (result.output, result.exit_code) == (b"/tmp\n", 143)
        assert (await sandbox.execute(["/nonexistent"], 10, 100)).exit_code == 127
        with pytest.raises(SandboxError):
            await sandbox.execute([], 10, 100)
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"


async def test_files(anywhere):
    async with await anywhere.start() as sandbox:
        home = (await sandbox.run("pwd", 10, 1000)).output.decode().strip()
        data = bytes(range(256)) * 1000
        await sandbox.write(f"{home}/a b/c\n'd", data, 0o750)
        assert await sandbox.read(f"{home}/a b/c\n'd") == data
        assert (await sandbox.run("stat -c '%a %s' 'a b'/*", 10, 1000)).output == b"750 256000\n"
        await sandbox.write(f"{home}/a b/c\n'd", b"short")
        assert await sandbox.read(f"{home}/a b/c\n'd") == b"short"
        await sandbox.run("ln -s nowhere 'a b/link'; mkfifo 'a b/pipe'", 10, 1000)
        listed = {e.path: (e.kind, e.size_bytes) for e in await sandbox.list(home)}
        assert listed == {
            "a b": ("directory", listed["a b"][1]),
            "a b/c\n'd": ("file", 5),
            "a b/link": ("link", 7),
            "a b/pipe": ("other", 0),
        }
        with pytest.raises(FileError):
            await sandbox.list(home, max_entries=3)
        for path in (f"{home}/none", home, f"{home}/a b/pipe", "/dev/zero", "relative", "/a\0b", "/" + "x" * 5000):
            with pytest.raises(FileError):
                await sandbox.read(path)
        with pytest.raises(FileError):
            await sandbox.read(f"{home}/a b/c\n'd", max_bytes=4)
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"  # none of it did harm


async def test_no_folder_is_in_the_way_of_a_file_on_its_way(anywhere):
    """Whatever name a file has until it is whole, no program inside knows it."""
    async with await anywhere.start() as sandbox:
        home = (await sandbox.run("pwd", 10, 1000)).output.decode().strip()
        await sandbox.run("for i in $(seq 200); do mkdir -p b/a.$i.part/x b/a.part/x; done", 30, 100)
        await sandbox.write(f"{home}/b/a", b"fig")
        assert await sandbox.read(f"{home}/b/a") == b"fig"
        assert {e.path for e in await sandbox.list(f"{home}/b") if e.kind == "file"} == {"a"}


async def test_stop_processes_and_close(anywhere):
    async with await anywhere.start() as sandbox:
        await sandbox.run("X=5; setsid sleep 1000 & sleep 1000 & echo kept > file", 10, 100)
        await sandbox.stop_processes()
        result = await sandbox.run("cat file; echo x$X; cat /proc/*/comm 2>/dev/null | grep -c sleep", 10, 1000)
        if anywhere.name != "plain":  # there, other processes of the host may sleep
            assert result.output == b"kept\nx\n0\n"
        await sandbox.close()
        await sandbox.close()
        for operation in (sandbox.run("true", 1, 1), sandbox.read("/x"), sandbox.stop_processes()):
            with pytest.raises(SandboxClosed):
                await operation


async def test_a_cancelled_command_closes_the_sandbox(anywhere):
    async with await anywhere.start() as sandbox:
        task = asyncio.create_task(sandbox.run("sleep 100", 100, 100))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(SandboxClosed):
            await sandbox.run("true", 1, 1)


async def test_operations_wait_for_each_other(anywhere):
    async with await anywhere.start() as sandbox:
        results = await asyncio.gather(*[sandbox.run(f"sleep 0.0{i}; echo {i}", 10, 100) for i in range(8)])
        assert [r.output for r in results] == [b"%d\n" % i for i in range(8)]


async def test_environment_and_identity(isolated):
    async with await isolated.start(Spec(uid=1234, hostname="here", directory="/tmp", env={"A": "b c"})) as sandbox:
        os.environ["JAXAGENT_TEST_SECRET"] = "s3cret"
        env = (await sandbox.execute(["env"], 10, 10_000)).output.decode()
        assert "s3cret" not in env and "PATH=" in env and "A=b c" in env
        assert (await sandbox.run("id -u; hostname; pwd", 10, 100)).output == b"1234\nhere\n/tmp\n"


def test_root_inside_is_nobody_outside(isolated):
    async def check(sandbox):
        assert (await sandbox.run("id -u; touch x; stat -c %u x", 10, 100)).output == b"0\n0\n"
        assert (await sandbox.run("grep ^CapEff /proc/self/status", 10, 100)).output.split()[-1].strip(b"0") == b""

    if isolated.name == "podman" and "no user namespace" in isolated.backend.describe():
        with pytest.raises(ConfigError, match="uid"):
            isolated(check, Spec(uid=0))
    else:
        isolated(check, Spec(uid=0))


async def test_the_host_sees_no_privileged_user(isolated):
    async with await isolated.start() as sandbox:
        await sandbox.run("sleep 31415.92 &", 10, 100)
        seen = []
        for _ in range(200):
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if (entry / "cmdline").read_bytes() == b"sleep\x0031415.92\0":
                        seen.append((entry / "status").read_text())
            if seen:
                break
            await asyncio.sleep(0.01)
        users = [[int(user) for user in text.partition("Uid:")[2].split()[:4]] for text in seen]
        (mine,) = {user for four in users for user in four}
        assert len(users) == 1 and (
            mine == Spec().uid if isolated.name == "podman" else layer_owner(mine) == sandbox_uid()
        )
        assert mine != 0
        # No group of the host's either.
        assert all(not text.partition("Groups:")[2].splitlines()[0].strip() for text in seen) or os.geteuid() != 0


async def test_pool(local):
    pool = Pool(local, Spec(), 3)
    pool.fill()
    taken = await asyncio.gather(*[pool.take() for _ in range(5)])
    assert len(set(map(id, taken))) == 5
    for i, sandbox in enumerate(taken):
        assert (await sandbox.run(f"ls; touch {i}", 10, 100)).output == b""
        await sandbox.close()
    await pool.close()
    with pytest.raises(SandboxError):
        await pool.take()


class Flaky:
    """A back end whose starts fail while `works` is False."""

    def __init__(self, backend):
        self.backend, self.works = backend, True

    async def start(self, spec):
        if not self.works:
            raise SandboxError("no room for a moment")
        return await self.backend.start(spec)


@pytest.mark.parametrize("happened", ["killed", "closed", "did not start"])
async def test_a_pool_hands_out_what_lives_now(local, happened):
    """What died or failed while it waited is no taker's; where nothing starts now, that is what is said."""
    flaky = Flaky(local)
    flaky.works = happened != "did not start"
    pool = Pool(flaky, Spec(), 3)
    pool.fill()
    warm = await asyncio.gather(*pool._ready, return_exceptions=True)
    for sandbox in warm:
        if happened == "killed":
            os.kill(sandbox.pid, signal.SIGKILL)
        elif happened == "closed":
            await sandbox.close()
    await asyncio.sleep(0.2)
    flaky.works = False
    with pytest.raises(SandboxError, match="no room for a moment"):
        await pool.take()
    flaky.works = True
    for _ in range(4):
        async with await pool.take() as sandbox:
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
    await pool.close()


async def test_programs_die_for_memory_before_process_1_and_that_before_the_run(isolated):
    """As the host sees it: nobody inside is asked."""
    mark = f"{secrets.randbelow(10**9)}"
    async with await isolated.start() as sandbox:
        await sandbox.run(f"sleep 100{mark} &", 10, 100)
        await sandbox.execute(["sh", "-c", f"setsid sleep 200{mark} >/dev/null 2>&1 &"], 10, 100)
        found, run, until = {}, int(Path("/proc/self/oom_score_adj").read_text()), time.monotonic() + 10
        while len(found) < 3 and time.monotonic() < until:  # they may not have become what they start yet
            for entry in filter(lambda path: path.name.isdigit(), Path("/proc").iterdir()):
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes().split(b"\0")
                    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    value = int((entry / "oom_score_adj").read_text())
                    if line[-2:-1] in ([f"100{mark}".encode()], [f"200{mark}".encode()]):
                        found[line[-2]] = value
                    elif int(parent) == sandbox.pid:
                        found["1"] = value
        assert sorted(found.values())[1:] == [found["1"] + 100] * 2 and found["1"] >= 500 > run, found


def test_its_own_name_has_an_address(isolated, open_folder):
    """Whatever the image says of others."""

    async def check(sandbox):
        names = "getent hosts $(hostname) | head -1; getent hosts localhost | head -1; cat /etc/hosts"
        first, second, *rest = (await sandbox.execute(["sh", "-c", names], 10, 1000)).output.splitlines()
        assert first.split()[0] in (b"127.0.0.1", b"::1") and second.split()[0] in (b"127.0.0.1", b"::1")
        return rest

    isolated(check)
    if isolated.name == "namespaces":
        isolated(check, Spec(hostname="other"))
        for text in ("", "10.0.0.1 db\n127.0.0.1 localhost"):
            layer = open_folder / isolated.name / str(len(text))
            (layer / "etc").mkdir(parents=True)
            (layer / "etc/hosts").write_text(text)
            rest = isolated(check, Spec(layers=(str(layer),)))
            assert (b"10.0.0.1 db" in rest) == bool(text), rest


async def test_what_a_start_cannot_protect_is_told_once(backend, monkeypatch, caplog):
    for settings in ("SETTINGS", "NETWORK_SETTINGS"):
        monkeypatch.setitem(getattr(local, settings), f"net/{settings}", "1")  # as on a kernel without it

    other = type(backend)(backend.owner)
    for _ in range(2):
        async with await other.start(Spec()) as sandbox:
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
    await other.close()
    missing = "; ".join(other.missing)
    assert "net/SETTINGS: " in missing and "net/NETWORK_SETTINGS" in missing
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_specs_are_checked():
    for wrong in (
        lambda: Limits(processes=0),
        lambda: Limits(cpus=float("nan")),
        lambda: Limits(cpus=float("inf")),
        lambda: Spec(layers="/a"),
        lambda: Spec(layers=("relative",)),
        lambda: Spec(layers=("/a:b",)),
        lambda: Spec(uid=-1),
        lambda: Spec(env={"A=B": "c"}),
    ):
        with pytest.raises(ConfigError):
            wrong()


async def test_a_limit_that_the_kernel_does_not_take_leaves_no_group(backend):
    if "pids" not in backend.owner.cgroups.controllers:
        pytest.skip("processes are not limited by control groups here")
    root = backend.owner.cgroups._roots["pids"]
    before = sorted(root.iterdir())
    with pytest.raises(SandboxError, match="no control group can be made"):
        await backend.start(Spec(limits=Limits(processes=2**62)))
    assert sorted(root.iterdir()) == before


@pytest.mark.usefixtures("local")
async def test_a_back_end_that_fails_late_is_passed_over(monkeypatch):
    """What it had made by then does not stand in the way of the next one; every reason is told."""
    start = Namespaces.describe_outside

    def fails_late(self, *told):
        start(self, *told)
        raise OSError(28, "No space left on device")

    def broken(owner):
        backend = Namespaces(owner)
        backend.describe_outside = functools.partial(fails_late, backend)
        return backend

    owner = Owner()
    try:
        monkeypatch.setitem(choose.SAFE, "podman", broken)
        backend = await choose.choose_backend(owner, ["podman", "namespaces-python"])  # its name in older configs
        assert backend.name == "namespaces"
        await backend.close()
        with pytest.raises(ConfigError, match=r"podman: .*No space left on device"):
            await choose.choose_backend(owner, ["podman"])
    finally:
        owner.close()


def test_the_command_that_says_what_works_here(backends, monkeypatch, capsys):
    backends.backend("namespaces")
    monkeypatch.setattr(choose, "SAFE", {name: choose.SAFE[name] for name in ("apptainer", "namespaces")})
    works = sandbox_command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert works and lines[0].startswith("apptainer: ") and lines[1].startswith("namespaces: works; missing: ")
    assert lines[2].startswith("a run takes: ")
    monkeypatch.setattr(choose, "SAFE", {})
    assert sandbox_command.main([]) == 1 and "none works here" in capsys.readouterr().out


async def test_choosing():
    owner = Owner()
    try:
        with pytest.raises(ConfigError, match="namespaces"):
            await choose.choose_backend(owner, ["namspaces"])
        with pytest.raises(ConfigError, match="unsafe"):
            await choose.choose_backend(owner, ["plain"])
        backend = await choose.choose_backend(owner, [], unsafe=True)
        assert backend.name == "plain (unsafe)" and "all isolation" in backend.describe()
        await backend.close()
        with pytest.raises(ConfigError, match="no sandbox back end works"):
            await choose.choose_backend(owner, [])
    finally:
        owner.close()


async def test_a_control_group_is_free_again_however_its_sandbox_ends(isolated):
    groups = isolated.backend.owner.cgroups
    if not groups.controllers:
        pytest.skip("no control groups can be made here")
    before = dict(groups._sums)  # a group in which something still dies is removed, others are used again
    async with await isolated.start() as sandbox:
        assert groups._sums != before
        os.kill(sandbox.pid, signal.SIGKILL)
    assert groups._sums == before
    with pytest.raises(SandboxError):
        await isolated.backend.begin(Spec(), lambda: (["x"], []), executable="/nowhere")
    assert groups._sums == before
