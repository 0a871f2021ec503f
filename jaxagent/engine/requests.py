"""What the engine remembers about sessions and turns: host-side bookkeeping, NumPy only.

A `Session` is one sequence and the pages that cache it; a `Request` is one turn of it; the `Ledger` holds, for all
slots, what the turns in progress have sampled, so that a dispatch is recorded without a Python loop over tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.engine import functions
from jaxagent.engine.pages import PagedSequence
from jaxagent.engine.priority import Claim, OpenGroup
from jaxagent.engine.sampling import SamplingParams
from jaxagent.engine.stop_table import Block
from jaxagent.types import Generation


class EngineError(RuntimeError):
    """The engine cannot serve: it failed, was stopped, or the session was used against its rules."""


class BusyError(EngineError):
    """The queue of turns is full. The session has not changed: the same turn can be requested again later."""


def _none(dtype: type) -> np.ndarray:
    return np.zeros(0, dtype)


@dataclasses.dataclass(eq=False)
class Session:
    """One sequence. Made by `Driver.open`; fields belong to the driver, those below the line to its thread."""

    task_id: str
    sample: int
    number: int  # in the order of opening
    life: object  # which start of the driver it belongs to
    group: OpenGroup
    domain: str
    conversation: int = 0  # of the attempt
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: _none(np.int32))  # i32, all turns so far
    request: Request | None = None  # the turn in progress
    closed: bool = False
    broken: bool = False  # a turn was abandoned: what it would have sampled is missing
    # ---
    shard: int = 0  # of the mesh, where its pages are
    pages: PagedSequence | None = None  # None: nothing is cached
    cached: int = 0  # leading tokens that the pages hold
    lost: int = 0  # leading tokens that were cached when others took its pages, until they are cached again


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a turn has sampled so far, n tokens."""

    tokens: np.ndarray = dataclasses.field(default_factory=lambda: _none(np.int32))
    logprobs: np.ndarray = dataclasses.field(default_factory=lambda: _none(np.float32))
    versions: np.ndarray = dataclasses.field(default_factory=lambda: _none(np.int32))

    def __add__(self, more: Sampled) -> Sampled:
        """The tokens of this part of a turn followed by those of the next part."""
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Sampled(*(np.concatenate(pair) for pair in pairs))


@dataclasses.dataclass(eq=False)
class Request:
    """One turn, waiting or in progress."""

    session: Session
    tokens: np.ndarray  # i32[n] the whole sequence up to the turn, or up to where the turn was interrupted
    budget: int  # tokens to sample at most, from there
    sampling: SamplingConfig
    key: np.ndarray  # u32[2]
    stops: Block  # ends at these strings
    future: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    since_s: float  # when its present phase began
    slot: int = -1
    prefilled: int = 0  # leading tokens that are cached, or whose caching has been issued
    before: Sampled = dataclasses.field(default_factory=Sampled)  # sampled before an interruption
    on_tokens: Callable[[Sampled], None] | None = None  # called with new tokens as they come, in the caller's own loop
    told: int = 0  # tokens that `on_tokens` has been called with
    admitted: bool = False  # has had a slot
    cached_tokens: int = 0  # context tokens that needed no prefill when it was first admitted
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def spend(self, phase: str, now_s: float) -> float:
        """Ends a phase, "queue_s", "prefill_s" or "decode_s"; a turn that is interrupted has several of each."""
        spent = now_s - self.since_s
        setattr(self, phase, getattr(self, phase) + spent)
        self.since_s = now_s
        return spent

    @property
    def claim(self) -> Claim:
        """What the order of admission reads of this turn."""
        return Claim(self.session.domain, self.session.group.unfinished, self.session.number)

    @property
    def truncated(self) -> bool:
        """Whether the request needs the program that truncates the distribution."""
        s = self.sampling
        return not s.greedy and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0)


