"""Which sampled turn of a session an assistant message is, whatever the program has made of it since.

A message is named, in this order, by the ids of its calls, which the session gave out; by what it says; and by how it
begins, where a turn was sampled at that place of the conversation and the program has added words of its own behind it:
a text that shares no more than its first letters is another one.
See docs/gateway.md.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jaxagent.gateway.chat import APPENDED, Answer, Ask, Call, ChatMessage
from jaxagent.gateway.renderer import Context, Renderer, SampledTokens
from jaxagent.gateway.threads import End, RequestDigests, Thread, chain_digest, idle_or_first, message_digest
from jaxagent.types import TokenKind

OWN_ID = re.compile("[0-9a-f]{24}")  # of a call, as `reading` makes it; dialects and programs put prefixes before it
LEAST = 16  # letters of a sampled text with which another one does not begin by chance


@dataclasses.dataclass(frozen=True, eq=False)
class SampledTurn:
    """What the policy sampled for one request, and how it was answered."""

    thread: Thread
    end: End
    tokens: SampledTokens
    digest: bytes  # of the message
    calls: Mapping[str, Call]  # by the part of the id that is ours
    texts: tuple[str, ...]  # what a message that holds it may begin with, the longest first


@dataclasses.dataclass(frozen=True)
class KnownRequest:
    """A request whose sampled turns are known.

    Attributes:
      ask: the request; what was added behind a sampled text is a message of its own with the role APPENDED.
      digests: its own; a sampled turn has that of its answer.
      turns: by the number of the message in `ask`.
    """

    ask: Ask
    digests: RequestDigests
    turns: Mapping[int, SampledTurn]

    def sampled_from(self, start: int) -> dict[int, SampledTokens]:
        """The ids of the sampled turns from a message on."""
        return {number: turn.tokens for number, turn in self.turns.items() if number >= start}

    def context(self, renderer: Renderer, base: tuple[Thread, End] | None) -> Context:
        """The tokens in front of the answer, of a request that begins as `base` does, or as no trajectory does.

        Assistant messages that the session sampled are spliced with their ids, wherever they stand.

        Raises:
          BadRequest: the chat template refuses the conversation.
        """
        ask = self.ask
        if base is None:
            return renderer.prompt(ask.messages, ask.tools, self.sampled_from(0))
        thread, end = base
        at, ended_by = end.prefix_size - 1, end.ended_by
        context = Context([], [], thread.tokens[: end.tokens])
        for number, sampled_tokens in [*self.sampled_from(end.prefix_size).items(), (len(ask.messages), None)]:
            rendered = renderer.continuation(ask.messages[:number], ask.tools, at, ended_by)
            context.ids.extend(rendered.ids)
            context.kinds.extend(rendered.kinds)
            if sampled_tokens is not None:
                context.ids.extend(sampled_tokens.ids)
                context.kinds.extend([int(TokenKind.PROMPT)] * len(sampled_tokens.ids))
                at, ended_by = number, sampled_tokens.ended_by
        return context


class Recall:
    """The turns of a session, by everything that names them.

    Attributes:
      rewritten_calls: ids of calls that came back with another name, other arguments or another text beside them.
      retokenised_turns: conversations that go on with an assistant message that is none of the turns sampled there:
        its text is encoded anew, and with it every later one that is not known.
    """

    def __init__(self) -> None:
        self.rewritten_calls: set[str] = set()
        self.retokenised_turns: set[bytes] = set()
        self._by_call: dict[str, SampledTurn] = {}
        self._by_digest: dict[bytes, SampledTurn] = {}  # the first that said so
        self._behind: dict[bytes, list[SampledTurn]] = {}  # by the digest of the conversation in front of them

    def add(self, thread: Thread, end: End, chain: bytes, answer: Answer, sampled: Sequence[int], text: str) -> None:
        """`chain`: of the conversation in front of the turn; `text`: of all its tokens."""
        digest = message_digest(ChatMessage("assistant", answer.text, answer.calls))
        calls = {own: call for call in answer.calls if (own := _own_id(call))}
        spellings = {answer.text, answer.text.strip()} if answer.text.strip() else set()
        texts = spellings | {text + answer.stop_string for text in spellings if answer.stop_string}
        texts |= {text} if spellings and not calls else set()
        sampled_tokens = SampledTokens(tuple(sampled), end.ended_by)
        turn = SampledTurn(thread, end, sampled_tokens, digest, calls, tuple(sorted(texts, key=len, reverse=True)))
        self._by_call |= dict.fromkeys(calls, turn)
        self._by_digest.setdefault(digest, turn)
        self._behind.setdefault(chain, []).append(turn)

    def read(self, ask: Ask, digests: RequestDigests, count: bool = True) -> KnownRequest:
        """A request with its sampled turns. `count`: what was changed is counted."""
        messages: list[ChatMessage] = []
        message_digests: list[bytes] = []
        chain, turns, broken = [digests.chain[0]], {}, False
        places: dict[SampledTurn, set[str]] = {}  # the calls of each that have been met

        def put(message: ChatMessage, digest: bytes) -> None:
            messages.append(message)
            message_digests.append(digest)
            chain.append(chain_digest(chain[-1], digest))

        for message, digest in zip(ask.messages, digests.messages, strict=True):
            turn, added, rewritten = None, "", False
            if message.role == "assistant":
                turn, added, rewritten = self._turn(message, digest, chain[-1], ask.stops)
            if turn is None:
                broken = broken or (message.role == "assistant" and chain[-1] in self._behind)
                put(message, digest)
                if broken and message.role == "assistant" and count:
                    self.retokenised_turns.add(chain[-1])
                continue
            own = {one: call for call in message.calls if (one := _own_id(call)) in turn.calls}
            split = bool(own) and own.keys().isdisjoint(places.get(turn, own))
            if count:
                self.rewritten_calls |= {one for one, call in own.items() if not _same(call, turn.calls[one])}
                self.rewritten_calls |= {*(own or turn.calls)} if rewritten or (split and added.strip()) else set()
            if split:
                places[turn] |= own.keys()  # a program may send each call of a turn in a message of its own
                continue
            places[turn] = set(own)
            turns[len(messages)] = turn
            put(message, turn.digest)
            if added.strip():
                put(ChatMessage(APPENDED, added), message_digest(ChatMessage(APPENDED, added)))
        ask = dataclasses.replace(ask, messages=tuple(messages))
        return KnownRequest(ask, RequestDigests(tuple(message_digests), tuple(chain), digests.digest), turns)

    def match(self, request: KnownRequest) -> tuple[Thread, End] | None:
        """The longest beginning of a request that ends with an assistant message of a trajectory.

        Of several trajectories, the one comes first that has sampled this very message, as the ids of its calls say,
        then one that ends there and is idle, and of these the youngest.
        """
        for number in range(len(request.digests.messages) - 1, -1, -1):
            digest, turns = request.digests.messages[number], self._behind.get(request.digests.chain[number], ())
            if ends := [(turn.thread, turn.end) for turn in turns if turn.digest == digest]:
                named = request.turns.get(number)
                own = [one for one in ends if named is not None and named.calls and one[0] is named.thread]
                return idle_or_first(own or ends)
        return None

    def _turn(
        self, message: ChatMessage, digest: bytes, chain: bytes, stops: Sequence[str]
    ) -> tuple[SampledTurn | None, str, bool]:
        """(turn, what the program added to its text, whether the text is another one, which it does not see)."""
        named = {self._by_call.get(_own_id(call)) for call in message.calls}
        if len(named) == 1 and (turn := named.pop()) is not None:
            rest = _rest(message.text, turn, stops, 1)
            return turn, rest or "", rest is None and bool(message.text.strip())
        if (turn := self._by_digest.get(digest)) is not None:
            return next((one for one in self._behind.get(chain, ()) if one.digest == digest), turn), "", False
        best: tuple[SampledTurn | None, str, bool] = None, message.text, False
        for turn in self._behind.get(chain, ()) if not message.calls else ():
            if any(own in message.text for own in turn.calls):  # smolagents writes calls, with their ids, as text
                complete = all(own in message.text and call.name in message.text for own, call in turn.calls.items())
                return turn, "", not complete
            rest = _rest(message.text, turn, stops)
            if rest is not None and not turn.calls and len(rest) < len(best[1]):
                best = turn, rest, False
        return best


def _rest(text: str, turn: SampledTurn, stops: Sequence[str], least: int = LEAST) -> str | None:
    """What stands behind the turn's text; None: the message begins otherwise, or as if by chance."""
    ends = tuple(end for end in ("\n", "\r", turn.tokens.ended_by, *stops) if end)
    for visible in (text, text.lstrip()):
        for text in turn.texts:
            if visible.startswith(text):
                rest = visible[len(text) :]
                apart = len(text) >= least and not (text[-1].isalnum() and rest[:1].isalnum())
                if apart or not rest.strip() or rest.startswith(ends) or any(end in text for end in ends[2:]):
                    return rest
    return None


def _own_id(call: Call) -> str:
    match = OWN_ID.search(call.id)
    return match[0] if match else ""


def _same(call: Call, other: Call) -> bool:
    return message_digest(ChatMessage("", "", (call,))) == message_digest(ChatMessage("", "", (other,)))
