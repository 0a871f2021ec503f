"""A policy that samples what a test says: the engine's place behind the gateway, with a record of what it saw.

    policy = Scripted(tokenizer, lambda context, turn: "hello")

It keeps the driver's rules: one turn at a time per sequence, and a sequence whose turn was given up can only be closed.
Log-probs are a function of token and position, so that a trajectory can be checked number for number.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine.requests import EngineError, SampledTokens
from jaxagent.types import Generation

Reply = Callable[[str, int], "str | Sequence[int]"]


@dataclasses.dataclass(eq=False)
class Opened:
    """One sequence of the policy."""

    task_id: str
    sample: int
    conversation: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    busy: bool = False
    broken: bool = False
    closed: bool = False


@dataclasses.dataclass(eq=False)
class Turn:
    """One call of `generate`, as the policy saw it."""

    task_id: str
    sample: int
    conversation: int
    turn: int
    context: list[int]  # every token in front of the sampled ones
    new_tokens: list[int]  # those of them that came with this call
    sampled: list[int]
    max_tokens: int
    sampling: SamplingConfig
    stop_strings: tuple[str, ...]
    finish: str = ""  # "" until it is done, "cancelled" where the caller went away
    version: int = 0


class Scripted:
    """The policy.

    Args:
      tokenizer: encodes the replies and decodes the contexts.
      reply: (text of the context, turn) -> text to be sampled, behind which EOS is sampled too; or token ids, which
        are sampled as they are. It may raise.
      eos: the id that ends a reply; None: the first of the tokenizer's.
      piece: tokens of one dispatch, after each of which `pause_s` passes.
      pause_s: 0 lets other coroutines run once.

    Attributes:
      turns: every turn begun, in the order of arrival.
      sequences: every sequence opened.
      version: the policy version of what is sampled next; may be set at any time.
      gate: cleared, every turn waits before its first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, reply: Reply, eos: int | None = None, piece: int = 4, pause_s: float = 0.0
    ) -> None:
        self.tokenizer, self.reply, self.piece, self.pause_s = tokenizer, reply, piece, pause_s
        self.eos = eos if eos is not None else next(iter(tokenizer.eos_ids), None)
        self.turns: list[Turn] = []
        self.sequences: list[Opened] = []
        self.version = 0
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def left_open(self) -> list[Opened]:
        """Sequences that nobody has closed."""
        return [s for s in self.sequences if not s.closed]

    @property
    def done(self) -> list[Turn]:
        """Turns that ended by themselves."""
        return [t for t in self.turns if t.finish not in ("", "cancelled")]

    def answer(self, turn: Turn) -> str | Sequence[int]:
        """What is sampled in a turn; may be overridden where the reply depends on more than text and turn."""
        return self.reply(self.tokenizer.decode(turn.context), turn.turn)

    async def open(
        self, task_id: str, sample: int, group_size: int = 1, domain: str = "", conversation: int = 0
    ) -> Opened:
        """A new sequence."""
        self.sequences.append(Opened(task_id, sample, conversation))
        return self.sequences[-1]

    async def generate(
        self,
        session: Opened,
        new_tokens: Sequence[int] | np.ndarray,
        max_tokens: int,
        sampling: SamplingConfig,
        turn: int,
        deadline_s: float,
        on_tokens: Callable[[SampledTokens], None] | None = None,
        stop_strings: Sequence[str] | None = None,
    ) -> Generation:
        """Samples the reply."""
        if session.closed or session.broken or session.busy:
            raise EngineError("The session is closed, broken or busy.")
        new = [int(i) for i in new_tokens]
        context = [*session.tokens, *new]
        if not context:
            raise ValueError("A turn needs at least one token to continue from.")
        key = (session.task_id, session.sample, session.conversation, turn)
        record = Turn(*key, context, new, [], max_tokens, sampling, tuple(stop_strings or ()), version=self.version)
        self.turns.append(record)
        session.busy, versions = True, []
        try:
            async with asyncio.timeout(deadline_s):
                await self.gate.wait()
                ids, finish, stop, overshoot = self._sampled(record)
                for at in range(0, len(ids), self.piece):
                    await asyncio.sleep(self.pause_s)
                    await self.gate.wait()
                    piece = ids[at : at + self.piece]
                    versions += [self.version] * len(piece)
                    part = self._part(len(context) + at, piece, versions[at:])
                    record.sampled += piece
                    if on_tokens is not None:
                        on_tokens(part)
            if session.closed:
                raise EngineError("The session was closed.")
        except BaseException:
            session.broken, record.finish = True, "cancelled"
            raise
        finally:
            session.busy = False
        record.finish = finish
        session.tokens = [*context, *ids]
        whole = self._part(len(context), ids, versions)
        return Generation(
            whole.tokens,
            whole.logprobs,
            whole.versions,
            finish,
            stop,
            overshoot,
            0.1,
            0.2,
            0.3,
            len(context) - len(new),
        )

    def close(self, session: Any) -> None:
        """Ends a sequence."""
        session.closed = True

    def _sampled(self, turn: Turn) -> tuple[list[int], str, str | None, int]:
        """(ids, finish, stop string, bytes beyond it) of a turn."""
        reply = self.answer(turn)
        if isinstance(reply, str):
            ids = self.tokenizer.encode(reply)
            if self.eos is not None and ids[-1:] != [self.eos]:
                ids.append(self.eos)
        else:
            ids = list(reply)
        for count in range(1, len(ids) + 1) if turn.stop_strings else ():
            text = self.tokenizer.decode_bytes(ids[:count])
            ends = [(text.index(s.encode()) + len(s.encode()), s) for s in turn.stop_strings if s.encode() in text]
            if ends and count <= turn.max_tokens:
                return ids[:count], "stop", min(ends)[1], len(text) - min(ends)[0]
        if len(ids) > turn.max_tokens:
            return ids[: turn.max_tokens], "length", None, 0
        return ids, "eos" if ids and ids[-1] in self.tokenizer.eos_ids else "length", None, 0

    def _part(self, start: int, ids: Sequence[int], versions: Sequence[int]) -> SampledTokens:
        logprobs = [logprob(start + i, token) for i, token in enumerate(ids)]
        return SampledTokens(
            np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), np.asarray(versions, np.int32)
        )


def logprob(position: int, token: int) -> float:
    """The log-prob of a token that the policy sampled at a position of its sequence."""
    return float(np.float32(-0.01 - ((position * 131 + token * 31) % 997) / 500))
