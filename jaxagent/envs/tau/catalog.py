"""What a policy is told of the tools: the published descriptions beside a shop's data, or our own short ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import show
from jaxagent.envs.tau.toolbox import TOOLS
from jaxagent.envs.tau2.toolkit import arguments_of
from jaxagent.tools.calls import Tool, tool_form

FILE = "tools_info.json"
_SHORT: Mapping[str, str] = {
    "calculate": "Computes an arithmetic expression.",
    "cancel_pending_order": "Cancels a pending order. The reason is 'no longer needed' or 'ordered by mistake'.",
    "exchange_delivered_order_items": (
        "Exchanges items of a delivered order for other items of the same products. Once for an order."
    ),
    "find_user_id_by_email": "Finds a user by e-mail.",
    "find_user_id_by_name_zip": "Finds a user by name and zip code.",
    "get_order_details": "Shows an order.",
    "get_product_details": "Shows all items of a product.",
    "get_user_details": "Shows a user and the ids of the user's orders.",
    "list_all_product_types": "Lists products by name and id.",
    "modify_pending_order_address": "Changes where a pending order is sent.",
    "modify_pending_order_items": (
        "Changes items of a pending order to other items of the same products. Once for an order."
    ),
    "modify_pending_order_payment": "Changes how a pending order is paid.",
    "modify_user_address": "Changes a user's default address.",
    "return_delivered_order_items": (
        "Returns items of a delivered order, to the original payment method or a gift card."
    ),
    "think": "Writes a thought down; changes nothing.",
    "transfer_to_human_agents": "Hands the user over to a human, who is told the summary.",
}


def short() -> list[dict[str, Any]]:
    """Our own descriptions, in OpenAI's form."""
    return [tool_form(Tool(name, text, _schema(arguments_of(TOOLS[name])))) for name, text in _SHORT.items()]


def load(folder: Path) -> list[dict[str, Any]]:
    """The descriptions beside a shop's data, as they are written there; `short` where there is no such file. Raises
    ConfigError: the file is malformed, or describes other tools than there are."""
    path = folder / FILE
    if not path.is_file():
        return short()
    try:
        forms = json.loads(path.read_bytes())
        described = {form["function"]["name"]: sorted(form["function"]["parameters"]["properties"]) for form in forms}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} must be a list of tools in OpenAI's form: {type(error).__name__}: {error}."
        ) from None
    for name, tool in TOOLS.items():
        arguments = arguments_of(tool)
        if described.pop(name, None) != sorted(arguments):
            raise ConfigError(f"{path}: the tool {name} must be there, with the arguments {list(arguments)}.")
    if described:
        raise ConfigError(f"{path} describes {show(next(iter(described)))}, and there is no such tool.")
    return forms


def tools_of(forms: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The same for the parsers of tool calls."""
    functions = [form["function"] for form in forms]
    return tuple(Tool(f["name"], f.get("description", ""), f["parameters"]) for f in functions)


def _schema(arguments: Iterable[str]) -> dict[str, Any]:
    lists = {"type": "array", "items": {"type": "string"}}
    properties = {name: lists if name in ("item_ids", "new_item_ids") else {"type": "string"} for name in arguments}
    return {"type": "object", "properties": properties, "required": list(arguments)}


assert list(_SHORT) == list(TOOLS)
