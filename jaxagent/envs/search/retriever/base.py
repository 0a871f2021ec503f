"""What every search engine offers: `Passage`, the `Retriever` protocol, its errors, and the corpus file.

Queries in -> for each query its passages, best first. An engine that fails raises `RetrieverError`: an empty list
means "nothing found" and never "something broke", so that a dead server cannot look like a hard question.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxagent import contract
from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError
from jaxagent.envs.base import Opening
from jaxagent.envs.forms import shaped
from jaxagent.io import files

CLOSE_TIMEOUT_S = 10.0
TRY_TIMEOUT_S = 20.0  # for the first answer; a search engine that is up gives it at once


class RetrieverError(RuntimeError):
    """The search engine failed."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """One document. `title` is the first line of its contents as written, quotes included; `text` the other lines."""

    id: str
    title: str
    text: str
    score: float = 0.0  # of one search; higher is better, comparable within that search only

    @classmethod
    def from_contents(cls, id: str, contents: str, score: float = 0.0) -> Passage:
        """Splits Search-R1's "contents" (`"Title"\\ntext`) at its first newline."""
        title, _, text = contents.partition("\n")
        return cls(id, title, text, score)

    @property
    def contents(self) -> str:
        """The document as the corpus and the HTTP protocol write it."""
        return f"{self.title}\n{self.text}"


class Retriever(Protocol):
    """A search engine. Used by many episodes at once from one asyncio loop."""

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """For every query at most `topk` passages, best first.

        Raises:
          RetrieverError: the engine failed.
          TimeoutError: it did not answer in time.
        """

    async def close(self) -> None:
        """Releases connections. The retriever may not be used afterwards."""


@contextlib.contextmanager
def opened_by(config: Any, opening: Opening, own: Path | None) -> Iterator[Retriever]:
    """What `config`, a choice of `env.retriever`, opens over the passages `own`. It is asked one question first.

    Nothing found is an answer; a search engine that is down, or is another program, is a mistake.

    Raises:
      ConfigError: it does not work.
    """
    retriever = contract.call(config, own, method="open")
    contract.check_methods(config, retriever, "open", "search", "close")
    question = opening.tasks[0].prompt if opening.tasks else "?"

    async def ask() -> None:
        async with asyncio.timeout(TRY_TIMEOUT_S):
            await passages_of(retriever, question, config.topk)

    try:
        try:
            opening.run(ask(), 2 * TRY_TIMEOUT_S)
        except (RetrieverError, TimeoutError) as failure:
            reason = str(failure) or f"no answer in {TRY_TIMEOUT_S:g} s"
            raise ConfigError(f"env.retriever: the search engine {config} does not work: {reason}.") from failure
        yield retriever
    finally:
        opening.run(retriever.close(), CLOSE_TIMEOUT_S)


def corpus_identity(config: Any, corpus: Path | None) -> dict[str, str]:
    """The digest of the passages, where the engine that `config` names has them on this machine."""
    return {"corpus": files.digest_of_file(corpus)} if config.local and corpus is not None else {}


async def passages_of(retriever: Retriever, query: str, topk: int) -> list[Passage]:
    """The passages of one query, as `Retriever.search` gives them; ConfigError where it gives something else."""
    answer = await contract.awaited(retriever, "search", [query], topk)
    lists = isinstance(answer, (list, tuple)) and len(answer) == 1 and isinstance(answer[0], (list, tuple))
    if not lists or len(answer[0]) > topk or not all(isinstance(passage, Passage) for passage in answer[0]):
        came = f"{answer!r:.200}" if isinstance(answer, (list, tuple)) else f"a result {contract.described(answer)}"
        raise contract.wrong(retriever, came, f"a list of one list of at most {topk} Passage, for one query,", "search")
    return list(answer[0])


def passages_from_rows(rows: Iterable[dict], origin: str = "corpus") -> list[Passage]:
    """Checks rows of {"id", "contents"} and returns them as passages, in order. Raises ConfigError: names `origin`, the
    row (from 1) and the column."""
    return [_passage(row, f"{origin}, row {number}") for number, row in enumerate(rows, 1)]


def _passage(row: object, where: str) -> Passage:
    try:
        row = shaped(row, {"id": object, "contents": str}, "", strict=False)
    except RowError as error:
        raise ConfigError(f"{where}: {error}.") from None
    return Passage.from_contents(str(row["id"]), row["contents"])


def read_corpus(path: str | Path) -> list[Passage]:
    """Reads a jsonl corpus of {"id", "contents"}; blank lines are skipped. Raises ConfigError: no such file, or a
    malformed row, named by file, row and column."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"env.retriever.corpus: no file '{path}'.")

    out = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise ConfigError(f"{path}, row {number}: not JSON ({error}).") from error
            out.append(_passage(row, f"{path}, row {number}"))
    return out
