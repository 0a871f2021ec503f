"""Puzzles of the package reasoning-gym: a question, one answer, and the data set's own score of it.

    --config.env=reasoning_gym --config.env.make=chain_sum --config.env.arguments='{"max_terms": 3}' \
        --config.data.source=reasoning_gym

A task is an item of the data set of one name, seed and size (`metadata`), which is made anew for each attempt. Item i
of seed s is item i + 1 of seed s - 1 in most of the package's data sets, so training and held-out tasks are items of
one seed, and no question is in both; see `tasks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.errors import as_config_error, failure_line
from jaxagent.config.ranges import FiniteFloat, Seconds
from jaxagent.envs import forms
from jaxagent.envs.base import Attempt, Environment, Message, Opening, Step, Transcript, Verdict
from jaxagent.envs.own_thread import OwnThread
from jaxagent.types import StopReason, Task

SCORE, SOLVED = "score", "solved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym(Environment):
    """One of reasoning-gym's data sets, or its "composite" of several."""

    make: str = ""  # the data set's name: "chain_sum"
    arguments: str = "{}"  # of the data set, a JSON object; without seed and size, which the tasks have
    # reasoning_gym.utils.SYSTEM_PROMPTS["simple"]; "" = none
    instructions: str = (
        "You are a helpful assistant that answers questions accurately and concisely. When asked to solve a problem, "
        "show your work step by step. Provide your final answer between <answer> and </answer> tags."
    )
    solved_score: FiniteFloat = 1.0  # from which score an attempt counts as solved, in reports
    step_timeout_s: Seconds = 60.0  # to make an item, and to score an answer

    score = SCORE
    stop_strings = ("</answer>",)
    tokens = ("<answer>", "</answer>")

    def __post_init__(self) -> None:
        """Raises ConfigError where no data set is named, or arguments are given that the tasks have."""
        if not self.make:
            raise ConfigError("config.env.make is empty: name a data set of reasoning-gym, such as chain_sum.")
        for name in ("seed", "size"):
            if name in forms.json_object(self.arguments, "config.env.arguments"):
                raise ConfigError(f"config.env.arguments holds {name}, which the tasks have: config.data.source.")

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt of a question."""
        system = (Message("system", f"{self.instructions}\n"),) if self.instructions else ()
        return (*system, Message("user", f"{text}\n"))

    def oracle(self, task: Task) -> Sequence[str] | None:
        """The data set's own answer. A few data sets have an example there, which their score does not take."""
        return tuple(f"<answer>{answer}</answer>" for answer in task.answers[:1]) or None

    def dataset(self, seed: int, size: int) -> Any:
        """The package's data set. Raises ConfigError: it cannot be made."""
        return _dataset(self.make, self.arguments, seed, size)

    def tasks(self, seed: int, num_train: int, num_heldout: int) -> dict[str, list[dict[str, Any]]]:
        """The rows of both splits: the last items are held out, and each question is in the data once.

        Raises:
          ConfigError: the data set cannot be made, or has too few different questions.
        """
        size = num_train + num_heldout
        splits: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
        questions: set[str] = set()
        for i in reversed(range(size)):  # the held-out ones first: what comes twice is theirs
            item = self.item(seed, size, i)
            if item["question"] in questions:
                continue
            questions.add(item["question"])
            split = "heldout" if i >= num_train else "train"
            row = {"id": f"{self.make}-{seed}-{i}", "prompt": item["question"]}
            row["answers"] = [] if item["answer"] is None else [str(item["answer"])]
            splits[split].append({**row, "kind": self.make, "metadata": {"seed": seed, "size": size, "index": i}})
        for rows in splits.values():
            rows.reverse()
        if not splits["train"]:
            raise ConfigError(f"config.env.make='{self.make}' has {len(questions)} questions, and all are held out.")
        return splits

    def item(self, seed: int, size: int, index: int) -> dict[str, Any]:
        """An item of the data set. Raises ValueError: the data set fails, or gives no question."""
        try:
            item = self.dataset(seed, size)[index]
        except ConfigError:
            raise
        except Exception as error:  # other people's code
            raise ValueError(f"item {index} of {self.make}: {failure_line(error)}") from error
        if not isinstance(item, dict) or not isinstance(item.get("question"), str) or "answer" not in item:
            raise ValueError(f"item {index} of {self.make} must have a question and an answer, got {item!r:.100}")
        return item

    def check_question(self, item: Mapping[str, Any], task: Task) -> None:
        """Raises ValueError: the package makes another question of the task than when the task was written."""
        if item["question"] != task.prompt:
            raise ValueError(
                f"the question of task {task.id!r} is another one than when the tasks were written: start both with "
                "PYTHONHASHSEED=0 in the environment, and with one version of reasoning-gym"
            )

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], ReasoningGymAttempt]]:
        """Makes the first held-out item anew, to see that this process makes the same ones.

        Raises:
          ConfigError: it does not: some data sets follow from the hashes of texts, other ones in each process.
        """
        for task in opening.tasks[:1]:
            try:
                self.check_question(self.item(*place_of(task)), task)
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(f"config.env.make='{self.make}': {error}.") from None
        yield lambda task: ReasoningGymAttempt(task, self)


