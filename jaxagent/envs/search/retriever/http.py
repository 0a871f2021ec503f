"""Client of the published `POST /retrieve` protocol (Search-R1's retrieval server, ours in `server.py`, others).

    {"queries": [str, ...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id", "contents"}, "score": float}, ...], ...]}

All attempts (io/http.py says what is tried again) together stay within `timeout_s * (retries + 1)` seconds plus short
pauses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxagent.envs.search.retriever.base import Passage, Retriever, RetrieverError
from jaxagent.io.http import HttpClient, HttpError, HttpTimeout

MAX_REPLY_BYTES = 64 << 20


class HttpRetriever(Retriever):
    """A search engine over HTTP. Must be used and closed on one asyncio loop."""

    def __init__(self, url: str, timeout_s: float, retries: int):
        self._url = url
        self._client = HttpClient(timeout_s, MAX_REPLY_BYTES, retries)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """The best passages of each query, as the server gives them."""
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        try:
            reply = await self._client.request("POST", self._url, json=body)
        except HttpTimeout as failure:
            raise TimeoutError(str(failure)) from failure
        except HttpError as failure:
            raise RetrieverError(str(failure)) from failure
        return parse_result(reply.decode("utf-8", "replace"), len(queries), self._url)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def parse_result(text: str, queries: int, origin: str) -> list[list[Passage]]:
    """Checks and converts the body of an answer; documents without scores (return_scores false) have score 0. Raises
    RetrieverError: not JSON, not the protocol, or not one list per query."""
    try:
        result = json.loads(text)["result"]
        passages = [[_passage(item) for item in items] for items in result]
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise RetrieverError(f"{origin} sent a malformed answer ({type(failure).__name__}: {failure})") from failure
    if len(passages) != queries:
        raise RetrieverError(f"{origin} sent {len(passages)} results for {queries} queries")
    return passages


def _passage(item: dict[str, Any]) -> Passage:
    document = item.get("document", item)
    return Passage.from_contents(str(document["id"]), document["contents"], float(item.get("score", 0.0)))
