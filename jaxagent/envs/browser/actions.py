"""What the policy writes: one action a turn, <action>click 3</action>.

    click 3          type 2 red mug     select 4 blue     press enter
    scroll down      scroll up          back              answer blue

Brackets around a number and quotes around a text may be there. Without tags, as a chat model may forget them, the last
line is read.
"""

from __future__ import annotations

import dataclasses
import re

from jaxagent.envs import tags

OPENING, CLOSING = tags.pair("action")
KEYS = {
    name.lower(): name
    for name in ("Enter", "Tab", "Escape", "Backspace", "Delete", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight")
}
TEXT_CHARS = 2_000  # of what is typed
WORDS = (
    "click NUMBER, type NUMBER TEXT, select NUMBER OPTION, press KEY, scroll up, scroll down, back, or answer TEXT; "
    "numbers are those of the page"
)
_NUMBERED = re.compile(r"(click|type|select)\s+\[?(\d{1,6})\]?(?:\s+(.*))?", re.DOTALL | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Action:
    """One action."""

    kind: str  # "click", "type", "select", "press", "scroll", "back", "answer"
    number: int = 0  # of an element
    text: str = ""  # typed, selected or answered; the key; "up" or "down"


def read(reply: str) -> tuple[Action | None, str]:
    """The last action of a reply, or None and what is wrong with it."""
    reply = reply[: tags.MAX_CHARS]
    tagged = tags.inside(OPENING, CLOSING, reply)
    text = tagged[-1].strip() if tagged else next((s for s in map(str.strip, reversed(reply.splitlines())) if s), "")
    if not text:
        return None, "there is none"
    if match := _NUMBERED.fullmatch(text):
        kind, number, rest = match[1].lower(), int(match[2]), _unquoted(match[3] or "")
        if kind == "select" and not rest:
            return None, "select needs an option behind the number"
        if kind == "click" and rest:
            return None, "nothing stands behind click and the number"
        if len(rest) > TEXT_CHARS or any(ord(c) < 32 and c not in "\n\t" for c in rest):
            return None, f"what is typed has at most {TEXT_CHARS} characters, and none that cannot be seen"
        return Action(kind, number, rest), ""
    kind, _, rest = text.partition(" ")
    kind, rest = kind.lower(), rest.strip()
    if kind == "answer" and rest:
        return Action(kind, text=_unquoted(rest)), ""
    if kind == "back" and not rest:
        return Action(kind), ""
    if kind == "scroll" and rest.lower() in ("up", "down"):
        return Action(kind, text=rest.lower()), ""
    if kind == "press":
        if rest.lower() in KEYS:
            return Action(kind, text=KEYS[rest.lower()]), ""
        return None, f"the keys are {', '.join(KEYS)}"
    if kind in ("click", "type", "select"):
        return None, f"{kind} needs the number of an element"
    return None, f"'{text[:60]}' is none"


def _unquoted(text: str) -> str:
    text = text.strip()
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text