class ReasoningGymAttempt(Attempt):
    """One answer to one question."""

    stop_strings: Sequence[str] = ReasoningGym.stop_strings

    def __init__(self, task: Task, config: ReasoningGym) -> None:
        self._task, self._config = task, config
        self._thread = OwnThread("reasoning_gym", config.step_timeout_s, "reasoning-gym's ")
        self._item: dict[str, Any] = {}
        self.counters: dict[str, float] = {"answers": 0.0, "unreadable_answers": 0.0}

    async def start(self) -> Sequence[Message]:
        """The question. Raises ValueError: see `check_question`."""
        place = place_of(self._task)
        self._item = await self._thread.call("making the item", lambda: self._config.item(*place))
        self._config.check_question(self._item, self._task)
        return self._config.messages(self._task.prompt)

    async def step(self, action: str) -> Step:
        """The answer is the policy's only message."""
        return Step(stop_reason=StopReason.ANSWER)

    async def verify(self, transcript: Transcript) -> Verdict:
        """The data set's score of the last <answer>; 0 where it fails at that. Raises ValueError: it is not finite."""
        from reasoning_gym.utils import extract_answer

        seed, size, _ = place_of(self._task)
        answer = extract_answer(transcript.actions)
        self.counters["answers"] += answer is not None
        score_answer = self._config.dataset(seed, size).score_answer
        try:
            score = await self._thread.call("score_answer", lambda: score_answer(answer, self._item))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            if answer is None:
                raise
            score = 0.0  # the policy's text is none that it can read
            self.counters["unreadable_answers"] = 1.0
        if not hasattr(score, "__float__") or not math.isfinite(score):
            raise ValueError(f"score_answer must return a finite number, got {score!r:.100}")
        return Verdict(float(score), {SCORE: float(score), SOLVED: float(score >= self._config.solved_score)})

    async def close(self) -> None:
        """Lets the thread end."""
        self._thread.end()


def place_of(task: Task) -> tuple[int, int, int]:
    """(seed, size, index) of a task's item. Raises ValueError: the task names none."""
    numbers = [task.metadata.get(name) for name in ("seed", "size", "index")]
    if all(type(number) is int for number in numbers):
        seed, size, index = (int(number or 0) for number in numbers)
        if 0 <= index < size:
            return seed, size, index
    raise ValueError(f"task {task.id!r} names no item of a data set: take --config.data.source=reasoning_gym")


@functools.lru_cache(maxsize=4)
def _dataset(make: str, arguments: str, seed: int, size: int) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("config.env=reasoning_gym needs the package reasoning-gym: pip install reasoning-gym.")
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    options = forms.json_object(arguments, "config.env.arguments")
    with as_config_error(f"config.env.make='{make}'"):
        if make == "composite":
            options["datasets"] = [DatasetSpec(**spec) for spec in options.get("datasets", ())]
        return reasoning_gym.create_dataset(make, seed=seed, size=size, **options)
