"""A role behind HTTP: any server that speaks OpenAI's chat completions."""

from __future__ import annotations

import dataclasses

from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from jaxagent.roles.base import TextRole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Http(TextRole):
    """A chat model behind HTTP."""

    url: str  # up to and without /chat/completions, e.g. "http://127.0.0.1:8000/v1"
    model: str
    token_file: str = ""  # a file with what is sent as a bearer token; "" = none
    temperature: NonNegativeFloat = 0.7
    retries: NonNegativeInt = 2  # further attempts of one call
    calls: PositiveInt = 256  # in flight at once; further ones wait
