"""The search engines that `config.env.retriever` can name. Each is imported only when it is opened."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeInt, PositiveInt, Seconds
from jaxagent.envs.search.retriever.base import Passage, Retriever, read_corpus


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
        from jaxagent.envs.search.retriever.http import HttpRetriever

        return HttpRetriever(self.url, self.timeout_s, self.retries)

    def __str__(self) -> str:
        return self.url


RETRIEVERS: dict[str, type[RetrieverConfig]] = {"bm25": Bm25Config, "dense": DenseConfig, "http": HttpConfig}
