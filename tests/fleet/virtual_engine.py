"""An engine in virtual time: the real scheduler, pages and prefix tree around a device that only costs seconds."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import types
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.engine import functions, scheduler
from jaxagent.engine.executor import Sizes
from jaxagent.engine.priority import OpenGroup
from jaxagent.engine.requests import Request, Session
from jaxagent.fleet import in_flight
from jaxagent.runs.fleet.in_flight import counted

# Of one episode, turn by turn: tokens of the observation before it, tokens that it samples, seconds of its environment.
Turns = Sequence[tuple[int, int, float]]
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


@dataclasses.dataclass(frozen=True)
class Device:
    """Sizes, and seconds."""

    slots: int = 8
    pages: int = 480
    page_tokens: int = 16
    context: int = 2048
    steps: int = 8  # of a dispatch
    decode_s: float = 10e-3  # a decode step, whatever it holds
    sequence_s: float = 0.3e-3  # of a decode step, for each sequence
    prefill_s: float = 0.2e-3  # of a token


class _Executor:
    """What a scheduler asks of `engine.executor.Executor`."""

    def __init__(self, device: Device, clock: _Clock):
        self._device, self._clock, self.steps = device, clock, device.steps
        table = -(-device.context // device.page_tokens)
        self.sizes = Sizes(
            shards=1, slots=device.slots, usable=device.slots, tile_rows=device.slots, decode_tiles=(device.slots,),
            share=1, prefill_tiles=64, pages=device.pages + 1, page_tokens=device.page_tokens, table=table,
        )  # fmt: skip
        self._left = np.zeros(device.slots, np.int64)

    def prefill(self, spans, tables):
        used = sum(len(span.tokens) for span in spans)
        self._clock.now += used * self._device.prefill_s
        return types.SimpleNamespace(used_tokens=used, tiles=1, tokens=np.zeros((1, used)))

    def copy_pages(self, copies):
        pass

    def wait(self):
        pass

    def free(self, mask):
        pass

    def begin(self, rows):
        self._left[rows.mask] = rows.budget[rows.mask]

    def generate(self, tables, active, lengths, truncated):
        count = np.where(active, np.minimum(self._left, self.steps), 0)
        self._clock.now += int(count.max()) * (self._device.decode_s + self._device.sequence_s * int(active.sum()))
        self._left -= count
        shape = (len(active), self.steps)
        finish = np.where(active & (self._left == 0), functions.LENGTH, functions.RUNNING)
        zeros = np.zeros(shape, np.int32)
        return functions.StepResult(zeros, zeros.astype(np.float32), count, finish, np.zeros(len(active), np.int32))


class _Clock:
    now = 0.0


class _Episode:
    def __init__(self, number: int, turns: Turns):
        self.number, self.turns, self.at = number, turns, 0
        self.session = Session(f"t{number}", 0, number, None, OpenGroup(1), "")


@dataclasses.dataclass(frozen=True)
class Played:
    """What came of it."""

    ends: list[float]  # of episodes, in the order in which they ended
    decisions: list[in_flight.Decision]
    stats: Mapping[str, float]  # the scheduler's


def play(
    device: Device,
    episodes: int,
    turns: Callable[[int], Turns],
    limit: int | in_flight.State,
    patch: Callable[[object, str, object], None],
) -> Played:
    """Plays episodes, with always as many in hand as there may be, as long as there are any.

    Args:
      device: sizes and seconds.
      episodes: how many.
      turns: of an episode, a function of its number alone.
      limit: episodes in hand, or how an engine begins that decides that itself.
      patch: sets an attribute for the test: the scheduler's clock.
    """
    clock = _Clock()
    patch(scheduler, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    plan = scheduler.Scheduler(_Executor(device, clock), device.context)
    loop = asyncio.new_event_loop()
    stops = types.SimpleNamespace(state_after=lambda tokens: 0)
    state = limit if isinstance(limit, in_flight.State) else None
    of_session: dict[Session, _Episode] = {}
    waiting: list[tuple[float, int, _Episode]] = []  # by the time when its environment has answered
    begun, ends, told = 0, list[float](), list[in_flight.Decision]()
    while len(ends) < episodes:
        while begun < episodes and len(of_session) < (state.limit if state else limit):
            episode = _Episode(begun, turns(begun))
            of_session[episode.session] = episode
            heapq.heappush(waiting, (clock.now, begun, episode))
            begun += 1
        if not plan.requests:
            clock.now = max(clock.now, waiting[0][0])
        while waiting and waiting[0][0] <= clock.now:
            since, _, episode = heapq.heappop(waiting)
            session, (seen, sampled, _) = episode.session, episode.turns[episode.at]
            new = np.random.default_rng((episode.number, episode.at)).integers(1, 2**30, seen).astype(np.int32)
            tokens = np.concatenate([session.tokens, new])
            future = loop.create_future()
            plan.submit(
                [Request(session, tokens, sampled, SAMPLING, np.zeros(2, np.uint32), stops, future, loop, since)]
            )
        plan.admit()
        for request, _ in plan.dispatch(0):
            episode = of_session[request.session]
            wait_s = episode.turns[episode.at][2]
            episode.at += 1
            if episode.at < len(episode.turns):
                heapq.heappush(waiting, (clock.now + wait_s, episode.number, episode))
            else:
                plan.drop([episode.session])
                del of_session[episode.session]
                ends.append(clock.now)
        if state:
            state, decision = in_flight.decide(state, counted(clock.now, len(of_session), plan.stats))
            if decision:
                told.append(decision)
    loop.close()
    return Played(ends, told, plan.stats)
