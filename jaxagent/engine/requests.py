"""What the engine remembers about sessions and turns, and which turn is admitted next. Host side, NumPy only.

A `Session` is one sequence and the pages that cache it; a `Request` is one turn of it; the `SlotTable` holds, for all
slots, what the turns in progress have sampled, so that a dispatch is recorded without a Python loop over tokens.

Admission is fair over domains, then nearly complete groups come first. A free slot goes to the domain that holds
fewest, and of several to the one that was served longest ago. A slot is held for one turn, so a flood of one domain
delays another by a turn, and with fewer slots than domains they take turns. Inside a domain the group with the fewest
unfinished episodes goes first, because a batch waits for whole groups; then the session that was opened first. The
order says when a turn runs, never what it samples.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.config import EngineConfig, SamplingConfig
from jaxagent.engine import functions
from jaxagent.engine.automaton import Automaton
from jaxagent.engine.pages import PagedSequence
from jaxagent.engine.sampling import SamplingParams
from jaxagent.types import Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What the programs of an engine are compiled for, and how requests are treated."""

    cfg: EngineConfig  # sizes
    context: int  # tokens of the longest sequence, prompt and everything after it
    stops: Automaton  # of requests that bring no stop strings of their own, for the model's vocabulary
    eos_ids: tuple[int, ...]  # tokens that end a turn by themselves
    exact: bool  # whether tokens and log-probs may depend on nothing but their own sequence, bit for bit
    truncation: bool = False  # whether requests may use top-p, top-k or min-p: their programs are compiled only then
    seed: int = 0  # of the run; with task, sample, conversation, turn and position it fixes every random number
    # Turns that may be in hand beyond the number of slots; one more is refused with `QueueFullError`. None: the callers
    # see to it themselves, as rollout workers do, which are `concurrent_episodes` at most.
    max_waiting: int | None = None


@dataclasses.dataclass(eq=False)
class OpenGroup:
    """The episodes of one task that are sampled together; shared by its sessions while any of them is in use."""

    size: int
    finished: set[int] = dataclasses.field(default_factory=set)  # samples whose sessions are closed

    @property
    def unfinished(self) -> int:
        """Episodes that are still to come, the running ones included."""
        return self.size - len(self.finished)


Claim = tuple[str, int, int]  # of a waiting turn: its domain, its group's unfinished episodes, its session's number


def admission_order(
    claims: Sequence[Claim], slots_in_use: Mapping[str, int], last_admissions: Mapping[str, int]
) -> list[int]:
    """The indices of waiting turns, the one to admit first in front.

    Args:
      claims: the waiting turns, in any order; session numbers differ.
      slots_in_use: by domain.
      last_admissions: a clock's reading at each domain's last admission; of a domain that is missing it is long ago.
    """
    queues: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
    for i in sorted(range(len(claims)), key=lambda i: claims[i][1:]):
        queues[claims[i][0]].append(i)

    def entry(domain: str, slots: int, last: int) -> tuple[int, int, int, int, str]:
        _, unfinished, number = claims[queues[domain][0]]
        return slots, last, unfinished, number, domain

    heap = [entry(domain, slots_in_use.get(domain, 0), last_admissions.get(domain, -1)) for domain in queues]
    heapq.heapify(heap)
    clock = max(last_admissions.values(), default=-1)
    order: list[int] = []
    while heap:
        slots, _, _, _, domain = heapq.heappop(heap)
        order.append(queues[domain].popleft())
        clock += 1
        if queues[domain]:
            heapq.heappush(heap, entry(domain, slots + 1, clock))
    return order


class EngineError(RuntimeError):
    """The engine cannot serve: it failed, was stopped, or the session was used against its rules."""


