"""The harness rollout: an agent program in a sandbox, wired to a session of the gateway, into an `Episode`.

    attempt.start()             a sandbox, within init_s; the program's files; a port inside that leads to the gateway
    the program runs            within run_s; then every process of the sandbox is killed
    attempt.verify(ended)       within verify_s
    attempt.close()             always; the session ends and its token is worth nothing

The policy speaks in the session, so its trajectories hold the tokens that it saw and sampled. How it ends:

    ANSWER                   the program ended by itself, whatever its exit status
    TIME_LIMIT               it was killed after run_s
    TOKEN_LIMIT, TURN_LIMIT  the session refused its last request: no room, or too many requests
    ENV_ERROR                it could not start, or failed without having asked anything; start or verify failed
    ENGINE_ERROR             the last thing that it heard was that generation had failed, or nobody listened any more
    TIMEOUT                  start, verify or the whole episode took too long
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.agents.base import Agent, Where
from jaxagent.config import ConfigError
from jaxagent.envs.agent_attempt import Place
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.server import Gateway
from jaxagent.gateway.session import COUNTERS, Session, SessionLimits
from jaxagent.gateway.trained import TrainingRules
from jaxagent.rollout.episode import (
    CLOSE_TIMEOUT_S,
    EpisodeRollout,
    Failed,
    Playing,
    one_line,
    seconds,
    token_counts,
    verdict_of,
)
from jaxagent.rollout.templates import CHAT_DATE, Plain
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox.base import CommandResult, SandboxError, SandboxLost
from jaxagent.types import StopReason, Task, Trajectory

logger = logging.getLogger(__name__)

PORT = 29_117  # inside; the same in every episode, and no server's usual one
OUTPUT_BYTES = 64 * 1024  # kept of what the program prints
TAIL_CHARS = 500  # of it in the error of a program that fails
LISTEN_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0  # to kill every process of a sandbox; then the sandbox is closed
NOT_STARTED = (126, 127)  # exit statuses
KILLED = 137
MODEL = "policy"  # the name that programs ask for
COUNTED = tuple(name for name in COUNTERS if name != "sampled_tokens")  # of the session
WARNINGS = {  # counter -> what a run is told when it first sees it
    "retokenised_turns": "a program sent an answer back with other words and without our call ids: its text was "
    "tokenised again, in a trajectory of its own",
    "foreign_conversations": "somebody asked the gateway what the agent program did not ask: it is not trained",
}


@dataclasses.dataclass(frozen=True)
class SessionRollout(EpisodeRollout):
    """A rollout whose policy speaks in sessions of a gateway, `shared`, which the run has from its beginning."""

    shared: Any

    @functools.cached_property
    def renderer(self) -> Renderer:
        """Conversations -> tokens, with the run's chat template."""
        if isinstance(self.template, Plain):
            return Renderer(self.tokenizer, "", CHAT_DATE)
        return Renderer(self.tokenizer, self.tokenizer.chat_template, CHAT_DATE, self.tokenizer.tool_template)

    def session(self, task_id: str, sample: int, group_size: int, domain: str, rules: TrainingRules) -> Session:
        """A session for one attempt, whatever its program asks to be sampled from. `rules`: what of it is trained."""
        config = self.config
        return Session(
            self.policy,
            self.renderer,
            self.tokenizer,
            SessionLimits(config.turn_tokens, config.context_tokens, config.most_turns),
            self.sampling,
            task_id,
            sample,
            group_size,
            domain,
            self.request_timeout_s,
            rules=rules,
        )

    def text(self, trajectories: Sequence[Trajectory]) -> str:
        """What people read of an episode."""
        return "\n\n".join(self.tokenizer.decode(t.tokens.tolist()) for t in trajectories)


@dataclasses.dataclass(frozen=True)
class SessionReport:
    """What is known of what a session was asked, by the names of `Session`; of one that is far away: when it ended."""

    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stop: StopReason | None = None
    refusal: str = ""
    failure: Exception | None = None


