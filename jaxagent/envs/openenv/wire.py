"""One session with an OpenEnv server: a web socket at /ws, on which each message is answered by one.

    {"type": "reset", "data": {"seed": 1, ...}}  -> {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": {...the action...}} -> likewise
    {"type": "state"}                            -> {"type": "state", "data": {...}}
    any                                          -> {"type": "error", "data": {"message", "code", ...}}

The server's POST /reset and POST /step make a new environment for every request, so no episode can be played by them.
Every answer has a deadline and a bound; what is none of these is an exception that names the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Self

import aiohttp

from jaxagent.envs.server_process import REPLY_BYTES

CLOSE_S = 2.0  # for the server to end a session
FULL = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"


class ServerError(Exception):
    """The server's answer is an error.

    Attributes:
      code: "EXECUTION_ERROR", "VALIDATION_ERROR", "CAPACITY_REACHED", ...
      data: all that it says.
    """

    def __init__(self, url: str, data: Mapping[str, Any]) -> None:
        self.code, self.data = str(data.get("code", "")), data
        super().__init__(f"{url} answered {self.code or 'an error'}: {str(data.get('message', ''))[:500]}")


@dataclasses.dataclass(frozen=True)
class Result:
    """What an environment shows after a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None  # None: the environment paid nothing, not even 0
    done: bool


class OpenEnvSession:
    """One episode's. Single use; closed in any case, on the loop that connected it."""

    def __init__(self, url: str, client: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._url, self._client, self._socket = url, client, socket
        self._heard: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(2)
        # It listens all the time, so that pings of a server are answered while the policy writes.
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def connect(cls, url: str, timeout_s: float) -> Self:
        """Connects. Raises ConnectionError, TimeoutError."""
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with asyncio.timeout(timeout_s):
                close_s = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)  # type: ignore[call-arg]
                socket = await client.ws_connect(f"{url}/ws", max_msg_size=REPLY_BYTES, timeout=close_s)
                return cls(url, client, socket)
        except BaseException as failure:
            await client.close()
            if isinstance(failure, aiohttp.ClientError):
                raise ConnectionError(f"{url}/ws is not reached: {failure}") from failure
            if isinstance(failure, TimeoutError):
                raise TimeoutError(f"{url}/ws was not connected in {timeout_s:g} s") from failure
            raise

    async def ask(self, kind: str, data: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """The data of the server's answer to a message.

        Raises:
          ServerError: it is an error.
          ConnectionError: the session is over. TimeoutError: there was no answer in time.
          ValueError: it is not what is answered to such a message.
        """
        message = {"type": kind} | ({} if data is None else {"data": data})
        try:
            async with asyncio.timeout(timeout_s):
                early = not self._heard.empty()  # an error, or its end
                with contextlib.suppress(ConnectionError):  # what it said before it closed says why
                    await self._socket.send_str(json.dumps(message))
                answer = await self._heard.get()
        except TimeoutError:
            raise TimeoutError(f"{self._url} did not answer '{kind}' in {timeout_s:g} s") from None
        if answer.type is aiohttp.WSMsgType.ERROR:
            raise ConnectionError(f"{self._url} broke the session: {answer.data}")
        if answer.type is not aiohttp.WSMsgType.TEXT:
            what = "sent bytes" if answer.type is aiohttp.WSMsgType.BINARY else "closed the session"
            raise ConnectionError(f"{self._url} {what} in place of an answer to '{kind}'")
        try:
            reply = json.loads(answer.data)
        except (ValueError, RecursionError):
            raise ValueError(f"{self._url} answered '{kind}' with no JSON: {answer.data[:100]!r}") from None
        expected = kind if kind == "state" else "observation"
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
            raise ValueError(f"{self._url} answered '{kind}' with no data: {answer.data[:100]!r}")
        if reply.get("type") == "error":
            raise ServerError(self._url, reply["data"])
        if early:
            raise ValueError(f"{self._url} sent a message before '{kind}' was asked: {answer.data[:100]!r}")
        if reply.get("type") != expected:
            raise ValueError(f"{self._url} answered '{kind}' with {reply.get('type')!r:.100}, not '{expected}'")
        return reply["data"]

    async def play(self, kind: str, data: Mapping[str, Any], timeout_s: float) -> Result:
        """The result of "reset" or "step". Raises as `ask`."""
        reply = await self.ask(kind, data, timeout_s)
        observation, reward, done = reply.get("observation"), reply.get("reward"), reply.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise ValueError(f"{self._url} answered '{kind}' without an observation: {reply!r:.200}")
        try:
            number = None if reward is None else finite(reward)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{self._url} paid a reward that is no finite number: {reward!r:.100}") from None
        return Result(observation, number, done)

    async def close(self) -> None:
        """Ends the session: the server says when it has closed the environment."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.send_str('{"type": "close"}')
                while not self._listener.done():
                    await self._heard.get()
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            pass
        finally:
            self._listener.cancel()
            await self._client.close()

    async def _listen(self) -> None:
        """Hears until the session is over, which it hears as well."""
        kind = aiohttp.WSMsgType.TEXT
        while kind in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            message = await self._socket.receive()
            await self._heard.put(message)
            kind = message.type


def finite(value: Any) -> float:
    """A JSON number as a float. Raises TypeError, ValueError, OverflowError: it is none, or not finite."""
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise ValueError("no finite number")
    return float(value)
