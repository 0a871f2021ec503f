"""Opens the retriever that the config names. Each back end is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.config import ConfigError, RetrieverConfig
from jaxagent.envs.retriever.base import Passage, Retriever, read_corpus


def open_retriever(config: RetrieverConfig, passages: Sequence[Passage]) -> Retriever:
    """Opens `config.backend` over `config.corpus`, or over the dataset's own `passages` where that is "".

    Raises:
      ConfigError: a field that the back end needs is empty, or what it names cannot be read.
    """
    return {"bm25": _bm25, "dense": _dense, "http": _http}[config.backend](config, passages)


def _corpus(config: RetrieverConfig, passages: Sequence[Passage]) -> Sequence[Passage]:
    found = read_corpus(config.corpus) if config.corpus else passages
    if not found:
        raise ConfigError(
            "env.retriever.corpus is empty and the dataset brings no passages: there is nothing to search."
        )
    return found


def _bm25(config: RetrieverConfig, passages: Sequence[Passage]) -> Retriever:
    from jaxagent.envs.retriever.bm25 import Bm25

    return Bm25(_corpus(config, passages))


def _dense(config: RetrieverConfig, passages: Sequence[Passage]) -> Retriever:
    from jaxagent.envs.retriever.dense import Dense

    if not config.index:
        raise ConfigError("env.retriever.backend='dense' needs env.retriever.index, a folder made by data_pipelines.")
    return Dense.load(config.index, _corpus(config, passages))


def _http(config: RetrieverConfig, passages: Sequence[Passage]) -> Retriever:
    from jaxagent.envs.retriever.http import HttpRetriever

    if not config.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"env.retriever.backend='http' needs env.retriever.url, a http(s) address; got '{config.url}'."
        )
    return HttpRetriever(config.url, config.timeout_s, config.retries)
