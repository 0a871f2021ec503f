"""How the policy reads a page: one line for each element that is to be seen, in the order of the document.

    page "Shop" at /product/3
    heading "Red mug"
    [1] link "Basket"
    [2] combobox "Size" = "S" of "S", "M", "L"
    [3] checkbox "As a gift" (checked)
    [4] button "Add to basket"
    ... 41 more elements below: scroll down

Elements that can be acted on are numbered from 1. What a page itself says stands between quotes, on one line, without
quotes, angle brackets and what cannot be seen: no page can write a line, a number or a tag of ours.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Sequence

NAME_CHARS, TEXT_CHARS = 200, 2_000  # of one name or value, and of one piece of text
MOST_OPTIONS = 50  # of one list
# What lines are made of, for a tokenizer that is trained for a run.
MARKS = (
    *('page "', '" at /', '"\n[', '"\n', '" = "', '" of "', '", "'),
    *(f'] {role} "' for role in ("link", "button", "textbox", "combobox")),
)
_PLAIN = str.maketrans({'"': "'", "<": "‹", ">": "›"})


@dataclasses.dataclass(frozen=True)
class Element:
    """An element of a page, by its role of the accessibility tree."""

    role: str  # "button", "link", "textbox", "combobox", "checkbox", ..., "heading", "text", "image"
    name: str = ""
    usable: bool = False  # whether it has a number
    value: str | None = None  # of fields and lists
    options: Sequence[str] = ()  # of lists
    states: Sequence[str] = ()  # "checked", "disabled", ...


def clean(text: str, most: int = NAME_CHARS) -> str:
    """A page's text on one line, without what cannot be seen or would look like ours, cut to `most` characters."""
    text = text[: 4 * most]
    seen = "".join(c if c.isspace() or unicodedata.category(c)[0] not in "CZ" else "" for c in text)
    seen = " ".join(seen.split()).translate(_PLAIN)
    return seen if len(seen) <= most else f"{seen[: most - 1]}…"


def line(element: Element, number: int = 0) -> str:
    """An element as its line; `number` 0 = it has none."""
    text = f"[{number}] {element.role}" if number else element.role
    if element.name:
        text += f' "{clean(element.name, TEXT_CHARS if element.role in ("text", "heading") else NAME_CHARS)}"'
    if element.value is not None:
        text += f' = "{clean(element.value, TEXT_CHARS)}"'
    if element.options:
        shown = ", ".join(f'"{clean(option)}"' for option in element.options[:MOST_OPTIONS])
        more = len(element.options) - MOST_OPTIONS
        text += f" of {shown}" + (f" and {more} more" if more > 0 else "")
    return text + (f" ({', '.join(element.states)})" if element.states else "")


def page_text(
    title: str,
    address: str,
    elements: Sequence[Element],
    above: int = 0,
    below: int = 0,
    left: int = 0,
    most_elements: int = 200,
    most_chars: int = 8_000,
) -> tuple[str, list[int]]:
    """A page as the policy reads it, and the place in `elements` of each number from 1.

    `above`, `below` and `left` count what would be seen after scrolling up or down, and what more there is to be seen
    than `elements`. How much was left out of what is shown is said.
    """
    lines = [f'page "{clean(title)}" at {clean(address)}']
    lines += [_more(above, "above: scroll up")] if above else []
    numbered: list[int] = []
    chars = len(lines[0])
    for i, element in enumerate(elements):
        text = line(element, (len(numbered) + 1) * element.usable)
        chars += len(text) + 1
        if i >= most_elements or chars > most_chars:
            left += len(elements) - i
            break
        lines.append(text)
        numbered += [i] * element.usable
    lines += [
        _more(count, where) for count, where in ((left, "here, left out"), (below, "below: scroll down")) if count
    ]
    return "\n".join(lines), numbered


def _more(count: int, where: str) -> str:
    return f"... {count} more element{'s' * (count != 1)} {where}"


def find(shown: str, role: str, name: str = "", nth: int = 0) -> int:
    """The number of the `nth` element, from 0, of a role and name ("" = any) in a page's text; 0 = there is none."""
    quoted = f' "{re.escape(clean(name))}"' if name else r"\b"
    numbers = re.findall(rf"^\[(\d+)\] {re.escape(role)}{quoted}", shown, re.MULTILINE)
    return int(numbers[nth]) if nth < len(numbers) else 0
