"""What the driver remembers about sessions and turns: host-side bookkeeping, NumPy only.

A `Session` is one sequence that owns a slot; a `Request` is one turn of it; the `Ledger` holds, for all slots at once,
what the turns in progress have sampled, so that a dispatch is recorded without a Python loop over tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.engine import functions
from jaxagent.engine.automaton import Automaton
from jaxagent.engine.batching import Span
from jaxagent.engine.sampling import SamplingParams
from jaxagent.types import Generation


class EngineError(RuntimeError):
    """The engine cannot serve: it failed, was stopped, or the session was used against its rules."""


@dataclasses.dataclass(eq=False)
class Session:
    """One sequence and the slot that caches it. Made by `Driver.open`; fields belong to the driver."""

    task_id: str
    sample: int
    slot: int
    life: object  # which start of the driver the slot belongs to
    cached: int = 0  # leading tokens of the sequence that the slot's cache holds
    uncached: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # i32, what follows
    request: Request | None = None  # the turn in progress
    closed: bool = False
    freeing: bool = False  # the device has yet to stop an abandoned turn
    broken: bool = False  # a turn was abandoned: nobody knows what the cache holds


@dataclasses.dataclass(eq=False)
class Request:
    """One turn, waiting or in progress."""

    session: Session
    tokens: np.ndarray  # i32[n] the sequence's tokens that are not cached, the new ones last; n >= 1
    budget: int  # tokens to sample at most
    sampling: SamplingConfig
    key: np.ndarray  # u32[2]
    future: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    submitted_s: float
    admitted_s: float = 0.0
    begun_s: float = 0.0
    cached_tokens: int = 0  # context tokens that needed no prefill of their own

    @property
    def truncated(self) -> bool:
        """Whether the request needs the program that truncates the distribution."""
        s = self.sampling
        return s.temperature > 0 and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0)


def spans_of(arrived: Sequence[Request]) -> list[Span]:
    """What must be prefilled before the turns can begin; identical whole prompts are one span for several slots.

    Marks the context as cached in each session, and how much of it was free in each request.
    """
    spans: dict[bytes | int, Span] = {}
    for request in arrived:
        session, context = request.session, request.tokens[:-1]
        request.cached_tokens = session.cached
        if len(context):
            # A prompt may be shared; a continued turn has only its own slot to continue in.
            key = context.tobytes() if session.cached == 0 else session.slot
            if key in spans:
                spans[key] = dataclasses.replace(spans[key], slots=(*spans[key].slots, session.slot))
                request.cached_tokens = len(context)
            else:
                spans[key] = Span(context, session.cached, (session.slot,))
        session.cached += len(context)
    return list(spans.values())


def rows_of(arrived: Sequence[Request], slots: int) -> functions.Requests:
    """The turns as `functions.begin` takes them; their contexts are cached by now."""
    rows = functions.Requests.blank(slots)
    at = [r.session.slot for r in arrived]
    rows.mask[at] = True
    rows.token[at] = [r.tokens[-1] for r in arrived]
    rows.position[at] = [r.session.cached for r in arrived]
    rows.budget[at] = [r.budget for r in arrived]
    rows.keys[at] = [r.key for r in arrived]
    for field in dataclasses.fields(SamplingParams):
        getattr(rows.sampling, field.name)[at] = [getattr(r.sampling, field.name) for r in arrived]
    return rows


class Ledger:
    """Per-slot arrays of the turns in progress."""

    def __init__(self, slots: int, context: int, stops: Automaton) -> None:
        self.requests: list[Request | None] = [None] * slots
        self.active = np.zeros(slots, bool)
        self._stops = stops
        self._truncated = np.zeros(slots, bool)
        self._cached = np.zeros(slots, np.int64)  # before the first sampled token
        self._count = np.zeros(slots, np.int64)  # sampled tokens
        self._tokens = np.zeros((slots, context), np.int32)
        self._logprobs = np.zeros((slots, context), np.float32)
        self._versions = np.zeros((slots, context), np.int32)

    @property
    def truncated(self) -> bool:
        """Whether any turn in progress truncates its distribution."""
        return bool((self._truncated & self.active).any())

    @property
    def cached(self) -> int:
        """Largest number of cached tokens among turns in progress."""
        return int((self._cached + self._count)[self.active].max())

    def begin(self, request: Request) -> None:
        """A turn starts: all its context but the last token is cached."""
        slot = request.session.slot
        self.requests[slot] = request
        self.active[slot] = True
        self._truncated[slot] = request.truncated
        self._cached[slot] = request.session.cached
        self._count[slot] = 0

    def drop(self, slot: int) -> None:
        """The turn in a slot is abandoned."""
        self.requests[slot] = None
        self.active[slot] = False

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
        self.drop(slot)
        count = int(self._count[slot])
        tokens = self._tokens[slot, :count].copy()
        session = request.session
        session.cached += count  # the last context token and all sampled tokens but the last
        session.uncached = tokens[-1:]
        finish = functions.FINISH_NAMES[int(result.finish[slot])]
        stop_string, overshoot = self._stops.decode(result.stop[slot]) if finish == "stop" else (None, 0)
        return request, Generation(
            tokens=tokens,
            logprobs=self._logprobs[slot, :count].copy(),
            policy_versions=self._versions[slot, :count].copy(),
            finish=finish,
            stop_string=stop_string,
            overshoot_bytes=overshoot,
            queue_s=request.admitted_s - request.submitted_s,
            prefill_s=request.begun_s - request.admitted_s,
            decode_s=now_s - request.begun_s,
            cached_tokens=request.cached_tokens,
        )


def empty_generation() -> Generation:
    """A turn for which the context has no room left."""
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "length")