class QueueFullError(EngineError):
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
    recorded: int = 0  # leading tokens whose choices were handed on
    lost_tokens: int = 0  # leading tokens that were cached when others took its pages, until they are cached again


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """What a turn has sampled so far, n tokens."""

    tokens: np.ndarray = dataclasses.field(default_factory=lambda: _none(np.int32))
    logprobs: np.ndarray = dataclasses.field(default_factory=lambda: _none(np.float32))
    versions: np.ndarray = dataclasses.field(default_factory=lambda: _none(np.int32))

    def __add__(self, more: SampledTokens) -> SampledTokens:
        """The tokens of this part of a turn followed by those of the next part."""
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return SampledTokens(*(np.concatenate(pair) for pair in pairs))


@dataclasses.dataclass(eq=False)
class Request:
    """One turn, waiting or in progress."""

    session: Session
    tokens: np.ndarray  # i32[n] the whole sequence up to the turn, or up to where the turn was interrupted
    budget: int  # tokens to sample at most, from there
    sampling: SamplingConfig
    key: np.ndarray  # u32[2]
    stops: Automaton  # ends at these strings
    future: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    since_s: float  # when its present phase began
    slot: int = -1
    prefilled: int = 0  # leading tokens that are cached, or whose caching has been issued
    branches: set[int] = dataclasses.field(default_factory=set)  # counts of leading tokens from which others go on
    before: SampledTokens = dataclasses.field(default_factory=SampledTokens)  # sampled before an interruption
    on_tokens: Callable[[SampledTokens], None] | None = (
        None  # called with new tokens as they come, in the caller's own loop
    )
    choices: list[np.ndarray] = dataclasses.field(default_factory=list)  # [n, W] each, see `Executor.take_choices`
    reported: int = 0  # tokens that `on_tokens` has been called with
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
        return self.session.domain, self.session.group.unfinished, self.session.number

    @property
    def truncated(self) -> bool:
        """Whether the request needs the program that truncates the distribution."""
        s = self.sampling
        return not s.greedy and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0)


def rows_of(ready: Sequence[Request], slots: int) -> functions.Slots:
    """Turns as `functions.begin` takes them; their contexts are cached."""
    rows = functions.Slots.blank(slots)
    at = [r.slot for r in ready]
    rows.active[at] = True
    rows.token[at] = [r.tokens[-1] for r in ready]
    rows.position[at] = [len(r.tokens) - 1 for r in ready]
    rows.automaton[at] = [r.stops.state_after(r.before.tokens) for r in ready]
    rows.budget[at] = [r.budget for r in ready]
    rows.keys[at] = [r.key for r in ready]
    for field in dataclasses.fields(SamplingParams):
        getattr(rows.sampling, field.name)[at] = [getattr(r.sampling, field.name) for r in ready]
    return rows


class SlotTable:
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

    def length(self, slot: int) -> int:
        """Tokens of the whole sequence in a slot."""
        return len(self.requests[slot].tokens) + self.count(slot)

    def sampled(self, slot: int, start: int = 0) -> SampledTokens:
        """What the turn in a slot has sampled since `begin`, from its token `start` on."""
        count = self._count[slot]
        return SampledTokens(*(x[slot, start:count].copy() for x in (self._tokens, self._logprobs, self._versions)))

    def drop(self, slot: int) -> SampledTokens:
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
        stop_string, overshoot = request.stops.decode(result.stop[slot]) if finish == "stop" else (None, 0)
        turn = request.before + sampled
        request.spend("decode_s", now_s)
        return request, Generation(
            tokens=turn.tokens,
            logprobs=turn.logprobs,
            policy_versions=turn.versions,
            finish=finish,
            stop_string=stop_string,
            overshoot_bytes=overshoot,
            queue_s=request.queue_s,
            prefill_s=request.prefill_s,
            decode_s=request.decode_s,
            cached_tokens=request.cached_tokens,
            experts=np.concatenate(request.choices) if request.choices else None,
        )


def deliver(loop: asyncio.AbstractEventLoop, outcomes: Sequence[tuple[asyncio.Future, Any]]) -> None:
    """Settles futures of one loop with a result or an exception each: one wake-up, however many there are."""

    def settle() -> None:
        for future, outcome in outcomes:
            if future.done():  # cancelled, or out of time
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(settle)
