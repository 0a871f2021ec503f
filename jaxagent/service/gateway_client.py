"""Sessions at a gateway on another host, by its admin routes: a node's agents reach the trainer's policy so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.io.http import HttpClient, HttpError, HttpStatus
from jaxagent.types import StopReason, Trajectory

TIMEOUT_S = 60.0
MAX_BYTES = 256 * 2**20  # of a session's trajectories


@dataclasses.dataclass(frozen=True)
class OpenedSession:
    """A session at the gateway."""

    id: str  # of the admin routes
    token: str  # for the agent, and nobody else


@dataclasses.dataclass(frozen=True)
class SampledSession:
    """What a session gives at its end."""

    trajectories: tuple[Trajectory, ...]
    counters: Mapping[str, float]
    stop: StopReason | None  # why its last request was refused
    failure: str | None  # why generation failed for its last request, in one line
    refusal: str = ""  # what the program was told where its last request was refused


class GatewayClient:
    """Must be used and closed on one asyncio loop. Every method raises `HttpError`: how the last attempt failed.

    Args:
      url: of the gateway, without /v1.
      token: its admin token.
    """

    def __init__(self, url: str, token: str, timeout_s: float = TIMEOUT_S, retries: int = 3):
        self.url = url.rstrip("/")
        self._http = HttpClient(timeout_s, MAX_BYTES, retries, {"Authorization": f"Bearer {token}"})

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def open(
        self, task_id: str, sample: int, group_size: int, domain: str, rules: Mapping[str, Any] | None = None
    ) -> OpenedSession:
        """A new session. Asked twice after a lost answer, it leaves one that is never used, until the gateway ends."""
        body = {"task_id": task_id, "sample": sample, "group_size": group_size, "domain": domain}
        body |= {"rules": rules or {}}
        answer = await self._ask("POST", "", json=body)
        try:
            return OpenedSession(str(answer["id"]), str(answer["token"]))
        except KeyError as missing:
            raise HttpError(f"{self.url}/sessions told no {missing}") from None

    async def trajectories(self, session: OpenedSession) -> SampledSession:
        """Ends the session: what it sampled. May be asked again."""
        answer = await self._ask("GET", f"/{session.id}/trajectories")
        try:
            rows = [codec.decode_trajectory(r, f"trajectories[{i}]") for i, r in enumerate(answer["trajectories"])]
            stop = None if answer["stop"] is None else StopReason(answer["stop"])
            failure = None if answer["failure"] is None else str(answer["failure"])
            counters = {str(name): float(value) for name, value in answer["counters"].items()}
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as failure:
            raise HttpError(f"{self.url}: session {session.id} cannot be read: {failure}") from failure
        return SampledSession(tuple(rows), counters, stop, failure, str(answer.get("refusal", "")))

    async def remove(self, session: OpenedSession) -> None:
        """Ends the session, and has the gateway forget it. Twice is harmless."""
        try:
            await self._ask("DELETE", f"/{session.id}")
        except HttpStatus as answer:
            if answer.status != 404:
                raise

    async def _ask(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        return await self._http.request_object(method, f"{self.url}/sessions{path}", **content)
