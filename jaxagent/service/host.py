"""A node of the rollout service: takes sessions from the server, plays them, sends the episodes.

`await Node(...).run()` lasts until the node is drained: by the server, by `drain()`, or because another process has
registered under its name. Beats, work and results go on independently, so a slow agent holds up nothing. An episode
is kept until the server has it on disk; a server that is away for a while is waited for, and sessions go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from typing import Any, NamedTuple

from jaxagent.config import ConfigError
from jaxagent.config.errors import WaitedInVainError
from jaxagent.fleet.wire import REPEATED, RefusedCallError, may_pass
from jaxagent.io.http import HttpError, HttpStatus
from jaxagent.rollout.workers import guarded
from jaxagent.service.client import ServiceClient
from jaxagent.service.episodes import to_bytes
from jaxagent.service.play import Phases, Places, Play, Work
from jaxagent.service.states import State
from jaxagent.service.store import Held
from jaxagent.types import Episode, StopReason

logger = logging.getLogger(__name__)
CLEAN_UP_S = 30.0  # for a play that is cancelled to kill its sandbox
RESULT_S = 3600.0  # longest time for which an episode is offered to a server that does not take it
TAKE_S = 20.0  # of one long poll
PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between attempts at a server that does not answer
BEATS_APART_S = 0.1  # phases that change quickly are told together
PATIENCE_S = 600.0  # for a server that is away at the start, or refuses the token


class _SessionInProgress(NamedTuple):
    """A session in progress."""

    phases: Phases
    task: asyncio.Task[None]


@dataclasses.dataclass(eq=False)
class Node:
    """One host that plays."""

    client: ServiceClient  # of the server
    play: Play  # plays one session
    node_id: str  # the host's name; a process that registers it again takes its place
    places: Places  # how many sessions may be in each phase
    drain_s: float  # how long a node that is to end waits for what it plays; the rest goes back to the server
    gateway_url: str = ""  # where agents of this node reach the policy; only told
    # How long the node asks again where the server is away at the start, or refuses its token.
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        self._accepted = False  # whether the server has ever registered it
        self._refused_since: float | None = None  # clock of the first of the refusals since a call was accepted
        self._process = secrets.token_hex(8)
        self._interval_s = 10.0
        self._playing: dict[Held, _SessionInProgress] = {}
        self._changed, self._free, self._draining = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ended = 0  # sessions whose episode the server has

    def drain(self) -> None:
        """Takes no more work; `run` returns when what is played has ended."""
        self._draining.set()
        self._free.set()

    async def run(self) -> None:
        """Plays until drained.

        Raises:
          RefusedCallError: another process is this node now.
          HttpError: the server refuses this node; its token only where it was never accepted, and after `patience_s`.
          WaitedInVainError: the server was away at the start, or has refused a token that worked, for `patience_s`.
        """
        await self._register(patient=True)
        loops = [asyncio.create_task(self._beats()), asyncio.create_task(self._takes())]
        drained = asyncio.create_task(self._drained())
        try:
            first_tasks, _ = await asyncio.wait([*loops, drained], return_when=asyncio.FIRST_COMPLETED)
            for task in first_tasks:
                task.result()  # raises what ended it
        finally:
            for task in (*loops, drained, *[playing.task for playing in self._playing.values()]):
                task.cancel()
            rest = [*loops, drained, *[playing.task for playing in self._playing.values()]]
            await asyncio.wait(rest, timeout=CLEAN_UP_S)
            with contextlib.suppress(HttpError):
                await self.client.leave(self.node_id, self._process)

    async def _drained(self) -> None:
        await self._draining.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.drain_s):
                while self._playing:
                    await asyncio.wait([playing.task for playing in self._playing.values()])

    async def _register(self, patient: bool = False) -> None:
        places = {f"max_{name}_workers": most for name, most in self.places.most.items()}
        pause_s = PAUSE_S
        while True:
            try:
                answer = await self.client.register(self.node_id, self._process, self.gateway_url, places)
                self._interval_s = float(answer["heartbeat_interval"])
                self._accepted, self._refused_since = True, None
                return
            except HttpError as failure:
                if not patient:
                    raise
                self._wait_out(failure)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._draining.wait()
                    return  # nothing is played yet: it can end at once
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    # ---------------------------------------------------------------- beats

    async def _beats(self) -> None:
        """Tells the server what is played: at every interval, and whenever a phase changes."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            self._changed.clear()
            try:
                self._heed(await self.client.beat(self.node_id, self._process, self._phases(), self.places.free))
                self._refused_since = None
            except HttpStatus as refusal:
                await self._refused(refusal)
            except HttpError as failure:  # the server is away: what is played goes on
                logger.warning("%s", failure)
            await asyncio.sleep(BEATS_APART_S)

    def _phases(self) -> list[tuple[Held, State]]:
        return [(key, playing.phases.state) for key, playing in self._playing.items()]

    def _heed(self, answer: dict[str, Any]) -> None:
        for task_id, sample, attempt in answer["cancel"]:
            playing = self._playing.get((task_id, sample, attempt))
            if playing is not None and not playing.task.done():
                logger.info("session %s/%d is no longer wanted here", task_id, sample)
                playing.task.cancel()
        if answer["drain"] and not self._draining.is_set():
            logger.info("the server drains this node")
            self.drain()

    async def _refused(self, refusal: HttpStatus) -> None:
        """What a refused beat or take means. Raises where the node cannot go on."""
        if refusal.status == 409:
            raise RefusedCallError("replaced", f"another process has registered as node '{self.node_id}'") from refusal
        if refusal.status == 404:  # the server has forgotten it
            with contextlib.suppress(HttpError):
                await self._register()
        else:
            self._wait_out(refusal)

    def _wait_out(self, failure: HttpError) -> None:
        """Logs a failure that may pass. Raises it, or WaitedInVainError, where the node waits no longer."""
        now, status = time.monotonic(), failure.status if isinstance(failure, HttpStatus) else 0
        self._refused_since = now if self._refused_since is None else self._refused_since
        waited_s = now - self._refused_since
        if not failure.passing and not may_pass(status, waited_s, self.patience_s, self._accepted):
            raise failure
        if waited_s > self.patience_s and (status == 401 or not self._accepted):
            raise WaitedInVainError(f"The rollout service has failed for {waited_s:.0f} s: {failure}.") from failure
        logger.warning("%s", failure)

    # ---------------------------------------------------------------- work

    async def _takes(self) -> None:
        pause_s = PAUSE_S
        while not self._draining.is_set():
            self._free.clear()
            if self._room() < 1:
                await self._free.wait()
                continue
            free = self.places.free | {"init": self._room()}
            try:
                rows = await self.client.take(self.node_id, self._process, list(self._playing), free, TAKE_S)
                self._refused_since = None
                work = [Work.of(row) for row in rows]
                if self._draining.is_set():
                    await self.client.give_back(self.node_id, self._process, [w.key for w in work])
                else:
                    for each in work:
                        self._begin(each)
                pause_s = PAUSE_S
                continue
            except HttpStatus as refusal:
                await self._refused(refusal)
            except HttpError as failure:
                logger.warning("%s", failure)
            except (ConfigError, KeyError, TypeError) as mistake:
                raise HttpError(f"the server's work cannot be read: {mistake}: is it another version?") from mistake
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await asyncio.Event().wait()  # until `run` ends it

    def _room(self) -> int:
        """Sessions that it can take; episodes that the server does not take hold their place in all of them."""
        return min(self.places.free["init"], sum(self.places.most.values()) - len(self._playing))

    def _begin(self, work: Work) -> None:
        if work.key in self._playing:
            return
        phases = Phases(self.places, self._changed.set)
        task = asyncio.create_task(self._session(work, phases))
        self._playing[work.key] = _SessionInProgress(phases, task)

    async def _session(self, work: Work, phases: Phases) -> None:
        """One session, from its first place to the server's receipt."""
        try:
            await phases.enter(State.INITIALIZING)
            episode = await self._bounded_episode(work, phases)
            phases.over()
            self._free.set()
            await self._deliver(work, episode)
        except Exception:
            logger.exception("session %s/%d was given up", work.task_id, work.sample)
        finally:
            phases.leave()
            del self._playing[work.key]
            self._free.set()

    async def _bounded_episode(self, work: Work, phases: Phases) -> Episode:
        """The episode, whatever happens, within the session's time and that of cleaning up."""
        play = asyncio.ensure_future(guarded(lambda *_: self.play(work, phases), work.task, work.number))
        try:
            await asyncio.wait({play}, timeout=work.timeout_s)
        finally:
            if not play.done():
                play.cancel()
                await asyncio.wait({play}, timeout=CLEAN_UP_S)
        if not play.done() or play.cancelled():
            late = "" if play.done() else f", and it did not clean up in {CLEAN_UP_S:g} s"
            why = f"the session's {work.timeout_s:g} s were over in {phases.state}{late}"
            return work.failed(StopReason.TIMEOUT, why)
        if (failure := play.exception()) is not None:
            logger.error("session %s/%d: the play raised", work.task_id, work.sample, exc_info=failure)
            return work.failed(StopReason.ENV_ERROR, f"{type(failure).__name__}: {failure}")
        return play.result()

    async def _deliver(self, work: Work, episode: Episode) -> None:
        """Offers the episode until the server has it, refuses it for good, or `RESULT_S` is over."""
        try:
            body, digest = to_bytes(episode)
        except (ValueError, TypeError) as failure:
            body, digest = to_bytes(work.failed(StopReason.ENV_ERROR, f"the episode cannot be sent: {failure}"))
        pause_s = PAUSE_S
        async with asyncio.timeout(RESULT_S):
            while True:
                try:
                    is_new = await self.client.finish(work.key, body, digest)
                    self.ended += is_new
                    return
                except HttpStatus as refusal:
                    if refusal.status in (400, 413):
                        why = f"the server refused the episode: {refusal}"
                        body, digest = to_bytes(work.failed(StopReason.ENV_ERROR, why))
                    elif not refusal.passing and refusal.status not in REPEATED:
                        logger.error("session %s/%d: %s", work.task_id, work.sample, refusal)
                        return
                    logger.warning("%s", refusal)
                except HttpError as failure:
                    logger.warning("%s", failure)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
