"""The servers that a run's attempts share: as many sessions on each as it takes, as many processes as are allowed.

How many sessions a server takes at once it only says when it refuses one more (CAPACITY_REACHED, `max_sessions`; most
take one). A server of ours that is full gets another process beside it, up to `processes`; beyond that, and where a
server is somebody else's, attempts wait until another attempt of this run leaves its place. Where somebody else's
sessions fill a server, an attempt asks for some two seconds, and then fails with the refusal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from jaxagent.envs.openenv.wire import FULL, OpenEnvSession, Result, ServerError
from jaxagent.envs.server_process import LOOK_S, REPLY_BYTES, ServerProcess, ServerProgram, answers
from jaxagent.io.http import HttpClient

PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # a server may not yet have noticed that a session of ours is over


@dataclasses.dataclass
class Place:
    """A server that runs."""

    url: str
    process: ServerProcess | None = None  # None: somebody else's
    sessions: int = 0  # of ours
    capacity: float = float("inf")  # that it takes, as far as it has said


class Servers:
    """Opens sessions on one server by its URL, or on processes of a program. Used and closed on one loop.

    Args:
      url: of a server that runs; "" = processes are started.
      program: what to start.
      processes: at most.
      start_s: until a process answers.
      reply_s: for one answer.
    """

    def __init__(self, url: str, program: ServerProgram, processes: int, start_s: float, reply_s: float) -> None:
        self._program, self._most, self._start_s, self._reply_s = program, processes, start_s, reply_s
        self._places = [Place(url)] if url else []
        self._local = not url
        self._starting = 0
        self._changed = asyncio.Event()

    async def get(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What a server answers GET, or POST with a body, over HTTP, as JSON. Raises HttpError, ValueError."""
        place = await self._take()
        try:
            async with HttpClient(self._reply_s, REPLY_BYTES) as client:
                content: dict[str, Any] = {} if body is None else {"json": body}
                return json.loads(await client.request("POST" if content else "GET", f"{place.url}{path}", **content))
        except RecursionError:
            raise ValueError(f"{place.url}{path} sent JSON too deep to be read") from None
        finally:
            self._leave(place)

    async def begin(self, kind: str, data: Mapping[str, Any]) -> tuple[OpenEnvSession, Place, Result]:
        """A new session, where it is, and the answer to its first message. Raises as `OpenEnvSession.play`."""
        pauses, again = iter(PAUSES_S), True
        while True:
            place = await self._take()
            session = None
            try:
                session = await OpenEnvSession.connect(place.url, self._reply_s)
                return session, place, await session.play(kind, data, self._reply_s)
            except BaseException as failure:
                if session is not None:
                    await session.close()
                self._leave(place)
                if again and session is None and place.process is not None and isinstance(failure, ConnectionError):
                    again = False  # it has died, and its keeper has not yet: once, another is started
                    await place.process.close()
                    continue
                if not isinstance(failure, ServerError) or failure.code != FULL:
                    raise
                most = failure.data.get("max_sessions")
                place.capacity = most if type(most) is int and most > 0 else max(place.sessions, 1)
                if place.sessions < place.capacity:  # it may not have noticed yet; else somebody else has the place
                    pause_s = next(pauses, None)
                    if pause_s is None:
                        raise
                    await asyncio.sleep(pause_s)

    async def end(self, session: OpenEnvSession, place: Place, suspect: bool = False) -> None:
        """Closes a session. A process of ours that is `suspect`, and does not answer any more, is killed."""
        try:
            await session.close()
            if suspect and place.process is not None:
                async with HttpClient(LOOK_S, REPLY_BYTES) as client:
                    if not await answers(client, f"{place.url}/health"):
                        await place.process.close()
        finally:
            self._leave(place)

    async def close(self) -> None:
        """Kills the processes."""
        await asyncio.gather(*(place.process.close() for place in self._places if place.process is not None))

    async def _take(self) -> Place:
        """A place for one more session, which is counted at once."""
        while True:
            self._places = [place for place in self._places if place.process is None or place.process.alive]
            free = [place for place in self._places if place.sessions < place.capacity]
            if free:
                place = min(free, key=lambda one: one.sessions)
                place.sessions += 1
                return place
            if self._local and len(self._places) + self._starting < self._most:
                return await self._start()
            self._changed.clear()
            await self._changed.wait()

    async def _start(self) -> Place:
        process = ServerProcess(self._program)
        self._starting += 1
        try:
            await process.start("/health", self._start_s)
        except BaseException:
            await process.close()
            raise
        finally:
            self._starting -= 1
            self._changed.set()
        # A process takes as many sessions as the one beside it has said.
        capacity = min(itertools.chain((place.capacity for place in self._places), [float("inf")]))
        place = Place(process.url, process, 1, capacity)
        self._places.append(place)
        return place

    def _leave(self, place: Place) -> None:
        place.sessions -= 1
        self._changed.set()
