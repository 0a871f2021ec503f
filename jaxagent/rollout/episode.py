"""What every rollout shares: the settings of a run's episodes, and how one attempt is played to its end.

Task + sample index in -> `Episode` out, always: whatever fails becomes a `StopReason` with one line of error, never an
exception, so that a broken tool costs one attempt and not a run. Every wait has the episode's deadline above it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from jaxagent import contract
from jaxagent.config import EnvConfig, SamplingConfig
from jaxagent.config.errors import AttemptLost
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine.requests import SampledTokens
from jaxagent.envs.base import Verdict
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.templates import Template
from jaxagent.types import Episode, Generation, StopReason, Task, TokenKind, Trajectory

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0  # for an environment's close(), which also runs after the episode's own deadline has passed
_UNIT = 2.0**-64


class Failed(Exception):
    """Ends an episode with a stop reason that is a failure, and with a line that says why."""

    def __init__(self, stop_reason: StopReason, message: str):
        super().__init__(message)
        self.stop_reason = stop_reason


class Engine(Protocol):
    """What a rollout needs of an engine: `engine.driver.Driver` is one. Sessions are opaque, times seconds from now."""

    @property
    def open(self) -> Callable[..., Awaitable[Any]]:
        """Begins a sequence: open(task_id, sample, group_size, domain); where there are several, conversation=number.

        All but the task, the sample and the conversation, which key its randomness, only say what is urgent.
        """
        ...

    async def generate(
        self,
        session: Any,
        new_tokens: Sequence[int],
        max_tokens: int,
        sampling: SamplingConfig,
        turn: int,
        deadline_s: float,
        on_tokens: Callable[[SampledTokens], None] | None = None,
        stop_strings: Sequence[str] | None = None,
    ) -> Generation:
        """Samples one turn after appending `new_tokens`; ends at a stop string, None: at one of the engine's own."""
        ...

    def close(self, session: Any) -> None:
        """Ends the sequence, also in the middle of a turn."""


@dataclasses.dataclass(frozen=True)
class SpeakerSettings:
    """How an engine of this run speaks: for the policy, and for roles."""

    engine: Engine
    tokenizer: Tokenizer
    template: Template
    sampling: SamplingConfig
    turn_tokens: int  # of one reply, at most
    context_tokens: int  # of one conversation, at most
    observation_tokens: int  # what follows a reply is cut to so many
    timeout_s: float  # for one reply
    policys_ids: bool = True  # whether its token ids are the policy's: else tokens pass between the two as text


@dataclasses.dataclass(frozen=True)
class ForcedTools:
    """Epsilon tool choice: now and then the first words of a turn are those of a random tool call, not the policy's.

    With probability epsilon a turn begins with one of the environment's `tool_prefixes`, each as likely. These tokens
    enter the sequence as context (kind PROMPT): they were not sampled, have no log-prob and no policy loss; what the
    policy writes after them is sampled, recorded and trained as always. So the log-probs stay those of the distribution
    that was sampled. The choice is keyed by (seed, task, attempt, turn), apart from the engine's keys.
    """

    epsilon: float  # chance per turn; 0 = never
    seed: int  # of the run

    def choose(self, prefixes: Sequence[str], task_id: str, sample: int, turn: int) -> str:
        """The prefix that a turn must begin with; "" = none, the policy is free."""
        if self.epsilon <= 0 or not prefixes:
            return ""
        key = f"forced tool\0{self.seed}\0{task_id}\0{sample}\0{turn}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        if int.from_bytes(digest[:8], "little") * _UNIT >= self.epsilon:
            return ""
        return prefixes[int.from_bytes(digest[8:], "little") * len(prefixes) >> 64]


NEVER = ForcedTools(0.0, 0)


