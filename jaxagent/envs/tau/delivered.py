"""Tools that return or exchange what was delivered. Each checks in the published order, then writes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxagent.envs.tau.items import missing, price_difference
from jaxagent.envs.tau.pending import NO_METHOD
from jaxagent.envs.tau.reading import NO_ORDER
from jaxagent.envs.tau.store import Shop


def return_delivered_order_items(data: Shop, order_id: str, item_ids: Sequence[str], payment_method_id: str) -> str:
    """Asks for a return; the money goes where it came from, or to a gift card."""
    if order_id not in data.orders:
        return NO_ORDER
    order = data.orders[order_id]
    if order["status"] != "delivered":
        return "Error: non-delivered order cannot be returned"
    if payment_method_id not in data.users[order["user_id"]]["payment_methods"]:
        return NO_METHOD
    if "gift_card" not in payment_method_id and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        return "Error: payment method should be either the original payment method or a gift card"
    if missing(order, item_ids):
        return "Error: some item not found"
    order = data.orders.change(order_id)
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return json.dumps(order)


def exchange_delivered_order_items(
    data: Shop, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_method_id: str
) -> str:
    """Asks for an exchange for other items of the same products."""
    if order_id not in data.orders:
        return NO_ORDER
    order = data.orders[order_id]
    if order["status"] != "delivered":
        return "Error: non-delivered order cannot be exchanged"
    difference = price_difference(data, order, item_ids, new_item_ids)
    if isinstance(difference, str):
        return difference
    difference = round(difference, 2)
    if payment_method_id not in data.users[order["user_id"]]["payment_methods"]:
        return NO_METHOD
    method = data.users[order["user_id"]]["payment_methods"][payment_method_id]
    if method["source"] == "gift_card" and method["balance"] < difference:
        return "Error: insufficient gift card balance to pay for the price difference"
    order = data.orders.change(order_id)
    order["status"] = "exchange requested"
    order["exchange_items"] = sorted(item_ids)
    order["exchange_new_items"] = sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = difference
    return json.dumps(order)
