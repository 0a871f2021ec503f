"""A session's trajectories as they grow, and the digests by which requests are compared with them.

Messages are compared by role, text without outer blanks, calls by name and argument values. `RequestDigests` has one
digest per message and one per beginning of the conversation, tools included, so that finding the longest beginning
that some trajectory has is a look-up per message. See docs/gateway.md for the rules.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.gateway.chat import Ask, ChatMessage
from jaxagent.rollout.conversation import Columns
from jaxagent.types import Generation, Trajectory

DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class RequestDigests:
    """A request as it is compared with others."""

    messages: tuple[bytes, ...]  # a digest per message
    chain: tuple[bytes, ...]  # [k]: of the tools and the first k messages
    digest: bytes  # of all that the answer depends on


def request_digests(ask: Ask) -> RequestDigests:
    """The digests of a request. A pure function of its text: megabytes of it take milliseconds."""
    messages = tuple(message_digest(message) for message in ask.messages)
    tools = [[t.name, t.description, _plain(t.parameters)] for t in ask.tools]
    chain = [_digest(tools if ask.prompt is None else ask.prompt)]
    for message in messages:
        chain.append(_hash(chain[-1] + message))
    sampling = dataclasses.astuple(ask.sampling)
    ids = [call.id for message in ask.messages for call in message.calls]  # of samples that say the same
    wishes = _digest([ask.max_tokens, list(ask.stops), list(sampling), ask.seed, ask.user, ids])
    return RequestDigests(messages, tuple(chain), _hash(chain[-1] + wishes))


def message_digest(message: ChatMessage) -> bytes:
    """Equal for messages that say the same."""
    if not message.calls:  # nearly all; texts may hold half of a surrogate pair, which a template refuses later
        return _hash(f"{message.role}\0{message.text.strip()}".encode("utf-8", "surrogatepass"))
    calls = [
        [call.name, call.arguments.strip() if isinstance(call.arguments, str) else _plain(call.arguments)]
        for call in message.calls
    ]
    return _digest([message.role, message.text.strip(), calls])


def chain_digest(chain: bytes, answer: bytes) -> bytes:
    """The digest of a beginning of a conversation, given that without its last message and that message's."""
    return _hash(chain + answer)


def _plain(value: Any) -> Any:
    """JSON in which equal numbers are written alike: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> bytes:
    return _hash(json.dumps(value, sort_keys=True).encode())  # ASCII, whatever the texts hold


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclasses.dataclass(frozen=True)
class End:
    """Where an assistant message of a trajectory ends, or what was sampled for a prompt."""

    prefix_size: (
        int  # of a request that goes on there: its messages up to and with this one; bytes or ids of its prompt
    )
    tokens: int  # of the trajectory, likewise
    ended_by: str  # the EOS text that was sampled, or ""


class TrajectoryPrefix(Sequence[int]):
    """The first tokens of a trajectory, which only ever grows: a view, since every answer has one."""

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self._tokens, self._count = tokens, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        return self._tokens[: self._count][at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens[: self._count])


class Thread:
    """One trajectory: it grows by whole turns, so that a turn that fails leaves no trace.

    Attributes:
      key: `conversation` of its randomness.
      tools: whether its program offered tools, or goes on with a trajectory where it did.
      line: the first trajectory of its line; None: of no line of the program's. See `trained`.
      ends, turn_numbers: of its own turns, oldest first: where each ends, and its number in the session.
      parent: (trajectory, number of the turn in it) of the turn that it goes on with.
      trained: how many of its turns are trained.
      busy: a request continues it.
      handle: the policy's sequence; None: not open, and all tokens are to be sent.
    """

    def __init__(self, key: int) -> None:
        self.key = key
        self.tools = False
        self.line: Thread | None = None
        self.ends: list[End] = []
        self.turn_numbers: list[int] = []
        self.parent: tuple[Thread, int] | None = None
        self.trained = 0
        self.busy = False
        self.handle: Any = None
        self.began = 0  # tokens in front of the first action
        self._columns = Columns()

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def turns(self) -> int:
        """Turns that it has sampled."""
        return len(self.ends)

    @property
    def tokens(self) -> Sequence[int]:
        """Every token so far. Not to be changed."""
        return self._columns.tokens

    def add(self, ids: Sequence[int], kinds: Sequence[int], generation: Generation, end: End) -> None:
        """Appends context that the policy has now seen and what it sampled behind it."""
        self._columns.append(max(0, self.turns - 1), ids, kinds)
        if not self.ends:
            self.began = len(self)
        self._columns.append_action(self.turns, generation)
        self.ends.append(end)
        self.trained += 1

    def trajectory(self) -> Trajectory:
        """Its trained turns; it always ends with sampled tokens."""
        return self._columns.trajectory(self.ends[self.trained - 1].tokens)


def ends_here(thread: Thread, end: End) -> bool:
    """Whether the trajectory ends there and nothing continues it yet."""
    return not thread.busy and thread.ends[-1].tokens == end.tokens


def idle_or_first(ends: Sequence[tuple[Thread, End]]) -> tuple[Thread, End]:
    """Of several trajectories that a request may go on with: the youngest that ends there and is idle, or the first."""
    return next((one for one in reversed(ends) if ends_here(*one)), ends[0])


def conversation_key(context: Sequence[int], occurrence: int) -> int:
    """63 bits that depend on the tokens a trajectory begins with, and on how many began so before."""
    data = np.asarray(context, np.int32).tobytes() + occurrence.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
