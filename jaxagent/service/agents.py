"""A node's player for environments that an agent program plays: the program here, its policy at the trainer's gateway.

    python -m jaxagent.service.node ... --player=jaxagent.service.agents:player --config=configs/X.py \\
        --gateway_url=http://10.0.0.4:9000 --gateway_token_file=ADMIN

It is `gateway.harness.HarnessRollout` with sessions that are opened and read by the gateway's admin routes, and with
the places of the node in front of the program and of the verifier.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.choice import own_class
from jaxagent.engine.requests import EngineError
from jaxagent.envs.base import Environment, Opening
from jaxagent.gateway.harness import HarnessRollout, SessionLine, SessionReport
from jaxagent.gateway.trained import TrainingRules
from jaxagent.io.http import HttpError
from jaxagent.rollout.templates import Plain
from jaxagent.service.gateway_client import GatewayClient, OpenedSession, SampledSession
from jaxagent.service.play import Here, Phases, Play, Work
from jaxagent.service.remote_rollout import RemoteRollout
from jaxagent.service.states import State
from jaxagent.types import Episode, Task, Trajectory

logger = logging.getLogger(__name__)
PHASE = {"run": State.RUNNING, "verify": State.EVALUATING}
CLOSE_TIMEOUT_S = 30.0


class RemoteLine(SessionLine):
    """A session at a gateway on another host."""

    def __init__(self, gateway: GatewayClient, session: OpenedSession, work: Work, phases: Phases):
        self._gateway, self._opened, self._phases = gateway, session, phases
        self._sampled: SampledSession | None = None
        self.token, self.run_s = session.token, work.agent_timeout_s

    @property
    def state(self) -> SessionReport:
        """Nothing before the session has ended."""
        if (end := self._sampled) is None:
            return SessionReport()
        late = end.failure is not None and end.failure.startswith("TimeoutError")
        failure = None if end.failure is None else TimeoutError(end.failure) if late else EngineError(end.failure)
        return SessionReport(end.counters, end.stop, end.refusal, failure)

    async def phase(self, name: str) -> None:
        """Waits for the node's place."""
        await self._phases.enter(PHASE[name])

    async def end(self) -> tuple[Trajectory, ...]:
        """Asks for everything, and has the gateway forget the session. Raises HttpError: it does not answer."""
        if self._sampled is None:
            self._sampled = await self._gateway.trajectories(self._opened)
            with contextlib.suppress(HttpError):  # it forgets it when the run ends
                await self._gateway.remove(self._opened)
        return self._sampled.trajectories


@dataclasses.dataclass(frozen=True)
class RemoteHarness(HarnessRollout):
    """One session's rollout at a node; fields as its base's, of which the policy and the tokenizer are not there."""

    work: Work | None = None
    phases: Phases | None = None
    gateway: GatewayClient | None = None

    async def line(self, task: Task, sample: int, rules: TrainingRules) -> SessionLine:
        """A session at the trainer's gateway."""
        assert self.work is not None and self.phases is not None and self.gateway is not None
        domain = str(task.metadata.get("domain", ""))
        session = await self.gateway.open(task.id, sample, self.group_size, domain, dataclasses.asdict(rules))
        return RemoteLine(self.gateway, session, self.work, self.phases)

    def text(self, trajectories: Sequence[Trajectory]) -> str:
        """The trainer has the tokenizer, and writes it."""
        return ""


@contextlib.contextmanager
def player(here: Here) -> Iterator[Play]:
    """Opens the environment and yields its play. Raises ConfigError: no config, no agent programs, or no gateway."""
    if here.config is None or not isinstance(environment := here.config.env, Environment):
        raise ConfigError("This player needs --config: an environment whose agent programs it starts.")
    if not here.gateway_url or not here.gateway_token:
        raise ConfigError("This player needs --gateway_url and --gateway_token_file: where its agents find the policy.")
    if not issubclass(own_class(environment.rollout, "config.env.rollout"), (HarnessRollout, RemoteRollout)):
        raise ConfigError(f"config.env.rollout='{environment.rollout}' plays no agent programs.")
    gateway = GatewayClient(here.gateway_url, here.gateway_token)
    with environment.open(Opening(None, (), here.run, logger.info)) as begin:
        yield play_of(environment, begin, gateway)
    here.run(gateway.close(), CLOSE_TIMEOUT_S)


def play_of(environment: Environment, begin: Any, gateway: GatewayClient) -> Play:
    """The play of an open environment's attempts."""
    nothing: Any = None
    warnings: set[str] = set()

    async def play(work: Work, phases: Phases) -> Episode:
        rollout = RemoteHarness(
            begin, nothing, nothing, Plain(), environment, nothing, work.timeout_s, nothing,
            group_size=work.group_size, work=work, phases=phases, gateway=gateway, warnings=warnings,
        )  # fmt: skip
        return await rollout(work.task, work.number)

    return play
