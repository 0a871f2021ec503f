"""How a policy and a search engine speak: which text ends a turn, what is an action, and how results are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

Document = tuple[str, str]  # title, text


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One of `environment.PROTOCOLS`."""

    stop_strings: tuple[str, ...]
    tool_prefixes: tuple[str, ...]  # how each action begins
    tags: tuple[str, ...]  # that a tokenizer trained for a run keeps whole
    parse: Callable[[str], tuple[str, str] | None]  # a turn's text -> ("search" | "answer", content); None = neither
    render: Callable[[Iterable[Document]], str]  # documents, best first -> what follows a search
    write_search: Callable[[str], str]  # for demonstrations: a query -> a turn
    write_answer: Callable[[str], str]  # likewise an answer -> the last turn
    invalid_query: str = ""  # what follows a search for nothing, without asking the engine; "" = it is asked
