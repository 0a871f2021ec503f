"""The cast of one episode: conversations with the policy and with every role of `config.roles`; see envs/cast.py.

A conversation that an engine of this run plays is a `Conversation` like the policy's own: text is encoded once, sampled
tokens stay as they are. What a role fails with is remembered: an environment that swallows the exception cannot make an
honest reward of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import RoleConfig
from jaxagent.envs.base import Message, Observation
from jaxagent.envs.cast import POLICY, NoRoom, RoleError, RoleReply, Spliced, Tokens
from jaxagent.roles.base import Speaker
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.episode import Failed, Playing, SpeakerSettings, add_engine_times, one_line, sample_turn
from jaxagent.rollout.text_talk import TextTalk, misuse
from jaxagent.types import Generation, StopReason, Task, TokenKind, Trajectory, UntrainedConversation

NO_ROOM = "its conversation had no room for a reply, and cannot go on"
TIMES = ("engine_s", "open_s", "queue_s", "prefill_s", "decode_s", "cached_tokens", "overshoots")  # of the policy


SpeakerAt = Callable[[Task, int, int], Speaker]


@dataclasses.dataclass(frozen=True)
class Roles:
    """Who plays in the episodes of a run, beside the policy."""

    roles: Mapping[str, RoleConfig]  # `config.roles`
    voices: Mapping[str, SpeakerSettings | SpeakerAt]  # an engine of this run, or what begins a speaker's conversation


class EpisodeCast:
    """Everybody who plays in one episode; implements `envs.cast.Cast`.

    `first`: number of the first conversation; lower ones are the rollout's own.
    """

    def __init__(
        self, company: Roles, policy: SpeakerSettings, task: Task, sample: int, group_size: int = 1, first: int = 0
    ) -> None:
        self.names: Sequence[str] = tuple(company.roles)
        self.metrics: dict[str, float] = {}  # per role: replies, seconds, tokens, cost
        self.policy_metrics: dict[str, float] = dict.fromkeys(TIMES, 0.0)
        self.failure: Failed | None = None  # the first
        self._company, self._policy, self._task, self._sample = company, policy, task, sample
        self._group_size, self._next, self._first, self.closed = group_size, first, first, False
        self._talks: list[EngineTalk | TextTalk] = []

    def talk(self, role: str, trained: bool = True) -> EngineTalk | TextTalk:
        """Begins a conversation with a role; `envs.cast.Cast.talk` says with whom."""
        if role != POLICY and role not in self._company.voices:
            raise KeyError(f"there is no role '{role}' in config.roles, which has {list(self.names)}")
        if self.closed:
            raise self.misused(role, "the episode is over, and nobody speaks any more")
        if role == POLICY and trained and self._first:
            raise self.misused(
                role, "this rollout trains its own conversation and no other: talk(..., trained=False), or rollout.play"
            )
        number, self._next = self._next, self._next + 1
        voice = self._policy if role == POLICY else self._company.voices[role]
        after = sum(talk.trained for talk in self._talks)
        if isinstance(voice, SpeakerSettings):
            talk = EngineTalk(self, role, voice, number, trained and role == POLICY, after)
        else:
            try:
                speaker = voice(self._task, self._sample, number)
            except Exception as failure:  # a task that the role cannot read
                raise self.failed(role, failure) from failure
            talk = TextTalk(self, role, speaker, after)
        self._talks.append(talk)
        return talk

    def tokens(self, text: str) -> Tokens:
        """A text in the policy's tokenizer."""
        return Tokens(tuple(self._policy.tokenizer.encode(self._policy.tokenizer.normalize(text))), text)

    def decoded(self, ids: Sequence[int]) -> Tokens:
        """Ids of the policy's tokenizer with their text."""
        return Tokens(tuple(ids), self._policy.tokenizer.decode(ids))

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Those of the policy's trained conversations in which it has replied, in the order in which they began."""
        trajectories = (talk.conversation.trajectory() for talk in self._engine_talks if talk.trained)
        return tuple(trajectory for trajectory in trajectories if trajectory.action_mask.any())

    @property
    def turns(self) -> int:
        """Replies of the policy in trained conversations."""
        return sum(talk.conversation.turns for talk in self._engine_talks if talk.trained)

    @property
    def untrained_conversations(self) -> tuple[UntrainedConversation, ...]:
        """All other conversations."""
        return tuple(talk.as_untrained() for talk in self._talks if not talk.trained)

    @property
    def text(self) -> str:
        """What people read: the policy's trained conversations, one after the other."""
        transcripts = (talk.conversation.transcript for talk in self._engine_talks if talk.trained)
        return "\n\n".join(transcript.prompt + transcript.response for transcript in transcripts)

    def close(self) -> None:
        """Ends all conversations: nothing that is said from now on belongs to the episode."""
        self.closed = True
        for talk in self._engine_talks:
            talk.close()

    @property
    def _engine_talks(self) -> list[EngineTalk]:
        return [talk for talk in self._talks if isinstance(talk, EngineTalk)]

    def price(self, role: str, prompt_tokens: int, reply_tokens: int, seconds: float) -> float | None:
        """Counts a reply of a role other than the policy; returns what it costs."""
        cost = self._company.roles[role].cost(prompt_tokens, reply_tokens)
        counts = {"replies": 1, "s": seconds, "prompt_tokens": prompt_tokens, "reply_tokens": reply_tokens}
        for name, value in (counts if cost is None else counts | {"cost": cost}).items():
            self.metrics[f"{role}_{name}"] = self.metrics.get(f"{role}_{name}", 0.0) + value
        return cost

    def failed(self, role: str, cause: Exception) -> Exception:
        """Remembers a failure, and returns what `say` raises.

        No room in a role's context is counted and not remembered, once the policy has spoken: it may write as much as
        it likes, and an episode that is left out of its group for that would be one that it has chosen to leave.
        """
        timeout = isinstance(cause, TimeoutError)
        line = f"{role}: {one_line(cause, 'no reply in its time')}"
        # Of a rollout's own conversation it is not known here whether the policy has said something.
        spoke = self._first > 0 or any(talk.role == POLICY and talk.begun for talk in self._talks)
        if isinstance(cause, NoRoom) and spoke:
            self.metrics[f"{role}_no_room"] = self.metrics.get(f"{role}_no_room", 0.0) + 1.0
            return NoRoom(line)
        if role == POLICY:
            reason = StopReason.TIMEOUT if timeout else StopReason.ENGINE_ERROR
        else:
            reason = StopReason.TIMEOUT if timeout else StopReason.ENV_ERROR
        failure = Failed(reason, line)
        self.failure = self.failure or failure
        return failure if role == POLICY else TimeoutError(line) if timeout else RoleError(line)

    def misused(self, role: str, mistake: str) -> ValueError:
        """Remembers what the environment did wrong, and returns the exception that `say` raises."""
        mistake = f"{role}: {mistake}"
        self.failure = self.failure or Failed(StopReason.ENV_ERROR, mistake)
        return ValueError(mistake)

    @contextlib.contextmanager
    def question(
        self,
        talk: EngineTalk | TextTalk,
        messages: Sequence[Message | Spliced],
        stop_strings: Sequence[str],
        max_tokens: int | None,
    ) -> Iterator[None]:
        """One question at a time in a conversation; one that breaks off is over. Raises ValueError for a misuse."""
        mistake = misuse(messages, talk.begun, self._policy.tokenizer.vocab_size, stop_strings, max_tokens)
        if self.closed:
            mistake = "the episode is over, and nobody speaks any more"
        elif talk.state:
            mistake = talk.state
        if mistake:
            raise self.misused(talk.role, mistake)
        talk.state = "it has not answered yet, and cannot be asked two things at once"
        try:
            yield
        except BaseException:
            talk.state = "its conversation broke off, and cannot go on"
            raise
        talk.state = talk.state if talk.state == NO_ROOM else ""

    async def open(self, voice: SpeakerSettings, number: int) -> Any:
        """A sequence of an engine for conversation `number` of this episode."""
        domain = str(self._task.metadata.get("domain", ""))
        return await voice.engine.open(self._task.id, self._sample, self._group_size, domain, conversation=number)

    def limits(self, role: str) -> RoleConfig:
        """The settings of a role other than the policy."""
        return self._company.roles[role]


