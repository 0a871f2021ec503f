"""The records of tau2-bench's shop, and what its tools have in common: finding records, and money."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxagent.envs.forms import EACH
from jaxagent.envs.tau2.tables import Originals, Record, Table, open_tables
from jaxagent.envs.tau2.toolkit import ToolRefusal

ADDRESS = dict.fromkeys(("address1", "address2", "city", "country", "state", "zip"), str)
PAYMENT = {"transaction_type": str, "amount": float, "payment_method_id": str}
ORDER = {
    "order_id": str,
    "user_id": str,
    "address": ADDRESS,
    "items": [{"name": str, "product_id": str, "item_id": str, "price": float, "options": {EACH: str}}],
    "status": str,
    "fulfillments": [{"tracking_id": [str], "item_ids": [str]}],
    "payment_history": [PAYMENT],
    "cancel_reason?": str,
    "exchange_items?": [str],
    "exchange_new_items?": [str],
    "exchange_payment_method_id?": str,
    "exchange_price_difference?": float,
    "return_items?": [str],
    "return_payment_method_id?": str,
}
PRODUCT = {
    "name": str,
    "product_id": str,
    "variants": {EACH: {"item_id": str, "options": {EACH: str}, "available": bool, "price": float}},
}
METHOD = {"source": str, "id": str, "brand~": str, "last_four~": str, "balance~": float}
USER = {
    "user_id": str,
    "name": {"first_name": str, "last_name": str},
    "address": ADDRESS,
    "email": str,
    "payment_methods": {EACH: METHOD},
    "orders": [str],
}


class Shop(dict[str, Table]):
    """The tables of one attempt, with the rules in which tau-bench's shop (`envs.tau.store.Shop`) is another.

    Attributes:
      address_fields: of a new address, in the order in which they are written.
      distinct: whether an item of a pending order can be replaced by another item alone.
    """

    address_fields: Sequence[str] = tuple(ADDRESS)
    distinct = True

    def __init__(self, originals: Originals) -> None:
        super().__init__(open_tables(originals))

    def is_pending(self, order: Record) -> bool:
        """Whether an order may get another address or payment method: even if its items were changed."""
        return "pending" in order["status"]

    def is_gift_card(self, method: Record) -> bool:
        """Whether a payment method gets the money of any return."""
        return method["source"] == "gift_card"

    def charge(self, difference: float) -> float:
        """What is written down where other items cost more or less."""
        return float(abs(difference))

    def refund(self, user_id: str, method_id: str, amount: float) -> None:
        """Gives money back at once, if the method is a gift card."""
        add_money(self, user_id, method_id, amount)

    def replace(self, order: Record, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> None:
        """Puts new items in the place of an order's: all with the price and the options of the last new one."""
        last = variant_of(self, item_of(order, item_ids[-1])["product_id"], new_item_ids[-1]) if item_ids else {}
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = item_of(order, item_id)  # looked for again: an item that was changed just now may be the next one
            item |= {"item_id": new_item_id, "price": last["price"], "options": last["options"]}


def _record_getter(table: str, thing: str) -> Callable[[Shop, str], Record]:
    def find(data: Shop, key: str) -> Record:
        if key not in data[table]:
            raise ToolRefusal(f"{thing} not found")
        return data[table][key]

    return find


order_of, user_of, product_of = (_record_getter(f"{thing.lower()}s", thing) for thing in ("Order", "User", "Product"))


def pending(data: Shop, order_id: str) -> Record:
    """An order that may get another address or payment method."""
    order = order_of(data, order_id)
    if not data.is_pending(order):
        raise ToolRefusal("Non-pending order cannot be modified")
    return order


def method_of(data: Shop, user_id: str, method_id: str) -> Record:
    """One of a user's payment methods."""
    methods = user_of(data, user_id)["payment_methods"]
    if method_id not in methods:
        raise ToolRefusal("Payment method not found")
    return methods[method_id]


def variant_of(data: Shop, product_id: str, item_id: str) -> Record:
    """One of a product's items."""
    variants = product_of(data, product_id)["variants"]
    if item_id not in variants:
        raise ToolRefusal("Variant not found", item_id)
    return variants[item_id]


def item_of(order: Record, item_id: str) -> Record:
    """The order's first item with this id."""
    item = next((item for item in order["items"] if item["item_id"] == item_id), None)
    if item is None:
        raise ToolRefusal("Item {} not found", item_id)
    return item


def must_have(order: Record, item_ids: Sequence[str], words: str) -> None:
    """Refuses, with the id in `words`, the first id that is named more often than the order has it."""
    there = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > there.count(item_id):
            raise ToolRefusal(words, item_id)


def price_difference(
    data: Shop, order: Record, item_ids: Sequence[str], new_item_ids: Sequence[str], distinct: bool = False
) -> float:
    """What the new items cost more, not rounded; the integer 0 where there are none."""
    difference = 0
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        if distinct and item_id == new_item_id:
            raise ToolRefusal("The new item id should be different from the old item id")
        item = item_of(order, item_id)
        variant = variant_of(data, item["product_id"], new_item_id)
        if not variant["available"]:
            raise ToolRefusal("New item {} not found or available", new_item_id)
        difference += variant["price"] - item["price"]
    return difference


def transaction(kind: str, amount: float, method_id: str) -> Record:
    """A payment or a refund."""
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method_id}


def add_money(data: Shop, user_id: str, method_id: str, amount: float) -> None:
    """Money to, or with a minus from, a gift card; for other methods nothing is kept here."""
    if method_of(data, user_id, method_id)["source"] == "gift_card":
        method = data["users"].change(user_id)["payment_methods"][method_id]
        method["balance"] = round(method["balance"] + amount, 2)


def new_address(data: Shop, address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Record:
    """An address in the form of the records."""
    fields = {"address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip}
    return {name: fields[name] for name in data.address_fields}
