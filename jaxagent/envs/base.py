"""The interface of every environment: its settings and what its attempts share, and one attempt at one task.

    with environment.open(opening) as attempt_at:     # `environment` is config.env: a dataclass of settings
        attempt = attempt_at(task)                    # one object = one attempt
        messages = await attempt.start()
        step = await attempt.step(action)             # until step.stop_reason is set
        verdict = await attempt.verify(transcript)    # once, unless the episode failed
        await attempt.close()                         # always, even after an exception

An environment speaks text only: it knows no tokens, no model and no engine. Exceptions are allowed everywhere: the
rollout turns a `TimeoutError` into StopReason.TIMEOUT and any other into StopReason.ENV_ERROR, and calls `close`.
Every await must be cancellable, since the rollout enforces the episode's deadline by cancellation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxagent import contract
from jaxagent.config import ConfigError, EnvConfig
from jaxagent.types import StopReason, Task, TokenKind


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of the prompt. Without a chat template only the contents are used, one after the other."""

    role: str  # "system", "user", ...
    content: str


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the policy is shown after an action.

    `role` "" continues the policy's own text, as Search-R1 does; "user" or "tool" makes it a new chat message. A role
    that the chat template does not know becomes "user", and so does "" after a message that the policy ended itself;
    without a chat template roles mean nothing.
    """

    parts: tuple[tuple[str, TokenKind], ...]  # text with its kind: OBSERVATION, or WARNING for harness feedback
    role: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for parts of another form, such as one text alone."""
        pairs = isinstance(self.parts, (tuple, list)) and all(isinstance(part, tuple) for part in self.parts)
        if not pairs or not all(len(part) == 2 and isinstance(part[0], str) for part in self.parts):
            raise ValueError(f"an Observation has pairs of (text, TokenKind), got {self.parts!r:.200}")

    @property
    def text(self) -> str:
        """All parts, one after the other."""
        return "".join(text for text, _ in self.parts)


@dataclasses.dataclass(frozen=True)
class Step:
    """The environment's answer to an action: either something to see, or the end."""

    observation: Observation | None = None
    stop_reason: StopReason | None = None  # ANSWER, TURN_LIMIT or TIME_LIMIT when the episode is over

    def __post_init__(self) -> None:
        if (self.observation is None) == (self.stop_reason is None):
            raise ValueError("A step has either an observation or a stop reason.")


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The episode as text, exactly as far as the policy wrote and saw it (observations after being cut)."""

    prompt: str  # contents of the prompt messages
    turns: tuple[tuple[str, str], ...]  # (action, observation that followed or "")
    action_tokens: tuple[int, ...] = ()  # sampled tokens of each turn; () = not counted
    ended: StopReason | None = None  # why the episode is over; None while it is not

    @property
    def actions(self) -> str:
        """What the policy wrote, and nothing it read."""
        return "".join(action for action, _ in self.turns)

    @property
    def response(self) -> str:
        """Everything after the prompt."""
        return "".join(action + observation for action, observation in self.turns)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verifier's judgement of one episode."""

    reward: float  # the scalar that is trained
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)  # for reports: "em", "well_formed", ...
    turn_rewards: tuple[float, ...] = ()  # one per turn of the transcript, paid beside `reward`; () = none


class Attempt(Protocol):
    """One attempt at one task. Single use: there is no reset.

    Attributes:
      stop_strings: a generation ends with the first of these that it completes.
      tool_prefixes: how each tool call begins, for `rl.tool_epsilon`; may be missing, then no call is ever forced.
      counters: what happened so far ("searches", "invalid_actions", ...); read at the end, even after a failure.
    """

    stop_strings: Sequence[str]
    counters: Mapping[str, float]

    async def start(self) -> Sequence[Message]:
        """The prompt. Expensive preparation (a sandbox, a user simulator) belongs here, not into the constructor."""
        ...

    async def step(self, action: str) -> Step:
        """Acts on the policy's text, which ends with its stop string, if one was completed."""
        ...

    async def verify(self, transcript: Transcript) -> Verdict:
        """Judges the finished episode, also one that ended at a turn, token or time limit (`transcript.ended`)."""
        ...

    async def close(self) -> None:
        """Releases everything. Called exactly once, also when `start` failed."""


