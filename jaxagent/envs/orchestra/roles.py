"""Scripted experts of the ToolOrchestra laptop: what one can do, how much it says, and so what it costs.

An expert knows the answers of some families of problems by heart, and can read an answer off what it is shown. All it
says follows from the task and its question alone, so a run with scripted experts repeats exactly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any, ClassVar, Literal, NamedTuple

from jaxagent.config.errors import Removed
from jaxagent.envs.cast import Scripted, Speaker, TextRole
from jaxagent.types import Task

UNKNOWN = "unknown"  # the answer of an expert that knows none
THOUGHTS = ("first", "look", "at", "the", "problem", "then", "think", "about", "each", "step", "and", "check", "it")


_NUMBERED = re.compile(r"^Doc \d+: ", re.MULTILINE)  # what experts.documents_text puts in front of a document


def _stands_in(gold: str, text: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(gold)}(?!\w|[.,]\d)", text) is not None


class Skill(NamedTuple):
    """What one expert can do, and what a million of its tokens cost, in and out: ToolOrchestra's prices."""

    does: str  # one of envs.orchestra.tools.TOOLS
    prices: tuple[float, float]
    words: int  # that it says before its answer, each of which costs
    knows: tuple[str, ...] = ()  # families of kinds of tasks that it answers by itself
    knows_frac: float = 1.0  # of the tasks of these families; which, follows from their ids


# The five of the laptop. They are a part of its task, as its problems are, and nothing that a run would change.
SKILLS = {
    "reasoner-3": Skill("enhance_reasoning", (0.8, 0.8), 12),
    # A program or a search does better still.
    "answer-1": Skill("answer", (1.25, 10.0), 40, ("one_step", "two_step", "fact"), 0.9),
    "answer-3": Skill("answer", (0.9, 0.9), 12, ("one_step",)),
    "search-1": Skill("search", (1.25, 10.0), 24),
    "search-3": Skill("search", (0.8, 0.8), 12),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrchestraExpert(TextRole):
    """An expert that reads the task's own answer where it is skilled, and says something wrong elsewhere."""

    expert: Literal["reasoner-3", "answer-1", "answer-3", "search-1", "search-3"]
    reply_tokens: ClassVar[int] = 96  # pyright: ignore[reportIncompatibleVariableOverride] (more than it says)
    timeout_s: ClassVar[float] = 60.0  # pyright: ignore[reportIncompatibleVariableOverride] (it answers at once)

    removed: ClassVar = dict.fromkeys(
        ("does", "knows", "knows_frac", "words", "reply_tokens", "timeout_s"),
        Removed("what a scripted expert can do, and its limits, follow from its field 'expert'"),
    )

    @classmethod
    def of_earlier_version(cls, section: dict[str, Any]) -> dict[str, Any]:
        """What an earlier version stored, an expert by its skill and its limits, by its name; its prices stay."""
        limits = {"reply_tokens": cls.reply_tokens, "timeout_s": cls.timeout_s}
        prices = {field: section.get(field) for field in ("price_prompt", "price_reply")}
        priced = any(price is not None for price in prices.values())
        for name, skill in SKILLS.items():
            fields = skill._asdict() | limits | {"knows": list(skill.knows)}
            del fields["prices"]
            if priced and fields == {field: section.get(field) for field in fields} | {
                "knows": list(section.get("knows", ()))
            }:
                own = {} if tuple(prices.values()) == skill.prices else prices
                return {"name": section["name"], "expert": name} | own
        return section

    @property
    def skill(self) -> Skill:
        """What it can do."""
        return SKILLS[self.expert]

    @property
    def prices(self) -> tuple[float | None, float | None]:
        """Those of its skill, where the config gives none."""
        own_prices = self.price_prompt, self.price_reply
        return self.skill.prices if own_prices == (None, None) else own_prices

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh conversation."""
        return Scripted(lambda messages: self._reply(task, messages[-1].content))

    def knows_task(self, task: Task) -> bool:
        """Whether it knows the answer without being shown anything."""
        digest = hashlib.blake2b(f"knows/{task.id}".encode(), digest_size=4).digest()
        is_in_frac = int.from_bytes(digest, "big") < self.skill.knows_frac * 2**32
        return task.kind.partition("/")[0] in self.skill.knows and is_in_frac

    def _reply(self, task: Task, question: str) -> str:
        """A program, a query or an answer, as its question asks for."""
        if self.skill.does == "enhance_reasoning":
            text = f"```python\n{task.metadata.get('program', 'print(0)')}\n```"
        elif self.skill.does == "search":
            text = f"<query>{task.metadata.get('query', task.prompt)}</query>"
        else:
            text = f"\\boxed{{{self._answer(task, question)}}}"
        return " ".join([*(THOUGHTS[i % len(THOUGHTS)] for i in range(self.skill.words)), text])

    def _answer(self, task: Task, question: str) -> str:
        """The gold answer where it knows it, or where it stands in what it is shown in front of the problem.

        As a word or a number of its own, and not as the number of a document.
        """
        context = _NUMBERED.sub("", question.rpartition(f"Problem: {task.prompt}")[0])
        answer = next((gold for gold in task.answers if gold and _stands_in(gold, context)), None)
        if answer is None and self.knows_task(task):
            answer = task.answers[0]
        return answer or UNKNOWN
