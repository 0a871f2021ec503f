"""How a small policy that is taught by examples speaks with a shop's customer and calls its tools: pure text.

    <say>Which order?</say>                                      answered by <user>...</user>
    <call>get_order_details {"order_id": "#W261"}</call>         answered by <out>...</out>

`TOKENS` are what a tokenizer trained for such a policy keeps whole: the tags, the names of tools, and what of the
shop's JSON is the same in every record. So an order takes forty tokens instead of two hundred.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.envs.base import Message
from jaxagent.tools.base import load_json

SYSTEM = "Find the customer. Look orders up. Serve every wish. Refuse what concerns others.\n"
STOP_STRINGS = ("</say>", "</call>")
PREFIXES = ("<say>", "<call>")
_TAGS = ("<say>", "</say>", "<call>", "</call>", "<user>", "</user>\n", "<out>", "</out>\n")
_NAMES = (
    "cancel_pending_order", "exchange_delivered_order_items", "find_user_id_by_email", "find_user_id_by_name_zip",
    "get_order_details", "get_product_details", "get_user_details", "modify_pending_order_address",
    "modify_pending_order_items", "modify_pending_order_payment", "modify_user_address",
    "return_delivered_order_items",
)  # fmt: skip
_TEXTS = ("credit_card_", "gift_card_", "paypal_", "@example.com", "#W", "Error: ", " not found")
_JSON = (
    *(f' {{"{key}": "' for key in ("email", "first_name", "order_id", "product_id", "user_id")),
    *(f'{{"{key}": "' for key in ("order_id", "name")),
    *(
        f'", "{key}": "'
        for key in (
            "address1", "address2", "city", "country", "item_id", "last_name", "payment_method_id", "product_id",
            "reason", "state", "status", "user_id", "zip",
        )
    ),
    *(f'", "options": {{"{key}": "' for key in ("color", "material", "size")),
    '", "payment_history": [{"transaction_type": "payment", "amount": ', ', "payment_method_id": "',
    '"}], "items": [{"name": "', '"}, "price": ', '}, {"name": "', '}], "fulfillments": [',
    '"}, {"transaction_type": "refund", "amount": ', '"}, {"transaction_type": "payment", "amount": ',
    '", "variants": {"', '": {"item_id": "', '"}, "available": true, "price": ', '}, "',
    '", "item_ids": ["', '"], "new_item_ids": ["', '"], "payment_method_id": "', '"}', '{"name": {"first_name": "',
)  # fmt: skip
TOKENS: tuple[str, ...] = (*_TAGS, *_NAMES, *_TEXTS, *_JSON)


def say(text: str) -> str:
    """What an agent writes to speak to the customer."""
    return f"<say>{text}</say>"


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """What an agent writes to call a tool."""
    return f"<call>{name} {json.dumps(dict(arguments))}</call>"


def customer_text(text: str) -> str:
    """What the agent is shown of the customer's words."""
    return f"<user>{text}</user>\n"


def tool_text(text: str) -> str:
    """What the agent is shown of a tool's answer."""
    return f"<out>{text}</out>\n"


def messages(opening: str) -> Sequence[Message]:
    """What an episode begins with: the short policy, and the customer's first words."""
    return (Message("system", SYSTEM), Message("user", customer_text(opening)))


def parse(action: str) -> tuple[str, Mapping[str, Any]]:
    """The tool and its arguments; ("respond", {"content": ...}) for speech. Raises ValueError: it is neither; says what
    is missing."""
    text = action.strip()
    if text.startswith("<say>") and text.endswith("</say>"):
        return "respond", {"content": text[len("<say>") : -len("</say>")]}
    if not (text.startswith("<call>") and text.endswith("</call>")):
        raise ValueError("an action is <say>...</say> or <call>name {...}</call>")
    name, _, arguments_text = text[len("<call>") : -len("</call>")].partition(" ")
    try:
        arguments = load_json(arguments_text.strip())
    except ValueError as error:
        raise ValueError("the arguments of a call must be JSON") from error
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object")
    return name, arguments
