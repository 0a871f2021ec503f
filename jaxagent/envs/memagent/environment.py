r"""MemAgent: the policy reads a long document chunk by chunk and keeps a memory; with it alone it answers.

Yu et al., "MemAgent" (arXiv 2507.02259). Task (a question with gold answers and a context) -> a conversation per chunk
(question, memory so far, chunk -> new memory) and one for the answer (question, memory -> \boxed{answer}). Each is a
prompt and a reply: the policy's window holds a chunk, however long the document is. The document is tokenised once and
cut into ids; a memory goes into the next prompt as the ids that were sampled.

Two codes are published. The original trains every conversation with the episode's whole advantage. The reproduction of
LMIS-ORG does not train the answer and divides the advantage by the number of conversations: `train_answer=False` with
rl.advantage.multi_trajectory="divide".
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeInt, PositiveInt
from jaxagent.envs.base import Environment, Opening, Verdict, folder_of
from jaxagent.envs.cast import POLICY, Cast, PlayedAttempt, Tokens
from jaxagent.envs.memagent import documents, prompts
from jaxagent.io import files
from jaxagent.rewards import boxed
from jaxagent.types import StopReason, Task

_KEPT = 64  # contexts in memory: of the groups that are being played
SCORES = {"boxed": boxed.equality, "sub_em": boxed.sub_em}
Score = Literal["boxed", "sub_em"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemAgent(Environment):
    """Questions about documents that are longer than the policy's window.

    `max_turns` counts chunks and the answer: 9 is eight chunks. `turn_tokens` bounds a memory, and the answer.
    """

    max_turns: PositiveInt = 9
    turn_tokens: PositiveInt = 1024
    context_tokens: PositiveInt = 9216
    prompt: Literal["memagent", "compact"] = "memagent"  # the published texts; short ones for a tiny policy
    chunk_tokens: PositiveInt = 5000
    question_tokens: PositiveInt = 1024  # of a question; a longer one is refused
    overlong: Literal["centre", "refuse"] = "centre"  # a document of too many chunks: its two ends are read; an error
    num_docs: NonNegativeInt = 0  # documents of a context, where tasks name them; 0 = as each task says
    length_tokens: NonNegativeInt = 0  # as many documents as a context of so many tokens holds; 0 = by number
    train_answer: bool = True  # whether the answer's conversation is trained, like those of the chunks
    reward: Score = "boxed"  # what is trained: the published equality, or sub-EM
    metric: Score = "boxed"  # what evaluations look at; RULER-HQA's is sub_em

    needs_answers = True
    tokens = ("\\boxed{",)
    rollout = "jaxagent.rollout.play:Play"

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that leave no room to read."""
        super().__post_init__()
        if self.max_turns < 2:
            raise ConfigError(f"env.max_turns={self.max_turns}: an episode is at least one chunk and the answer.")
        if self.chunk_tokens + 2 * self.turn_tokens >= self.context_tokens:
            raise ConfigError(
                f"env.context_tokens={self.context_tokens} must hold a chunk ({self.chunk_tokens}), a memory and a new "
                f"one (2 x {self.turn_tokens}), and the question."
            )
        if self.num_docs and self.length_tokens:
            raise ConfigError("env.num_docs and env.length_tokens exclude each other: set one of them to 0.")

    @property
    def score(self) -> str:  # type: ignore[override]  # a choice of the config here
        """The component of the verdict that evaluations look at."""
        return self.metric

    @property
    def most_turns(self) -> int:
        """Replies of the policy in one conversation, and so in one trajectory."""
        return 1

    @property
    def style(self) -> prompts.Style:
        """The texts of the prompts."""
        return prompts.STYLES[self.prompt]

    @property
    def max_chunks(self) -> int:
        """Chunks that are read, at most."""
        return self.max_turns - 1

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task, Cast], MemAgentAttempt]]:  # type: ignore[override]
        """Looks at all tasks, with the documents that they name: of held-out ones from elsewhere those beside them."""
        dataset = folder_of(opening.dataset) if opening.dataset else Path()
        beside = dataset if opening.held_out is None else folder_of(opening.held_out)
        heldout = Contexts(self, beside)
        training = heldout if beside == dataset else Contexts(self, dataset)
        dataclasses.replace(opening, train=()).check(heldout.check)
        dataclasses.replace(opening, tasks=()).check(training.check)
        own = {task.id: task for task in opening.tasks} if beside != dataset else {}

        def attempt_at(task: Task, cast: Cast) -> MemAgentAttempt:
            return MemAgentAttempt(task, cast, self, heldout if own.get(task.id) == task else training)

        yield attempt_at

    def too_short(self, tasks: Sequence[Task], place: Path, tokens: Callable[[str], int]) -> Sequence[Task]:
        """The tasks whose documents, beside `place`, end before `length_tokens`; `tokens` counts a text's. Raises
        ConfigError: a task's documents cannot be read, or are surely too few."""
        texts = documents.Documents(folder_of(place) / documents.FILE)
        for task in tasks:
            documents.check(task, texts, 0, self.length_tokens)
        return documents.tasks_with_short_pools(tasks, texts, self.length_tokens, tokens)

    def identity(self, dataset: Path) -> Mapping[str, str]:
        """The documents' digest, of a data set that has some."""
        return self._digest("documents", dataset)

    def held_out_identity(self, place: Path) -> Mapping[str, str]:
        """The digest of the documents beside held-out tasks."""
        return self._digest("held_out_documents", place)

    def _digest(self, name: str, place: Path) -> Mapping[str, str]:
        path = folder_of(place) / documents.FILE
        return {name: files.digest_of_file(path)} if path.is_file() else {}


