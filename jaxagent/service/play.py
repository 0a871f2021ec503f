"""What a node plays: work from the server in, an episode out; the places that each phase of it needs.

A `Play` says in which phase it is by `await phases.enter(State.RUNNING)`, which waits for a place of that phase. A
`Rollout` (task, sample -> episode) is one by `of_rollout`: all of it is RUNNING.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, Self

from jaxagent.config import Config
from jaxagent.data import codec
from jaxagent.rollout.workers import Rollout, no_episode
from jaxagent.service.states import ORDER, State
from jaxagent.service.store import Held
from jaxagent.types import Episode, StopReason, Task

# Which of a node's places a phase takes.
PLACE = {
    State.INITIALIZING: "init",
    State.RUNNING: "run",
    State.POST_RUN: "postrun",
    State.BUILDING: "postrun",
    State.EVALUATING: "postrun",
}


@dataclasses.dataclass(frozen=True)
class Work:
    """One attempt at a session, as the server gives it to a node."""

    task_id: str  # of the submission
    sample: int  # its place in the group
    attempt: int
    number: int  # the attempt's number in its run, by which randomness is keyed; the episode's `sample`
    group_size: int
    timeout_s: float  # of all of it
    agent_timeout_s: float  # of RUNNING
    task: Task

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """From the server's answer. Raises ConfigError, KeyError or TypeError: it is none."""
        return cls(**{**row, "task": codec.decode_task(row["task"], "the work's task")})

    @property
    def key(self) -> Held:
        """What the server names it by."""
        return self.task_id, self.sample, self.attempt

    def failed(self, stop_reason: StopReason, error: str) -> Episode:
        """The empty episode that says how it failed."""
        return no_episode(self.task, self.number, stop_reason, error)


class Places:
    """How many sessions of a node may be in each phase."""

    def __init__(self, init: int, run: int, postrun: int):
        self.most = {"init": init, "run": run, "postrun": postrun}
        self.semaphores = {name: asyncio.Semaphore(most) for name, most in self.most.items()}
        self.used = dict.fromkeys(self.most, 0)

    @property
    def free(self) -> dict[str, int]:
        """Places that nobody has."""
        return {name: most - self.used[name] for name, most in self.most.items()}


class Phases:
    """One session's way through its node's places.

    A session keeps its place until it has the next one, so those that wait for a later phase hold up the taking of
    new work, and never each other.
    """

    def __init__(self, places: Places, changed: Callable[[], None]):
        self.state = State.INITIALIZING
        self._places, self._changed = places, changed
        self._place = ""

    async def enter(self, state: State) -> None:
        """Goes on to a phase, once it has a place there. A phase that lies behind changes nothing."""
        place = PLACE[state]
        if self._place and ORDER.index(state) <= ORDER.index(self.state):
            return
        if place != self._place:
            if state is State.RUNNING:
                self._now(State.READY)
            await self._places.semaphores[place].acquire()
            self.leave()
            self._place = place
            self._places.used[place] += 1
        self._now(state)

    def over(self) -> None:
        """It is played, and only to be sent."""
        self.leave()
        if ORDER.index(self.state) < ORDER.index(State.POST_RUN):
            self._now(State.POST_RUN)

    def leave(self) -> None:
        """Gives its place back."""
        if self._place:
            self._places.used[self._place] -= 1
            self._places.semaphores[self._place].release()
            self._place = ""
            self._changed()

    def _now(self, state: State) -> None:
        self.state = state
        self._changed()


@dataclasses.dataclass(frozen=True)
class Here:
    """What a node tells its player."""

    config: Config | None  # the parsed --config, where there is one
    run: Callable[[Coroutine[Any, Any, Any], float], Any]  # (coroutine, timeout_s): on the loop of the plays
    gateway_url: str = ""  # where agents reach the policy; "" = the player knows another way
    gateway_token: str = ""  # the gateway's admin token


class Play(Protocol):
    """Plays one session, and owns the agent's time: one that runs for longer than `work.agent_timeout_s` is killed and
    judged as it is (TIME_LIMIT), so that what the policy sampled is kept.
    """

    async def __call__(self, work: Work, phases: Phases) -> Episode:
        """The episode of `work.task` and `work.number`."""
        ...


def of_rollout(rollout: Rollout) -> Play:
    """A rollout as a play. One that the agent's time cuts off leaves no tokens: an episode of reward 0 without any."""

    async def play(work: Work, phases: Phases) -> Episode:
        await phases.enter(State.RUNNING)
        limit = asyncio.timeout(work.agent_timeout_s)
        with contextlib.suppress(TimeoutError):
            async with limit:
                return await rollout(work.task, work.number)
        if limit.expired():
            return work.failed(StopReason.TIME_LIMIT, "")
        return work.failed(StopReason.TIMEOUT, "the rollout raised a TimeoutError")

    return play
