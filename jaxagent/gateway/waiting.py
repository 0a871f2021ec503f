"""One generation and who waits for it: several identical requests share one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxagent.gateway.chat import Answer, Reasoning, Text
from jaxagent.gateway.reading import Begun, Event
from jaxagent.gateway.threads import Thread


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
    def done(self) -> bool:
        """Whether there is a result."""
        return self.result.done()

    def lost(self, taking_s: float) -> bool:
        """Whether nobody waits for it and nobody has taken its answer within so many seconds."""
        late = self._settled is not None and asyncio.get_running_loop().time() > self._settled + taking_s
        return not self.waiters and not self.delivered and (late or not self.done)

    def gave(self, answer: Answer) -> bool:
        """Whether this is its answer."""
        return self.done and not self.result.exception() and self.result.result() is answer

    def settle(self, answer: Answer) -> None:
        """The answer is whole. For those who ask again, it comes in as few pieces as can be."""
        told: list[Event] = [Begun(len(answer.prompt_ids))]
        told += [kind(text) for kind, text in ((Reasoning, answer.reasoning), (Text, answer.text)) if text]
        self._events = [*told, *answer.calls]
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
