"""A rollout service for tests: in this process on a free port, or as real processes that can be killed."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

from jaxagent.config.command import bound_socket
from jaxagent.io import connections
from jaxagent.service import callbacks, leases
from jaxagent.service.api import Api
from jaxagent.service.client import ServiceClient
from jaxagent.service.host import Node
from jaxagent.service.play import Places
from jaxagent.service.server import sweep
from jaxagent.service.states import ServiceRules
from jaxagent.service.store import ServiceStore
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef-token"
RULES = ServiceRules()


def trajectory(seed: int, actions: int = 5) -> Trajectory:
    """A prompt of three tokens and `actions` sampled ones, of values that tell `seed`."""
    rng, length = np.random.default_rng(seed), 3 + actions
    kinds = np.array([TokenKind.PROMPT] * 3 + [TokenKind.ACTION] * actions, np.uint8)
    sampled = kinds == TokenKind.ACTION
    logprobs = np.where(sampled, -rng.random(length, np.float32), 0).astype(np.float32)
    versions = np.where(sampled, 3, -1).astype(np.int32)
    tokens = rng.integers(0, 1000, length).astype(np.int32)
    return Trajectory(tokens, kinds, logprobs, versions, np.zeros(length, np.int32))


def episode(task: Task, sample: int, reward: float = 1.0, stop_reason=StopReason.ANSWER, actions: int = 5) -> Episode:
    """What attempt `sample` at the task gives, wherever it is played."""
    trajectories = (trajectory(sample, actions),) if actions else ()
    failed = stop_reason.is_failure
    error = "it failed on purpose" if failed else ""
    return Episode(
        task, sample, trajectories, 0.0 if failed else reward, {}, stop_reason, 1, text="for people", error=error
    )


def same(a: Episode, b: Episode) -> bool:
    """Whether two episodes are equal in every bit."""
    fields = ("tokens", "kinds", "logprobs", "policy_versions", "turns")
    arrays = len(a.trajectories) == len(b.trajectories) and all(
        np.array_equal(getattr(x, f), getattr(y, f))
        for x, y in zip(a.trajectories, b.trajectories, strict=True)
        for f in fields
    )
    return arrays and dataclasses.replace(a, trajectories=()) == dataclasses.replace(b, trajectories=())


@dataclasses.dataclass
class Service:
    """What tests reach of a server in this process."""

    url: str
    store: ServiceStore
    api: Api
    client: ServiceClient
    rules: ServiceRules
    late_s: float = 0.0  # by which this server's clock is ahead of the machine's

    def clock(self) -> float:
        return time.time() + self.late_s

    async def pass_time(self, seconds: float) -> None:
        """So many seconds later, everything that time ends has ended."""
        self.late_s += seconds
        await self.store.do(leases.sweep, self.rules)
        self.api.ring()


@contextlib.asynccontextmanager
async def serving(path, rules: ServiceRules = RULES, heartbeat_s: float = 0.2, late_s: float = 0.0):
    """A server in this process, and a client of it."""
    with ServiceStore(path, clock=lambda: found.clock()) as store, bound_socket("127.0.0.1", 0) as address:
        url = f"http://127.0.0.1:{address.getsockname()[1]}"
        api = Api(store, rules, TOKEN, heartbeat_s)
        found = Service(url, store, api, ServiceClient(url, TOKEN), rules, late_s)
        await store.do(leases.resumed, rules)
        async with connections.serving(api.app(), address):
            loops = [
                asyncio.create_task(sweep(store, rules, api)),
                asyncio.create_task(callbacks.tell(store, 0.05)),
            ]
            try:
                yield found
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
                await found.client.close()


@contextlib.asynccontextmanager
async def playing(url, play, name="node", places=(4, 4, 4), drain_s=10.0, patience_s=60.0):
    """A node in this process, which is drained at the end. Yields it and the task that runs it."""
    client = ServiceClient(url, TOKEN)
    node = Node(client, play, name, Places(*places), drain_s, patience_s=patience_s)
    running = asyncio.create_task(node.run())
    try:
        yield node, running
    finally:
        node.drain()
        await asyncio.wait({running}, timeout=20)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def ended(client, task_id, within_s=60.0):
    """The group, once it has ended."""
    async with asyncio.timeout(within_s):
        while (found := await client.task(task_id, wait_s=5))["status"] == "running":
            pass
    return found


async def until(condition, within_s=60.0):
    """Waits for an async condition that is true in the end, and returns what it gave."""
    async with asyncio.timeout(within_s):
        while not (found := await condition()):
            await asyncio.sleep(0.02)
    return found


class Process:
    """A real process of ours, which can be killed; its output is in `log`."""

    def __init__(self, log: pathlib.Path, *arguments: str):
        self.log = log
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=out, stderr=out, cwd=ROOT, env=env, start_new_session=True
            )

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def wait(self, within_s: float = 60.0) -> int:
        return self._process.wait(within_s)


def start_server(folder: pathlib.Path, port: int, *more: str) -> Process:
    (folder / "token").write_text(TOKEN)
    flags = [f"--store={folder / 'service.sqlite'}", f"--token_file={folder / 'token'}", f"--port={port}"]
    return Process(folder / "server.log", "jaxagent.service.server", *flags, "--heartbeat_s=0.2", "--lease_s=2", *more)


def start_node(folder: pathlib.Path, port: int, name: str, *more: str) -> Process:
    (folder / "token").write_text(TOKEN)
    flags = [f"--server=http://127.0.0.1:{port}", f"--token_file={folder / 'token'}", f"--node_id={name}"]
    return Process(
        folder / f"{name}.log", "jaxagent.service.node", *flags, "--player=tests.service.players:patient", *more
    )


def free_port() -> int:
    with bound_socket("127.0.0.1", 0) as address:
        return address.getsockname()[1]
