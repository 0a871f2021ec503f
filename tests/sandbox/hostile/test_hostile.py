"""Every hostile program, in every isolating back end that works here: nothing gets out, nothing lasts, all ends."""

import asyncio
import os
import subprocess
import time

import pytest

from jaxagent.sandbox.base import SandboxError
from tests.sandbox.conftest import ISOLATING, SMALL
from tests.sandbox.hostile.host import Host, leftovers
from tests.sandbox.hostile.programs import PROGRAMS

LATE_S = 12.0  # ^C, kill, and a machine that others use
HARMLESS = {"forged status, printed": 77, "forged frames": 77, "exec of nothing": None, "binary output": 0}


@pytest.fixture(scope="module")
def host():
    made = Host()
    outsider = subprocess.Popen(["sleep", "600"])
    made.outsider = outsider.pid
    os.environ["JAXAGENT_TEST_SECRET"] = made.secret
    yield made
    assert outsider.poll() is None, "a process of the host was killed"
    outsider.kill()
    outsider.wait()
    del os.environ["JAXAGENT_TEST_SECRET"]
    made.close()


def filled(program, host, backend):
    text = program.text
    values = {
        "secret": host.secret,
        "bait": host.bait,
        "directory": host.directory,
        "tcp": host.tcp.getsockname()[1],
        "udp": host.udp.getsockname()[1],
        "abstract": host.abstract_name,
        "outsider": host.outsider,
        "owner": os.getpid(),
        "inodes": not any("number of files" in gap for gap in backend.missing),
    }
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


async def limit_is_active(sandbox):
    """No fork bomb without this: the number of processes must be limited, and seen to be."""
    counted = await sandbox.run(
        "n=0; while [ $n -lt 200 ]; do sleep 20 & n=$((n + 1)); done 2>/dev/null; jobs -r | wc -l", 20, 10_000
    )
    await sandbox.stop_processes()
    alive = counted.output.split()
    return counted.shell_lost or not alive or not alive[-1].isdigit() or int(alive[-1]) < 100


async def one(backend, program, host):
    """Runs a program; returns what went wrong, as text."""
    wrong = []
    before, text = host.listing(), filled(program, host, backend)
    sandbox = await backend.start(SMALL)
    try:
        begin = time.monotonic()
        if program.name == "fork bomb" and not await limit_is_active(sandbox):
            return ["the number of processes is not limited: not tried"]
        if program.language == "python":
            await sandbox.write("/tmp/program.py", text.encode())
            text = "python3 /tmp/program.py"
        begin = time.monotonic()
        try:
            result = await sandbox.run(text, program.limit_s, 100_000)
            if b"ESCAPED" in result.output:
                wrong.append(f"escaped: {result.output[-500:]!r}")
            if b"python3: not found" in result.output or b"SyntaxError" in result.output:
                wrong.append(f"was not run: {result.output[-500:]!r}")
            if len(result.output) > 100_000:
                wrong.append("the output is over its cap")
            expected = HARMLESS.get(program.name, "any")
            if expected not in ("any", None) and result.exit_code != expected:
                wrong.append(f"status {result.exit_code}, not {expected}")
            # Whatever it did, the sandbox goes on, or a fresh process of it does.
            await sandbox.stop_processes()
            again = await sandbox.run("echo on", 10, 1000)
            fresh = await sandbox.execute(["sh", "-c", "echo on"], 10, 1000)
            if again.output != b"on\n" or fresh.output != b"on\n":
                wrong.append(f"afterwards: {again} {fresh}")
        except SandboxError as failure:  # a dead sandbox is contained too
            wrong += [] if program.name in ("memory", "shared memory") else [f"the sandbox died: {failure}"]
        took = time.monotonic() - begin
        if took > program.limit_s + LATE_S + 20:
            wrong.append(f"took {took:.1f} s")
    finally:
        await sandbox.close()
    if visitors := host.visitors():
        wrong.append(f"reached {visitors}")
    after = host.listing()
    wrong += [f"changed {key}: {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key]]
    return wrong


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name.replace(" ", "-"))
@pytest.mark.parametrize("name", ISOLATING)
def test_contained(name, program, host, opened):
    context = opened(name)

    async def main():
        async with context as backend:
            return await one(backend, program, host)

    wrong = asyncio.run(asyncio.wait_for(main(), 120))
    assert not wrong, wrong


def test_there_are_enough():
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS) >= 30


def test_nothing_of_a_run_is_left(opened):
    from jaxagent.sandbox.namespaces import Namespaces
    from jaxagent.sandbox.owner import Owner

    opened("namespaces")

    async def main():
        owner = Owner()
        backend = Namespaces(owner)
        sandbox = await backend.start(SMALL)
        await sandbox.run("setsid sleep 1000 &", 10, 100)
        assert len(leftovers(owner.id)) >= 2  # the check sees something while there is something
        await backend.close()
        owner.close()
        return owner.id

    assert leftovers(asyncio.run(main())) == []
