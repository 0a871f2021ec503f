"""Asks the policy for the turns of an attempt's trajectories; `Pending` is one generation and who waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from jaxagent.config import SamplingConfig
from jaxagent.engine.requests import QueueFullError, SampledTokens
from jaxagent.gateway.chat import Answer, Reasoning, Text
from jaxagent.gateway.reading import Begun, Event, Reading, generation_of
from jaxagent.gateway.threads import Thread
from jaxagent.rollout.episode import Engine
from jaxagent.types import Generation

logger = logging.getLogger(__name__)

ENGINE_STOP_BYTES = 48  # of a request's stop strings together; `engine.stop_states` is the room for those of all
BUSY_PAUSE_S = 0.1  # between two tries while the engine's queue is full


class Sampler:
    """Keeps a policy's sequence for each trajectory.

    Args:
      policy: samples.
      attempt: (task id, sample, size of the group, domain): of the engine's randomness, and of its order.
      timeout_s: longest wait for one turn.
      patient: waits while the engine's queue is full.
      engine_stops: the engine may end turns at a request's stop strings, instead of at its own.
    """

    def __init__(
        self, policy: Engine, attempt: tuple[str, int, int, str], timeout_s: float, patient: bool, engine_stops: bool
    ) -> None:
        self._policy, self._attempt, self._timeout_s, self._patient = policy, attempt, timeout_s, patient
        self._engine_stops = engine_stops
        self._stops: tuple[str, ...] | None = None  # what the engine ends turns at

    def shut(self, thread: Thread) -> None:
        """Closes the policy's sequence: a turn that was cut short leaves it unusable. The next turn opens another."""
        handle, thread.handle = thread.handle, None
        if handle is not None:
            self._policy.close(handle)

    async def sample(
        self, thread: Thread, ids: Sequence[int], most: int, sampling: SamplingConfig, reading: Reading, live: bool
    ) -> Generation:
        """Samples `most` tokens behind the trajectory's and `ids`, the context that the policy has not seen.

        `reading` reads all of them, and finds the request's stop strings; `live`: while they are sampled.

        Raises:
          TimeoutError, EngineError: there is no turn.
        """
        turn = (thread, ids, most, sampling)
        if self._for_engine(reading.stops):
            try:
                return await self._read(reading, live, reading.stops, *turn)
            except ValueError as error:  # before anything is sampled: the engine has no room for them
                logger.info("stop strings are found after the engine: %s", error)
                self._stops = ()
        return await self._read(reading, live or bool(reading.stops), None, *turn)

    def _for_engine(self, stops: tuple[str, ...]) -> bool:
        """Whether the engine itself ends turns at these strings. New ones cost it a table, so it gets one set of each
        attempt, and a short one, since all attempts share the room for them. Programs send the same with all requests.
        """
        if self._stops is None and 0 < sum(len(stop.encode()) for stop in stops) <= ENGINE_STOP_BYTES:
            self._stops = stops
        return bool(stops) and self._engine_stops and stops == self._stops

    async def _read(
        self, reading: Reading, live: bool, stops: tuple[str, ...] | None, thread: Thread, *turn: Any
    ) -> Generation:
        """`stops` are those at which the engine ends the turn; None: its own. Others end it once they are read."""
        pieces: list[SampledTokens] = []
        stop = asyncio.Event()

        def take(sampled: SampledTokens) -> None:
            pieces.append(sampled)
            reading.feed(sampled.tokens.tolist())
            if reading.stop is not None and stops is None:
                stop.set()

        generation = await unless(stop, self._generate(take if live else None, stops, thread, *turn))
        if generation is not None:
            if not live:
                take(SampledTokens(generation.tokens, generation.logprobs, generation.policy_versions))
            if reading.taken == len(generation.tokens):
                return generation
        self.shut(thread)  # the engine has sampled beyond the stop string
        return generation_of(pieces, reading.taken)

    async def _generate(
        self,
        take: Callable[[SampledTokens], None] | None,
        stops: tuple[str, ...] | None,
        thread: Thread,
        ids: Sequence[int],
        *how: Any,
    ) -> Generation:
        if thread.handle is None:
            ids = [*thread.tokens, *ids]
            thread.handle = await self._policy.open(*self._attempt, conversation=thread.key)
        handle, turn = thread.handle, (thread.turns, self._timeout_s)
        try:
            while True:
                try:
                    return await self._policy.generate(handle, ids, *how, *turn, on_tokens=take, stop_strings=stops)
                except QueueFullError:
                    if not self._patient:
                        raise
                await asyncio.sleep(BUSY_PAUSE_S)
        except BaseException:  # the trajectory may have been given to another turn since: this closes its own sequence
            self._policy.close(handle)
            if thread.handle is handle:
                thread.handle = None
            raise


async def unless(stop: asyncio.Event, generation: Coroutine[Any, Any, Generation]) -> Generation | None:
    """The generation; None where it was to stop before, and was cancelled."""
    tasks = asyncio.ensure_future(generation), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Pending:
    """A request's generation. Lives in one event loop.

    Attributes:
      digest: of the request.
      result: the answer, or why there is none.
      task: what samples it.
      thread: the trajectory that it continues, once that is known.
      waiters: requests that wait for it.
      delivered: a client has taken the whole answer.
    """

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.result: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())  # read: nobody may wait
        self.task: asyncio.Task[None] | None = None
        self.thread: Thread | None = None
        self.waiters = 0
        self.delivered = False
        self._settled: float | None = None  # when there was an answer, by the loop's clock
        self._events: list[Event] = []
        self._watchers: list[Callable[[Event], None]] = []

    @property
    def has_result(self) -> bool:
        """Whether there is a result."""
        return self.result.done()

    def is_abandoned(self, taking_s: float) -> bool:
        """Whether nobody waits for it and nobody has taken its answer within so many seconds."""
        late = self._settled is not None and asyncio.get_running_loop().time() > self._settled + taking_s
        return not self.waiters and not self.delivered and (late or not self.has_result)

    def gave(self, answer: Answer) -> bool:
        """Whether this is its answer."""
        return self.has_result and not self.result.exception() and self.result.result() is answer

    def settle(self, answer: Answer) -> None:
        """The answer is whole. For those who ask again, it comes in as few pieces as can be."""
        events: list[Event] = [Begun(len(answer.prompt_ids))]
        events += [kind(text) for kind, text in ((Reasoning, answer.reasoning), (Text, answer.text)) if text]
        self._events = [*events, *answer.calls]
        self._settled = asyncio.get_running_loop().time()
        self.result.set_result(answer)

    def tell(self, *events: Event) -> None:
        """Tells all watchers, those too that come later."""
        for event in events:
            self._events.append(event)
            for watcher in tuple(self._watchers):
                watcher(event)

    async def wait(self, watch: Callable[[Event], None] | None) -> Answer:
        """The result. A waiter that is cancelled leaves the others their generation."""
        self.waiters += 1
        if watch is not None:
            for event in self._events:
                watch(event)
            self._watchers.append(watch)
        try:
            return await asyncio.shield(self.result)
        finally:
            self.waiters -= 1
            if watch is not None:
                self._watchers.remove(watch)
