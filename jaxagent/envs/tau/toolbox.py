"""The 16 tools by name, and the call of one: whatever a policy writes, the answer is a text.

What a tool's own exception says is shown, as published, with the published names in it:
"Error: CancelPendingOrder.invoke() missing 1 required positional argument: 'reason'".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.envs.tau import delivered, pending, reading
from jaxagent.envs.tau.store import Shop

Tool = Callable[..., str]
TERMINATING = ("transfer_to_human_agents",)  # they end the conversation, and are left out of replays

_TOOLS: tuple[Tool, ...] = (
    reading.calculate,
    pending.cancel_pending_order,
    delivered.exchange_delivered_order_items,
    reading.find_user_id_by_email,
    reading.find_user_id_by_name_zip,
    reading.get_order_details,
    reading.get_product_details,
    reading.get_user_details,
    reading.list_all_product_types,
    pending.modify_pending_order_address,
    pending.modify_pending_order_items,
    pending.modify_pending_order_payment,
    pending.modify_user_address,
    delivered.return_delivered_order_items,
    reading.think,
    reading.transfer_to_human_agents,
)
TOOLS: Mapping[str, Tool] = {tool.__name__: tool for tool in _TOOLS}
for _name, _tool in TOOLS.items():  # what Python says of missing and of unknown arguments begins with this
    _tool.__qualname__ = f"{''.join(map(str.capitalize, _name.split('_')))}.invoke"


@functools.cache
def arguments_of(name: str) -> tuple[str, ...]:
    """What a tool takes besides the shop. None of it has a default."""
    return tuple(inspect.signature(TOOLS[name]).parameters)[1:]


def call(shop: Shop, name: str, arguments: Mapping[str, Any]) -> str:
    """Calls a tool; its answer, or why there is none."""
    if name not in TOOLS:
        return f"Unknown action {name}"
    try:
        if "data" in arguments:  # the name of the argument that is the shop
            raise TypeError(f"{TOOLS[name].__qualname__}() got multiple values for keyword argument 'data'")
        return TOOLS[name](shop, **arguments)
    except Exception as error:
        return f"Error: {error}"


def replay(shop: Shop, actions: Any) -> list[str | None]:
    """Calls tools one after the other, as the published reward does with a task's actions.

    Returns:
      their answers; None for those that end the conversation, which are not called.
    """
    return [None if name in TERMINATING else call(shop, name, arguments) for name, arguments in actions]
