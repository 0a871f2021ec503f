"""The trainer's side of the service: a rollout whose episodes are played by nodes on any hosts.

An environment of yours becomes one whose episodes the service plays:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Remote(MyEnvironment):
        service: ServiceConfig
        rollout = "jaxagent.service.remote_rollout:RemoteRollout"

The first attempt at a task that a step asks for submits its whole group; the others wait for the same submission.
What comes back goes the way of every group: failed sessions are failed episodes with their reasons, sessions that an
early stop cancelled are those of `rollout/workers.py`, and of a group that is not accepted nothing is valid. Nodes
reach the policy through this run's gateway, by its admin routes (`gateway_client.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, Seconds, ZeroToOne
from jaxagent.data import codec
from jaxagent.gateway.chat import BadRequest
from jaxagent.gateway.harness import SessionRollout
from jaxagent.gateway.server import Gateway
from jaxagent.gateway.session import Session
from jaxagent.gateway.trained import read_rules
from jaxagent.io.http import HttpError, checked_url
from jaxagent.rollout.workers import ENOUGH, Workers, no_episode
from jaxagent.service import groups
from jaxagent.service.client import ServiceClient
from jaxagent.service.server import read_token
from jaxagent.service.states import State
from jaxagent.types import Episode, StopReason, Task

logger = logging.getLogger(__name__)
LISTEN_TIMEOUT_S = 30.0
CANCEL_TIMEOUT_S = 10.0
PAUSE_S = 1.0  # between attempts at a server that is away
POLL_S = 20.0


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """Where the episodes are played, and when a group of them is good enough."""

    url: str  # of the rollout service
    token_file: str  # file with its token
    timeout_s: Seconds = 600.0  # of a session, from its beginning at a node
    agent_timeout_s: NonNegativeFloat = 0.0  # of RUNNING alone; 0 = timeout_s
    min_complete_accept_fraction: ZeroToOne = 0.0  # of a group's sessions that must be usable; 0 = all groups are taken
    priority: NonNegativeInt = 0  # up to 100; higher ones go first
    group_s: Seconds = 7200.0  # after which a group is given up
    gateway_host: str = "127.0.0.1"  # where this run's gateway listens for nodes
    gateway_port: NonNegativeInt = 0  # 0 = any
    gateway_token_file: str = ""  # file with the gateway's admin token; "" = nodes have a policy of their own

    def __post_init__(self) -> None:
        """Raises ConfigError where the service's address is none."""
        checked_url(self.url, "config.env.service.url")


@dataclasses.dataclass(frozen=True)
class RemoteRollout(SessionRollout):
    """The rollout of episodes that the service plays. `shared` are the run's connections.

    Attributes:
      begun: submissions of this rollout, by task and place in the run.
    """

    begun: dict[tuple[str, int], _Group] = dataclasses.field(default_factory=dict)

    @staticmethod
    @contextlib.contextmanager
    def open_shared(workers: Workers, note: Callable[[str], None]) -> Iterator[Shared]:
        """The run's connections, on the loop of the episodes, from the run's beginning to its end."""
        shared = Shared(note)
        try:
            yield shared
        finally:
            workers.run(shared.close(), LISTEN_TIMEOUT_S)

    @property
    def service(self) -> ServiceConfig:
        """The environment's section."""
        return self.config.service  # type: ignore[attr-defined]

    async def __call__(self, task: Task, sample: int) -> Episode:
        """The attempt's episode, as its node played it. Only cancellation of the caller's own task passes through."""
        client = await self.shared.client(self)
        number, place = divmod(sample, self.group_size)
        group = self.begun.get((task.id, number))
        if group is None:
            playing = asyncio.create_task(_play(client, self.service, task, number * self.group_size, self.group_size))
            group = self.begun[task.id, number] = _Group(playing)
        group.waiting += 1
        try:
            await asyncio.wait({group.playing})
        finally:
            group.waiting -= 1
            if not group.waiting and not group.playing.done():
                group.playing.cancel()  # nobody wants it any more
        if group.playing.cancelled():
            return no_episode(task, sample, StopReason.CANCELLED, "the other attempts of its group were cancelled")
        episode = group.playing.result()[place]
        if episode.text or not episode.trajectories:
            return episode
        text = self.text(episode.trajectories)
        return dataclasses.replace(episode, text=text)  # nodes whose agents speak to a gateway have no tokenizer


@dataclasses.dataclass
class _Group:
    """A submission in progress."""

    playing: asyncio.Task[list[Episode]]
    waiting: int = 0  # attempts that wait for it


