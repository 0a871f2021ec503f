"""Plays trials by the package `harbor` itself, for tests that compare: its task reader, trial loop and verifier.

    PYTHON tests/envs/terminal/harbor_trials.py FOLDER '[{"commands": [["echo x > a"]], "ending": "stop"}]'

PYTHON is one that has the package. A scripted agent sends commands step by step, and its last one ends as told.
Programs run in a root of their own, made of this machine's by bind mounts, which only root may do. Prints a JSON list:
of each play the rewards of the trial and of its steps, and the exceptions.
"""

import asyncio
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18
TIME_S = 4.0  # that an agent has
FOLDERS = ("app", "tests", "logs", "solution")


def enter_own_root() -> None:
    """Everything of the machine's root but `FOLDERS`, which are new and empty, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str | None, flags: int) -> None:
        names = [name.encode() if name else None for name in (source, target, kind)]
        if libc.mount(*names, ctypes.c_ulong(flags), None):
            raise OSError(ctypes.get_errno(), f"mount {target}")

    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", None, RECURSIVE | PRIVATE)
    root = tempfile.mkdtemp(prefix="harbor-root-")
    mount("tmpfs", root, "tmpfs", 0)
    for entry in os.scandir("/"):
        place = f"{root}/{entry.name}"
        if entry.name in FOLDERS:
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), place)
        elif entry.is_dir():
            os.mkdir(place)
            mount(entry.path, place, None, BIND | RECURSIVE)
    for name in FOLDERS:
        os.mkdir(f"{root}/{name}")
    os.chroot(root)
    os.chdir("/")


async def play(folder: str, one: dict) -> dict:
    from harbor.agents.base import BaseAgent
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities
    from harbor.llms.base import ContextLengthExceededError, OutputLengthExceededError
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    class Here(BaseEnvironment):
        """Programs of this machine, in /app."""

        @staticmethod
        def type():
            return "here"

        @property
        def capabilities(self):
            return EnvironmentCapabilities(disable_internet=True)

        def _validate_definition(self):
            pass

        async def start(self, force_build):
            os.makedirs("/logs/verifier", exist_ok=True)

        async def stop(self, delete):
            pass

        async def upload_file(self, source_path, target_path):
            shutil.copy(source_path, target_path)

        async def upload_dir(self, source_dir, target_dir):
            shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

        async def download_file(self, source_path, target_path):
            shutil.copy(source_path, target_path)

        async def download_dir(self, source_dir, target_dir):
            shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

        async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
            variables = {**os.environ, **self.task_env_config.env, **(env or {})}
            ran = await asyncio.to_thread(
                subprocess.run,
                ["bash", "-c", command],
                cwd=cwd or "/app",
                env=variables,
                capture_output=True,
                text=True,
            )
            return ExecResult(stdout=ran.stdout, stderr=ran.stderr, return_code=ran.returncode)

    class Scripted(BaseAgent):
        step = 0

        @staticmethod
        def name():
            return "scripted"

        def version(self):
            return "1"

        async def setup(self, environment):
            pass

        async def run(self, instruction, environment, context):
            commands, Scripted.step = one["commands"], Scripted.step + 1
            for command in commands[Scripted.step - 1] if Scripted.step <= len(commands) else []:
                await environment.exec(command)
            if Scripted.step != len(commands):
                return
            if one["ending"] == "time":
                await asyncio.sleep(1000)
            if one["ending"] == "length":
                raise OutputLengthExceededError("cut")
            if one["ending"] == "context":
                raise ContextLengthExceededError("full")

    sys.modules["here"] = type(sys)("here")
    sys.modules["here"].Here, sys.modules["here"].Scripted = Here, Scripted
    at = tempfile.mkdtemp()
    config = TrialConfig.model_validate(
        {
            "task": {"path": folder},
            "trials_dir": at,
            "agent": {"import_path": "here:Scripted", "override_timeout_sec": TIME_S},
            "environment": {"import_path": "here:Here"},
        }
    )
    result = await (await Trial.create(config)).run()
    exceptions = [part.exception_info for part in (result, *(result.step_results or ()))]
    return {
        "rewards": result.verifier_result and result.verifier_result.rewards,
        "steps": [s.verifier_result and s.verifier_result.rewards for s in result.step_results or ()],
        "exceptions": [info.exception_type for info in exceptions if info],
    }


def main() -> None:
    import harbor.trial.multi_step
    import harbor.trial.single_step  # noqa: F401  (once, before the forks)

    folder, plays = sys.argv[1], json.loads(sys.argv[2])
    pipes = []
    for one in plays:
        read, write = os.pipe()
        if os.fork() == 0:
            enter_own_root()
            copy = f"{tempfile.mkdtemp()}/{Path(folder).name}"
            shutil.copytree(folder, copy)
            os.write(write, json.dumps(asyncio.run(play(copy, one))).encode())
            os._exit(0)
        os.close(write)
        pipes.append(os.fdopen(read))
    print("RESULTS", json.dumps([json.loads(text) if (text := pipe.read()) else None for pipe in pipes]))


if __name__ == "__main__":
    main()
