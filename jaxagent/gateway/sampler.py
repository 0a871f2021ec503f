"""Asks the policy for the turns of an attempt's trajectories, and ends a turn at a stop string of the request."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

from jaxagent.config import SamplingConfig
from jaxagent.engine.requests import BusyError, Sampled
from jaxagent.gateway.reading import Event, Reading, generation_of
from jaxagent.gateway.threads import Thread
from jaxagent.rollout.episode import Engine
from jaxagent.types import Generation

logger = logging.getLogger(__name__)

ENGINE_STOP_BYTES = 48  # of a request's stop strings together; `engine.stop_states` is the room for those of all
BUSY_PAUSE_S = 0.1  # between two tries while the engine's queue is full


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What an attempt's randomness is keyed by, and what its turns' order in the engine depends on."""

    task_id: str
    sample: int
    group_size: int
    domain: str


class Sampler:
    """Keeps a policy's sequence for each trajectory.

    Args:
      policy: samples.
      attempt: whose trajectories they are.
      timeout_s: longest wait for one turn.
      patient: waits while the engine's queue is full.
      engine_stops: the engine may end turns at a request's stop strings, instead of at its own.
    """

    def __init__(self, policy: Engine, attempt: Attempt, timeout_s: float, patient: bool, engine_stops: bool) -> None:
        self._policy, self._attempt, self._timeout_s, self._patient = policy, attempt, timeout_s, patient
        self._engine_stops = engine_stops
        self._stops: tuple[str, ...] | None = None  # what the engine ends turns at

    def shut(self, thread: Thread) -> None:
        """Closes the policy's sequence: a turn that was cut short leaves it unusable. The next turn opens another."""
        handle, thread.handle = thread.handle, None
        if handle is not None:
            self._policy.close(handle)

    async def sample(
        self,
        thread: Thread,
        ids: Sequence[int],
        most: int,
        sampling: SamplingConfig,
        reading: Reading,
        tell: Callable[..., None],
        live: bool,
        stops: Sequence[str],
    ) -> Generation:
        """Samples behind the trajectory's tokens and `ids`, and has the reading read all of it.

        Args:
          thread: the trajectory.
          ids: context that the policy has not seen.
          most: tokens to sample at most.
          sampling: the distribution.
          reading: reads the tokens.
          tell: called with what the reading makes of them.
          live: reads them while they are sampled, as a stream needs it.
          stops: of the request; the reading finds them too.

        Raises:
          TimeoutError, EngineError: there is no turn.
        """
        if self._for_engine(stops):
            try:
                return await self._sample(thread, ids, most, sampling, reading, tell, live, tuple(stops))
            except ValueError as error:  # before anything is sampled: the engine has no room for them
                logger.info("stop strings are found after the engine: %s", error)
                self._stops = ()
        return await self._sample(thread, ids, most, sampling, reading, tell, live or bool(stops), None)

    def _for_engine(self, stops: Sequence[str]) -> bool:
        """Whether the engine itself ends turns at these strings. New ones cost it a table, so it gets one set of each
        attempt, and a short one, since all attempts share the room for them. Programs send the same with all requests.
        """
        if self._stops is None and 0 < sum(len(stop.encode()) for stop in stops) <= ENGINE_STOP_BYTES:
            self._stops = tuple(stops)
        return bool(stops) and self._engine_stops and tuple(stops) == self._stops

    async def _sample(
        self,
        thread: Thread,
        ids: Sequence[int],
        most: int,
        sampling: SamplingConfig,
        reading: Reading,
        tell: Callable[..., None],
        live: bool,
        stops: tuple[str, ...] | None,
    ) -> Generation:
        """`stops` are those at which the engine ends the turn; None: its own. Others end it once they are read."""
        pieces: list[Sampled] = []
        found = asyncio.Event()

        def take(sampled: Sampled) -> None:
            if not found.is_set():
                pieces.append(sampled)
                events: Sequence[Event] = reading.feed(sampled.tokens.tolist())
                tell(*events)
                if reading.stop is not None:
                    found.set()

        work = asyncio.ensure_future(self._turn(thread, ids, most, sampling, take if live else None, stops))
        stopped = asyncio.ensure_future(found.wait())
        try:
            await asyncio.wait({work, stopped} if stops is None else {work}, return_when=asyncio.FIRST_COMPLETED)
            if reading.stop is None or stops is not None:
                generation = await work
                if not live:
                    take(Sampled(generation.tokens, generation.logprobs, generation.policy_versions))
                if reading.taken == len(generation.tokens):
                    return generation
            self.shut(thread)  # the engine has sampled beyond the stop string, or is about to
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
        return generation_of(pieces, reading.taken)

    async def _turn(
        self,
        thread: Thread,
        ids: Sequence[int],
        most: int,
        sampling: SamplingConfig,
        take: Callable[[Sampled], None] | None,
        stops: tuple[str, ...] | None,
    ) -> Generation:
        if thread.handle is None:
            ids = [*thread.tokens, *ids]
            own = dataclasses.astuple(self._attempt)
            thread.handle = await self._policy.open(*own, conversation=thread.key)
        handle, turn = thread.handle, thread.turns
        try:
            while True:
                try:
                    return await self._policy.generate(
                        handle, ids, most, sampling, turn, self._timeout_s, on_tokens=take, stop_strings=stops
                    )
                except BusyError:
                    if not self._patient:
                        raise
                await asyncio.sleep(BUSY_PAUSE_S)
        except BaseException:  # the trajectory may have been given to another turn since: this closes its own sequence
            self._policy.close(handle)
            if thread.handle is handle:
                thread.handle = None
            raise
