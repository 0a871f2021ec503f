"""The answers to `GET /v1/models` and `GET /v1/models/NAME`.

One address serves both vendors' clients: Anthropic's send the header `anthropic-version`, OpenAI's do not.
"""

from __future__ import annotations

import datetime
from typing import Any

ANTHROPIC_HEADER = "anthropic-version"


def openai_model(name: str, created: int) -> dict[str, Any]:
    """A model as OpenAI's clients read it. created: seconds since the epoch."""
    return {"id": name, "object": "model", "created": created, "owned_by": "jaxagent"}


def anthropic_model(name: str, created: int) -> dict[str, Any]:
    """A model as Anthropic's clients read it. created: seconds since the epoch."""
    told = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": told, "lifecycle": "active"}


def openai_list(name: str, created: int) -> dict[str, Any]:
    """The list of the server's only model."""
    return {"object": "list", "data": [openai_model(name, created)]}


def anthropic_list(name: str, created: int) -> dict[str, Any]:
    """The list of the server's only model."""
    return {"data": [anthropic_model(name, created)], "has_more": False, "first_id": name, "last_id": name}
