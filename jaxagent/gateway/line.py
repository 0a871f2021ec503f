"""An attempt's session at a gateway: the run's own, or one on another host (`service/agents.py`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

from jaxagent.gateway.server import Gateway
from jaxagent.gateway.session import Session
from jaxagent.types import StopReason, Trajectory


@dataclasses.dataclass(frozen=True)
class LineState:
    """What is known of what a session was asked; see `Session`. Of one that is far away: when it ended."""

    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stop: StopReason | None = None
    refusal: str = ""
    failure: Exception | None = None


class Line(Protocol):
    """What an agent program is given, and what is known of what it asked."""

    @property
    def url(self) -> str:
        """Of the gateway; "" while it does not listen."""
        ...

    @property
    def token(self) -> str:
        """Lets the program in."""
        ...

    @property
    def run_s(self) -> float:
        """The program's time, where that is less than the attempt's."""
        ...

    @property
    def state(self) -> LineState:
        """What was asked so far."""
        ...

    async def phase(self, name: str) -> None:
        """Is called in front of the program ("run") and of its judgement ("verify"); may wait."""

    async def end(self) -> tuple[Trajectory, ...]:
        """Lets nobody in any more; what the session has. More than once is harmless."""
        ...


class LocalLine:
    """A session at the run's own gateway; see `Line`."""

    run_s = math.inf

    def __init__(self, gateway: Gateway, session: Session):
        self._gateway, self._session = gateway, session
        self.token = gateway.add(session)

    @property
    def url(self) -> str:
        """See `Line`."""
        return self._gateway.url

    @property
    def state(self) -> LineState:
        """See `Line`."""
        session = self._session
        return LineState(session.counters, session.stop, session.refusal, session.failure)

    async def phase(self, name: str) -> None:
        """Nobody else wants the place."""

    async def end(self) -> tuple[Trajectory, ...]:
        """See `Line`."""
        self._gateway.remove(self.token)
        return self._session.close()
