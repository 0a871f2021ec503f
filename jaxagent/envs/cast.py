"""Who plays in an episode beside the environment: the policy and other roles, as an environment meets them.

    talk = cast.talk("user")                                   # a new conversation with a role of `config.roles`
    said = await talk.say(Message("system", "..."), Message("user", "Hi!"))        # its prompt, and its first reply
    said = await talk.say(Message("user", "What is your order number?"))           # and so on

An environment whose `roles` is not empty, and every environment that plays itself (`PlayedAttempt`), gets a `Cast` with
each task: `attempt_at(task, cast)`. "policy" is the policy that is trained; only its tokens carry gradient.

What a role does wrong (an endpoint that is down, a reply that comes too late) is an exception of `say`: a `RoleError`
or a `TimeoutError`. It passes through the environment and ends the episode as ENV_ERROR or TIMEOUT, and never as a
reward of 0. A role whose context has no room left for what the policy made the episode hold is none of these: `NoRoom`
passes through the environment and ends the episode as TOKEN_LIMIT, judged as it stands; an environment may also catch
it and go on.

A role that speaks text, a scripted counterpart or an endpoint, is a `TextRole`; engines of this run are
`roles.engines`:

    with role.open(name, run, note) as speaker_at:       # once per run
        speaker = speaker_at(task, sample, number)       # one conversation
        reply = await speaker.reply(messages, stop_strings, max_tokens)     # the whole conversation so far, each time
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jaxagent.config import RoleConfig
from jaxagent.envs.base import Message, Verdict
from jaxagent.types import StopReason, Task

POLICY = "policy"  # the role that is trained


class RoleError(RuntimeError):
    """A role other than the policy gave no reply. The message begins with the role's name."""


class NoRoom(RoleError):
    """A role's context has no room for what it is shown. Once the policy has spoken that is a limit of the policy's."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Text with the token ids that it has in the policy's tokenizer: what was sampled, or was encoded once."""

    ids: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Spliced:
    """A message whose pieces keep their tokens: texts are encoded, `Tokens` are taken as they are."""

    role: str
    pieces: tuple[str | Tokens, ...]

    @property
    def content(self) -> str:
        """All pieces as one text."""
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class RoleReply:
    """One reply of a role."""

    text: str  # without the token that ends a message; with the stop string that it completed
    finish: (
        str  # "stop" (a stop string), "eos", "length" (no more tokens, or no room in the context: then it may be "")
    )
    # As sampled, without the token that ends a message; None where no engine sampled it with the policy's tokenizer
    tokens: Tokens | None
    prompt_tokens: int  # that the role was shown for this reply, its whole conversation
    reply_tokens: int
    seconds: float  # between the question and the reply
    cost: float | None  # by the role's prices; None where it has none


class Talk(Protocol):
    """One conversation with a role: of the policy, one trajectory."""

    async def say(
        self, *messages: Message | Spliced, stop_strings: Sequence[str] = (), max_tokens: int | None = None
    ) -> RoleReply:
        """Shows the role messages, its prompt or what follows its last reply, and returns what it says.

        Args:
          messages: at least one. Of a later call, exactly one.
          stop_strings: end the reply; one from outside (HTTP) is cut behind the first of them.
          max_tokens: of the reply; None = the role's own limit (of the policy: env.turn_tokens).

        Raises:
          RoleError: the role cannot reply; NoRoom: what it is shown is too long.
          TimeoutError: it did not, in its time.
          ValueError: it cannot be asked this: two things at once, nothing at all, after a failure or the episode's end.
            The episode ends as ENV_ERROR, also where the environment swallows it.
        """
        ...


class Cast(Protocol):
    """Everybody who plays in one episode.

    Attributes:
      names: the roles of `config.roles`, in the config's order; without the policy.
    """

    names: Sequence[str]

    def talk(self, role: str, trained: bool = True) -> Talk:
        """Begins a conversation with a role.

        Conversations of an episode are numbered in the order of these calls, and their random numbers follow from that
        order: call it before you await anything that ends in another order each time.

        Args:
          role: a name of `names`, or "policy".
          trained: False makes a conversation of the policy one that is only shown, and carries no gradient.

        Raises:
          KeyError: there is no such role.
        """
        ...

    def tokens(self, text: str) -> Tokens:
        """A text in the policy's tokenizer."""
        ...

    def decoded(self, ids: Sequence[int]) -> Tokens:
        """Ids of the policy's tokenizer with their text."""
        ...


class PlayedAttempt(Protocol):
    """One attempt that plays itself: it asks the policy and the other roles, in as many conversations as it likes.

    Such an environment's `rollout` is "jaxagent.rollout.play:Play", and its `open` yields `attempt_at(task, cast)`.

    Attributes:
      counters: what happened so far; read at the end, even after a failure.
    """

    counters: Mapping[str, float]

    async def play(self) -> StopReason:
        """Plays to the end: ANSWER, TURN_LIMIT, TOKEN_LIMIT or TIME_LIMIT. Exceptions are failures of the episode."""
        ...

    async def verify(self, stop_reason: StopReason) -> Verdict:
        """Judges the episode. `turn_rewards` count the replies of the policy's trained conversations, in order."""
        ...

    async def close(self) -> None:
        """Releases everything. Called exactly once, also when `play` failed."""


Run = Callable[[Coroutine[Any, Any, Any], float], Any]  # (coroutine, timeout_s): on the loop of the episodes


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a speaker says. Tokens that it does not count (None) are counted with the policy's tokenizer."""

    text: str
    finish: str = "eos"  # "stop", "eos" or "length"
    prompt_tokens: int | None = None
    reply_tokens: int | None = None


class Speaker(Protocol):
    """One conversation of a role."""

    async def reply(self, messages: Sequence[Message], stop_strings: Sequence[str], max_tokens: int) -> Reply:
        """Answers the conversation so far; `messages` with role "assistant" are its own earlier replies."""
        ...


@dataclasses.dataclass(frozen=True)
class Scripted(Speaker):
    """A conversation whose replies a function writes, given the messages so far."""

    write: Callable[[Sequence[Message]], str]

    async def reply(self, messages: Sequence[Message], stop_strings: Sequence[str], max_tokens: int) -> Reply:
        """What the function writes."""
        return Reply(self.write(messages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRole(RoleConfig):
    """A role that speaks text. A subclass has `speaker`, or `open` where its conversations share something."""

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh conversation: number `number` of attempt `sample` at a task, which key whatever is random."""
        raise NotImplementedError

    @contextlib.contextmanager
    def open(self, name: str, run: Run, note: Callable[[str], None]) -> Iterator[Callable[[Task, int, int], Speaker]]:
        """Takes what conversations share and yields the function that begins one.

        Raises:
          ConfigError: the role cannot speak; names config.roles.<name>.
        """
        yield self.speaker
