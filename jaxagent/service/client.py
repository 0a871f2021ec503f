"""The service's routes as methods, for nodes and for whoever submits. Every call is bounded and may be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.io.http import HttpClient, HttpError
from jaxagent.service.episodes import DIGEST, from_bytes
from jaxagent.service.reading import LONGEST_POLL_S, MAX_EPISODE_BYTES
from jaxagent.service.states import State
from jaxagent.service.store import Held
from jaxagent.types import Episode

TIMEOUT_S = 30.0
EPISODE_TIMEOUT_S = 180.0
RETRIES = 3


class ServiceClient:
    """A client of `jaxagent.service.server`. Must be used and closed on one asyncio loop.

    Args:
      url: of the server, such as "http://10.0.0.5:8080".
      token: what its --token_file holds.
      retries: further attempts where the server is not reached or busy; every route may be asked twice.

    Every method raises `HttpError`: how the last attempt failed (`HttpStatus` where the server refused).
    """

    def __init__(self, url: str, token: str, timeout_s: float = TIMEOUT_S, retries: int = RETRIES):
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"}
        self._http = HttpClient(timeout_s, MAX_EPISODE_BYTES, retries, headers, connections=0)
        self._timeout_s = timeout_s

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def _ask(self, method: str, path: str, wait_s: float = 0.0, **content: Any) -> dict[str, Any]:
        timeout_s = self._timeout_s + wait_s
        return await self._http.request_object(method, self.url + path, timeout_s=timeout_s, **content)

    # ---------------------------------------------------------------- clients

    async def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Submits a group: {"task_id", "status"}. The same body again is the same group."""
        return await self._ask("POST", "/rollout/task/submit", json=body)

    async def task(self, task_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        """The group as `views.task` tells it, as soon as it has ended, or after `wait_s` seconds."""
        wait_s = min(LONGEST_POLL_S, wait_s)
        return await self._ask("GET", f"/rollout/task/{task_id}", wait_s, params={"wait_s": str(int(wait_s))})

    async def cancel(self, task_id: str, register_if_missing: bool = False) -> dict[str, Any]:
        """Ends what has not ended of a group."""
        params = {"register_if_missing": str(int(register_if_missing))}
        return await self._ask("DELETE", f"/rollout/task/{task_id}", params=params)

    async def episode(self, task_id: str, sample: int, digest: str) -> Episode:
        """A session's episode. Raises HttpError, too, where its bytes are not those of the digest."""
        path = f"{self.url}/tasks/{task_id}/sessions/{sample}/episode"
        body = await self._http.request("GET", path, timeout_s=EPISODE_TIMEOUT_S)
        try:
            return from_bytes(body, digest)
        except Exception as failure:
            raise HttpError(f"{path}: {failure}") from failure

    async def status(self) -> dict[str, Any]:
        """Counts."""
        return await self._ask("GET", "/rollout/status")

    async def nodes(self) -> list[dict[str, Any]]:
        """Every node."""
        return (await self._ask("GET", "/nodes"))["nodes"]

    # ---------------------------------------------------------------- nodes

    async def register(self, node_id: str, process: str, gateway_url: str, places: Mapping[str, int]) -> dict[str, Any]:
        """This process is that node: {"heartbeat_interval", "lease_s"}, in seconds."""
        body = {"node_id": node_id, "process": process, "gateway_url": gateway_url}
        return await self._ask("POST", "/nodes/register", json={**body, **places})

    async def beat(
        self, node_id: str, process: str, playing: Sequence[tuple[Held, State]], free: Mapping[str, int]
    ) -> dict[str, Any]:
        """What the node plays; the answer says what to cancel, and whether to drain."""
        body = {"process": process, "sessions": [[*key, state] for key, state in playing], "free": free}
        return await self._ask("POST", f"/nodes/{node_id}/heartbeat", json=body)

    async def take(
        self, node_id: str, process: str, have: Sequence[Held], free: Mapping[str, int], wait_s: float
    ) -> list[dict[str, Any]]:
        """Work, as soon as there is some, or none after `wait_s` seconds."""
        body = {"process": process, "have": [list(key) for key in have], "free": free, "wait_s": int(wait_s)}
        return (await self._ask("POST", f"/nodes/{node_id}/take", wait_s, json=body))["work"]

    async def give_back(self, node_id: str, process: str, keys: Sequence[Held]) -> None:
        """Sessions that this node will not end."""
        body = {"process": process, "sessions": [list(key) for key in keys]}
        await self._ask("POST", f"/nodes/{node_id}/give_back", json=body)

    async def leave(self, node_id: str, process: str) -> None:
        """The node ends; what it holds goes to others."""
        await self._ask("DELETE", f"/nodes/{node_id}", params={"process": process})

    async def drain(self, node_id: str) -> None:
        """Has a node end what it plays, take no more, and end."""
        await self._ask("DELETE", f"/nodes/{node_id}")

    async def finish(self, key: Held, body: bytes, digest: str) -> bool:
        """Sends an episode; when this returns it is on the server's disk. False: the session had ended already."""
        task_id, sample, attempt = key
        headers = {DIGEST: digest, "Content-Type": "application/json"}
        url = f"{self.url}/sessions/{task_id}/{sample}/{attempt}"
        content = {"data": body, "headers": headers}
        return bool((await self._http.request_object("PUT", url, timeout_s=EPISODE_TIMEOUT_S, **content))["stored"])
