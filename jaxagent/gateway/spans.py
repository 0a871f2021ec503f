"""Where the bodies of messages stand in a rendered conversation, and that none of them is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxagent.gateway.chat import BadRequest


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
            found = frame.find(mark, after)
            if found < 0:
                raise _missing(i, body)
            between.append(frame[after:found])
            after = found + len(mark)
    between.append(frame[after:])
    places: list[tuple[int, int]] = []
    at = n = 0
    for i, (body, _) in enumerate(bodies):
        if body:
            place = _framed(text, at, between[n], body, between[n + 1]) or _found(text, at, body)
            if place is None:
                raise _missing(i, body)
            n, at = n + 1, place[1]
            places.append(place)
        else:
            places.append((at, at))
    return places


def _framed(text: str, at: int, before: str, body: str, behind: str) -> tuple[int, int] | None:
    if not text.startswith(before, at):
        return None
    start = at + len(before)
    for shown in _ways(body):
        end = start + len(shown)
        if text.startswith(shown, start) and text.startswith(behind, end):
            return start, end
    return None


def _found(text: str, at: int, body: str) -> tuple[int, int] | None:
    for shown in _ways(body):
        start = text.find(shown, at)
        if start >= 0:
            return start, start + len(shown)
    return None


def _ways(body: str) -> list[str]:
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
