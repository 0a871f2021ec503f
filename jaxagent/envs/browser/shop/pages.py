"""What a page of the shop has, from top to bottom, and its HTML: text, links and forms, and no script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from html import escape


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclasses.dataclass(frozen=True)
class Link:
    """A link to another page of the shop."""

    text: str
    path: str


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a form: to type into, or to select one of `values` in."""

    label: str
    name: str  # in the address, or in what is sent
    value: str = ""  # at first
    values: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """Fields, and the button that sends them with what is hidden."""

    path: str
    button: str
    fields: Sequence[Field] = ()
    hidden: Mapping[str, str] = dataclasses.field(default_factory=dict)
    method: str = "post"


@dataclasses.dataclass(frozen=True)
class Page:
    """A page."""

    title: str
    elements: Sequence[Text | Link | Form]


def html(page: Page) -> str:
    """The page as HTML."""
    body = "\n".join(map(_element, page.elements))
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(page.title)}</title><body>\n{body}\n'


def _element(element: Text | Link | Form) -> str:
    if isinstance(element, Text):
        return f"<p>{escape(element.text)}</p>"
    if isinstance(element, Link):
        return f'<p><a href="{escape(element.path)}">{escape(element.text)}</a></p>'
    hidden = "".join(f'<input type="hidden" name="{n}" value="{escape(v)}">' for n, v in element.hidden.items())
    # Without autocomplete="off" a browser that goes back would fill in what was chosen before.
    return (
        f'<form action="{escape(element.path)}" method="{element.method}" autocomplete="off">{hidden}'
        f"{''.join(map(_field, element.fields))}<button>{escape(element.button)}</button></form>"
    )


def _field(field: Field) -> str:
    label, name, value = escape(field.label), escape(field.name), escape(field.value)
    if not field.values:
        return f'<input type="text" aria-label="{label}" name="{name}" value="{value}"> '
    options = "".join(f"<option{' selected' * (v == field.value)}>{escape(v)}</option>" for v in field.values)
    return f'<select aria-label="{label}" name="{name}">{options}</select> '
