"""tau2-bench's retail domain: tau-bench's shop, with tools that refuse in other words and differ in some rules.

`envs.tau` calls the same functions; where its rules are others, they ask the `shop.Shop`. What differs: there is
`get_item_details` and no `think`; a transfer to a human does not end the conversation; records have all of their fields
(null where nothing was done), and prices are floats; an order whose items were changed may still get another address or
payment method; and of several changed items every one takes the price and the options of the last new one, a mistake
that is kept because the published scores have it.
"""

from __future__ import annotations

import json
from typing import Annotated

from jaxagent.envs.tau2.arithmetic import evaluate
from jaxagent.envs.tau2.shop import (
    ORDER,
    PRODUCT,
    USER,
    Shop,
    add_money,
    method_of,
    must_have,
    new_address,
    order_of,
    pending,
    price_difference,
    product_of,
    transaction,
    user_of,
)
from jaxagent.envs.tau2.tables import Record
from jaxagent.envs.tau2.toolkit import Toolkit, ToolRefusal

REASONS = ("no longer needed", "ordered by mistake")
_ARITHMETIC = "0123456789+-*/(). "

OrderId = Annotated[str, "The order's id, with its '#', such as '#W0000000'."]
UserId = Annotated[str, "The user's id, such as 'sara_doe_496'."]
MethodId = Annotated[str, "The id of one of the user's payment methods, such as 'gift_card_0000000'."]
ItemIds = Annotated[list[str], "Ids of items of the order; one that is there twice may be named twice."]
NewItemIds = Annotated[list[str], "Ids of items of the same products, each in the place of the item it replaces."]
Address1 = Annotated[str, "The address's first line, such as '123 Main St'."]
Address2 = Annotated[str, "Its second line, such as 'Apt 1', or ''."]
City = Annotated[str, "The city, such as 'San Francisco'."]
State = Annotated[str, "The state, such as 'CA'."]
Country = Annotated[str, "The country, such as 'USA'."]
Zip = Annotated[str, "The zip code, such as '12345'."]


def calculate(data: Shop, expression: Annotated[str, "Numbers, + - * /, parentheses and blanks."]) -> str:
    """Computes an expression, rounded to two digits."""
    if not all(char in _ARITHMETIC for char in expression):
        raise ToolRefusal("Invalid characters in expression")
    return str(round(float(evaluate(expression)), 2))


def cancel_pending_order(
    data: Shop,
    order_id: OrderId,
    reason: Annotated[str, "Either 'no longer needed' or 'ordered by mistake'."],
) -> Record:
    """Cancels a pending order and refunds what was paid: a gift card at once, anything else in 5 to 7 business days.
    Explain what will happen and have the user confirm it (yes) first."""
    order = order_of(data, order_id)
    if order["status"] != "pending":
        raise ToolRefusal("Non-pending order cannot be cancelled")
    if reason not in REASONS:
        raise ToolRefusal("Invalid reason")
    order, refunds = data["orders"].change(order_id), []
    for paid in order["payment_history"]:
        refunds.append(transaction("refund", paid["amount"], paid["payment_method_id"]))
        data.refund(order["user_id"], paid["payment_method_id"], paid["amount"])
    order |= {"status": "cancelled", "cancel_reason": reason}
    order["payment_history"].extend(refunds)
    return order