def folder_of(place: Path) -> Path:
    """The folder of a dataset that is one, or of its file."""
    return place if place.is_dir() else place.parent


def check_texts(name: str, texts: Any) -> None:
    """Raises ValueError unless `texts`, an environment's `name`, are several texts with at least a character each.

    One text alone would be taken for its letters: ("</guess>") without a comma is none but it.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"the environment's {name} must be a tuple of texts that are not empty, got {texts!r:.200}")


def check_messages(chosen: Any, messages: Any, method: str) -> None:
    """Raises ConfigError unless what a method gave back is several messages, each a text with its role."""
    several = isinstance(messages, (tuple, list)) and bool(messages)
    for message in messages if several else (messages,):
        texts = (getattr(message, name, None) for name in ("role", "content"))
        if not several or not all(isinstance(text, str) for text in texts):
            raise contract.wrong(chosen, f"a result {contract.described(message)}", "a list of Message", method)


@dataclasses.dataclass(frozen=True)
class Opening:
    """What an environment gets when a run opens it."""

    dataset: Path | None  # file or folder of the run's tasks
    tasks: Sequence[Task]  # the held-out ones: `check` refuses those of a wrong kind now, not in the middle of training
    run: Callable[[Coroutine[Any, Any, Any], float], Any]  # (coroutine, timeout_s): on the loop of the attempts
    note: Callable[[str], None]  # prints a line
    held_out: Path | None = None  # file or folder of `tasks`, where they are not in `dataset`
    train: Sequence[Task] = ()  # the training tasks, read from their file one by one; () = they are not played here
    place: Callable[[Task], str] = lambda task: ""  # file and row of a task, for messages; may take seconds

    def check(self, look: Callable[[Task], object]) -> None:
        """Looks at every task now, the held-out ones first. Every source of tasks ends, and was read once before.

        Raises:
          ConfigError: what `look` has raised, after the task's file and row.
        """
        for task in itertools.chain(self.tasks, self.train):
            try:
                look(task)
            except ConfigError as error:
                place = self.place(task)
                raise ConfigError(f"{place}: {error}" if place else str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment(EnvConfig):
    """One environment: `config.env`. A subclass is a dataclass that adds settings, and says what follows from them.

    It has `attempt`, or `open` where its attempts share something: a retriever, sandboxes, a server. Settings that
    cannot work raise a ConfigError in `__post_init__`.

    Attributes:
      score: the component of the verdict that evaluation, reports and the warm start's gate look at, from 0 to 1.
      calls: the counter of tool calls that evaluation reports; "" = none.
      cost: the counter of what an attempt costs, which evaluation reports beside the score; "" = none.
      components: of the verdict, beside `score`, those that `rl.group_reward` may read.
      counted: the counters of every attempt that `rl.group_reward` may weigh: "cost" and "latency_s".
      needs_answers: whether a task without gold answers is a mistake.
      takes_messages: whether attempts begin with the messages before a row's question, as `prompt_messages` has them;
        where not, rows that have such are refused.
      stop_strings: what ends a generation, of demonstrations; an attempt has its own, which may differ.
      observation_role: of what demonstrations show after an action, as attempts do.
      tokens: texts that a tokenizer trained for this run keeps whole.
      rollout: the class that plays episodes, "module:Class", with the fields of `rollout.multi_turn.MultiTurn`.
      roles: names that `config.roles` must have. With roles, `open` yields a function of (task, cast): see `cast.py`.
      priced_roles: those of them that must have a price.
      new_task: for `rl.phases`, (failed task, random.Random) -> a task like it, with any id, or None: none this time. A
        function of both alone, which asks nothing that only held-out tasks may ask. None = it makes no tasks.
      solves: whether attempts have `solve()`, for `envs.check`.
      repeatable: whether an attempt that does the same is answered the same at any time: else a replay takes the
        environment's side from the run's record, and no attempt may be forked (`rl.branching`).
    """

    score = "solved"
    calls = ""
    cost = ""
    components: ClassVar[Sequence[str]] = ()
    counted: ClassVar[Sequence[str]] = ()
    needs_answers = False
    takes_messages: ClassVar[bool] = False
    stop_strings: ClassVar[Sequence[str]] = ()
    observation_role: ClassVar[str] = ""
    tokens: ClassVar[Sequence[str]] = ()
    rollout = "jaxagent.rollout.multi_turn:MultiTurn"
    roles: ClassVar[Sequence[str]] = ()
    priced_roles: ClassVar[Sequence[str]] = ()
    repeatable: ClassVar[bool] = True
    new_task: ClassVar[Any] = None
    solves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a class without attempts."""
        own = type(self)
        if own.attempt is Environment.attempt and own.open is Environment.open:
            raise ConfigError(f"{own.__module__}:{own.__qualname__} needs a method attempt(task), or open(opening).")

    def attempt(self, task: Task) -> Attempt:
        """A fresh attempt at a task, where attempts share nothing."""
        raise NotImplementedError

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[..., Any]]:
        """Takes what attempts share, yields the function that begins an attempt, and gives everything back.

        Raises:
          ConfigError: something does not work on this machine, or with these tasks.
        """
        yield self.attempt

    def messages(self, text: str) -> Sequence[Message]:
        """The prompt of a task, for demonstrations: as `Attempt.start` gives it."""
        return (Message("user", text),)

    def prompt_messages(self, task: Task) -> Sequence[Message]:
        """The prompt of a task, with what its row has before the question; two system messages become one."""
        *own, last = self.messages(task.prompt)
        earlier = [Message(m["role"], m["content"]) for m in task.metadata.get("earlier_messages", ())]
        if own and earlier and own[0].role == earlier[0].role == "system":
            first = earlier.pop(0)
            own[0] = Message("system", f"{own[0].content}\n\n{first.content}")
        return (*own, *earlier, last)

    def oracle(self, task: Task) -> Sequence[str] | None:
        """What the policy writes, turn by turn, that solves the task by what its row says: `envs.check` plays it.

        None = the row does not say how. In its place an attempt may have `solve()`, which does it; False = it cannot.
        """
        return None

    @property
    def has_solutions(self) -> bool:
        """Whether `envs.check` can play solutions that rows have, by `oracle` or an attempt's `solve`."""
        return self.solves or type(self).oracle is not Environment.oracle

    def as_checked(self) -> Environment:
        """The settings under which `envs.check` plays solutions."""
        return self

    def rows_of(self, source: Path) -> Sequence[Mapping[str, Any]] | None:
        """The rows of tasks in a form of the environment's own, at `data.source`; None = it is none of these."""
        return None

    def content(self, task: Task) -> str:
        """A digest of what the task's row only names, such as a folder; "" = the row is all there is."""
        return ""

    def observation(self, action: str, text: str) -> Observation:
        """What an attempt shows after an action, given only its text, for demonstrations."""
        return Observation(((text, TokenKind.OBSERVATION),), self.observation_role)

    def corpus(self, dataset: Path) -> Path | None:
        """Passages that belong to the tasks, for the training of a tokenizer; None = there are none."""
        from jaxagent.data import sources  # late: settings are read without numpy

        return sources.corpus_of(dataset)

    def identity(self, dataset: Path) -> Mapping[str, str]:
        """Digests of what a resumed run and a further evaluation must find unchanged, beside their tasks."""
        return {}

    def held_out_identity(self, place: Path) -> Mapping[str, str]:
        """Digests of what held-out tasks from elsewhere, `data.eval_source`, have beside them, by other names."""
        return {}
