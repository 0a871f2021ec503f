"""A session: an agent program's requests, answered by the policy, as trajectories of exactly the policy's tokens.

asks in -> answers out, and at the end a `types.Trajectory` for every conversation the program held. The rules (what is
continued, what begins anew, what is joined, given again or cancelled) stand in docs/gateway.md, each with its test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine.requests import EngineError
from jaxagent.gateway import prompts
from jaxagent.gateway.chat import Answer, Ask, BadRequest
from jaxagent.gateway.reading import Begun, Event, Reading
from jaxagent.gateway.recall import KnownRequest, Recall
from jaxagent.gateway.renderer import Context, Renderer
from jaxagent.gateway.sampler import Pending, Sampler
from jaxagent.gateway.threads import (
    End,
    RequestDigests,
    Thread,
    TrajectoryPrefix,
    conversation_key,
    ends_here,
    request_digests,
)
from jaxagent.gateway.trained import Lines, TrainingRules
from jaxagent.rollout.episode import Engine
from jaxagent.tools import ToolParser
from jaxagent.types import Generation, StopReason, TokenKind, Trajectory

NO_ROOM = "context_length_exceeded"
LINGER_S = 8.0  # from the last client's leaving to the end of its generation: most come back within so long
KEPT_TURNS = 16  # of a session: answers that can be given again
LARGE_TEXT = 50_000  # characters: what is longer is rendered and tokenised in a thread, while others are served
TAKING_S = 0.25  # from an answer to its client's having taken it; after that the client counts as lost
COUNTERS = ("requests", "forks", "side_requests", "foreign_conversations", "rewritten_calls", "retokenised_turns")
COUNTERS += ("retries_joined", "replayed", "cancelled", "malformed_calls", "ignored_fields")
COUNTERS += ("sampled_tokens", "cached_tokens", "queue_s", "prefill_s", "decode_s")


@dataclasses.dataclass(frozen=True)
class SessionLimits:
    """What a session may use."""

    turn_tokens: int  # sampled for one request
    context_tokens: int  # of one trajectory
    requests: int  # that sample


Limits = SessionLimits  # as programs of yours may import it


class Session:
    """One attempt's conversations. All calls come from one event loop.

    Args:
      policy, renderer, tokenizer: the model.
      limits: what it may use.
      sampling: of every request; None: each request's own, as a server's clients expect.
      task_id, sample, group_size, domain: of the attempt, for the engine's randomness and order.
      request_timeout_s: longest wait for one generation.
      patient: waits while the engine's queue is full; else such a request is refused with a QueueFullError.
      rules: which conversations are trained.

    Attributes:
      counters: see COUNTERS.
      stop: why the program's last request was refused: TOKEN_LIMIT (no room), TURN_LIMIT (too many requests); None if
        it was not.
      refusal: what the program was told when its last request was refused as a mistake of its own; "" if it was not.
      failure: why generation failed for the last request that reached it; None if it did not.
    """

    def __init__(
        self,
        policy: Engine,
        renderer: Renderer,
        tokenizer: Tokenizer,
        limits: SessionLimits,
        sampling: SamplingConfig | None,
        task_id: str,
        sample: int,
        group_size: int = 1,
        domain: str = "",
        request_timeout_s: float = 600.0,
        patient: bool = True,
        rules: TrainingRules = TrainingRules(),  # noqa: B008, it is frozen
    ) -> None:
        self._renderer, self._tokenizer, self._limits, self._sampling = renderer, tokenizer, limits, sampling
        attempt = task_id, sample, group_size, domain
        self._sampler = Sampler(policy, attempt, request_timeout_s, patient, sampling is not None)
        self._call_key, self._timeout_s = f"{task_id}\0{sample}", request_timeout_s
        self._threads: dict[int, Thread] = {}  # by key
        self._prompts = prompts.Prompts(tokenizer)
        self._recall, self._lines = Recall(), Lines(rules)
        self._turns: list[Pending] = []  # the latest ones, in the order in which they began
        self._begun = self._number = 0
        self._trajectories: tuple[Trajectory, ...] | None = None  # when it is closed
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.stop: StopReason | None = None
        self.refusal = ""
        self.failure: Exception | None = None

    # ---------------------------------------------------------------- requests

    async def answer(
        self,
        ask: Ask,
        watch: Callable[[Event], None] | None = None,
        retry: bool | None = None,
        digests: RequestDigests | None = None,
    ) -> Answer:
        """The assistant's next message.

        Args:
          ask: the request.
          watch: called with `Begun` and then every delta as soon as it is known.
          retry: whether the client says that it has asked this before; None: it does not say.
          digests: `request_digests(ask)`, where the caller has it.

        Raises:
          BadRequest: what the program asks cannot be; 400 with code "context_length_exceeded" where there is no room,
            403 when the session's requests are used up, 401 when it is closed.
          TimeoutError: no answer within the time for a request.
          EngineError: generation failed; QueueFullError: the engine's queue is full.
        """
        self._check_open()
        digests = request_digests(ask) if digests is None else digests
        self.counters["requests"] += 1
        self.counters["ignored_fields"] += len(ask.ignored)
        self.counters["ignored_fields"] += self._sampling is not None and ask.sampling != self._sampling
        turn = self._earlier(digests.digest, retry)
        if turn is None:
            turn = self._begin(ask, digests, watched=watch is not None)
        else:
            self.counters["replayed" if turn.has_result else "retries_joined"] += 1
        answer = await self._wait(turn, watch)
        self.stop, self.refusal = None, ""
        return answer

    def _earlier(self, digest: bytes, retry: bool | None) -> Pending | None:
        """The turn whose answer a request asks for again; None: it wants a sample of its own.

        Who says that it asks for the first time only gets what nobody else waits for. Who says nothing shares what
        runs. What was taken is only given again to who says that it has asked before.
        """
        same = [turn for turn in reversed(self._turns) if turn.digest == digest]
        alone = [turn for turn in same if turn.is_abandoned(TAKING_S)]
        if retry is False:
            return next(iter(alone), None)
        latest = next(iter(alone or same), None)
        return latest if latest is not None and (retry or not latest.delivered) else None

    def delivered(self, answer: Answer) -> None:
        """Says that a client has taken the whole answer: when it asks the same again, it wants another."""
        for turn in self._turns:
            if turn.gave(answer):
                turn.delivered = True

    async def count(self, ask: Ask) -> int:
        """The number of tokens of a request's context, as far as it is known before it is asked."""
        self._check_open()
        request = self._recall.read(ask, request_digests(ask), count=False)
        return len(await self._context(request, self._base(request)))

    def close(self) -> tuple[Trajectory, ...]:
        """Ends the session: what runs is given up, and every later request is refused. May be called again."""
        if self._trajectories is None:
            for turn in list(self._turns):
                self._give_up(turn, BadRequest("the session is closed", status=401, code="session_closed"))
            for thread in self._threads.values():
                self._sampler.shut(thread)
            # The order does not depend on arrival.
            threads = sorted(self._threads.values(), key=lambda thread: (thread.began, thread.key))
            trained, foreign, side_requests = self._lines.select(threads)
            self._trajectories = tuple(thread.trajectory() for thread in trained)
            self.counters |= {"side_requests": float(side_requests), "foreign_conversations": float(foreign)}
        return self._trajectories

    @property
    def running(self) -> int:
        """Requests that generate now."""
        return sum(not turn.has_result for turn in self._turns)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._trajectories is not None

    def _check_open(self) -> None:
        if self._trajectories is not None:
            raise BadRequest("the session is closed", status=401, code="session_closed")

    # ---------------------------------------------------------------- who waits

    async def _wait(self, turn: Pending, watch: Callable[[Event], None] | None) -> Answer:
        try:
            return await turn.wait(watch)
        finally:
            if not turn.waiters and not turn.has_result:
                asyncio.get_running_loop().call_later(LINGER_S, self._abandoned, turn)

    def _abandoned(self, turn: Pending) -> None:
        if not turn.waiters and not turn.has_result:
            self.counters["cancelled"] += 1
            self._give_up(turn, EngineError("The client is gone."))

    def _give_up(self, turn: Pending, reason: Exception) -> None:
        """Ends a turn at once: the trajectory is again as it was before, for whoever asks next."""
        if turn.has_result:
            return
        turn.result.set_exception(reason)
        if turn in self._turns:
            self._turns.remove(turn)
        self._begun -= 1
        if turn.task is not None:
            turn.task.cancel()
        if turn.thread is not None:
            self._sampler.shut(turn.thread)
            turn.thread.busy = False
            if not turn.thread.turns:  # it has not sampled anything, and is none
                del self._threads[turn.thread.key]
                self._lines.leave(turn.thread)

    # ---------------------------------------------------------------- a turn

    def check_requests(self, draws: Sequence[RequestDigests], retry: bool | None) -> None:
        """Raises BadRequest where the session has fewer requests left than these need samples of their own."""
        self._check_left(sum(self._earlier(draw.digest, retry) is None for draw in draws))

    def _check_left(self, needed: int) -> None:
        if self._begun + needed > self._limits.requests:
            self.stop, message = StopReason.TURN_LIMIT, f"the session's {self._limits.requests} requests are used up"
            raise BadRequest(message, status=403, code="requests_used_up")

    def _begin(self, ask: Ask, digests: RequestDigests, watched: bool) -> Pending:
        self._check_left(1)
        self._begun += 1
        if len(self._turns) >= KEPT_TURNS:
            old = next((turn for turn in self._turns if turn.has_result), None)
            if old is not None:
                self._turns.remove(old)
        turn = Pending(digests.digest)
        self._turns.append(turn)
        turn.task = asyncio.get_running_loop().create_task(self._run(turn, ask, digests, watched))
        return turn

    async def _run(self, turn: Pending, ask: Ask, digests: RequestDigests, watched: bool) -> None:
        """Samples a turn and settles it. Until the last step nothing but `busy` and the policy's sequence changes."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._sampled(turn, ask, digests, watched)
        except asyncio.CancelledError:
            self._give_up(turn, EngineError("The turn was cancelled."))
            raise
        except Exception as failure:
            if isinstance(failure, BadRequest):
                self.stop = StopReason.TOKEN_LIMIT if failure.code == NO_ROOM else self.stop
            elif not turn.has_result:
                self.failure = failure
            self._give_up(turn, failure)
        else:
            self.failure = None
            if not turn.has_result:
                turn.settle(answer)

    async def _sampled(self, turn: Pending, ask: Ask, digests: RequestDigests, watched: bool) -> Answer:
        request = self._recall.read(ask, digests)
        for name in ("rewritten_calls", "retokenised_turns"):
            self.counters[name] = float(len(getattr(self._recall, name)))
        base = self._base(request)
        thread = None
        self._number += 1
        number = self._number
        if base is not None and ends_here(*base) and not request.sampled_from(base[1].prefix_size):
            turn.thread = thread = base[0]
            thread.busy = True
        context = await self._context(request, base)
        count, ids, kinds = len(context), context.ids, context.kinds
        room = self._limits.context_tokens - count
        if room <= 0:
            raise self._no_room(count)
        if thread is None:
            self.counters["forks"] += base is not None
            ids, kinds = [*context.copied, *ids], [int(TokenKind.PROMPT)] * len(context.copied) + kinds
            occurrence = 0  # among the session's trajectories that begin with these tokens
            while (key := conversation_key(ids, occurrence)) in self._threads:
                occurrence += 1
            turn.thread = thread = self._threads[key] = Thread(key)
            thread.busy = True
            sampled_places = [(turn.thread, turn.end) for turn in request.turns.values()]
            if origin := base or next(reversed(sampled_places), None):
                turns_before = sum(end.tokens < origin[1].tokens for end in origin[0].ends)
                thread.parent = origin[0], min(turns_before, origin[0].turns - 1)  # a prompt may end a turn otherwise
            parents = [one for one, _ in ([base] if base else []) + sampled_places]
            self._lines.admit(thread, ask, parents, base is not None)
        turn.tell(Begun(count))
        most = min(room, self._limits.turn_tokens, ask.max_tokens or room)
        parser = self._renderer.parser(ask.tools) if ask.prompt is None else ToolParser()  # a completion is all text
        key = f"{self._call_key}\0{thread.key}\0{thread.turns}"
        reading = Reading(self._tokenizer, parser, ask.stops, key, turn.tell)
        sampling = ask.sampling if self._sampling is None else self._sampling
        generation = await self._sampler.sample(thread, ids, most, sampling, reading, watched)
        if not len(generation.tokens):
            raise self._no_room(count)
        if turn.has_result:  # given up meanwhile: the trajectory is no longer this turn's
            raise EngineError("The turn was given up.")
        if not np.isfinite(generation.logprobs).all():
            raise EngineError("The log-prob of a sampled token is not finite: are the weights?")
        reading.end()
        answer = reading.answer(TrajectoryPrefix(thread.tokens, count), generation, complete=thread.handle is not None)
        thread.turn_numbers.append(number)
        self._commit(thread, ids, kinds, generation, request, answer)
        self.counters["malformed_calls"] += parser.malformed
        return answer

    def _commit(
        self,
        thread: Thread,
        ids: Sequence[int],
        kinds: Sequence[int],
        generation: Generation,
        request: KnownRequest,
        answer: Answer,
    ) -> None:
        """The turn becomes part of the trajectory."""
        sampled, digests = generation.tokens.tolist(), request.digests
        at_eos = sampled[-1] in self._tokenizer.eos_ids  # also where its text is a stop string
        ended_by = self._tokenizer.decode(sampled[-1:]) if at_eos else ""
        end = End(len(digests.messages) + 1, len(thread) + len(ids) + len(sampled), ended_by)
        thread.add(ids, kinds, generation, end)
        thread.busy = False
        if request.ask.prompt is None:
            text = self._tokenizer.decode(sampled[: len(sampled) - at_eos])
            self._recall.add(thread, end, digests.chain[-1], answer, sampled, text)
            self._lines.note(thread, answer)
        else:
            self._prompts.add(thread, end, request.ask.prompt, answer)
        self.counters["sampled_tokens"] += len(sampled)
        for name in ("cached_tokens", "queue_s", "prefill_s", "decode_s"):
            self.counters[name] += getattr(generation, name)

    # ---------------------------------------------------------------- contexts

    def _base(self, request: KnownRequest) -> tuple[Thread, End] | None:
        """The stored turn that this request continues, or branches from."""
        prompt = request.ask.prompt
        return self._recall.match(request) if prompt is None else self._prompts.match(prompt)

    async def _context(self, request: KnownRequest, base: tuple[Thread, End] | None) -> Context:
        """The tokens of a request. Large ones are made in a thread, while other requests are served."""
        if (prompt := request.ask.prompt) is not None:
            rest = prompts.behind(prompt, base)
            least, size = self._tokenizer.least_tokens(rest) if isinstance(rest, str) else len(rest), len(rest)
            build = functools.partial(prompts.build, self._tokenizer, rest, base)
        else:
            new = request.ask.messages[base[1].prefix_size if base else 0 :]
            least = sum(self._tokenizer.least_tokens(m.text) for m in new if m.role != "assistant")
            size = sum(len(message.text) + LARGE_TEXT // 1000 for message in new)  # many are slow, too
            build = functools.partial(request.context, self._renderer, base)
        if least >= self._limits.context_tokens:  # what cannot fit is not encoded
            raise self._no_room(least)
        return build() if size < LARGE_TEXT else await asyncio.to_thread(build)

    def _no_room(self, count: int) -> BadRequest:
        most = self._limits.context_tokens
        message = f"prompt is too long: {count} tokens > {most} maximum; this model's maximum context length is {most}"
        return BadRequest(message, code=NO_ROOM)