def exchange_delivered_order_items(
    data: Shop, order_id: OrderId, item_ids: ItemIds, new_item_ids: NewItemIds, payment_method_id: MethodId
) -> Record:
    """Exchanges items of a delivered order for other items of the same products. A delivered order can be returned or
    exchanged once. Explain what will happen and have the user confirm it (yes) first."""
    order = order_of(data, order_id)
    if order["status"] != "delivered":
        raise ToolRefusal("Non-delivered order cannot be exchanged")
    must_have(order, item_ids, "Number of {} not found.")
    if len(item_ids) != len(new_item_ids):
        raise ToolRefusal("The number of items to be exchanged should match.")
    difference = round(price_difference(data, order, item_ids, new_item_ids), 2)
    method = method_of(data, order["user_id"], payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolRefusal("Insufficient gift card balance to pay for the price difference")
    order = data["orders"].change(order_id)
    order |= {"status": "exchange requested", "exchange_items": sorted(item_ids)}
    order |= {"exchange_new_items": sorted(new_item_ids), "exchange_payment_method_id": payment_method_id}
    order["exchange_price_difference"] = difference
    return order


def find_user_id_by_name_zip(
    data: Shop,
    first_name: Annotated[str, "Such as 'John'."],
    last_name: Annotated[str, "Such as 'Doe'."],
    zip: Zip,
) -> str:
    """Finds a user's id by name and zip code, where the email is not known or finds nobody."""
    for user_id, user in data["users"].items():
        name = user["name"]
        named = name["first_name"].lower() == first_name.lower() and name["last_name"].lower() == last_name.lower()
        if named and user["address"]["zip"] == zip:
            return user_id
    raise ToolRefusal("User not found")


def find_user_id_by_email(data: Shop, email: Annotated[str, "Such as 'someone@example.com'."]) -> str:
    """Finds a user's id by the email."""
    for user_id, user in data["users"].items():
        if user["email"].lower() == email.lower():
            return user_id
    raise ToolRefusal("User not found")


def get_order_details(data: Shop, order_id: OrderId) -> Record:
    """Shows an order and its status."""
    return order_of(data, order_id)


def get_product_details(
    data: Shop, product_id: Annotated[str, "The product's id, such as '6086499569'; an item's id is another one."]
) -> Record:
    """Shows a product and all of its items."""
    return product_of(data, product_id)


def get_item_details(
    data: Shop, item_id: Annotated[str, "The item's id, such as '1008292230'; a product's id is another one."]
) -> Record:
    """Shows an item: its options, its price, and whether it is available."""
    for product in data["products"].values():
        if item_id in product["variants"]:
            return product["variants"][item_id]
    raise ToolRefusal("Item not found")


def get_user_details(data: Shop, user_id: UserId) -> Record:
    """Shows a user, with the ids of all orders."""
    return user_of(data, user_id)


def list_all_product_types(data: Shop) -> str:
    """Lists the names and ids of all products."""
    return json.dumps({product["name"]: product["product_id"] for product in data["products"].values()}, sort_keys=True)


def modify_pending_order_address(
    data: Shop,
    order_id: OrderId,
    address1: Address1,
    address2: Address2,
    city: City,
    state: State,
    country: Country,
    zip: Zip,
) -> Record:
    """Gives a pending order another address. Explain it and have the user confirm it (yes) first."""
    pending(data, order_id)
    order = data["orders"].change(order_id)
    order["address"] = new_address(data, address1, address2, city, state, country, zip)
    return order


def modify_pending_order_items(
    data: Shop, order_id: OrderId, item_ids: ItemIds, new_item_ids: NewItemIds, payment_method_id: MethodId
) -> Record:
    """Replaces items of a pending order by other items of the same products; can be done once for an order. Explain
    what will happen and have the user confirm it (yes) first."""
    order = order_of(data, order_id)
    if order["status"] != "pending":
        raise ToolRefusal("Non-pending order cannot be modified")
    must_have(order, item_ids, "{} not found")
    if len(item_ids) != len(new_item_ids):
        raise ToolRefusal("The number of items to be exchanged should match")
    difference = price_difference(data, order, item_ids, new_item_ids, distinct=data.distinct)
    method = method_of(data, order["user_id"], payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolRefusal("Insufficient gift card balance to pay for the new item")
    order = data["orders"].change(order_id)
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(transaction(kind, data.charge(difference), payment_method_id))
    add_money(data, order["user_id"], payment_method_id, -difference)
    data.replace(order, item_ids, new_item_ids)
    order["status"] = "pending (item modified)"
    return order


def modify_pending_order_payment(data: Shop, order_id: OrderId, payment_method_id: MethodId) -> Record:
    """Has a pending order paid in another way: pays anew, and refunds the first payment. Explain it and have the user
    confirm it (yes) first."""
    order = pending(data, order_id)
    method = method_of(data, order["user_id"], payment_method_id)
    paid = order["payment_history"]
    if len(paid) != 1 or paid[0]["transaction_type"] != "payment":
        raise ToolRefusal("There should be exactly one payment for a pending order")
    first = paid[0]
    if first["payment_method_id"] == payment_method_id:
        raise ToolRefusal("The new payment method should be different from the current one")
    amount = first["amount"]
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ToolRefusal("Insufficient gift card balance to pay for the order")
    order, old_id = data["orders"].change(order_id), first["payment_method_id"]
    pays, refunds = transaction("payment", amount, payment_method_id), transaction("refund", amount, old_id)
    order["payment_history"] += [pays, refunds]
    add_money(data, order["user_id"], payment_method_id, -amount)
    data.refund(order["user_id"], old_id, amount)
    return order


def modify_user_address(
    data: Shop,
    user_id: UserId,
    address1: Address1,
    address2: Address2,
    city: City,
    state: State,
    country: Country,
    zip: Zip,
) -> Record:
    """Gives a user another default address. Explain it and have the user confirm it (yes) first."""
    user_of(data, user_id)
    user = data["users"].change(user_id)
    user["address"] = new_address(data, address1, address2, city, state, country, zip)
    return user


def return_delivered_order_items(
    data: Shop, order_id: OrderId, item_ids: ItemIds, payment_method_id: MethodId
) -> Record:
    """Returns items of a delivered order; the money goes where it came from, or to a gift card. The user is told by
    email how to send them back. Explain it and have the user confirm it (yes) first."""
    order = order_of(data, order_id)
    if order["status"] != "delivered":
        raise ToolRefusal("Non-delivered order cannot be returned")
    method = method_of(data, order["user_id"], payment_method_id)
    if not data.is_gift_card(method) and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise ToolRefusal("Payment method should be the original payment method")
    must_have(order, item_ids, "Some item not found")
    order = data["orders"].change(order_id)
    order |= {"status": "return requested", "return_items": sorted(item_ids)}
    order["return_payment_method_id"] = payment_method_id
    return order


def transfer_to_human_agents(data: Shop, summary: Annotated[str, "What the user needs, in short."]) -> str:
    """Hands the user over to a human agent: only where the user asks for one, or the tools and the policy do not
    allow what the user needs."""
    return "Transfer successful"


AGENT = Toolkit(
    open=Shop,
    forms={"orders": ORDER, "products": PRODUCT, "users": USER},
    tools=(
        calculate, cancel_pending_order, exchange_delivered_order_items, find_user_id_by_name_zip,
        find_user_id_by_email, get_order_details, get_product_details, get_item_details, get_user_details,
        list_all_product_types, modify_pending_order_address, modify_pending_order_items, modify_pending_order_payment,
        modify_user_address, return_delivered_order_items, transfer_to_human_agents,
    ),
)  # fmt: skip
