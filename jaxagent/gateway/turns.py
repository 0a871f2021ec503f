"""A conversation fitted to what its chat template can show, and where its messages stand in the rendered text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import Any

from jaxagent.gateway.abilities import Abilities
from jaxagent.gateway.chat import APPENDED, BadRequest, Call, ChatMessage
from jaxagent.tools import ToolParser
from jaxagent.types import TokenKind

Parts = tuple[tuple[str, TokenKind], ...]

GAP = ("\n\n", TokenKind.PROMPT)  # between two texts in one message
OPEN_REMINDER, CLOSE_REMINDER = ("<system-reminder>\n", TokenKind.PROMPT), ("\n</system-reminder>", TokenKind.PROMPT)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A message as the template gets it.

    Attributes:
      parts: its text, each part with its kind.
      index: of an assistant message whose tokens are known: its number in the conversation; its own text is not
        rendered, and `parts` are what the program added behind it.
    """

    role: str
    parts: Parts
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    name: str = ""
    index: int | None = None

    @property
    def text(self) -> str:
        """All parts, one after the other."""
        return "".join(text for text, _ in self.parts)

    def form(self, content: str) -> dict[str, Any]:
        """The message in Hugging Face's form, with another content."""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.name:
            message["name"] = self.name
        return message


def fit(
    messages: Sequence[ChatMessage],
    sampled_numbers: Collection[int],
    abilities: Abilities,
    writer: type[ToolParser],
    native: bool,
    preface: str,
) -> list[Turn]:
    """Turns that the template shows whole.

    A stretch between two assistant messages becomes the same turns whatever stands before and behind it, so that a
    conversation rendered stretch by stretch is the conversation rendered whole.

    Args:
      messages, abilities: the conversation, and what its template can show.
      sampled_numbers: numbers of the assistant messages whose tokens are known.
      writer: the family whose way to write calls is taken where the template does not write them.
      native: the template writes calls in the family's way itself.
      preface: more text for the first system message; "" for none.
    """
    numbered = list(enumerate(messages))
    if preface and messages and messages[0].role == "system":
        numbered[0] = (0, dataclasses.replace(messages[0], text=f"{messages[0].text}\n\n{preface}"))
    elif preface:
        numbered.insert(0, (-1, ChatMessage("system", preface)))
    turns: list[Turn] = []
    notes: list[Parts] = []  # system texts that wait for a user message to stand in
    names = {call.id: call.name for message in messages for call in message.calls if call.id}
    begun = False  # the assistant has spoken
    for i, message in numbered:
        kind = TokenKind.OBSERVATION if begun or message.role == "tool" else TokenKind.PROMPT
        parts: Parts = ((message.text, kind),)
        if message.role == "assistant":
            turns += [Turn("user", _joined(notes))] * bool(notes)
            notes, begun = [], True
            if i in sampled_numbers:
                turns.append(Turn("assistant", (), index=i))
            else:
                turns.append(_assistant(message, abilities, writer, native))
        elif message.role == "system":
            parts = ((message.text, TokenKind.PROMPT),)
            if abilities.systems or (abilities.system and not turns):
                turns.append(Turn("system", parts))
            elif abilities.system and len(turns) == 1 and turns[0].role == "system":
                turns[0] = dataclasses.replace(turns[0], parts=_joined([turns[0].parts, parts]))
            else:
                notes.append((OPEN_REMINDER, *parts, CLOSE_REMINDER) if turns else parts)
        elif message.role == APPENDED:
            turns[-1] = dataclasses.replace(turns[-1], parts=(*turns[-1].parts, (message.text, TokenKind.PROMPT)))
        elif message.role == "tool":
            name = message.name or names.get(message.call_id, "tool")  # some templates refuse a result without one
            turns.append(Turn(abilities.tool_role, parts, name=name))
        else:
            turns.append(Turn(message.role, _joined([*notes, parts])))
            notes = []
    turns += [Turn("user", _joined(notes))] * bool(notes)
    return turns if abilities.user_runs else _without_runs(turns)


