"""Search agents: one retriever for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import Config, ConfigError
from jaxagent.data import sources
from jaxagent.envs import search
from jaxagent.envs.base import Message, Observation
from jaxagent.envs.retriever.backends import open_retriever
from jaxagent.envs.retriever.base import Retriever, RetrieverError, read_corpus
from jaxagent.rollout.workers import Workers
from jaxagent.types import Task

_CLOSE_TIMEOUT_S = 10.0
_TRY_TIMEOUT_S = 20.0  # for the first answer; a search engine that is up gives it at once


class SearchFamily:
    """See `family.Family`."""

    score = "em"
    calls = "searches"
    needs_answers = True
    stop_strings: Sequence[str] = search.STOP_STRINGS
    tokens: Sequence[str] = search.TAGS

    def __init__(self, cfg: Config):
        search.check(cfg.env)
        self._config = cfg.env
        self._retriever: Retriever | None = None

    def prompt(self, text: str) -> tuple[Message, ...]:
        """See `family.Family`."""
        return search.messages(self._config.prompt, text)

    def observation(self, action: str, text: str) -> Observation:
        """See `family.Family`."""
        return search.observed(self._config.prompt, search.parse_action(action) is not None, text)

    def open(self, dataset: Path, tasks: Sequence[Task], workers: Workers, note: Callable[[str], None]) -> None:
        """Opens the retriever over the configured corpus, or the dataset's own, and asks it one question."""
        corpus = sources.corpus_of(dataset)
        self._retriever = open_retriever(self._config.retriever, read_corpus(corpus) if corpus else ())
        workers.run(self._try(tasks[0].prompt if tasks else "?"), timeout_s=2 * _TRY_TIMEOUT_S)

    def environment(self, task: Task) -> search.SearchEnvironment:
        """See `family.Family`."""
        return search.SearchEnvironment(task, self._config, self._retriever)

    async def _try(self, question: str) -> None:
        """Nothing found is an answer; a search engine that is down, or is another program, is a mistake."""
        try:
            async with asyncio.timeout(_TRY_TIMEOUT_S):
                await self._retriever.search([question], self._config.retriever.topk)
        except (RetrieverError, TimeoutError) as failure:
            which = self._config.retriever.url or self._config.retriever.backend
            reason = str(failure) or f"no answer in {_TRY_TIMEOUT_S:g} s"
            raise ConfigError(f"env.retriever: the search engine {which} does not work: {reason}.") from failure

    def close(self, workers: Workers) -> None:
        """Closes the retriever."""
        if self._retriever is not None:
            workers.run(self._retriever.close(), timeout_s=_CLOSE_TIMEOUT_S)
