"""`Renderer`: a conversation with tools -> the tokens of the policy's context. What was sampled is never encoded again.

The chat template renders texts; sampled turns stand in it as placeholders, the text is cut there, and their stored
tokens are put in between. Before every stored turn stands what the template writes before the policy's next turn,
since that is what the policy continued, and behind it the template's end of a message, unless the policy sampled it.
So the tokens that a session gathers turn by turn are the tokens of the conversation rendered at once.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.gateway.abilities import WORDS, find_abilities, find_family
from jaxagent.gateway.chat import BadRequest, ChatMessage, Tool
from jaxagent.gateway.turns import Turn, fit, locate
from jaxagent.rollout.conversation import encode_spans
from jaxagent.rollout.templates import Chat, Spans, body_spans
from jaxagent.tools import Hermes, ToolParser
from jaxagent.tools.calls import tool_form, tools_text
from jaxagent.types import TokenKind


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """Those of a turn, and the EOS text that they end with, or ""."""

    ids: Sequence[int]
    ended_by: str


@dataclasses.dataclass(frozen=True)
class Context:
    """Tokens of a request's context, and the `types.TokenKind` of each."""

    ids: list[int]
    kinds: list[int]
    copied: Sequence[int] = ()  # tokens of a trajectory, from its beginning, which stand before these

    def __len__(self) -> int:
        return len(self.copied) + len(self.ids)


class Renderer:
    """Renders conversations with one tokenizer and one chat template.

    Kinds: the bodies of tools' results, and of user messages after the first assistant message, are OBSERVATION; all
    else is PROMPT, spliced tokens too, since they are trained where they were sampled.

    Args:
      tokenizer: encodes the texts.
      template_source: the chat template; "" = plain: contents one after the other behind the tokenizer's prefix, no
        tools.
      date: what `strftime_now` in the template sees.
      tool_source: the template of conversations in which tools are offered; "" = the same.

    Raises:
      ConfigError: a template cannot be used.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_source: str, date: datetime.datetime, tool_source: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._with_tools = Renderer(tokenizer, tool_source, date) if tool_source else self
        self._chat: Chat | None = None
        if not template_source:
            return
        self._chat = chat = Chat(template_source, tokenizer.special_strings | tokenizer.template_variables, date)
        self._abilities = find_abilities(chat)
        family = find_family(chat)
        self._native = family is not None and self._abilities.tools
        self._family: type[ToolParser] = family if family is not None and self._native else Hermes
        self._headers = {role: _headers(chat, role) for role in ("user", self._abilities.tool_role)}
        self._reasoning = "</think>" in template_source or "<think>" in template_source

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """A new parser for one answer to a request with these tools, of the template's family."""
        if tools and self._with_tools is not self:
            return self._with_tools.parser(tools)
        if self._chat is None:
            return ToolParser()
        return self._family(tools, self._reasoning, self._headers["user"][1].rstrip().endswith("<think>"))

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], sampled_tokens: Mapping[int, SampledTokens]
    ) -> Context:
        """The whole conversation, up to where the assistant writes.

        `sampled_tokens`: of turns, by the number of their message; they are spliced.

        Raises:
          BadRequest: the template refuses the conversation or does not show all of it.
        """
        if tools and self._with_tools is not self:
            return self._with_tools.prompt(messages, tools, sampled_tokens)
        _check(messages, sampled_tokens)
        if self._chat is None:
            rendered = self._encode(_plain(messages, tools, sampled_tokens))
            prefix = list(self._tokenizer.prefix_ids)
            return Context(prefix + rendered.ids, [int(TokenKind.PROMPT)] * len(prefix) + rendered.kinds)
        return self._encode(self._pieces(self._fit(messages, tools, sampled_tokens), tools, sampled_tokens))

    def continuation(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], at: int, ended_by: str) -> Context:
        """What follows message number `at`, which the policy sampled last, up to where the assistant writes next.

        Its tokens are in the context already; `ended_by`: the EOS text that they end with, or "".

        Raises:
          BadRequest: the template refuses the conversation or does not show all of it.
        """
        if tools and self._with_tools is not self:
            return self._with_tools.continuation(messages, tools, at, ended_by)
        _check(messages, [at])
        if self._chat is None:
            return self._encode(list(_plain(messages, tools, {}))[at + 1 :])
        turns = self._fit(messages, (), [at])  # where tools stand in the system message, that is behind us
        rest = turns[1 + next(i for i, turn in enumerate(turns) if turn.index == at) :]
        before = Turn("user", (("question", TokenKind.PROMPT),))  # as `Chat` frames an observation
        sampled_turn = next(turn for turn in turns if turn.index == at)
        shown_tools = () if self._abilities.tools_before else tools
        pieces = list(self._pieces([before, sampled_turn, *rest], shown_tools, {at: SampledTokens((), ended_by)}))
        return self._encode(pieces[1 + next(i for i, piece in enumerate(pieces) if isinstance(piece, SampledTokens)) :])

    def _fit(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], of_policy: Collection[int]) -> list[Turn]:
        preface = "" if self._native or not tools else tools_text(tools)
        return fit(messages, of_policy, self._abilities, self._family, self._native, preface)

    def _pieces(
        self, turns: Sequence[Turn], tools: Sequence[Tool], sampled_tokens: Mapping[int, SampledTokens]
    ) -> Iterator[Spans | SampledTokens]:
        """The template's text, cut at the stored turns."""
        mark = _unused_mark(turns, tools)
        marks = [f"{mark}-{i}-END" for i in range(len(turns))]
        bodies = [(m if turn.index is not None else "") + turn.text for m, turn in zip(marks, turns, strict=True)]
        marked = [m if body else "" for m, body in zip(marks, bodies, strict=True)]
        forms = [tool_form(tool) for tool in tools] if self._native and tools else None
        assert self._chat is not None
        try:
            text = self._chat.render([t.form(body) for t, body in zip(turns, bodies, strict=True)], forms)
            frame = self._chat.render([t.form(body) for t, body in zip(turns, marked, strict=True)], forms)
        except ConfigError as error:
            raise BadRequest(f"messages: {error}", "messages") from error
        at, spans, ended_by, role = 0, Spans(), "", "user"
        places = locate(text, frame, list(zip(bodies, marked, strict=True)))
        for mark, turn, (start, end) in zip(marks, turns, places, strict=True):
            between = text[at:start].removeprefix(ended_by)
            at, ended_by = end, ""
            header = self._headers.get(role, self._headers["user"])
            role = turn.role
            if turn.index is None:
                spans += [(between, TokenKind.PROMPT), *body_spans(text[start:end], turn.parts)]
                continue
            yield [*spans, (_with_opening(between, *header), TokenKind.PROMPT)]
            yield sampled_tokens[turn.index]
            spans = Spans(body_spans(text[start + len(mark) : end], turn.parts) if turn.parts else ())
            ended_by = "" if turn.parts else sampled_tokens[turn.index].ended_by
        yield [*spans, (text[at:].removeprefix(ended_by), TokenKind.PROMPT)]

    def _encode(self, pieces: Iterator[Spans | SampledTokens] | Sequence[Spans | SampledTokens]) -> Context:
        ids: list[int] = []
        kinds: list[int] = []
        for kind, group in itertools.groupby(pieces, type):  # spans between two stored turns are encoded together
            if kind is SampledTokens:
                more = [token for piece in group for token in piece.ids]
                of = [int(TokenKind.PROMPT)] * len(more)
            else:
                run = [span for piece in group for span in piece]
                try:
                    "".join(text for text, _ in run).encode()
                except UnicodeEncodeError as error:
                    why = "messages: a text has half of a surrogate pair, which is no text."
                    raise BadRequest(why, "messages") from error
                more, of = encode_spans(self._tokenizer, run)
            ids.extend(more)
            kinds.extend(of)
        return Context(ids, kinds)


