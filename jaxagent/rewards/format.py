"""The format of a response as a finite-state machine over its tags: a table (state, tag) -> state, and nothing else.

    MOVES = {("start", "<think>"): "in_think", ("in_think", "</think>"): "after_think", ...}
    follows(MOVES, "<think>hm</think><answer>7</answer>")

The tags are those that the table names; anything else, "<b>" too, is text. Text other than white space is allowed
only in states whose names start with "in_". A tag without a move from the present state ends the check. So what is not
in the table is not in the format: nested, unclosed, repeated and missing tags need no rules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Moves = Mapping[tuple[str, str], str]


def follows(moves: Moves, text: str, *, start: str = "start", end: str = "end") -> bool:
    """True when `text` moves the machine from `start` to `end`. One pass over the text."""
    tags = sorted({tag for _, tag in moves}, key=lambda tag: (-len(tag), tag))  # of two tags that fit, the longer one
    state, at = start, 0
    for tag in re.finditer("|".join(map(re.escape, tags)), text):
        if not _allowed(text[at : tag.start()], state) or (state, tag[0]) not in moves:
            return False
        state, at = moves[state, tag[0]], tag.end()
    return _allowed(text[at:], state) and state == end


def _allowed(text: str, state: str) -> bool:
    return state.startswith("in_") or not text.strip()
