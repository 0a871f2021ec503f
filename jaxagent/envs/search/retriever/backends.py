"""The search engines that `config.env.retriever` can name. Each is imported only when it is opened."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeInt, PositiveInt, Seconds
from jaxagent.envs.search.retriever.base import Passage, Retriever, RetrieverError, read_corpus
from jaxagent.io.http import HttpClient, HttpError, HttpTimeout

MAX_REPLY_BYTES = 64 << 20


class HttpRetriever(Retriever):
    """A client of the published `POST /retrieve` protocol (Search-R1's retrieval server, ours in `server.py`, others).

        {"queries": [str, ...], "topk": 3, "return_scores": true}
        -> {"result": [[{"document": {"id", "contents"}, "score": float}, ...], ...]}

    All attempts (io/http.py says what is tried again) together stay within `timeout_s * (retries + 1)` seconds plus
    short pauses. Must be used and closed on one asyncio loop.
    """

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieverConfig:
    """What every search engine has."""

    topk: PositiveInt = 3  # passages per search

    local = False  # whether the passages lie on this machine, and belong to what a resumed run must find unchanged

    def passages(self, own: Path | None) -> Path | None:
        """The file of passages that is searched; `own` is the dataset's."""
        return own

    def open(self, own: Path | None) -> Retriever:
        """Opens the engine, over the dataset's `own` passages where the config names no others. Raises ConfigError:
        what the config names is missing, or cannot be read."""
        raise NotImplementedError

    def __str__(self) -> str:
        return type(self).__name__.removesuffix("Config").lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bm25Config(RetrieverConfig):
    """Passages in memory, by their words; see `bm25`."""

    corpus: str = ""  # jsonl of {"id", "contents"}; "" = the dataset's own passages

    local = True

    def passages(self, own: Path | None) -> Path | None:
        """The configured corpus, or the dataset's own."""
        return Path(self.corpus) if self.corpus else own

    def open(self, own: Path | None) -> Retriever:
        """An index over the passages."""
        from jaxagent.envs.search.retriever.bm25 import Bm25

        return Bm25(self._read(own))

    def _read(self, own: Path | None) -> list[Passage]:
        path = self.passages(own)
        if path is None or not (corpus := read_corpus(path)):
            raise ConfigError(
                "env.retriever.corpus is empty and the dataset brings no passages: there is nothing to search."
            )
        return corpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(Bm25Config):
    """The same, by meaning; see `dense`."""

    index: str  # a folder of vectors that data_pipelines.corpus made

    def open(self, own: Path | None) -> Retriever:
        """The vectors of the passages."""
        from jaxagent.envs.search.retriever.dense import Dense

        return Dense.load(self.index, self._read(own))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpConfig(RetrieverConfig):
    """A server that speaks `POST /retrieve`; see `http`."""

    url: str  # the whole endpoint, "http://127.0.0.1:8000/retrieve"
    timeout_s: Seconds = 60.0  # of one attempt
    retries: NonNegativeInt = 2

    def __post_init__(self) -> None:
        """Refuses what is no address."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"env.retriever='http' needs env.retriever.url, a http(s) address; got '{self.url}'.")

    def open(self, own: Path | None) -> Retriever:
        """A client of the server."""

        return HttpRetriever(self.url, self.timeout_s, self.retries)

    def __str__(self) -> str:
        return self.url


RETRIEVERS: dict[str, type[RetrieverConfig]] = {"bm25": Bm25Config, "dense": DenseConfig, "http": HttpConfig}