def _headers(chat: Chat, role: str) -> tuple[str, str]:
    """What stands between a message of that role and the assistant's next one, the end of the message apart: (for an
    assistant message in the history, for the one that the policy is to write). They differ where only the latter begins
    with "<think>"."""
    answer, last, more, user = *WORDS[:3], {"role": "user", "content": WORDS[3]}
    message = {"role": role, "content": last, **({"name": "tool"} if role == "tool" else {})}
    talk = [user, {"role": "assistant", "content": answer}, message]
    footer = chat.render(talk, None, False).partition(last)[2]
    opening = chat.render(talk).partition(last)[2].removeprefix(footer)
    talk += [{"role": "assistant", "content": more}, user]
    turn_text = chat.render(talk).partition(last)[2].partition(more)[0].removeprefix(footer)
    return turn_text, opening


def _with_opening(between: str, turn_text: str, opening: str) -> str:
    """The text before an assistant message as it was when the policy began to write it."""
    if between.endswith(turn_text):
        return between[: len(between) - len(turn_text)] + opening
    same = os.path.commonprefix([turn_text, opening])  # noqa: RUF071, these are no paths
    return between[: between.rindex(same)] + opening if same and same in between else between


def _plain(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], sampled_tokens: Mapping[int, SampledTokens]
) -> Iterator[Spans | SampledTokens]:
    """The contents as they are, one piece for each message."""
    if tools or any(message.calls for message in messages):
        raise BadRequest("tools: this model has no chat template, so it cannot be offered tools.", "tools")
    begun = False
    for i, message in enumerate(messages):
        begun = begun or message.role == "assistant"
        observed = message.role == "tool" or (begun and message.role == "user")
        yield sampled_tokens.get(i) or [(message.text, TokenKind.OBSERVATION if observed else TokenKind.PROMPT)]


def _check(messages: Sequence[ChatMessage], of_policy: Collection[int]) -> None:
    if not messages:
        raise BadRequest("messages: there is none.", "messages")
    wrong = [i for i in of_policy if not (0 <= i < len(messages) and messages[i].role == "assistant")]
    if wrong:
        raise ValueError(f"Message {wrong[0]} is no assistant message: it has no sampled tokens.")


def _unused_mark(turns: Sequence[Turn], tools: Sequence[Tool]) -> str:
    """A word that is nowhere in the conversation, nor in what is said of the tools."""
    mark, words = "PLACEHOLDER", repr((turns, tools))
    while mark in words:
        mark += "X"
    return mark
