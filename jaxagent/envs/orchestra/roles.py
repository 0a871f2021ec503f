"""Scripted experts of the ToolOrchestra laptop: what one can do, how much it says, and so what it costs.

An expert knows the answers of some families of problems by heart, and can read an answer off what it is shown. All it
says follows from the task and its question alone, so a run with scripted experts repeats exactly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Literal

from jaxagent.config.ranges import NonNegativeInt, ZeroToOne
from jaxagent.envs.cast import Scripted, Speaker, TextRole
from jaxagent.types import Task

UNKNOWN = "unknown"  # the answer of an expert that knows none
THOUGHTS = ("first", "look", "at", "the", "problem", "then", "think", "about", "each", "step", "and", "check", "it")


_NUMBERED = re.compile(r"^Doc \d+: ", re.MULTILINE)  # what experts.shown puts in front of a document


def _stands_in(gold: str, shown: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(gold)}(?!\w|[.,]\d)", shown) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrchestraExpert(TextRole):
    """An expert that reads the task's own answer where it is skilled, and says something wrong elsewhere."""

    does: Literal["enhance_reasoning", "answer", "search"] = "answer"
    knows: tuple[str, ...] = ()  # families of kinds of tasks that it answers by itself
    knows_frac: ZeroToOne = 1.0  # of the tasks of these families; which, follows from its tasks' ids
    words: NonNegativeInt = 0  # that it says before its answer, each of which costs

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh conversation."""
        return Scripted(lambda messages: self._reply(task, messages[-1].content))

    def knows_task(self, task: Task) -> bool:
        """Whether it knows the answer without being shown anything."""
        digest = hashlib.blake2b(f"knows/{task.id}".encode(), digest_size=4).digest()
        known = int.from_bytes(digest, "big") < self.knows_frac * 2**32
        return task.kind.partition("/")[0] in self.knows and known

    def _reply(self, task: Task, question: str) -> str:
        """A program, a query or an answer, as its question asks for."""
        if self.does == "enhance_reasoning":
            text = f"```python\n{task.metadata.get('program', 'print(0)')}\n```"
        elif self.does == "search":
            text = f"<query>{task.metadata.get('query', task.prompt)}</query>"
        else:
            text = f"\\boxed{{{self._answer(task, question)}}}"
        return " ".join([*(THOUGHTS[i % len(THOUGHTS)] for i in range(self.words)), text])

    def _answer(self, task: Task, question: str) -> str:
        """The gold answer where it knows it, or where it stands in what it is shown in front of the problem.

        As a word or a number of its own, and not as the number of a document.
        """
        shown = _NUMBERED.sub("", question.rpartition(f"Problem: {task.prompt}")[0])
        answer = next((gold for gold in task.answers if gold and _stands_in(gold, shown)), None)
        if answer is None and self.knows_task(task):
            answer = task.answers[0]
        return answer or UNKNOWN