def _assistant(message: ChatMessage, abilities: Abilities, writer: type[ToolParser], native: bool) -> Turn:
    """An assistant message without known tokens; its calls become text where the template would drop or refuse them."""
    text, calls = message.text, message.calls
    can_show = native and (abilities.several_calls if len(calls) > 1 else abilities.calls)
    can_show = can_show and (abilities.text_and_calls or not text)
    if calls and not (can_show and all(isinstance(call.arguments, dict) for call in calls)):
        text, calls = writer.write(text, calls), ()
    return Turn("assistant", ((text, TokenKind.PROMPT),), calls, message.reasoning)


def _joined(texts: Sequence[Parts]) -> Parts:
    parts: Parts = ()
    for one in texts:
        if any(text for text, _ in one):
            parts = (*parts, GAP, *one) if parts else one
    return parts


def _without_runs(turns: Sequence[Turn]) -> list[Turn]:
    """Messages of one role in a row become one, but for tools' results and messages whose tokens are known."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.role == turn.role in ("user", "assistant")
            and last.index is None
            and turn.index is None
        ):
            parts = _joined([last.parts, turn.parts])
            joined[-1] = dataclasses.replace(last, parts=parts, calls=last.calls + turn.calls)
        else:
            joined.append(turn)
    return joined


# -------------------------------------------------------------------- in the rendered text


def locate(text: str, frame: str, bodies: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    """The place of every body in the text, found by the template text around it.

    Args:
      text: the rendered conversation.
      frame: the same conversation with a unique mark in every body's place. It tells the template's text, so that a
        body that reads like template text is not mistaken for it. Where the template writes otherwise around the
        bodies than around the marks, a body is where its text is found next.
      bodies: (body, its mark) in the order of the messages; a message without a text has ("", "").

    Returns:
      (start, end) of each; an empty body stands at the end of the one before it.

    Raises:
      BadRequest: the template leaves a message out.
    """
    between = []  # the template's text before each body that is not empty, and behind the last one
    after = 0
    for i, (body, mark) in enumerate(bodies):
        if body:
            start = frame.find(mark, after)
            if start < 0:
                raise _missing(i, body)
            between.append(frame[after:start])
            after = start + len(mark)
    between.append(frame[after:])
    places: list[tuple[int, int]] = []
    at = n = 0
    for i, (body, _) in enumerate(bodies):
        if body:
            if (place := _place(text, at, between[n], body, between[n + 1])) is None:
                raise _missing(i, body)
            n, at = n + 1, place[1]
            places.append(place)
        else:
            places.append((at, at))
    return places


def _place(text: str, at: int, before: str, body: str, behind: str) -> tuple[int, int] | None:
    """Where a body stands between the template's texts; else the next place that has it."""
    forms, start = _shown_forms(body), at + len(before)
    if text.startswith(before, at):
        for form in forms:
            if text.startswith(form, start) and text.startswith(behind, start + len(form)):
                return start, start + len(form)
    found = ((text.find(form, at), form) for form in forms)
    return next(((start, start + len(form)) for start, form in found if start >= 0), None)


def _shown_forms(body: str) -> list[str]:
    """How templates show a text: as it is, without outer blanks, escaped within a JSON string, without its thoughts."""
    visible = body.rpartition("</think>")[2]
    ways = [body]
    for one in (body, visible):
        ways += [one.rstrip("\n"), one.lstrip("\n"), one.strip("\n"), one.rstrip(), one.lstrip(), one.strip()]
    ways += [json.dumps(body, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)]
    return list(dict.fromkeys(ways))


def _missing(number: int, body: str) -> BadRequest:
    start = body[:40] + "..." * (len(body) > 40)
    return BadRequest(f"messages: the chat template does not show message {number}, which reads {start!r}.", "messages")