@dataclasses.dataclass(frozen=True)
class EpisodeRollout:
    """A rollout with everything that is the same for all episodes. `await rollout(task, sample)`."""

    playing: ClassVar[type[Playing]]  # of an attempt

    begin: Callable[..., Any]  # task -> a fresh attempt of the environment; with others beside the policy (task, cast)
    policy: Engine
    tokenizer: Tokenizer
    template: Template
    config: EnvConfig  # turn, observation and context budgets, and the episode's deadline
    sampling: SamplingConfig  # the distribution that the policy samples from
    request_timeout_s: float  # longest wait for one generation
    group_size: int = dataclasses.field(default=1, kw_only=True)  # wanted together, for the engine's order
    forced: ForcedTools = dataclasses.field(default=NEVER, kw_only=True)  # turns that begin with a random tool call

    @property
    def voice(self) -> SpeakerSettings:
        """How the policy speaks in conversations that the environment begins."""
        return SpeakerSettings(
            engine=self.policy,
            tokenizer=self.tokenizer,
            template=self.template,
            sampling=self.sampling,
            turn_tokens=self.config.turn_tokens,
            context_tokens=self.config.context_tokens,
            observation_tokens=self.config.observation_tokens,
            timeout_s=self.request_timeout_s,
        )

    async def __call__(self, task: Task, sample: int) -> Episode:
        """Runs one attempt. Only its cancellation and `AttemptLost` pass through, after cleaning up."""
        return await self.playing(self, task, sample).run()


class Playing:
    """The state of one attempt that is played. A subclass says how it is, and what its episode holds.

    `metrics`: names of what it measures.
    """

    def __init__(self, rollout: Any, task: Task, sample: int, *metrics: str) -> None:
        self._rollout, self._task, self._sample = rollout, task, sample
        self._attempt: Any = None  # the environment's, once it is begun
        self._verdict = Verdict(0.0)
        self._metrics = dict.fromkeys(metrics, 0.0)

    async def run(self) -> Episode:
        """Plays the attempt, and closes it, whatever happens."""
        started = time.monotonic()
        try:
            stop_reason, error = await play_with_deadline(self._play, self._rollout.config.episode_timeout_s)
        finally:
            try:
                await self._hang_up()
            finally:  # also where that fails, or is cancelled
                await close(self._attempt, self._task)
        try:
            if self._attempt:
                self._metrics |= contract.by_name(self._attempt, self._attempt.counters, "counters", "counters")
        except Exception as failure:  # environments are other people's code
            if not error:
                stop_reason, error = StopReason.ENV_ERROR, one_line(failure, "")
        if error:
            logger.info("task %s, sample %d: %s: %s", self._task.id, self._sample, stop_reason, error)
        # A failure is no zero of the policy's.
        verdict, fields = Verdict(0.0) if stop_reason.is_failure else self._verdict, self._fields()
        fields["metrics"]["total_s"] = time.monotonic() - started
        return Episode(
            task=self._task,
            sample=self._sample,
            reward=verdict.reward,
            rewards=verdict.components,
            turn_rewards=verdict.turn_rewards,
            stop_reason=stop_reason,
            error=error,
            **fields,
        )

    async def _play(self) -> StopReason:
        """Plays the attempt and has it judged: every step of it may fail."""
        raise NotImplementedError

    async def _hang_up(self) -> None:
        """Ends what the policy and others have open for the attempt."""
        raise NotImplementedError

    def _fields(self) -> dict[str, Any]:
        """Of the episode: trajectories, turns, metrics, text, and what else it has."""
        raise NotImplementedError


async def play_with_deadline(play: Callable[[], Awaitable[StopReason]], timeout_s: float) -> tuple[StopReason, str]:
    """Plays an episode under its deadline: (why it ended, "" or the first reason of a failure).

    Only cancellation of the caller's own task passes through, and `AttemptLost`: whoever called plays again.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await play(), ""
    except AttemptLost:
        raise
    except Failed as failure:
        return failure.stop_reason, str(failure)
    except TimeoutError as failure:
        return StopReason.TIMEOUT, one_line(failure, "the episode's deadline passed")
    except Exception as failure:  # environments are other people's code
        return StopReason.ENV_ERROR, one_line(failure, "")


async def close(attempt: Any, task: Task) -> None:
    """Closes an environment's attempt, if it was begun. What goes wrong is told and changes nothing of the verdict."""
    if attempt is None:
        return
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await attempt.close()
    except Exception as failure:  # a leak is the environment's to report
        logger.warning("task %s: closing the environment failed: %s", task.id, one_line(failure, "timeout"))


