"""The HTTP client of coroutines: a deadline for every attempt, a bounded reply, no redirects, pauses between attempts.

    async with HttpClient(timeout_s=5.0, max_bytes=1 << 20, retries=2) as client:
        body = await client.request("POST", url, json={...})

A connection that is refused or breaks off, a timeout, 429 and 5xx are tried again; all else fails at once. A client
with `busy_s` lets a server that is busy (429, 503) say when it wants to be asked again, and else pauses for longer. A
reply is taken as it is sent, so one that is compressed, which nobody asked for, cannot grow here.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Self

import aiohttp

from jaxagent.config.errors import ConfigError

FIRST_PAUSE_S = 0.1  # before the second attempt; doubled before each further one
BUSY = (429, 503)  # what a server answers that wants to be left alone for a while
BUSY_FACTOR = 10  # so much longer are pauses where it says nothing of how long
JITTER = 0.5  # pauses are up to so much longer, each request by another part: else all would come back at once
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
      retry_after_s: when the server wants to be asked again, at the earliest; None where it does not say.
    """

    def __init__(
        self,
        url: str,
        status: int,
        body: bytes,
        location: str | None = None,
        retry_after_s: float | None = None,
    ):
        reason = _quoted(body.decode("utf-8", "replace"))
        if location is not None:
            reason = f"a redirect to {_quoted(location)}, which is not followed"
        super().__init__(f"{url} answered {status}" + (f": {reason}" if reason else ""))
        self.status, self.body, self.retry_after_s = status, body, retry_after_s
        self.passing = status in (408, 429) or status >= 500


def _quoted(text: str) -> str:
    """The beginning of what a server sent, in one line that any log and terminal takes."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())[:QUOTED_CHARS])


def retry_after_s(value: str | None, now: datetime.datetime) -> float | None:
    """The seconds of a Retry-After, a number or an HTTP date; None for what is neither. Never less than 0."""
    value = (value or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value[:64])
        return max(0.0, (date.replace(tzinfo=date.tzinfo or datetime.UTC) - now).total_seconds())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


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
      busy_s: of a request with all its attempts, where a server that is busy is waited for: no pause goes beyond them.
        0: pauses are as after any other failure.
      keeps_cookies: of servers that know a session by them. It has no connection that its server may close just now.
    """

    def __init__(
        self,
        timeout_s: float,
        max_bytes: int,
        retries: int = 0,
        headers: Mapping[str, str] | None = None,
        connections: int = CONNECTIONS,
        busy_s: float = 0.0,
        keeps_cookies: bool = False,
    ):
        self._keeps_cookies = keeps_cookies
        self._timeout_s, self._max_bytes, self._retries = timeout_s, max_bytes, retries
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        self._connections, self._busy_s = connections, busy_s
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
        attempt, ends = 0, time.monotonic() + self._busy_s
        while True:
            try:
                return await self._attempt(
                    method, url, timeout_s or self._timeout_s, max_bytes or self._max_bytes, content
                )
            except HttpError as failure:
                if attempt == self._retries or not failure.passing:
                    raise
                pause_s = FIRST_PAUSE_S * 2**attempt
                if self._busy_s and isinstance(failure, HttpStatus) and failure.status in BUSY:
                    pause_s = _busy_pause_s(failure, pause_s, f"{attempt}/{content!r}")
                    if time.monotonic() + pause_s >= ends:
                        raise
            await asyncio.sleep(pause_s)
            attempt += 1

    async def request_object(self, method: str, url: str, **more: Any) -> dict[str, Any]:
        """The JSON object that an answer of status 200 or 201 holds. Args as `request`.

        Raises:
          HttpError: how the last attempt failed, or that it holds none.
        """
        try:
            body = await self.request(method, url, **more)
        except HttpStatus as answer:
            if answer.status != 201:
                raise
            body = answer.body
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(body), dict):
                return value
        raise HttpError(f"{url} sent no JSON object")

    async def _attempt(
        self, method: str, url: str, timeout_s: float, max_bytes: int, content: Mapping[str, Any]
    ) -> bytes:
        if self._session is None:  # made here: a session belongs to the running loop
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                auto_decompress=False,
                # Else no server's cookie decides what the next request is answered. `unsafe`: hosts are addresses.
                cookie_jar=aiohttp.CookieJar(unsafe=True) if self._keeps_cookies else aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=self._connections, force_close=self._keeps_cookies),
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
            reason = _quoted(str(failure)) or type(failure).__name__
            raise HttpUnreachable(f"{url} is not reached: {reason}") from failure
        if answer.status != 200:
            headers = answer.headers
            wanted_s = retry_after_s(headers.get("Retry-After"), datetime.datetime.now(datetime.UTC))
            raise HttpStatus(url, answer.status, bytes(body), headers.get("Location"), wanted_s)
        return bytes(body)


def _busy_pause_s(failure: HttpStatus, pause_s: float, key: str) -> float:
    """How long a busy server is left alone: as long as it says, but never less than after other failures."""
    asked_s = BUSY_FACTOR * pause_s if failure.retry_after_s is None else max(failure.retry_after_s, pause_s)
    part = int.from_bytes(hashlib.blake2b(key.encode(errors="replace"), digest_size=4).digest(), "little") / 2**32
    return asked_s * (1 + JITTER * part)