class Shared:
    """What the rollouts of a run share: the client of the service, and the gateway that nodes reach the policy by."""

    def __init__(self, note: Callable[[str], None]):
        self._note = note
        self._client: ServiceClient | None = None
        self._gateway: Gateway | None = None
        self._opening = asyncio.Lock()
        self._rollout: RemoteRollout | None = None  # the present one, whose sampling new sessions have

    async def client(self, rollout: RemoteRollout) -> ServiceClient:
        """The client, while the gateway listens. Raises ConfigError: a token cannot be read."""
        self._rollout = rollout
        async with self._opening:
            if self._client is None:
                service = rollout.service
                if service.gateway_token_file:
                    gateway = Gateway(make=self._session, admin_token=read_token(service.gateway_token_file))
                    await gateway.listen(service.gateway_port, service.gateway_host)
                    self._gateway = gateway
                    self._note(f"gateway for nodes: {gateway.url}")
                self._client = ServiceClient(service.url, read_token(service.token_file))
            return self._client

    async def close(self) -> None:
        """Listens no more."""
        if self._gateway is not None:
            await self._gateway.stop()
        if self._client is not None:
            await self._client.close()

    def _session(self, body: Mapping[str, Any]) -> Session:
        """What POST /sessions of the gateway makes. Raises BadRequest."""
        rollout, fields = self._rollout, {"task_id": str, "sample": int, "group_size": int, "domain": str}
        assert rollout is not None
        for name, kind in fields.items():
            if not isinstance(body.get(name), kind) or isinstance(body[name], bool):
                raise BadRequest(f"'{name}' must be {kind.__name__}", name)
        task_id, sample, group_size, domain = (body[name] for name in fields)
        return rollout.session(task_id, sample, group_size, domain, read_rules(body.get("rules", {})))


async def _play(client: ServiceClient, service: ServiceConfig, task: Task, first: int, size: int) -> list[Episode]:
    """A group's episodes, in the order of their samples, whatever happens."""
    name, samples = secrets.token_hex(16), range(first, first + size)
    try:
        async with asyncio.timeout(service.group_s):
            group = await _group_at_its_end(client, _request(service, name, task, first, size))
            return await _episodes(client, name, task, samples, group)
    except TimeoutError:
        error, reason = f"the rollout service did not end the group in {service.group_s:g} s", StopReason.TIMEOUT
        await _cancel(client, name)
    except HttpError as failure:
        error, reason = f"the rollout service: {failure}", StopReason.ENV_ERROR
    except asyncio.CancelledError:
        await _cancel(client, name)
        raise
    return [no_episode(task, sample, reason, error) for sample in samples]


def _request(service: ServiceConfig, name: str, task: Task, first: int, size: int) -> dict[str, Any]:
    return {
        "task_id": name,
        "task": codec.encode_task(task),
        "num_samples": size,
        "first_sample": first,
        "dispatch_priority": service.priority,
        "timeout_seconds": service.timeout_s,
        "min_complete_accept_fraction": service.min_complete_accept_fraction,
        "metadata": {"agent_timeout": service.agent_timeout_s or service.timeout_s},
    }


async def _group_at_its_end(client: ServiceClient, request: Mapping[str, Any]) -> dict[str, Any]:
    """The group, once it has ended; a server that is away for a while is waited for."""
    submitted = False
    while True:
        try:
            if not submitted:
                await client.submit(request)
                submitted = True
            group = await client.task(request["task_id"], POLL_S)
            if group["status"] != "running":
                return group
        except HttpError as failure:
            if not failure.passing:
                raise
            logger.warning("%s", failure)
            await asyncio.sleep(PAUSE_S)


async def _cancel(client: ServiceClient, name: str) -> None:
    """Tells the server that nobody waits; if it is away, the group ends all the same."""
    with contextlib.suppress(HttpError, TimeoutError):
        async with asyncio.timeout(CANCEL_TIMEOUT_S):
            await client.cancel(name, register_if_missing=True)


async def _episodes(
    client: ServiceClient, name: str, task: Task, samples: Sequence[int], group: Mapping[str, Any]
) -> list[Episode]:
    """The episodes of a group that has ended."""
    out = []
    for sample, result in zip(samples, group["results"], strict=True):
        if result["digest"]:
            episode = await client.episode(name, result["sample"], result["digest"])
            episode = dataclasses.replace(episode, task=task)
        else:
            episode = _without(task, sample, State(result["state"]), result["reason"])
        if group["status"] != "completed" and not episode.stop_reason.is_failure:
            reason = f"its group was not accepted: {group['reason']}"
            episode = dataclasses.replace(
                episode, stop_reason=StopReason.CANCELLED, error=reason, reward=0.0, rewards={}, turn_rewards=()
            )
        counts = {"service_attempts": float(result["attempt"]), "service_losses": float(result["losses"])}
        out.append(dataclasses.replace(episode, metrics={**episode.metrics, **counts}))
    return out


def _without(task: Task, sample: int, state: State, reason: str) -> Episode:
    """The episode that stands for a session that ended without one."""
    if reason == groups.ENOUGH:
        return no_episode(task, sample, StopReason.CANCELLED, ENOUGH)
    ends = {State.CANCELLED: StopReason.CANCELLED, State.TIMEOUT: StopReason.TIMEOUT}
    return no_episode(task, sample, ends.get(state, StopReason.ENV_ERROR), f"the rollout service: {reason}")
