"""A visitor of the web shop without a browser: what he would be shown in one, and what his actions would do.

    reader = Reader(visit)                 # of a task, as the environment `browser` has it
    reader.shown()                         # the text of the page
    reader.act("click 3")

For demonstrations. A test holds it against a real Chromium.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlencode, urlsplit

from jaxagent.envs.browser import tree
from jaxagent.envs.browser.shop import shopping
from jaxagent.envs.browser.shop.pages import Field, Form, Link, Page, Text
from jaxagent.envs.browser.shop.shopping import Shopping


@dataclasses.dataclass(frozen=True)
class Request:
    """What a browser asks for, and again when it goes back."""

    method: str
    path: str  # with the query
    fields: tuple[tuple[str, str], ...] = ()


class Reader:
    """One visitor; his state is the shop's own."""

    def __init__(self, state: Shopping) -> None:
        self._state = state
        self._past: list[Request] = []
        self._go(Request("GET", "/"))

    def _go(self, request: Request) -> None:
        if self._past[-1:] != [request] or request.method == "POST":  # a browser does not go twice to one address
            self._past.append(request)
        parts = urlsplit(request.path)
        form = {**dict(parse_qsl(parts.query, keep_blank_values=True)), **dict(request.fields)}
        self._page: Page = shopping.page(self._state, request.method, parts.path, form)
        # What stands in each field, by the form's place on the page and the field's name.
        self._values = {(id(form), field.name): field.value for form in self._forms() for field in form.fields}

    def _forms(self) -> Iterator[Form]:
        return (element for element in self._page.elements if isinstance(element, Form))

    def _elements(self) -> list[tuple[tree.Element, Link | Form | None, Field | None]]:
        """What is to be seen, each with what a click on it follows or sends, or with its field."""
        shown: list[tuple[tree.Element, Link | Form | None, Field | None]] = []
        for element in self._page.elements:
            if isinstance(element, Text):
                shown.append((tree.Element("text", element.text), None, None))
            elif isinstance(element, Link):
                shown.append((tree.Element("link", element.text, usable=True), element, None))
            else:
                for field in element.fields:
                    role, value = "combobox" if field.values else "textbox", self._values[id(element), field.name]
                    shown.append((tree.Element(role, field.label, True, value or None, field.values), element, field))
                shown.append((tree.Element("button", element.button, usable=True), element, None))
        return shown

    def shown(self) -> str:
        """The page as the policy reads it."""
        return tree.page_text(self._page.title, self._past[-1].path, [element for element, *_ in self._elements()])[0]

    def act(self, action: str) -> None:
        """Does one of: click ID, type ID text, select ID option, back. Raises ValueError for anything else."""
        verb, _, rest = action.partition(" ")
        if verb == "back":
            if len(self._past) == 1:
                raise ValueError("there is no page to go back to")
            del self._past[-1]
            return self._go(self._past.pop())
        number, _, value = rest.partition(" ")
        usable = [parts for parts in self._elements() if parts[0].usable]
        if not number.isdecimal() or not 1 <= int(number) <= len(usable):
            raise ValueError(f"no such element: {action!r}")
        _, target, field = usable[int(number) - 1]
        if verb == "click" and isinstance(target, Link):
            self._go(Request("GET", target.path))
        elif verb == "click" and field is None and isinstance(target, Form):
            self._send(target)
        elif field and isinstance(target, Form) and verb == ("select" if field.values else "type"):
            if field.values and value not in field.values:
                raise ValueError(f"no such option: {action!r}")
            self._values[id(target), field.name] = value
        else:
            raise ValueError(f"nothing to do: {action!r}")

    def _send(self, form: Form) -> None:
        fields = {**form.hidden, **{field.name: self._values[id(form), field.name] for field in form.fields}}
        if form.method == "get":
            self._go(Request("GET", f"{form.path}?{urlencode(fields)}"))
        else:
            self._go(Request("POST", form.path, tuple(fields.items())))
