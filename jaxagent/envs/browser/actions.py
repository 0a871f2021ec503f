"""What the policy writes: one action a turn, <action>click 3</action>.

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
# Kind -> what stands behind it, in words and as (number, text).
FORMS = {
    "click": ("NUMBER", r"\[?(\d{1,6})\]?()"),
    "type": ("NUMBER TEXT", r"\[?(\d{1,6})\]?(?:\s(.*))?"),
    "select": ("NUMBER OPTION", r"\[?(\d{1,6})\]?\s(.+)"),
    "press": ("KEY", rf"()({'|'.join(KEYS)})"),
    "scroll": ("up or down", r"()(up|down)"),
    "back": ("", r"()()"),
    "answer": ("TEXT", r"()(.+)"),
}
WORDS = ", ".join(f"{kind} {words}".strip() for kind, (words, _) in FORMS.items())


@dataclasses.dataclass(frozen=True)
class Action:
    """One action."""

    kind: str  # of `FORMS`
    number: int = 0  # of an element
    text: str = ""  # typed, selected or answered; the key; "up" or "down"


def read(reply: str) -> tuple[Action | None, str]:
    """The last action of a reply, or None and what is wrong with it."""
    reply = reply[: tags.MAX_CHARS]
    tagged = tags.inside(OPENING, CLOSING, reply)
    text = tagged[-1].strip() if tagged else next((s for s in map(str.strip, reversed(reply.splitlines())) if s), "")
    kind, rest, *_ = *text.split(None, 1), "", ""
    if kind.lower() not in FORMS:
        return None, f"'{text[:60]}' is none" if text else "there is none"
    kind = kind.lower()
    words, form = FORMS[kind]
    match = re.fullmatch(form, rest, re.DOTALL | (re.IGNORECASE if kind in ("press", "scroll") else 0))
    if not match:
        keys = f", which is {', '.join(KEYS)}" if kind == "press" else ""
        return None, f"behind {kind} stands {words or 'nothing'}{keys}"
    number, written = int(match[1] or 0), (match[2] or "").strip()
    if len(written) > TEXT_CHARS or any(ord(c) < 32 and c not in "\n\t" for c in written):
        return None, f"a text has at most {TEXT_CHARS} characters, and none that cannot be seen"
    if kind in ("press", "scroll"):
        return Action(kind, 0, KEYS.get(written.lower(), written.lower())), ""
    quoted = len(written) >= 2 and written[0] == written[-1] and written[0] in "\"'"
    return Action(kind, number, written[1:-1] if quoted else written), ""
