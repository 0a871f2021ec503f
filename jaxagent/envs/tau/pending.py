"""Tools that change a pending order, or a user's own address. Each checks in the published order, then writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxagent.envs.tau.items import in_order, price_difference
from jaxagent.envs.tau.reading import NO_ORDER, NO_USER
from jaxagent.envs.tau.store import Record, Shop

REASONS = ("no longer needed", "ordered by mistake")
NOT_MODIFIED = "Error: non-pending order cannot be modified"
NO_METHOD = "Error: payment method not found"


def cancel_pending_order(data: Shop, order_id: str, reason: str) -> str:
    """Cancels, and refunds every payment; a gift card gets its money at once."""
    if order_id not in data.orders:
        return NO_ORDER
    if data.orders[order_id]["status"] != "pending":
        return "Error: non-pending order cannot be cancelled"
    if reason not in REASONS:
        return "Error: invalid reason"
    order, refunds = data.orders.change(order_id), []
    for paid in order["payment_history"]:
        method_id = paid["payment_method_id"]
        refunds.append(_transaction("refund", paid["amount"], method_id))
        if "gift_card" in method_id:
            _add(data.users.change(order["user_id"])["payment_methods"][method_id], paid["amount"])
    order["status"] = "cancelled"
    order["cancel_reason"] = reason
    order["payment_history"].extend(refunds)
    return json.dumps(order)


def modify_pending_order_address(
    data: Shop, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> str:
    """Another address for an order."""
    if order_id not in data.orders:
        return NO_ORDER
    if data.orders[order_id]["status"] != "pending":
        return NOT_MODIFIED
    order = data.orders.change(order_id)
    order["address"] = _address(address1, address2, city, state, country, zip)
    return json.dumps(order)


def modify_pending_order_items(
    data: Shop, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_method_id: str
) -> str:
    """Other items of the same products. Happens once: the status no longer is "pending"."""
    if order_id not in data.orders:
        return NO_ORDER
    order = data.orders[order_id]
    if order["status"] != "pending":
        return NOT_MODIFIED
    difference = price_difference(data, order, item_ids, new_item_ids)
    if isinstance(difference, str):
        return difference
    if payment_method_id not in data.users[order["user_id"]]["payment_methods"]:
        return NO_METHOD
    method = data.users[order["user_id"]]["payment_methods"][payment_method_id]
    if method["source"] == "gift_card" and method["balance"] < difference:
        return "Error: insufficient gift card balance to pay for the new item"
    order = data.orders.change(order_id)
    # The amount is not rounded, as published: its digits are part of the digest.
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(_transaction(kind, abs(difference), payment_method_id))
    if method["source"] == "gift_card":
        _add(data.users.change(order["user_id"])["payment_methods"][payment_method_id], -difference)
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = in_order(order, item_id)  # looked for again: an item that was changed just now may be the next one
        variant = data.products[item["product_id"]]["variants"][new_item_id]
        item |= {"item_id": new_item_id, "price": variant["price"], "options": variant["options"]}
    order["status"] = "pending (item modified)"
    return json.dumps(order)


def modify_pending_order_payment(data: Shop, order_id: str, payment_method_id: str) -> str:
    """Another payment method: pays the whole amount anew, and refunds the first payment."""
    if order_id not in data.orders:
        return NO_ORDER
    order = data.orders[order_id]
    if order["status"] != "pending":
        return NOT_MODIFIED
    if payment_method_id not in data.users[order["user_id"]]["payment_methods"]:
        return NO_METHOD
    first = order["payment_history"][0]
    if len(order["payment_history"]) > 1 or first["transaction_type"] != "payment":
        return "Error: there should be exactly one payment for a pending order"
    if first["payment_method_id"] == payment_method_id:
        return "Error: the new payment method should be different from the current one"
    amount = first["amount"]
    method = data.users[order["user_id"]]["payment_methods"][payment_method_id]
    if method["source"] == "gift_card" and method["balance"] < amount:
        return "Error: insufficient gift card balance to pay for the order"
    order = data.orders.change(order_id)
    old_id = first["payment_method_id"]
    order["payment_history"] += [
        _transaction("payment", amount, payment_method_id),
        _transaction("refund", amount, old_id),
    ]
    if method["source"] == "gift_card":
        _add(data.users.change(order["user_id"])["payment_methods"][payment_method_id], -amount)
    if "gift_card" in old_id:
        _add(data.users.change(order["user_id"])["payment_methods"][old_id], amount)
    return json.dumps(order)


def modify_user_address(
    data: Shop, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> str:
    """Another default address for a user."""
    if user_id not in data.users:
        return NO_USER
    user = data.users.change(user_id)
    user["address"] = _address(address1, address2, city, state, country, zip)
    return json.dumps(user)


def _transaction(kind: str, amount: float, method_id: str) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method_id}


def _add(method: Record, amount: float) -> None:
    method["balance"] = round(method["balance"] + amount, 2)


def _address(address1: Any, address2: Any, city: Any, state: Any, country: Any, zip: Any) -> Record:
    return {"address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip}