class SessionLine:
    """An attempt's session at the run's own gateway. One at another host is a subclass (`service/agents.py`).

    Attributes:
      token: lets the program in.
      run_s: the program's time, where that is less than the attempt's.
    """

    run_s = math.inf

    def __init__(self, gateway: Gateway, session: Session):
        self._gateway, self._session = gateway, session
        self.token = gateway.add(session)

    @property
    def url(self) -> str:
        """Of the gateway; "" while it does not listen."""
        return self._gateway.url

    @property
    def state(self) -> Session | SessionReport:
        """What was asked so far."""
        return self._session

    async def phase(self, name: str) -> None:
        """Is called in front of the program ("run") and of its judgement ("verify"); may wait for a place."""

    async def end(self) -> tuple[Trajectory, ...]:
        """Closes the session to the program, and returns its trajectories. May be called again."""
        self._gateway.remove(self.token)
        return self._session.close()


class _ProgramEpisode(Playing):
    def __init__(self, rollout: HarnessRollout, task: Task, sample: int):
        super().__init__(rollout, task, sample, "init_s", "run_s", "verify_s", "exit_status")
        self._line: SessionLine | None = None
        self._trajectories: tuple[Trajectory, ...] = ()

    async def _play(self) -> StopReason:
        self._attempt = attempt = self._rollout.begin(self._task)
        with seconds(self._metrics, "init_s"):
            async with _deadline(attempt.init_s, "the agent program's place was not ready"):
                place = await attempt.start()
                agent = attempt.agent
                rules = TrainingRules(agent.side_requests, agent.foreign, place.instruction.strip(), agent.spawns)
                self._line = line = await self._rollout.line(self._task, self._sample, rules)
                where = await self._wire(place, attempt.agent, line)
        await line.phase("run")
        with seconds(self._metrics, "run_s"):
            result = await _run(place, attempt.agent, where, min(attempt.run_s, line.run_s))
        await self._end_session()  # the engine has no more to do with it: others want the room
        stop_reason = self._stop_reason_of(result, line)
        if stop_reason is StopReason.ANSWER:
            stop_reason = getattr(attempt, "stop_reason", stop_reason)
        await line.phase("verify")
        with seconds(self._metrics, "verify_s"):
            async with _deadline(attempt.verify_s, "the verifier did not end"):
                try:
                    self._verdict = await verdict_of(attempt, self._turns, stop_reason)
                except Exception as failure:
                    if isinstance(failure, SandboxLost) or not line.state.refusal:
                        raise
                    message = f"{_refused(line)}{one_line(failure, 'it took too long')}"
                    raise Failed(StopReason.ENV_ERROR, message) from failure
        return stop_reason

    async def _wire(self, place: Place, agent: Agent, line: SessionLine) -> Where:
        """Gives the program its way to its session, and its files."""
        config = self._rollout.config
        outside = urllib.parse.urlsplit(line.url)
        port = await place.sandbox.open_port(PORT, (outside.hostname or "", outside.port or 0))
        where = Where(
            url=f"http://127.0.0.1:{port}",
            token=line.token,
            model=MODEL,
            instruction=place.instruction,
            directory=place.directory,
            home=place.home,
            context_tokens=config.context_tokens,
            turn_tokens=config.turn_tokens,
        )
        for path, data in agent.files(where).items():
            await place.sandbox.write(path, data, 0o600)
        return where

    def _stop_reason_of(self, result: CommandResult, line: SessionLine) -> StopReason:
        """How the program ended. Raises Failed where that says nothing about the policy."""
        status, session = result.exit_code, line.state
        self._metrics["exit_status"] = float(status)
        requests, sampled = session.counters["requests"], session.counters["sampled_tokens"]
        printed = " ".join(result.output.decode("utf-8", "replace").split())[-TAIL_CHARS:]
        message = f"{_refused(line)}exit status {status}; it printed: {printed or 'nothing'}"
        if result.timed_out and sampled and session.failure is None and line.url:
            return StopReason.TIME_LIMIT
        if result.timed_out and not sampled:
            raise Failed(StopReason.TIMEOUT, f"the agent program's time was over before it had an answer; {message}")
        if status in NOT_STARTED and not requests:
            raise Failed(StopReason.ENV_ERROR, f"the agent program does not start: {message}")
        if session.failure is not None:
            reason = StopReason.TIMEOUT if isinstance(session.failure, TimeoutError) else StopReason.ENGINE_ERROR
            raise Failed(reason, one_line(session.failure, "a generation's deadline passed"))
        if not line.url:
            raise Failed(StopReason.ENGINE_ERROR, f"the gateway no longer listens; agent program: {message}")
        if session.stop is StopReason.TOKEN_LIMIT and not sampled:
            limit = self._rollout.config.context_tokens
            raise Failed(StopReason.ENV_ERROR, f"the agent program's first request is over env.context_tokens={limit}")
        if not sampled:
            raise Failed(StopReason.ENV_ERROR, f"the agent program ended without an answer: {message}")
        return session.stop or StopReason.ANSWER

    async def _end_session(self) -> None:
        """Lets nobody in any more and keeps what the session has; more than once is harmless."""
        if self._line is not None:
            self._trajectories = await self._line.end()

    async def _hang_up(self) -> None:
        """Ends the session, whatever happened. One at a gateway that does not answer is lost with what it sampled."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._end_session()
        except Exception as failure:
            logger.warning("task %s: its session did not end: %s", self._task.id, one_line(failure, "timeout"))

    @property
    def _turns(self) -> int:
        """As `Episode.turn_rewards` counts them: trajectory after trajectory."""
        return sum(int(trajectory.turns.max(initial=-1)) + 1 for trajectory in self._trajectories)

    def _fields(self) -> dict[str, Any]:
        counters, trajectories = self._line.state.counters if self._line is not None else {}, self._trajectories
        for name, message in WARNINGS.items():
            if counters.get(name) and name not in self._rollout.warnings:
                self._rollout.warnings.add(name)
                logger.warning("task %s: %s (counted as %s, told once).", self._task.id, message, name)
        values = {name: float(counters.get(name, 0.0)) for name in COUNTED}
        counts = {"trajectories": float(len(trajectories)), **token_counts(trajectories)}
        return dict(
            trajectories=trajectories,
            turns=self._turns,
            metrics={**values, **self._metrics, **counts},
            text=self._rollout.text(trajectories),
        )


@dataclasses.dataclass(frozen=True)
class HarnessRollout(SessionRollout):
    """The rollout of agent programs. `shared` is the run's gateway, to which episodes add their sessions.

    Attributes:
      warnings: of what the run has been told; see WARNINGS.
    """

    playing = _ProgramEpisode
    warnings: set[str] = dataclasses.field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        """Raises ConfigError for what an agent program cannot be made to do."""
        if self.forced.epsilon > 0:
            raise ConfigError("rl.tool_epsilon forces calls of an environment's tools; an agent program has its own.")

    @staticmethod
    @contextlib.contextmanager
    def open_shared(workers: Workers, note: Callable[[str], None]) -> Iterator[Gateway]:
        """The run's gateway, on the loop of the episodes, from the run's beginning to its end."""
        gateway = Gateway(MODEL)
        workers.run(gateway.listen(), LISTEN_TIMEOUT_S)
        note(f"gateway: {gateway.url}")
        try:
            yield gateway
        finally:
            workers.run(gateway.stop(), LISTEN_TIMEOUT_S)

    async def line(self, task: Task, sample: int, rules: TrainingRules) -> SessionLine:
        """A session for one attempt. `rules`: which of its conversations are trained."""
        domain = str(task.metadata.get("domain", ""))
        return SessionLine(self.shared, self.session(task.id, sample, self.group_size, domain, rules))


def _refused(line: SessionLine) -> str:
    return f"the gateway refused its last request: {line.state.refusal}; " if line.state.refusal else ""


async def _run(place: Place, agent: Agent, where: Where, run_s: float) -> CommandResult:
    """Runs the program and leaves none of its processes behind, if need be by ending the whole sandbox."""
    began = time.monotonic()
    try:
        result = await place.sandbox.execute(agent.argv(where), run_s, OUTPUT_BYTES, agent.env(where), place.directory)
    except SandboxError:
        if time.monotonic() - began < run_s:
            raise
        await place.sandbox.close()  # it did not even end at its deadline
        return CommandResult(b"", KILLED, timed_out=True)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await place.sandbox.stop_processes()
    except (SandboxError, TimeoutError) as failure:
        logger.info("a sandbox whose processes do not stop is closed: %s", one_line(failure, "timeout"))
        await place.sandbox.close()
    return result


@contextlib.asynccontextmanager
async def _deadline(timeout_s: float, message: str) -> AsyncIterator[None]:
    """Raises Failed when it takes longer; a TimeoutError from within passes as it is."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise Failed(StopReason.TIMEOUT, f"{message} after {timeout_s:g} s") from None
