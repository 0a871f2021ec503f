"""The program inside, in Python: its pieces, and that its archive serves by itself where it is copied to."""

import ast
import asyncio
import os
import random
import struct
import sys

import pytest

from jaxagent.sandbox import init_program
from jaxagent.sandbox.base import SandboxError, Spec
from jaxagent.sandbox.bubblewrap import Bubblewrap
from jaxagent.sandbox.init import output
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.plain import Plain

MODULES = sorted(init_program.PYTHON_SOURCE.glob("*.py"))


@pytest.mark.parametrize("keep", [0, 1, 7, 1000, 300_000])
def test_an_output_keeps_its_first_and_its_last_half(keep):
    draw = random.Random(keep)
    for pieces in (0, 1, 5, 40):
        out, everything = output.Output(keep), b""
        for _ in range(pieces):
            piece = draw.randbytes(draw.choice([0, 1, 3, 500, 70_000]))
            out.take(piece)
            everything += piece
        first = keep // 2
        kept = (
            everything if len(everything) <= keep else everything[:first] + everything[len(everything) - keep + first :]
        )
        assert out.result(5, 2) == struct.pack("<iBQ", 5, 2, len(everything)) + kept


def test_reading_stops_after_so_much_and_says_when_nobody_writes():
    reading, writing = os.pipe2(os.O_NONBLOCK)
    os.write(writing, b"x" * 10_000)
    out = output.Output(10)
    assert out.read(reading) and out.total == 10_000  # more may come
    os.close(writing)
    assert not out.read(reading)
    os.close(reading)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_everything_is_imported_at_the_start_and_nothing_of_ours(path):
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert all(node in tree.body for node in imports)
    names = [alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)]
    names += [node.module for node in imports if isinstance(node, ast.ImportFrom)]
    own = [name for name in names if name.startswith("jaxagent.")]
    assert all(name.startswith("jaxagent.sandbox.init.") for name in own)
    assert {name.partition(".")[0] for name in names} - {"jaxagent"} <= sys.stdlib_module_names


@pytest.mark.parametrize("kind", [Bubblewrap, Plain])
def test_the_archive_serves_inside(kind):
    async def main(owner):
        backend = kind(owner, compiled=False)
        async with await backend.start(Spec()) as sandbox:
            await sandbox.write("/tmp/jaxagent-init-test", b"1\n")
            said = await sandbox.run("cat /tmp/jaxagent-init-test; rm /tmp/jaxagent-init-test; (exit 7)", 30.0, 100)
            assert (said.output, said.exit_code) == (b"1\n", 7)
            assert (await sandbox.run("echo $?; exit 3", 30.0, 100)).shell_lost
            assert (await sandbox.execute(("sh", "-c", "exit 5"), 30.0, 100)).exit_code == 5
        await backend.close()

    owner = Owner()
    try:
        asyncio.run(asyncio.wait_for(main(owner), 100))
    except SandboxError as failure:
        assert kind is Bubblewrap, failure  # plain processes work anywhere
        pytest.skip(f"bubblewrap does not work here: {failure}")
    finally:
        owner.close()
