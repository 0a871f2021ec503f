"""Text between two marks, in time that grows with the text and no faster, whatever a policy wrote.

`re.findall("<a>(.*?)</a>", text)` gives the same, but looks through the rest of the text once for every mark that is
never closed: a policy that has come to repeat one tag would stop the loop that all episodes share, for minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_CHARS = 1_000_000  # of a reply: what comes behind is not read
Mark = re.Pattern[str]


def spans(opening: Mark, closing: Mark, text: str) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    """Each opening mark and the first closing one behind it, from left to right; what lies between is passed over.

    Args:
      opening: a mark, found in linear time: no part of it may match the same characters in several ways.
      closing: likewise.
      text: where to look.
    """
    at = 0
    while (start_mark := opening.search(text, at)) and (end_mark := closing.search(text, start_mark.end())):
        yield start_mark, end_mark
        at = end_mark.end()


def inside(opening: Mark, closing: Mark, text: str) -> list[str]:
    """What lies between the marks of each pair."""
    return [text[start_mark.end() : end_mark.start()] for start_mark, end_mark in spans(opening, closing, text)]


def outside(opening: Mark, closing: Mark, text: str) -> str:
    """The text without the pairs and what lies between them."""
    at, pieces = 0, []
    for start_mark, end_mark in spans(opening, closing, text):
        pieces.append(text[at : start_mark.start()])
        at = end_mark.end()
    return "".join([*pieces, text[at:]])


def pair(name: str, flags: re.RegexFlag = re.NOFLAG) -> tuple[Mark, Mark]:
    """The marks <name> and </name>."""
    return re.compile(f"<{name}>", flags), re.compile(f"</{name}>", flags)