@contextlib.contextmanager
def engine_failures() -> Iterator[None]:
    """What generation raises is the engine's failure, and no environment's; cancellation stays what it is."""
    try:
        yield
    except TimeoutError as failure:
        raise Failed(StopReason.TIMEOUT, one_line(failure, "a generation's deadline passed")) from failure
    except Exception as failure:
        raise Failed(StopReason.ENGINE_ERROR, one_line(failure, "a generation's deadline passed")) from failure


async def sample_turn(
    voice: SpeakerSettings, session: Any, conversation: Conversation, budget: int, stop_strings: Sequence[str]
) -> Generation:
    """The next turn of a conversation, of at most `budget` tokens, as an engine of this run samples it.

    Raises ValueError where a log-prob is not finite; also whatever the engine raises.
    """
    generation = await voice.engine.generate(
        session,
        conversation.pending,
        budget,
        voice.sampling,
        conversation.turns,
        voice.timeout_s,
        stop_strings=stop_strings,
    )
    if not np.isfinite(generation.logprobs).all():
        raise ValueError("the log-prob of a sampled token is not finite: are the weights?")
    return generation


def add_engine_times(metrics: dict[str, float], generation: Generation) -> None:
    """Adds where a turn's time went to an episode's metrics, and whether its last token ran over a stop string."""
    for name in ("queue_s", "prefill_s", "decode_s", "cached_tokens"):
        metrics[name] += getattr(generation, name)
    metrics["overshoots"] += generation.overshoot_bytes > 0


async def verdict_of(attempt: Any, turns: int, *arguments: Any) -> Verdict:
    """What an attempt's `verify` says of an episode of so many turns, with Python's floats (NumPy's cannot be logged).

    Raises ConfigError: no Verdict of finite numbers, or turn rewards for another number of turns; names the class.
    """
    verdict = await contract.awaited(attempt, "verify", *arguments, expected=Verdict)
    if not isinstance(paid := verdict.turn_rewards, (tuple, list)) or len(paid) not in (0, turns):
        came = f"{len(paid)} turn rewards" if hasattr(paid, "__len__") else f"turn_rewards {contract.described(paid)}"
        raise contract.wrong(
            attempt, f"{came} for {turns} turns", "a tuple of one for each turn, or of none,", "verify"
        )
    return Verdict(
        contract.number(attempt, verdict.reward, "a reward", "verify"),
        contract.by_name(attempt, verdict.components, "components", "verify"),
        tuple(contract.number(attempt, pay, f"turn_rewards[{turn}]", "verify") for turn, pay in enumerate(paid)),
    )


def token_counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """An episode's tokens over all of its trajectories: sampled, observed, and all of them."""
    return {
        "action_tokens": float(sum(int(t.action_mask.sum()) for t in trajectories)),
        "observation_tokens": float(sum(int((t.kinds >= TokenKind.OBSERVATION).sum()) for t in trajectories)),
        "trajectory_tokens": float(sum(map(len, trajectories))),
    }


@contextlib.contextmanager
def seconds(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds it was open to `metrics[name]`."""
    started = time.monotonic()
    try:
        yield
    finally:
        metrics[name] += time.monotonic() - started


def one_line(failure: BaseException | None, empty: str) -> str:
    """One line of an exception; asyncio's own timeouts carry no text."""
    text = " ".join(str(failure).split()).encode(errors="replace").decode()  # a log is UTF-8, a file's name may not be
    return f"{type(failure).__name__}: {text}" if text else empty or type(failure).__name__
