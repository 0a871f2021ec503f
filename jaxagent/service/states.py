"""The life of a session of the rollout service, and when a group of sessions is enough. Pure: no clock, no store.

    REGISTERED -> INITIALIZING -> READY -> RUNNING -> POST_RUN -> BUILDING -> EVALUATING -> an end

A session is one attempt at one task. A node takes it (INITIALIZING), reports the phases as they come, and sends the
episode, which ends it: COMPLETED, ERROR or TIMEOUT. CANCELLED is the end of one that nobody wants any more. A session
whose node is lost goes back to REGISTERED, for another node; the loss number `max_losses` ends it. An end is final:
whatever comes afterwards is told that it is a duplicate. Names, order and the rule of acceptance are those of NVIDIA's
Polar (NVIDIA-NeMo/ProRL-Agent-Server).
"""

from __future__ import annotations

import dataclasses
import enum
import math

from jaxagent.types import StopReason

SPARE_SESSIONS = 2  # usable sessions that an early stop waits for beyond those that acceptance needs


class State(enum.StrEnum):
    """Where a session stands, in the order in which it goes."""

    REGISTERED = "REGISTERED"  # waits for a node
    INITIALIZING = "INITIALIZING"  # a node has it and prepares its sandbox; its time begins
    READY = "READY"  # waits for a place to run
    RUNNING = "RUNNING"  # the agent works; only this counts for `agent_timeout`
    POST_RUN = "POST_RUN"  # the agent has ended
    BUILDING = "BUILDING"  # its trajectories are built
    EVALUATING = "EVALUATING"  # the verifier judges
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Whether the session is over for good."""
        return self in ENDS


ENDS = frozenset({State.COMPLETED, State.ERROR, State.TIMEOUT, State.CANCELLED})
ORDER = tuple(State)
HELD = tuple(state for state in ORDER if state not in ENDS and state is not State.REGISTERED)  # by a node


@dataclasses.dataclass(frozen=True)
class RolloutSession:
    """One attempt at a task, as the store keeps it. Times are seconds since 1970; 0 = not set."""

    task_id: str
    sample: int  # its place in its group, from 0
    state: State = State.REGISTERED
    attempt: int = 0  # how often a node took it
    losses: int = 0  # how often its node was lost with it
    node: str = ""  # who has it
    process: str = ""  # which process of that node
    lease: float = 0.0  # when it goes to another node, unless its node is heard
    deadline: float = 0.0  # of the whole attempt
    run_deadline: float = 0.0  # of RUNNING
    reason: str = ""  # why it ended so, in one line, unless it completed
    digest: str = ""  # sha256 of the episode's bytes
    ended_attempt: int = 0  # which attempt's result it is
    stop_reason: str = ""  # the episode's
    reward: float | None = None  # the episode's; None where it says nothing of the policy
    trainable: int = 0  # tokens that the policy sampled
    ended: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether it counts for the acceptance of its group."""
        return self.state is State.COMPLETED and self.trainable > 0


@dataclasses.dataclass(frozen=True)
class ServiceRules:
    """The settings of a service."""

    lease_s: float = 30.0  # a node that is not heard for so long has lost its sessions
    max_losses: int = 3  # nodes that may be lost with a session before it ends as an ERROR
    max_waiting: int = 10_000  # sessions that may wait for a node
    keep_s: float = 7 * 24 * 3600.0  # how long a task is kept after its end, and how long one may take to end
    callback_s: float = 3600.0  # how long a callback is tried


@dataclasses.dataclass(frozen=True)
class EpisodeSummary:
    """What the service needs to know of an episode."""

    stop_reason: StopReason
    reward: float
    trainable: int
    error: str
    digest: str

    @property
    def state(self) -> State:
        """How a session with this episode ends. The agent's own slowness (TIME_LIMIT) completes it."""
        if not self.stop_reason.is_failure:
            return State.COMPLETED
        return State.TIMEOUT if self.stop_reason is StopReason.TIMEOUT else State.ERROR


def take(
    session: RolloutSession, node: str, process: str, now: float, lease_s: float, timeout_s: float
) -> RolloutSession:
    """A waiting session in the hands of a node: its next attempt begins, and so does its time."""
    assert session.state is State.REGISTERED, session
    return dataclasses.replace(
        session,
        state=State.INITIALIZING,
        attempt=session.attempt + 1,
        node=node,
        process=process,
        lease=now + lease_s,
        deadline=now + timeout_s,
        run_deadline=0.0,
    )


def move(session: RolloutSession, state: State, now: float, lease_s: float, agent_timeout_s: float) -> RolloutSession:
    """A held session of which its node is heard: the lease begins anew; a phase that lies behind changes nothing."""
    assert session.state in HELD, session
    new = dataclasses.replace(session, lease=now + lease_s)
    if state in HELD and ORDER.index(state) > ORDER.index(session.state):
        run_deadline = now + agent_timeout_s if state is State.RUNNING else 0.0
        new = dataclasses.replace(new, state=state, run_deadline=run_deadline)
    return new


def lose(session: RolloutSession, why: str, max_losses: int, now: float) -> RolloutSession:
    """A held session whose node is gone: it waits for another, or ends with an ERROR after `max_losses` of them."""
    assert session.state in HELD, session
    losses = session.losses + 1
    if losses >= max_losses:
        reason = f"its node was lost {losses} times, the last time: {why}"
        return end(dataclasses.replace(session, losses=losses), State.ERROR, reason, now)
    return dataclasses.replace(give_back(session), losses=losses)


def give_back(session: RolloutSession) -> RolloutSession:
    """A held session that its node hands back, of its own will: it waits for another."""
    assert session.state in HELD, session
    return dataclasses.replace(
        session, state=State.REGISTERED, node="", process="", lease=0.0, deadline=0.0, run_deadline=0.0
    )


def end(session: RolloutSession, state: State, reason: str, now: float) -> RolloutSession:
    """A session that ends without an episode."""
    assert state.is_final and not session.state.is_final, (session, state)
    return dataclasses.replace(session, state=state, reason=reason, ended=now)


def finish(session: RolloutSession, attempt: int, result: EpisodeSummary, now: float) -> RolloutSession:
    """A session that ends with the episode of one of its attempts: the first that arrives, whichever it is."""
    assert not session.state.is_final and 1 <= attempt <= session.attempt, (session, attempt)
    return dataclasses.replace(
        session,
        state=result.state,
        reason=f"{result.stop_reason}: {result.error}" if result.stop_reason.is_failure else "",
        ended=now,
        ended_attempt=attempt,
        digest=result.digest,
        stop_reason=str(result.stop_reason),
        reward=None if result.stop_reason.is_failure else result.reward,
        trainable=result.trainable,
    )


def needed(total: int, fraction: float) -> int:
    """Usable sessions from which a group of `total` is accepted: ceil(total * fraction)."""
    return math.ceil(total * fraction - 1e-9)  # 10 * 0.7 is 7.000000000000001


def early_stop(total: int, fraction: float) -> int:
    """Usable sessions from which the rest of the group is cancelled; 0 = it never is."""
    return min(total, needed(total, fraction) + SPARE_SESSIONS) if 0 < fraction < 1 else 0