class Contexts:
    """Tokens of tasks' contexts: each is made once for all attempts at the task, and the last ones are kept."""

    def __init__(self, config: MemAgent, folder: Path):
        self._config, self._folder = config, folder
        self._documents: documents.Documents | None = None  # opened when the first task names some
        self._kept: collections.OrderedDict[str, tuple[asyncio.Lock, list[np.ndarray]]] = collections.OrderedDict()

    def check(self, task: Task) -> None:
        """Raises ConfigError unless the task's context can be put together."""
        if "documents" in task.metadata and self._documents is None:
            self._documents = documents.Documents(self._folder / documents.FILE)
        documents.check(task, self._documents, self._config.num_docs, self._config.length_tokens)

    async def ids(self, task: Task, cast: Cast) -> np.ndarray:
        """i32[T] of a context, before anything is cut. Encoding goes on in a thread: other episodes do not wait."""
        lock, encoded_ids = self._kept.setdefault(task.id, (asyncio.Lock(), []))
        self._kept.move_to_end(task.id)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        async with lock:
            if not encoded_ids:
                encoded_ids.append(await asyncio.to_thread(self._encoded, task, cast))
        return encoded_ids[0]

    def _encoded(self, task: Task, cast: Cast) -> np.ndarray:
        config = self._config
        self.check(task)  # again: where the training tasks are not known when the environment is opened
        if "documents" not in task.metadata or self._documents is None:
            context = task.metadata["context"]
        else:
            texts = documents.texts_of_context(
                task, self._documents, config.num_docs, config.length_tokens, lambda text: len(cast.tokens(text).ids)
            )
            context = documents.numbered(texts)
        return np.array(cast.tokens(config.style.gap + context).ids, np.int32)


class MemAgentAttempt(PlayedAttempt):
    """One attempt at one question."""

    def __init__(self, task: Task, cast: Cast, config: MemAgent, contexts: Contexts):
        self._task, self._cast, self._config, self._contexts = task, cast, config, contexts
        self._answer = ""
        self.counters: dict[str, Any] = {
            "chunks": 0.0,
            "document_tokens": 0.0,  # as the document is
            "dropped_tokens": 0.0,  # of it, in the middle of one that is too long
            "replies_cut": 0.0,  # memories and answers that ran out of tokens
            "memory_tokens": 0.0,  # of the last memory
        }

    async def play(self) -> StopReason:
        """Reads chunk after chunk, and answers. Raises ValueError: the question is too long, or the document where
        `overlong` says "refuse"."""
        config, cast, style = self._config, self._cast, self._config.style
        question = cast.tokens(style.gap + self._task.prompt)
        if len(question.ids) > config.question_tokens:
            raise ValueError(
                f"the question has {len(question.ids)} tokens, env.question_tokens={config.question_tokens}"
            )
        memory = cast.tokens(style.no_memory)
        for ids in self._chunks(await self._contexts.ids(self._task, cast)):
            chunk = cast.decoded(ids.tolist())
            memory = await self._ask(style.update, True, prompt=question, memory=memory, chunk=chunk)
            self.counters["chunks"] += 1
        self.counters["memory_tokens"] = float(len(memory.ids))
        self._answer = (await self._ask(style.final, config.train_answer, prompt=question, memory=memory)).text
        return StopReason.ANSWER

    async def verify(self, stop_reason: StopReason) -> Verdict:
        """The published checks of the answer, of which one is trained."""
        scores = {name: float(score(self._answer, self._task.answers)) for name, score in SCORES.items()}
        return Verdict(scores[self._config.reward], scores)

    def _chunks(self, ids: np.ndarray) -> Sequence[np.ndarray]:
        config = self._config
        limit = config.max_chunks * config.chunk_tokens
        self.counters["document_tokens"] = float(len(ids))
        if len(ids) > limit and config.overlong == "refuse":
            raise ValueError(
                f"the document has {len(ids)} tokens, and {config.max_chunks} chunks of {config.chunk_tokens} hold "
                f"{limit}: raise env.max_turns, or set env.overlong to 'centre'"
            )
        kept_ids = centre_truncated(ids, limit)
        self.counters["dropped_tokens"] = float(len(ids) - len(kept_ids))
        return [kept_ids[at : at + config.chunk_tokens] for at in range(0, len(kept_ids), config.chunk_tokens)]

    async def _ask(self, template: str, trained: bool, **put: Tokens) -> Tokens:
        """A conversation of one reply: its tokens without the one that ends a message."""
        reply = await self._cast.talk(POLICY, trained).say(prompts.message(template, **put))
        if reply.tokens is None:
            raise ValueError("the policy's tokens are missing: MemAgent needs an engine of this run")
        if reply.finish == "length" and not reply.reply_tokens:
            raise ValueError(
                f"a prompt of {reply.prompt_tokens} tokens leaves no room for a reply in "
                f"env.context_tokens={self._config.context_tokens}"
            )
        self.counters["replies_cut"] += reply.finish == "length"
        return reply.tokens


def centre_truncated(ids: np.ndarray, limit: int) -> np.ndarray:
    """The first and the last limit // 2 ids of more than `limit`, as published; an odd limit keeps one id less."""
    half = limit // 2
    return ids if len(ids) <= limit else np.concatenate((ids[:half], ids[len(ids) - half :]))
