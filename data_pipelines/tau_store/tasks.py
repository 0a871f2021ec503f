"""What a customer of a generated store wants: the right actions, the instruction, and the facts that he may reveal.

A kind is a family and what is wanted:

    one/return            one wish: cancel, address, payment, items, return, exchange, profile (his own address), price
    two/return_cancel     two wishes, the second of which he only names when he is asked whether there is more
    one/foreign           a cancellation to refuse: the order is somebody else's, and the store must stay as it is
    one/late              another: the order is delivered, which nobody can cancel
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxagent.data_pipelines.tau_store.store import Store
from jaxagent.data_pipelines.tau_store.store import address as new_address

KINDS = (
    "one/cancel", "one/address", "one/payment", "one/items", "one/return", "one/exchange", "one/profile", "one/price",
    "one/foreign", "one/late",
    "two/return_cancel", "two/cancel_profile", "two/payment_profile", "two/return_payment",
)  # fmt: skip
REASONS = ("no longer needed", "ordered by mistake")


@dataclasses.dataclass(frozen=True)
class Wish:
    """One thing that a customer wants.

    Attributes:
      kind: "cancel", ...
      facts: what he knows of it and says when he is asked: "wish" (in general), "order", "reason", "items", "option",
        "payment", "address".
      sentence: all of that, for an instruction; "You want to ...".
      action: what is right to do, {"name", "kwargs"}; None where nothing in the store may change.
      outputs: what he must be told.
    """

    kind: str
    facts: Mapping[str, str]
    sentence: str
    action: Mapping[str, Any] | None
    outputs: tuple[str, ...] = ()


def draw(
    kind: str, user_id: str, store: Store, others: Sequence[str], random_: random.Random, compact: bool
) -> dict[str, Any] | None:
    """A task of one kind for one user, as a row's metadata; None where the user has nothing to wish so.

    Args:
      kind: of `KINDS`.
      user_id: who asks.
      store: that the task is about.
      others: users whose orders `one/foreign` may name.
      random_: of all choices.
      compact: every customer says his e-mail, otherwise half of them say name and zip code; and addresses are short.
    """
    names = kind.partition("/")[2]
    wishes: list[Wish] = []
    used: set[str] = set()
    for name in names.split("_"):
        drawing = _Drawing(store, user_id, [other for other in others if other != user_id], used, random_, compact)
        wish = drawing.wish(name)
        if wish is None:
            return None
        used.add(wish.facts.get("order", ""))
        wishes.append(wish)
    return _task(user_id, store.users[user_id], wishes, compact or random_.random() < 0.5)


def _task(user_id: str, user: Mapping[str, Any], wishes: Sequence[Wish], by_email: bool) -> dict[str, Any]:
    name = " ".join(user["name"][part] for part in ("first_name", "last_name"))
    if by_email:
        known = f"your email is {user['email']}"
        identity = {"email": user["email"]}
    else:
        known = f"your zip code is {user['address']['zip']}"
        identity = {"name": name, "zip": user["address"]["zip"]}
    instruction = f"Your name is {name} and {known}. " + " Then: ".join(wish.sentence for wish in wishes)
    return {
        "user_id": user_id,
        "instruction": instruction,
        "actions": [dict(wish.action) for wish in wishes if wish.action],
        "outputs": [output for wish in wishes for output in wish.outputs],
        "customer": {"identity": identity, "wishes": [dict(wish.facts) for wish in wishes]},
    }


@dataclasses.dataclass(frozen=True)
class _Drawing:
    """Draws one wish. `used` are orders that an earlier wish of the task is about."""

    store: Store
    user_id: str
    others: Sequence[str]
    used: set[str]
    random: random.Random
    compact: bool

    def wish(self, name: str) -> Wish | None:
        """The wish `name`, or None."""
        makers: dict[str, Callable[[], Wish | None]] = {
            "cancel": self.cancel,
            "address": self.address,
            "payment": self.payment,
            "items": lambda: self.replace("items", "pending", "modify", "modify_pending_order_items"),
            "exchange": lambda: self.replace("exchange", "delivered", "exchange", "exchange_delivered_order_items"),
            "return": self.give_back,
            "profile": self.profile,
            "price": self.price,
            "foreign": self.foreign,
            "late": self.late,
        }
        return makers[name]()

    def order(self, status: str, of: str = "") -> Mapping[str, Any] | None:
        ids = [i for i in self.store.users[of or self.user_id]["orders"] if i not in self.used]
        fitting = [self.store.orders[i] for i in ids if not status or self.store.orders[i]["status"] == status]
        return self.random.choice(fitting) if fitting else None

    def cancel(self) -> Wish | None:
        order = self.order("pending")
        return self._cancel(order, denied=False) if order else None

    def foreign(self) -> Wish | None:
        others = [other for other in self.others if self.order("pending", other)]
        order = self.order("pending", self.random.choice(others)) if others else None
        return self._cancel(order, denied=True) if order else None

    def late(self) -> Wish | None:
        order = self.order("delivered")
        return self._cancel(order, denied=True) if order else None

    def _cancel(self, order: Mapping[str, Any], denied: bool) -> Wish:
        order_id, reason = order["order_id"], self.random.choice(REASONS)
        action = {"name": "cancel_pending_order", "kwargs": {"order_id": order_id, "reason": reason}}
        sentence = f"You want to cancel order {order_id}, because it is {reason}."
        facts = {"wish": "I want to cancel an order.", "order": order_id, "reason": reason}
        return Wish("cancel", facts, sentence, None if denied else action)

    def address(self) -> Wish | None:
        order = self.order("pending")
        if not order:
            return None
        address = new_address(self.random, self.compact)
        kwargs = {"order_id": order["order_id"], **address}
        sentence = f"You want order {order['order_id']} sent to another address: {', '.join(_lines(address))}."
        facts = {"wish": "I want another address for an order.", "order": order["order_id"]}
        facts["address"] = "\n".join(_lines(address))
        return Wish("address", facts, sentence, {"name": "modify_pending_order_address", "kwargs": kwargs})

    def profile(self) -> Wish | None:
        address = new_address(self.random, self.compact)
        kwargs = {"user_id": self.user_id, **address}
        sentence = f"You have moved and want your own address changed to {', '.join(_lines(address))}."
        facts = {"wish": "I have moved.", "address": "\n".join(_lines(address))}
        return Wish("profile", facts, sentence, {"name": "modify_user_address", "kwargs": kwargs})

    def payment(self) -> Wish | None:
        order = self.order("pending")
        if not order:
            return None
        paid, methods = order["payment_history"][0], self.store.users[self.user_id]["payment_methods"]
        fitting = [
            method["id"]
            for method in methods.values()
            if method["id"] != paid["payment_method_id"] and method.get("balance", paid["amount"]) >= paid["amount"]
        ]
        if not fitting:
            return None
        method_id, order_id = self.random.choice(fitting), order["order_id"]
        facts = {"wish": "I want to pay an order otherwise.", "order": order_id, "payment": method_id}
        kwargs = {"order_id": order_id, "payment_method_id": method_id}
        sentence = f"You want to pay order {order_id} with {method_id} instead."
        return Wish("payment", facts, sentence, {"name": "modify_pending_order_payment", "kwargs": kwargs})

    def give_back(self) -> Wish | None:
        order = self.order("delivered")
        if not order:
            return None
        item, method_id = self.random.choice(order["items"]), order["payment_history"][0]["payment_method_id"]
        order_id = order["order_id"]
        kwargs = {"order_id": order_id, "item_ids": [item["item_id"]], "payment_method_id": method_id}
        facts = {"wish": "I want to return an item.", "order": order_id, "items": item["name"], "payment": method_id}
        sentence = f"You want to return the item {item['name']} of order {order_id}, with the refund to {method_id}."
        return Wish("return", facts, sentence, {"name": "return_delivered_order_items", "kwargs": kwargs})

    def replace(self, kind: str, status: str, verb: str, tool: str) -> Wish | None:
        order = self.order(status)
        if not order:
            return None
        item, method_id = self.random.choice(order["items"]), order["payment_history"][0]["payment_method_id"]
        variants = self.store.products[item["product_id"]]["variants"].values()
        fitting = [v for v in variants if v["item_id"] != item["item_id"] and v["available"]]
        method = self.store.users[self.user_id]["payment_methods"][method_id]
        fitting = [v for v in fitting if v["price"] - item["price"] <= method.get("balance", v["price"])]
        if not fitting:
            return None
        new, order_id = self.random.choice(fitting), order["order_id"]
        kwargs = {
            "order_id": order_id,
            "item_ids": [item["item_id"]],
            "new_item_ids": [new["item_id"]],
            "payment_method_id": method_id,
        }
        option = ", ".join(new["options"].values())
        facts = {"wish": f"I want to {verb} an item.", "order": order_id, "items": item["name"], "option": option}
        facts["payment"] = method_id
        sentence = (
            f"You want to {verb} the item {item['name']} of order {order_id}: you want it {option}, and pay the "
            f"difference with {method_id}."
        )
        return Wish(kind, facts, sentence, {"name": tool, "kwargs": kwargs})

    def price(self) -> Wish | None:
        order = self.order("")
        if not order:
            return None
        total = str(order["payment_history"][0]["amount"])
        facts = {"wish": "I want to know what I paid for an order.", "order": order["order_id"]}
        sentence = f"You want to know what you paid for order {order['order_id']}."
        return Wish("price", facts, sentence, None, (total,))


def _lines(address: Mapping[str, str]) -> list[str]:
    """An address as on an envelope, without empty lines."""
    return [line for line in address.values() if line]