def rows_of(ready: Sequence[Request], slots: int) -> functions.Requests:
    """Turns as `functions.begin` takes them; their contexts are cached."""
    rows = functions.Requests.blank(slots)
    at = [r.slot for r in ready]
    rows.mask[at] = True
    rows.token[at] = [r.tokens[-1] for r in ready]
    rows.position[at] = [len(r.tokens) - 1 for r in ready]
    rows.automaton[at] = [r.stops.state_after(r.before.tokens) for r in ready]
    rows.budget[at] = [r.budget for r in ready]
    rows.keys[at] = [r.key for r in ready]
    for field in dataclasses.fields(SamplingParams):
        getattr(rows.sampling, field.name)[at] = [getattr(r.sampling, field.name) for r in ready]
    return rows


class Ledger:
    """Per-slot arrays of the turns that are generating."""

    def __init__(self, slots: int, context: int) -> None:
        self.requests: list[Request | None] = [None] * slots
        self.active = np.zeros(slots, bool)
        self._truncated = np.zeros(slots, bool)
        self._count = np.zeros(slots, np.int64)  # sampled tokens
        self._tokens = np.zeros((slots, context), np.int32)
        self._logprobs = np.zeros((slots, context), np.float32)
        self._versions = np.zeros((slots, context), np.int32)

    @property
    def truncated(self) -> bool:
        """Whether any turn in progress truncates its distribution."""
        return bool((self._truncated & self.active).any())

    def begin(self, request: Request) -> None:
        """A turn starts: all its context but the last token is cached."""
        slot = request.slot
        self.requests[slot] = request
        self.active[slot] = True
        self._truncated[slot] = request.truncated
        self._count[slot] = 0

    def count(self, slot: int) -> int:
        """Tokens sampled since `begin`."""
        return int(self._count[slot])

    def sampled(self, slot: int, start: int = 0) -> Sampled:
        """What the turn in a slot has sampled since `begin`, from its token `start` on."""
        count = self._count[slot]
        return Sampled(*(x[slot, start:count].copy() for x in (self._tokens, self._logprobs, self._versions)))

    def drop(self, slot: int) -> Sampled:
        """The turn in a slot is over or interrupted; returns what it sampled since `begin`."""
        self.requests[slot] = None
        self.active[slot] = False
        return self.sampled(slot)

    def record(self, result: functions.StepResult, version: int) -> np.ndarray:
        """Appends what a dispatch sampled; returns the slots whose turn is over."""
        valid = np.arange(result.tokens.shape[1]) < (result.count * self.active)[:, None]
        slot, step = np.nonzero(valid)
        at = self._count[slot] + step
        self._tokens[slot, at] = result.tokens[slot, step]
        self._logprobs[slot, at] = result.logprobs[slot, step]
        self._versions[slot, at] = version
        self._count += valid.sum(axis=1)
        return np.flatnonzero(self.active & (result.finish != functions.RUNNING))

    def finish(self, slot: int, result: functions.StepResult, now_s: float) -> tuple[Request, Generation]:
        """Closes the books of a slot whose turn is over; its session can go on."""
        request = self.requests[slot]
        assert request is not None
        sampled = self.drop(slot)
        request.session.tokens = np.concatenate([request.tokens, sampled.tokens])
        finish = functions.FINISH_NAMES[int(result.finish[slot])]
        stop_string, overshoot = request.stops.stops.decode(result.stop[slot]) if finish == "stop" else (None, 0)
        whole = request.before + sampled
        request.spend("decode_s", now_s)
        return request, Generation(
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            policy_versions=whole.versions,
            finish=finish,
            stop_string=stop_string,
            overshoot_bytes=overshoot,
            queue_s=request.queue_s,
            prefill_s=request.prefill_s,
            decode_s=request.decode_s,
            cached_tokens=request.cached_tokens,
        )


def empty_generation() -> Generation:
    """A turn for which the context has no room left."""
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "length")
