"""Client of the published `POST /retrieve` protocol (Search-R1's retrieval server, ours in `server.py`, others).

    {"queries": [str, ...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id", "contents"}, "score": float}, ...], ...]}

A refused connection, a 5xx or 429 status and a timeout are tried again; any other bad answer fails at once. All
attempts together stay within `timeout_s * (retries + 1)` seconds plus short pauses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from jaxagent.envs.search.retriever.base import Passage, RetrieverError, RetrieverTimeout

FIRST_PAUSE_S = 0.1  # before the first retry; doubled for each further one
CONNECTIONS = 256  # at once, to the one server


class HttpRetriever:
    """A `Retriever` over HTTP. Must be used and closed on one asyncio loop.

    Args:
      url: the whole endpoint, e.g. "http://127.0.0.1:8000/retrieve".
      timeout_s: longest wait for one attempt.
      retries: further attempts after the first.
    """

    def __init__(self, url: str, timeout_s: float, retries: int):
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """See `base.Retriever`."""
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        for attempt in range(self._retries + 1):
            try:
                text = await self._post(body)
                break
            except _Transient as failure:
                if attempt == self._retries:
                    raise failure.error from failure.__cause__
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        return parse_result(text, len(queries), self._url)

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, body: dict[str, Any]) -> str:
        if self._session is None:  # made here: a session belongs to the running loop
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout_s), connector=aiohttp.TCPConnector(limit=CONNECTIONS)
            )
        try:
            async with self._session.post(self._url, json=body) as response:
                text = await response.text(errors="replace")
                status = response.status
        except TimeoutError as failure:
            raise _Transient(RetrieverTimeout(f"{self._url} did not answer in {self._timeout_s:g} s")) from failure
        except aiohttp.InvalidURL as failure:
            raise RetrieverError(f"'{self._url}' is not a URL") from failure
        except aiohttp.ClientError as failure:
            raise _Transient(RetrieverError(f"{self._url}: {failure}")) from failure
        if status == 200:
            return text
        error = RetrieverError(f"{self._url} answered {status}: {' '.join(text.split())[:200]}")
        raise _Transient(error) if status >= 500 or status == 429 else error


class _Transient(Exception):
    """Carries an error that another attempt may not meet."""

    def __init__(self, error: RetrieverError):
        super().__init__(str(error))
        self.error = error


def parse_result(text: str, queries: int, origin: str) -> list[list[Passage]]:
    """Checks and converts the body of an answer; documents without scores (return_scores false) have score 0.

    Raises:
      RetrieverError: not JSON, not the protocol, or not one list per query.
    """
    try:
        result = json.loads(text)["result"]
        passages = [[_passage(item) for item in found] for found in result]
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise RetrieverError(f"{origin} sent a malformed answer ({type(failure).__name__}: {failure})") from failure
    if len(passages) != queries:
        raise RetrieverError(f"{origin} sent {len(passages)} results for {queries} queries")
    return passages


def _passage(item: dict[str, Any]) -> Passage:
    document = item.get("document", item)
    return Passage.from_contents(str(document["id"]), document["contents"], float(item.get("score", 0.0)))
