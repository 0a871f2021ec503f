"""Back end (e), the near side: sandboxes on the hosts of any number of workers (`worker.py`), by HTTP and a token."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.io.http import HttpClient, HttpError, HttpStatus
from jaxagent.sandbox import wire
from jaxagent.sandbox.base import (
    MAX_FILE_BYTES,
    Backend,
    CommandResult,
    Entry,
    FileError,
    Sandbox,
    SandboxClosed,
    SandboxError,
    SandboxLost,
    Spec,
)
from jaxagent.sandbox.connection import SNAPSHOT_TIMEOUT_S
from jaxagent.sandbox.worker import CLIENT, STATUS

START_TIMEOUT_S = 90.0
LATE_S = 30.0  # beyond a command's deadline, for the worker's own escalation and the network
FILE_TIMEOUT_S = 120.0
MAX_REPLY_BYTES = 2 * MAX_FILE_BYTES  # a file, or a long listing
HEARTBEAT_S = 10.0
MAX_UNENDED = 10_000  # of a worker: one that is gone so long has closed them when its lease ran out
ENDED_PER_BEAT = 64
HEALTH_TIMEOUT_S = 10.0
AWAY_S, LOOK_S = 30.0, 0.5  # while all workers are away or full: somebody starts them again, places become free
KINDS = {k.__name__: k for k in STATUS}


class Remote(Backend):
    """Sandboxes on workers. One starts on the worker with the fewest of ours; a worker that fails is passed over.

    Must be used and closed on one asyncio loop.

    Args:
      urls: of the workers, e.g. "http://10.0.0.5:8100".
      token: what their --token_file holds.
    """

    def __init__(self, urls: Sequence[str], token: str):
        if not urls:
            raise ConfigError("a remote sandbox back end needs the URL of at least one worker")
        self.name = "remote"
        self.missing: tuple[str, ...] = ("unknown until `connect` has asked the workers",)
        self._running = {url.rstrip("/"): 0 for url in urls}
        headers = {"Authorization": f"Bearer {token}", CLIENT: secrets.token_hex(8)}
        self._client = HttpClient(FILE_TIMEOUT_S, MAX_REPLY_BYTES, headers=headers, connections=0)
        self._heart: asyncio.Future | None = None
        self._unended: dict[str, set[str]] = {url: set() for url in self._running}  # names by worker
        self._ending: set[asyncio.Task] = set()

    async def connect(self) -> None:
        """Asks every worker what it is; fills in `name` and `missing`.

        Raises:
          SandboxError, or SandboxLost after some patience: one does not answer, or the token is wrong.
        """
        requests = [_patient(self.ask, "GET", f"{url}/health", START_TIMEOUT_S) for url in self._running]
        facts = dict(zip(self._running, await asyncio.gather(*requests), strict=True))
        kinds = sorted({str(f["backend"]) for f in facts.values()})
        self.name = f"remote ({len(facts)} workers: {', '.join(kinds)})"
        gaps = [f"{url}: {gap}" for url, f in facts.items() for gap in f["missing"]]
        plain = [u for u in self._running if u.startswith("http://")]
        self.missing = (*gaps, *([f"requests to {len(plain)} workers are not encrypted"] if plain else []))

    async def start(self, spec: Spec) -> Sandbox:
        """Starts a sandbox on one of the workers; waits some time while all are away or full."""
        return await _patient(self._start, {**dataclasses.asdict(spec), "env": dict(spec.env)})

    async def _start(self, body: Mapping[str, Any]) -> Sandbox:
        reasons, away = [], True
        for url in sorted(self._running, key=self._running.__getitem__):
            self._running[url] += 1
            name = secrets.token_hex(16)
            try:
                await self.ask("POST", f"{url}/sandboxes", START_TIMEOUT_S, json={**body, "id": name})
                return _RemoteSandbox(self, url, name)
            except BaseException as failure:  # the worker may have started it all the same, or be about to
                self._ending.add(ending := asyncio.get_running_loop().create_task(self.end(url, name)))
                ending.add_done_callback(self._ending.discard)
                if not isinstance(failure, (SandboxError, SandboxLost)):
                    raise
                reasons.append(f"{url}: {failure}")
                away = away and isinstance(failure, SandboxLost)
        raise (SandboxLost if away else SandboxError)("no worker starts a sandbox: " + "; ".join(reasons))

    async def ask(self, method: str, url: str, timeout_s: float, raw: bool = False, **more: Any) -> Any:
        """One request. Returns the JSON, or bytes with `raw`; what the worker raised is raised here.

        Raises:
          SandboxClosed: no answer; SandboxLost where another attempt may have one.
        """
        if self._heart is None:  # made here: it belongs to the running loop
            self._heart = asyncio.gather(*[self._beat(url) for url in self._running])
        try:
            answer = await self._client.request(method, url, timeout_s=timeout_s, **more)
            return answer if raw else json.loads(answer)
        except HttpStatus as refusal:
            raise _raised(refusal) from None
        except HttpError as failure:
            raise (SandboxLost if failure.passing else SandboxClosed)(str(failure)) from failure
        except ValueError as failure:
            raise SandboxLost(f"{url} sent no JSON: {failure}") from failure

    async def end(self, url: str, name: str) -> int | None:
        """Has a worker close a sandbox. Where it does not answer, it is told again after the next heartbeats.

        Its lease would not do that, since the lease is this client's and other sandboxes of ours keep it.

        Returns:
          what `Sandbox.oom_kills` counted up to its end.
        """
        self._running[url] -= 1
        if len(self._unended[url]) < MAX_UNENDED:
            self._unended[url].add(name)
        return await self._end(url, name, FILE_TIMEOUT_S)

    async def _end(self, url: str, name: str, timeout_s: float) -> int | None:
        with contextlib.suppress(SandboxError, SandboxLost):
            answer = await self.ask("DELETE", f"{url}/sandboxes/{name}", timeout_s)
            self._unended[url].discard(name)
            return answer.get("oom_kills")
        return None

    async def _beat(self, url: str) -> None:
        """Workers close the sandboxes of clients that they do not hear. One that does not answer delays no other."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(SandboxError, SandboxLost):
                await self.ask("GET", f"{url}/health", HEALTH_TIMEOUT_S)
                names = list(itertools.islice(self._unended[url], ENDED_PER_BEAT))
                await asyncio.gather(*[self._end(url, name, HEALTH_TIMEOUT_S) for name in names])

    async def close(self) -> None:
        """Ends the heartbeats: sandboxes that are still open end with their worker's lease."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=HEALTH_TIMEOUT_S)
        for ending in self._ending:
            ending.cancel()
        if self._heart is not None:
            self._heart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heart
            self._heart = None
        await self._client.close()


class _RemoteSandbox(Sandbox):
    """A sandbox on a worker's host: each operation is one request."""

    def __init__(self, backend: Remote, worker: str, name: str):
        self._backend = backend
        self._worker, self._name = worker, name
        self._url = f"{worker}/sandboxes/{name}"
        self._closing: asyncio.Task | None = None

    async def run(self, command: str, deadline_s: float, output_bytes: int) -> CommandResult:
        body = {"command": command, "deadline_s": deadline_s, "output_bytes": output_bytes}
        return _result(await self._ask("POST", "/run", deadline_s + LATE_S, json=body))

    async def execute(
        self,
        argv: Sequence[str],
        deadline_s: float,
        output_bytes: int,
        env: Mapping[str, str] | None = None,
        directory: str = "",
    ) -> CommandResult:
        wire.execute_request(argv, env or {}, directory, deadline_s, output_bytes, 0)  # the same checks as at home
        body = {"argv": list(argv), "env": dict(env or {}), "directory": directory}
        body |= {"deadline_s": deadline_s, "output_bytes": output_bytes}
        return _result(await self._ask("POST", "/execute", deadline_s + LATE_S, json=body))

    async def read(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        query = {"path": path, "max_bytes": str(max_bytes)}
        return await self._ask("GET", "/file", FILE_TIMEOUT_S, raw=True, params=query)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise FileError(f"{path}: {len(data)} bytes are more than the {MAX_FILE_BYTES} that one write takes")
        query = {"path": path, "mode": str(mode)}
        await self._ask("PUT", "/file", FILE_TIMEOUT_S, params=query, data=data)

    async def list(self, path: str, max_entries: int = 10_000) -> list[Entry]:
        query = {"path": path, "max_entries": str(max_entries)}
        entries = await self._ask("GET", "/list", FILE_TIMEOUT_S, params=query)
        return [Entry(str(p), str(k), int(m), int(s)) for p, k, m, s in entries]

    async def stop_processes(self, spared: Sequence[tuple[int, int]] = ()) -> None:
        await self._ask("POST", "/stop", FILE_TIMEOUT_S, json={"spared": [list(process) for process in spared]})

    async def snapshot(self, directory: str) -> str:
        """The directory is in the worker's --folder, and the layer is of use on its host only."""
        timeout_s = SNAPSHOT_TIMEOUT_S + LATE_S
        return str((await self._ask("POST", "/snapshot", timeout_s, json={"directory": directory}))["layer"])

    async def open_port(self, port: int, target: tuple[str, int]) -> int:
        """The worker must have been started with `--relay_to` this very target."""
        body = {"port": port, "host": target[0], "target_port": target[1]}
        return int((await self._ask("POST", "/port", FILE_TIMEOUT_S, json=body))["port"])

    async def oom_kills(self) -> int | None:
        with contextlib.suppress(SandboxClosed):
            if self._closing is None:
                return (await self._ask("GET", "/oom_kills", FILE_TIMEOUT_S))["oom_kills"]
        await self.close()
        return self._closing.result() if self._closing is not None else None

    async def lives(self) -> bool:
        """Asks the worker: for a file that is none, since nothing else is there for sure."""
        try:
            await self.read("/", 1)
        except FileError:
            return True
        except (SandboxError, SandboxLost):
            return False
        return True

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._backend.end(self._worker, self._name))
        await asyncio.shield(self._closing)

    async def _ask(self, method: str, where: str, timeout_s: float, **more: Any) -> Any:
        if self._closing is not None:
            raise SandboxClosed("the sandbox is closed")
        try:
            return await self._backend.ask(method, self._url + where, timeout_s, **more)
        except (SandboxClosed, SandboxLost, asyncio.CancelledError):
            await self.close()
            raise


async def _patient(call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """What a call gives. While SandboxLost is raised it is made again, for `AWAY_S`; then that passes."""
    until = asyncio.get_running_loop().time() + AWAY_S
    while True:
        try:
            return await call(*arguments)
        except SandboxLost as failure:
            if asyncio.get_running_loop().time() >= until:
                raise SandboxLost(f"env.sandbox.remote.workers: for {AWAY_S:g} s, {failure}.") from failure
        await asyncio.sleep(LOOK_S)


def _raised(refusal: HttpStatus) -> Exception:
    """What the worker raised; `SandboxLost` where the answer is none of a worker's."""
    try:
        reply = json.loads(refusal.body)
    except ValueError:
        return SandboxLost(str(refusal))
    reply = reply if isinstance(reply, dict) else {}
    return KINDS.get(reply.get("kind"), SandboxError)(reply.get("error", f"status {refusal.status}"))


def _result(answer: dict[str, Any]) -> CommandResult:
    return CommandResult(**{**answer, "output": base64.b64decode(answer["output"])})
