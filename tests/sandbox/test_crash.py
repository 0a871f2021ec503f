"""kill -9 of an owner with 64 busy sandboxes: nothing is left after the next start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxagent.sandbox.base import Spec
from jaxagent.sandbox.owner import Owner
from tests.sandbox.hostile.host import leftovers

BUSY = """
import asyncio, sys
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import Limits, Spec
from jaxagent.sandbox.owner import Owner

async def main(name, count):
    owner = Owner()
    backend = choose.SAFE[name](owner)
    limits = Limits(processes=32, memory_bytes=2**26, disk_bytes=2**24)
    gate = asyncio.Semaphore(8)
    async def one():
        async with gate:
            sandbox = await backend.start(Spec(limits=limits))
            await sandbox.run("trap '' INT HUP TERM; (setsid sleep 1000 &); echo data > f", 60, 100)
        return sandbox
    sandboxes = await asyncio.gather(*[one() for _ in range(count)])
    print(owner.id, flush=True)
    await asyncio.gather(*[s.run("while :; do sleep 0.05; done", 600, 100) for s in sandboxes])

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize(("name", "count"), [("namespaces", 64), ("namespaces-python", 6), ("bubblewrap", 12)])
def test_kill_9(name, count, places):
    places.backend(name)  # skips where it does not work
    root = Path(__file__).parents[2]
    owner = subprocess.Popen(
        [sys.executable, "-c", BUSY, name, str(count)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    try:
        run = owner.stdout.readline().strip()
        assert run, "the owner did not start its sandboxes"
        time.sleep(0.5)
        # The outermost processes at least, and the run's directory and lock.
        assert len(leftovers(run)) >= count + 2
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    after = Owner()  # the next start
    try:
        assert run in after.swept
        assert leftovers(run) == []
    finally:
        after.close()


def test_a_living_run_is_not_swept(places):
    async def main(backend):
        async with await backend.start(Spec()) as sandbox:
            other = Owner()
            assert backend.owner.id not in other.swept
            other.close()
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"

    places.run(main(places.backend("namespaces")))


def test_a_closed_run_leaves_nothing(tmp_path):
    owner = Owner()
    assert owner.path.is_dir() and leftovers(owner.id)
    owner.close()
    owner.close()
    assert leftovers(owner.id) == []
