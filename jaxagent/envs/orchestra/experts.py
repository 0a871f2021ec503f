"""What experts are asked, and how their replies are read. Experts see the problem and what was found; nobody else.

How long an expert takes is a part of the reward (`env.latency`). Measured, it follows the machine and its load, so two
runs of one config differ. Simulated from its tokens, it follows from what was said alone, and a run repeats exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxagent.config.errors import Removed
from jaxagent.envs import tags
from jaxagent.envs.cast import RoleReply
from jaxagent.envs.orchestra.tools import ANSWER, REASON, SEARCH
from jaxagent.envs.python import formats
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.rewards import maths

HOW = {
    REASON: (
        "Do not answer the question. Write one Python program whose output helps to answer it, complete with its "
        "imports, between ```python and ```."
    ),
    ANSWER: "Think, then write the final answer in \\boxed{}.",
    SEARCH: (
        "Do not answer the question. Write a search query for what is still missing to answer it, a few words between "
        "<query> and </query>."
    ),
}
_QUERY = tags.pair("query")


def newest(documents: Sequence[Passage], more: Sequence[Passage], most: int) -> tuple[Passage, ...]:
    """Documents and those of `more` that are new; the oldest of more than `most` are dropped."""
    ids = {passage.id for passage in documents}
    return (*documents, *(passage for passage in more if passage.id not in ids))[-most:]


def context(documents: Sequence[Passage], programs: Sequence[tuple[str, str]]) -> str:
    """All that an attempt has: documents, and (program, what it printed); "" of nothing."""
    first = f"Documents:\n{documents_text(documents)}\n\n" if documents else ""
    return first + "".join(f"```python\n{c}\n```\n```output\n{o}\n```\n\n" for c, o in programs)


def documents_text(documents: Sequence[Passage]) -> str:
    """Documents as policy and experts see them."""
    return "\n".join(f"Doc {i}: {p.title}\n{p.text}" for i, p in enumerate(documents, 1))


def question(tool: str, problem: str, context: str) -> str:
    """What an expert is asked."""
    return f"{context}Problem: {problem}\n{HOW[tool]}\n"


def program_of(reply: str) -> str | None:
    """The last program of a reply; None where there is none."""
    return formats.find_program("fenced", reply)


def query_of(reply: str) -> str | None:
    """The last query of a reply; None where there is none, or it is empty."""
    queries = tags.inside(*_QUERY, formats.spoken(reply))
    return queries[-1].strip() or None if queries else None


def answer_of(reply: str) -> str | None:
    """The last boxed answer of a reply; None where there is none, or it is empty."""
    return maths.last_boxed(formats.spoken(reply)) or None


PROMPT_TOKENS_PER_S, REPLY_TOKENS_PER_S = 5_000.0, 50.0  # what one accelerator does for a model of 8B, about
PROGRAM_S = 1.0  # of every program


@dataclasses.dataclass(frozen=True)
class FromTokens:
    """Seconds that a server of these speeds would take."""

    removed: ClassVar = {
        "prompt_tokens_per_s": Removed(f"it is {PROMPT_TOKENS_PER_S:g}", PROMPT_TOKENS_PER_S),
        "reply_tokens_per_s": Removed(f"it is {REPLY_TOKENS_PER_S:g}", REPLY_TOKENS_PER_S),
        "program_s": Removed(f"it is {PROGRAM_S:g}", PROGRAM_S),
    }

    def of_reply(self, reply: RoleReply) -> float:
        """Seconds of an expert's reply."""
        return reply.prompt_tokens / PROMPT_TOKENS_PER_S + reply.reply_tokens / REPLY_TOKENS_PER_S

    def of_program(self, seconds: float) -> float:
        """Seconds of a program that took `seconds`."""
        return PROGRAM_S


@dataclasses.dataclass(frozen=True)
class Measured:
    """The clock's seconds, as published."""

    def of_reply(self, reply: RoleReply) -> float:
        """Seconds of an expert's reply."""
        return reply.seconds

    def of_program(self, seconds: float) -> float:
        """Seconds of a program that took `seconds`."""
        return seconds


LATENCIES: dict[str, type] = {"tokens": FromTokens, "measured": Measured}
