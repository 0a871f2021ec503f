"""The one thread that touches the device for generation, and the async API in front of it: continuous batching.

Coroutines of any event loop `open` a session, `generate` turn by turn, and `close`; they get types.Generation back.
Between two dispatches the thread takes what has arrived: new weights, closed sessions, new turns; the scheduler decides
what runs next. Nothing here knows what a model is.

Rules that hold: there may be more sessions than slots and pages, and their turns then wait (`admission_order`); weights
change between dispatches only, and each token carries the version that sampled it; an error of the device ends the
driver, and every waiting turn raises it.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh

from jaxagent.config import ConfigError, SamplingConfig
from jaxagent.engine.automaton import StopTable
from jaxagent.engine.executor import Executor, count_compiles
from jaxagent.engine.model import Model, Params
from jaxagent.engine.requests import (
    EngineError,
    EngineSetup,
    OpenGroup,
    QueueFullError,
    Request,
    SampledTokens,
    Session,
    deliver,
)
from jaxagent.engine.sampling import request_key
from jaxagent.engine.scheduler import Scheduler
from jaxagent.engine.turns import Turns
from jaxagent.types import Generation

STOPS_PAUSE_S = 0.005  # between two looks for room among the stop strings


class Driver:
    """Serves generation from one mesh.

    Args:
      model: an `engine.model.Model`.
      params: its parameters; may lie in any sharding of the mesh.
      version: policy version of `params`.
      setup: everything else that is fixed.
      mesh: with axes data, fsdp and tensor.
      turns: of all engines on the mesh, where there are several.
    """

    def __init__(
        self, model: Model, params: Params, version: int, setup: EngineSetup, mesh: Mesh, turns: Turns | None = None
    ) -> None:
        self.model, self.mesh, self._setup, self._turns = model, mesh, setup, turns or Turns()
        self._timeout_s = setup.cfg.request_timeout_s
        # Everything below is shared between threads and guarded by `_work`, but for `_scheduler`, the thread's own.
        self._work = threading.Condition()
        self._weights: tuple[Params, int] | None = None  # to take before the next dispatch
        self._held: tuple[Params, int] = (params, version)  # what the engine has, or will start with
        self._version = version
        self._thread: threading.Thread | None = None
        self._error: EngineError | None = EngineError("The engine is not started.")
        self._stats: collections.Counter[str] = collections.Counter()
        self._idle_since: float | None = None  # as the scheduler said

    def start(self, timeout_s: float) -> None:
        """Starts the thread and waits until every program is compiled. May be called again after `stop`.

        Raises:
          ConfigError: sizes that the mesh does not divide.
          EngineError: warm-up failed or took longer than `timeout_s`.
        """
        if self._thread is not None:
            raise EngineError("The engine is already started.")
        self._stops = StopTable(self._setup.stops, self._setup.cfg.stop_states)
        self._stops.changed = False  # the executor starts with the same
        self._queue: list[Request] = []  # submitted, not seen by the thread yet
        self._dropped: list[Session] = []  # closed, or their turn abandoned, not seen by the thread yet
        self._held_requests: list[Request] = []  # the thread's, as of its last look
        self._opened = 0
        # An entry lives as long as sessions of its group do.
        self._groups: weakref.WeakValueDictionary[tuple[str, int, int], OpenGroup] = weakref.WeakValueDictionary()
        self._life = object()  # sessions of an earlier start have no say in this one
        self._stopping = self._ready = False
        self._error = None
        self._weights = self._held
        self._thread = threading.Thread(target=self._run, name="engine-driver", daemon=True)
        self._thread.start()
        with self._work:
            in_time = self._work.wait_for(lambda: self._ready or self._error is not None, timeout_s)
        if self._error is not None:
            self._thread = None
            raise self._error.__cause__ if isinstance(self._error.__cause__, ConfigError) else self._error
        if not in_time:
            raise EngineError(f"The engine was not warm after {timeout_s:.0f} s.")

    def stop(self, timeout_s: float) -> None:
        """Ends the thread. Turns that still wait raise an EngineError.

        Raises:
          EngineError: the thread did not end in time (it is inside a device call).
        """
        if (thread := self._thread) is None:  # `start`, in another thread, may set it to None
            return
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._turns.look()
        thread.join(timeout_s)
        if thread.is_alive():
            raise EngineError(f"The engine did not stop within {timeout_s:.0f} s.")
        self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(self._timeout_s)

    @property
    def params(self) -> Params:
        """The weights that are served; once the driver is started, in the layout that generation uses."""
        with self._work:
            return self._held[0]

    def update_params(self, params: Params, version: int) -> None:
        """Swaps the weights between two dispatches and returns when that is done; it then holds no old ones.

        What sessions have cached stays as the old weights computed it, or with config.engine.kv_on_update="recompute"
        is computed again; new sessions never see it. Arrays that generation wants as they are (the embedding, say)
        are shared, not copied: a caller who donates them must not do so while turns are in progress.

        Raises:
          EngineError: the engine is dead, or did not swap the weights in time.
        """
        with self._work:
            if self._thread is None:  # taken at the next start
                self._held = (params, version)
                return
            self._check()
            self._weights = (params, version)
            self._work.notify_all()
            if not self._work.wait_for(lambda: self._weights is None or self._error is not None, self._timeout_s):
                raise EngineError(f"The engine did not take new weights within {self._timeout_s:.0f} s.")
            self._check()

    def stats(self) -> dict[str, float]:
        """Counters since construction: seconds per phase, tokens, dispatches, overshoots, compilations.

        "free_slot_s" grows while no turn is in hand; all others stand still then.
        """
        with self._work:
            stats = dict(self._stats)
            if self._idle_since is not None:
                stats["free_slot_s"] = stats.get("free_slot_s", 0.0) + time.monotonic() - self._idle_since
            return stats

    def check(self) -> None:
        """Raises EngineError where generation has failed, or the driver is stopped. Any thread."""
        with self._work:
            self._check()

    async def open(
        self, task_id: str, sample: int, group_size: int = 1, domain: str = "", conversation: int = 0
    ) -> Session:
        """A new sequence: a conversation of attempt `sample` at a task. It costs nothing until its first turn.

        Args:
          task_id, sample: what all its random numbers are keyed by, together with `conversation`.
          group_size: attempts i * group_size up to (i + 1) * group_size are wanted together: the fewer of them are
            not closed yet, the sooner their turns are admitted.
          domain: slots are shared evenly over the domains that want them.
          conversation: of the attempt, counted from 0: an attempt of several sequences gives each another number, so
            that they draw other random numbers at the same turn.

        Raises:
          EngineError: the engine is dead.
        """
        with self._work:
            self._check()
            self._opened += 1
            group = self._groups.setdefault((task_id, group_size, sample // group_size), OpenGroup(group_size))
            group.finished.discard(sample)  # an episode may have several sessions, one after the other
            return Session(task_id, sample, self._opened, self._life, group, domain, conversation)

    async def generate(
        self,
        session: Session,
        new_tokens: Sequence[int] | np.ndarray,
        max_tokens: int,
        sampling: SamplingConfig,
        turn: int,
        deadline_s: float,
        on_tokens: Callable[[SampledTokens], None] | None = None,
        stop_strings: Sequence[str] | None = None,
    ) -> Generation:
        """Samples one turn after appending `new_tokens` (prompt, or observation) to the session's sequence.

        Ends at a stop string, an EOS token, `max_tokens` or the end of the context; where the context has no room for
        a single token, the result is empty with finish "length". `stop_strings` are the turn's own; None = those that
        the engine was made with. While those of other turns fill `engine.stop_states`, the turn waits. `on_tokens` is
        called, in the caller's loop, with what each dispatch sampled, before the whole turn is returned.

        Raises:
          TimeoutError: not done within `deadline_s` seconds; the session can only be closed then. So it is after
            the coroutine was cancelled.
          EngineError: the engine is dead, or the session is closed, broken or busy.
          QueueFullError: too many turns wait, see `max_waiting`.
          ValueError: nothing to continue from, truncation without `truncation=True`, or stop strings that cannot be.
        """
        tokens = np.concatenate([session.tokens, np.asarray(new_tokens, np.int32)])
        budget = min(max_tokens, self._setup.context - len(tokens))
        if not len(tokens):
            raise ValueError("A turn needs at least one token to continue from.")
        loop = asyncio.get_running_loop()
        request = Request(
            session=session,
            tokens=tokens,
            budget=budget,
            sampling=sampling,
            stops=self._stops.default,
            key=request_key(self._setup.seed, session.task_id, session.sample, turn, session.conversation),
            future=loop.create_future(),
            loop=loop,
            since_s=time.monotonic(),
            on_tokens=on_tokens,
        )
        if request.truncated and not self._setup.truncation:
            raise ValueError("The driver was made without truncation: top_p, top_k and min_p must be off.")
        try:
            async with asyncio.timeout(deadline_s):
                while not self._submit(request, stop_strings):
                    await asyncio.sleep(STOPS_PAUSE_S)
                if budget <= 0:
                    return Generation(*vars(SampledTokens()).values(), finish="length")
                return await request.future
        except BaseException:
            with self._work:
                if session.request is request:  # else it is another turn's, or this one never came so far
                    self._abandon(session)
            raise

    def close(self, session: Session) -> None:
        """Ends a session, also in the middle of a turn. Any thread; closing twice is harmless."""
        with self._work:
            if session.closed:
                return
            session.closed = True
            session.group.finished.add(session.sample)
            request = session.request
            self._abandon(session)
            if session.life is self._life:
                self._dropped.append(session)
                self._work.notify_all()
        if request is not None:
            deliver(request.loop, [(request.future, EngineError("The session was closed."))])

    def _submit(self, request: Request, stop_strings: Sequence[str] | None) -> bool:
        """Hands a turn to the thread; False while stop strings of the turns in hand leave no room for its own."""
        with self._work:
            self._check()
            session = request.session
            if session.closed or session.broken or session.request is not None or session.life is not self._life:
                raise EngineError("The session is closed, broken or busy.")
            if request.budget <= 0:
                session.tokens = request.tokens
                return True
            in_hand = (*self._queue, *self._held_requests)
            most = self._setup.max_waiting
            if most is not None and len(in_hand) >= self._slots + most:
                raise QueueFullError(f"The engine is busy: {len(in_hand)} turns are in hand already.")
            if stop_strings is not None:
                if (block := self._stops.block(stop_strings, (r.stops for r in in_hand))) is None:
                    return False
                request.stops = block
            session.request = request
            self._queue.append(request)
            self._work.notify_all()
            return True

    def _check(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error.__cause__

    def _abandon(self, session: Session) -> None:
        request, session.request = session.request, None
        if request is None or session.life is not self._life:
            return
        session.broken = True
        if request in self._queue:
            self._queue.remove(request)
        self._dropped.append(session)
        self._work.notify_all()

    def _run(self) -> None:
        compiles = count_compiles(self._stats)
        try:
            with jax.set_mesh(self.mesh):
                with self._turns.turn(lambda: self._stopping) as waited_s:
                    if waited_s is None:
                        raise EngineError("it was stopped before it began.")
                    executor = Executor(self.model, self._setup)
                    self._take_weights(executor)
                    executor.warm_up()
                scheduler = Scheduler(executor, self._setup.context)
                with self._work:
                    self._slots = executor.sizes.usable * executor.sizes.shards
                    self._ready = True
                    self._work.notify_all()
                with jax.transfer_guard("disallow"):
                    while self._step(executor, scheduler):
                        pass
            self._die(EngineError("The engine was stopped."), None)
        except BaseException as error:  # whatever it is, no turn may be left waiting
            self._die(EngineError(f"Generation failed: {type(error).__name__}: {error}"), error)
        finally:
            jax.monitoring.unregister_event_duration_listener(compiles)

    def _step(self, executor: Executor, scheduler: Scheduler) -> bool:
        """Waits for work and for the engine's turn, then does a round. False when the thread must stop."""
        with self._work:
            arrived = lambda: self._stopping or self._queue or self._dropped or self._weights is not None  # noqa: E731
            self._work.wait_for(lambda: arrived() or scheduler.requests)
        with self._turns.turn(lambda: self._stopping) as waited_s:
            if waited_s is None or self._stopping:
                return False
            if waited_s:
                scheduler.stats.update(turn_wait_s=waited_s)
            self._round(executor, scheduler)
            executor.wait()  # nothing of this round may still run in another engine's
        return True

    def _round(self, executor: Executor, scheduler: Scheduler) -> None:
        """Takes the requests that have arrived, then runs one dispatch."""
        with self._work:
            arrived, self._queue = self._queue, []
            dropped, self._dropped = self._dropped, []
            if self._stops.changed:
                executor.set_stops(self._stops.table)
                self._stops.changed = False
            self._held_requests = [*scheduler.requests, *arrived]  # first: an error below reaches them too
            if arrived:
                scheduler.count_idle(time.monotonic())
                self._take_stats(scheduler)
            if self._weights is not None:
                self._take_weights(executor)
                scheduler.forget(self._setup.cfg.kv_on_update == "recompute")
        if dropped:
            scheduler.drop(dropped)
        scheduler.submit(arrived)
        scheduler.admit()
        finished = scheduler.dispatch(self._version)
        outcomes: dict[asyncio.AbstractEventLoop, list] = collections.defaultdict(list)
        with self._work:
            for request, generation in finished:
                if request.session.request is request:  # else it was abandoned in the meantime
                    request.session.request = None
                    outcomes[request.loop].append((request.future, generation))
            self._held_requests = scheduler.requests
            self._take_stats(scheduler)
        for loop, settled in outcomes.items():  # one wake-up per event loop, however many turns ended
            deliver(loop, settled)

    def _take_stats(self, scheduler: Scheduler) -> None:
        self._stats.update(scheduler.stats)
        scheduler.stats.clear()
        self._idle_since = scheduler.idle_since

    def _take_weights(self, executor: Executor) -> None:
        with self._work:
            params, self._version = self._weights
            executor.set_params(params)
            self._held, self._weights = (executor.params, self._version), None
            self._work.notify_all()

    def _die(self, error: EngineError, cause: BaseException | None) -> None:
        """Ends every waiting turn with the error. The driver serves no turn until it is started again."""
        error.__cause__ = cause
        with self._work:
            self._stats["free_slot_s"] = self.stats().get("free_slot_s", 0.0)  # what was told stays told
            self._error, self._idle_since = error, None
            waiting = [(r.loop, r.future) for r in {*self._queue, *self._held_requests}]
            self._queue, self._dropped, self._held_requests = [], [], []
            self._work.notify_all()
        for loop, future in waiting:
            failure = EngineError(str(error))
            failure.__cause__ = cause
            deliver(loop, [(future, failure)])
