"""A repository of two files, its tasks, and attempts at them by scripted commands in real sandboxes."""

import functools
import importlib.metadata
import io
import tarfile
from pathlib import Path

from jaxagent.config import SandboxConfig
from jaxagent.envs.base import Transcript
from jaxagent.envs.coding.attempts import AgentCodingAttempt, BuiltInAttempt
from jaxagent.envs.coding.environment import Coding
from jaxagent.envs.coding.task import from_task
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox.of_config import Sandboxes
from jaxagent.types import StopReason, Task

TIMEOUT_S = 120.0
LEXERS = ("__init__", "_mapping", "diff", "python")  # that pytest imports, of hundreds
GOOD = 'def add(a, b):\n    """The sum."""\n    return a + b\n\n\ndef twice(a):\n    return add(a, a)\n'
BAD = GOOD.replace("a + b", "a - b")
PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,6 +1,6 @@
 def add(a, b):
     \"\"\"The sum.\"\"\"
-    return a - b
+    return a + b
{blank}
{blank}
 def twice(a):
""".format(blank=" ")
UNITTEST = """import unittest

import calc


class Calc(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(2, 3), 5)

    def test_zero(self):
        self.assertEqual(calc.add(4, 0), 4)
"""
PYTEST = """import calc


def test_add():
    assert calc.add(2, 3) == 5


def test_zero():
    assert calc.add(4, 0) == 4
"""
FIX = "sed -i 's/a - b/a + b/' calc.py"


def unittest_task(**changes) -> Task:
    """Without pytest: nothing but the interpreter is needed."""
    about = {
        "files": {"calc.py": BAD, "test_calc.py": UNITTEST},
        "patch": PATCH,
        "check_tests": {
            "framework": "unittest",
            "fail_to_pass": ["test_calc.Calc.test_add"],
            "pass_to_pass": ["test_calc.Calc.test_zero"],
        },
    }
    return Task("tiny", "add(2, 3) gives -1.", (), "tiny", {"coding": about | changes})


def pytest_task(tools: Path, **changes) -> Task:
    """With pytest, which is brought along."""
    about = {
        "files": {"calc.py": BAD, "tests/test_calc.py": PYTEST, "tests/__init__.py": ""},
        "tools": str(tools),
        "patch": PATCH,
        "check_tests": {
            "fail_to_pass": ["tests/test_calc.py::test_add"],
            "pass_to_pass": ["tests/test_calc.py::test_zero"],
        },
    }
    return Task("tiny", "add(2, 3) gives -1.", (), "tiny", {"coding": about | changes})


@functools.cache
def packed_pytest() -> bytes:
    """The pytest that runs this, and what it needs, as a tar."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for file in importlib.metadata.files(name) or ():
                rare = file.parts[:2] == ("pygments", "lexers") and file.stem not in LEXERS
                if ".." not in file.parts and (file.suffix == ".py" or file.name == "METADATA") and not rare:
                    archive.add(str(file.locate()), str(file))
    return target.getvalue()


def make_config(**changes) -> Coding:
    sandbox = SandboxConfig(warm=1, memory_mb=256, disk_mb=64, files=5_000)
    return Coding(**{"play": "built_in", "verify_s": 60.0, "max_turns": 8, "sandbox": sandbox, **changes})


class Player:
    """Plays attempts in the sandboxes of one back end."""

    def __init__(self, workers: Workers, sandboxes: Sandboxes):
        self.run, self.take, self._sandboxes = workers.run, sandboxes.take, sandboxes

    def begin(self, config: Coding, task: Task) -> BuiltInAttempt | AgentCodingAttempt:
        kind = AgentCodingAttempt if config.play == "agent" else BuiltInAttempt
        return kind(from_task(task), config, lambda own: self._sandboxes.take())

    def __call__(self, config: Coding, task: Task, *commands: str, ended: StopReason = StopReason.ANSWER):
        """Runs commands as the policy would, and returns (verdict, attempt)."""
        attempt = self.begin(config, task)

        async def episode():
            try:
                await attempt.start()
                for command in commands:
                    await attempt.step(f"<cmd>{command}</cmd>")
                return await attempt.verify(Transcript("", (), ended=ended))
            finally:
                await attempt.close()

        return self.run(episode(), TIMEOUT_S), attempt
