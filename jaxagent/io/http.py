"""The one HTTP client: a deadline for every attempt, a bounded reply, no redirects, pauses between attempts.

    async with HttpClient(timeout_s=5.0, max_bytes=1 << 20, retries=2) as client:
        body = await client.request("POST", url, json={...})

A connection that is refused or breaks off, a timeout, 429 and 5xx are tried again; all else fails at once. A reply is
taken as it is sent, so one that is compressed, which nobody asked for, cannot grow here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import aiohttp

from jaxagent.config.errors import ConfigError

FIRST_PAUSE_S = 0.1  # before the second attempt; doubled before each further one
CONNECTIONS = 256  # at once
QUOTED_CHARS = 200  # of a refusal


class HttpError(Exception):
    """A request failed. The message names the address and says how, in one line."""

    passing = False  # whether another attempt may not meet it


class HttpUnreachable(HttpError):
    """The connection was refused, or broke off."""

    passing = True


class HttpTimeout(HttpError):
    """An attempt took longer than it may."""

    passing = True


class HttpStatus(HttpError):
    """The answer has another status than 200.

    Attributes:
      status, body: of the answer.
    """

    def __init__(self, url: str, status: int, body: bytes, location: str | None = None):
        said = _quoted(body.decode("utf-8", "replace"))
        if location is not None:
            said = f"a redirect to {_quoted(location)}, which is not followed"
        super().__init__(f"{url} answered {status}" + (f": {said}" if said else ""))
        self.status, self.body = status, body
        self.passing = status == 429 or status >= 500


def _quoted(text: str) -> str:
    """The beginning of what a server sent, in one line that any log and terminal takes."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())[:QUOTED_CHARS])


def checked_url(url: str, name: str) -> str:
    """The URL of a server, without a slash at its end.

    Raises:
      ConfigError: it does not say http:// or https://; names the flag or field `name`.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{name}='{url}' is no URL: write http://{url or '127.0.0.1:8080'}.")
    return url.rstrip("/")


class HttpClient:
    """Connections to any servers. Must be used and closed on one asyncio loop.

    Args:
      timeout_s: for one attempt, from its connection to the last byte of the answer.
      max_bytes: of an answer.
      retries: further attempts after the first.
      headers: of every request.
      connections: at once; a request beyond them waits, within its own deadline. 0: no bound.
    """

    def __init__(
        self,
        timeout_s: float,
        max_bytes: int,
        retries: int = 0,
        headers: Mapping[str, str] | None = None,
        connections: int = CONNECTIONS,
    ):
        self._timeout_s, self._max_bytes, self._retries = timeout_s, max_bytes, retries
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self, method: str, url: str, *, timeout_s: float | None = None, max_bytes: int | None = None, **content: Any
    ) -> bytes:
        """The body of an answer with status 200.

        Args:
          method, url: what to ask, and where.
          timeout_s, max_bytes: of this request, where they are not those of all.
          content: `json`, `data` or `params`, as aiohttp takes them.

        Raises:
          HttpError: how the last attempt failed.
        """
        attempt = 0
        while True:
            try:
                return await self._attempt(
                    method, url, timeout_s or self._timeout_s, max_bytes or self._max_bytes, content
                )
            except HttpError as failure:
                if attempt == self._retries or not failure.passing:
                    raise
            await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
            attempt += 1

    async def _attempt(
        self, method: str, url: str, timeout_s: float, max_bytes: int, content: Mapping[str, Any]
    ) -> bytes:
        if self._session is None:  # made here: a session belongs to the running loop
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),  # no server's cookie decides what the next request is answered
                connector=aiohttp.TCPConnector(limit=self._connections),
                timeout=aiohttp.ClientTimeout(total=None),  # the one below: aiohttp rounds its own up to whole seconds
            )
        body = bytearray()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, allow_redirects=False, **content) as answer,
            ):
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > max_bytes:
                        raise HttpError(f"{url} sent more than {max_bytes} bytes")
        except TimeoutError as failure:
            raise HttpTimeout(f"{url} did not answer in {timeout_s:g} s") from failure
        except (aiohttp.InvalidURL, UnicodeError) as failure:  # UnicodeError: a host that no name can be, "a..b"
            raise HttpError(f"'{_quoted(url)}' is not a URL") from failure
        except aiohttp.ClientError as failure:
            said = _quoted(str(failure)) or type(failure).__name__
            raise HttpUnreachable(f"{url} is not reached: {said}") from failure
        if answer.status != 200:
            raise HttpStatus(url, answer.status, bytes(body), answer.headers.get("Location"))
        return bytes(body)
