"""Tools and what an answer says of them, as dataclasses, whatever way a model or an API writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the program offers to the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments


@dataclasses.dataclass(frozen=True)
class Call:
    """The policy's call of a tool."""

    name: str
    arguments: Mapping[str, Any] | str  # a text only where it is no JSON object
    id: str = ""  # the dialect's; does not count when messages are compared


@dataclasses.dataclass(frozen=True)
class Text:
    """Part of the answer's text, as it is sampled."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Part of the answer's reasoning, as it is sampled."""

    text: str


Delta = Text | Reasoning | Call  # a call comes whole
