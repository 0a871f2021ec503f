"""The 16 tools by name, and the call of one: whatever a policy writes, the answer is a text.

The tools are those of tau2-bench's shop (`envs.tau2.retail`), which refuse here in tau-bench's words. What Python says
of a wrong call is shown, as published, with the published names in it:
"Error: CancelPendingOrder.invoke() missing 1 required positional argument: 'reason'".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.envs.tau.store import Shop
from jaxagent.envs.tau2 import retail
from jaxagent.envs.tau2.toolkit import ToolRefusal, as_text

TERMINATING = ("transfer_to_human_agents",)  # they end the conversation, and are left out of replays
_WORDS = {  # where a refusal is not tau2-bench's with a small letter
    "Number of {} not found.": "{} not found",
    "Payment method should be the original payment method": (
        "payment method should be either the original payment method or a gift card"
    ),
    "The number of items to be exchanged should match.": "the number of items to be exchanged should match",
    "Variant not found": "new item {} not found or available",
}


def think(data: Shop, thought: str) -> str:
    """Nothing: the thought stands in the conversation."""
    return ""


TOOLS: Mapping[str, Callable[..., Any]] = {
    tool.__name__: tool
    for tool in sorted((*retail.AGENT.tools, think), key=lambda tool: tool.__name__)
    if tool is not retail.get_item_details
}


def call(shop: Shop, name: str, arguments: Mapping[str, Any]) -> str:
    """Calls a tool; its answer, or why there is none."""
    if name not in TOOLS:
        return f"Unknown action {name}"
    published = f"{''.join(map(str.capitalize, name.split('_')))}.invoke()"
    try:
        if "data" in arguments:  # the name of the argument that is the shop
            raise TypeError(f"{published} got multiple values for keyword argument 'data'")
        return as_text(TOOLS[name](shop, **arguments))
    except ToolRefusal as error:
        words = _WORDS.get(error.text, error.text[:1].lower() + error.text[1:])
        return f"Error: {words.format(*error.values)}"
    except Exception as error:
        text, called = str(error), f"{name}()"
        return f"Error: {published}{text.removeprefix(called)}" if text.startswith(called) else f"Error: {text}"


def replay(shop: Shop, actions: Any) -> list[str | None]:
    """Calls tools one after the other, as the published reward does with a task's actions.

    Returns:
      their answers; None for those that end the conversation, which are not called.
    """
    return [None if name in TERMINATING else call(shop, name, arguments) for name, arguments in actions]