ALONE = Roles({}, {})


class PlayedWithCast(Playing):
    """An attempt beside which others may play."""

    def __init__(self, rollout: Any, task: Task, sample: int, *metrics: str, first: int) -> None:
        """`first`: number of the first conversation that the environment begins."""
        super().__init__(rollout, task, sample, *metrics)
        self._voice = rollout.voice
        self._cast = EpisodeCast(rollout.company, self._voice, task, sample, rollout.group_size, first)

    async def _hang_up(self) -> None:
        self._cast.close()

    def _check(self) -> None:
        """An attempt may have gone on without a role that failed; nothing that follows is the policy's doing."""
        if self._cast.failure is not None:
            raise self._cast.failure


class EngineTalk:
    """A conversation that an engine of this run plays: one trajectory."""

    def __init__(
        self, cast: EpisodeCast, role: str, voice: SpeakerSettings, number: int, trained: bool, after: int
    ) -> None:
        self.trained = trained
        self.conversation = Conversation(voice.tokenizer, voice.template, voice.observation_tokens)
        self.role, self.state = role, ""  # why it cannot be asked now; "" = it can
        self._cast, self._voice, self._number, self._after = cast, voice, number, after
        self._session: Any = None
        self._shown: list[str] = []

    async def say(
        self, *messages: Message | Spliced, stop_strings: Sequence[str] = (), max_tokens: int | None = None
    ) -> RoleReply:
        """Asks one question and returns the reply; `envs.cast.Talk.say` says what may be asked."""
        with self._cast.question(self, messages, stop_strings, max_tokens):
            return await self._say(messages, stop_strings, max_tokens)

    @property
    def begun(self) -> bool:
        """Whether it has a reply."""
        return self.conversation.turns > 0

    async def _say(
        self, messages: Sequence[Message | Spliced], stop_strings: Sequence[str], max_tokens: int | None
    ) -> RoleReply:
        voice, conversation, began = self._voice, self.conversation, time.monotonic()
        self._show(messages)
        room = voice.context_tokens - len(conversation)
        prompt_tokens = len(conversation)
        if room <= 0:
            if self.role == POLICY:
                self.state = NO_ROOM
                return RoleReply("", "length", Tokens((), ""), prompt_tokens, 0, 0.0, None)
            why = f"its conversation of {prompt_tokens} tokens leaves no room in context_tokens={voice.context_tokens}"
            raise self._cast.failed(self.role, NoRoom(why))
        budget = min(voice.turn_tokens, room, voice.turn_tokens if max_tokens is None else max_tokens)
        try:
            if self._session is None:
                self._session = await self._cast.open(voice, self._number)
            generation = await sample_turn(voice, self._session, conversation, budget, stop_strings)
        except Exception as failure:
            raise self._cast.failed(self.role, failure) from failure
        if self._cast.closed:  # it has answered, but too late: the episode is judged
            raise RoleError(f"{self.role}: the episode is over")
        text = conversation.add_action(generation)
        seconds = time.monotonic() - began
        return self._reply(text, generation, prompt_tokens, seconds)

    def _show(self, messages: Sequence[Message | Spliced]) -> None:
        self._shown.append("\n".join(message.content for message in messages))
        if not self.begun:
            own = self._voice.policys_ids
            self.conversation.add_prompt(messages if own else [Message(m.role, m.content) for m in messages])
            return
        (message,) = messages
        self.conversation.add_observation(Observation(((message.content, TokenKind.OBSERVATION),), message.role))

    def _reply(self, text: str, generation: Generation, prompt_tokens: int, seconds: float) -> RoleReply:
        cost = None
        if self.role == POLICY:
            add_engine_times(self._cast.policy_metrics, generation)
            self._cast.policy_metrics["engine_s"] += seconds
        else:
            cost = self._cast.price(self.role, prompt_tokens, len(generation.tokens), seconds)
        ids = generation.tokens.tolist()
        if generation.finish == "eos" and ids and ids[-1] in self._voice.tokenizer.eos_ids:
            ids = ids[:-1]
        tokens = Tokens(tuple(ids), self._voice.tokenizer.decode(ids)) if self._voice.policys_ids else None
        return RoleReply(text, generation.finish, tokens, prompt_tokens, len(generation.tokens), seconds, cost)

    def as_untrained(self) -> UntrainedConversation:
        """The conversation, for people and for checks."""
        replies = [action for action, _ in self.conversation.transcript.turns]
        turns = zip(self._shown, [*replies, ""] if len(replies) < len(self._shown) else replies, strict=True)
        return UntrainedConversation(self.role, tuple(turns), self.conversation.trajectory(), self._after)

    def close(self) -> None:
        """Ends the sequence; twice is harmless."""
        if self._session is not None:
            self._voice.engine.close(self._session)
            self._session = None
