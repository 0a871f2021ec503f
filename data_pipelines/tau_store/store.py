"""Draws a retail store with the schema of tau-bench's: orders, products and users, each keyed by its id.

Every status, payment method and amount is one that the store's tools can act on: an order's payment is the sum of its
items, an item is a variant of a product, and a gift card covers what is paid with it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from jaxagent.config import ConfigError

FILES = ("orders", "products", "users")
FIRST_NAMES = tuple(
    [
        "Ada",
        "Amir",
        "Anna",
        "Bela",
        "Boris",
        "Carla",
        "Chen",
        "Clara",
        "David",
        "Dora",
        "Elif",
        "Emil",
        "Eva",
        "Farid",
        "Fiona",
        "Goran",
        "Greta",
        "Hana",
        "Hugo",
        "Ida",
        "Igor",
        "Ines",
        "Ivan",
        "Jana",
        "Jonas",
        "Kaito",
        "Karin",
        "Lars",
        "Lena",
        "Lucia",
        "Marco",
        "Maria",
        "Mila",
        "Nadia",
        "Nils",
        "Nora",
        "Olga",
        "Omar",
        "Paula",
        "Pavel",
        "Rosa",
        "Samir",
        "Sara",
        "Selma",
        "Stefan",
        "Tara",
        "Theo",
        "Uma",
        "Viktor",
        "Yara",
        "Yuki",
        "Zoe",
    ]
)
LAST_NAMES = tuple(
    [
        "Adler",
        "Bauer",
        "Berg",
        "Blanc",
        "Costa",
        "Dahl",
        "Diaz",
        "Duran",
        "Ekman",
        "Faber",
        "Fischer",
        "Garcia",
        "Gupta",
        "Haas",
        "Hansen",
        "Ito",
        "Jansen",
        "Kaya",
        "Keller",
        "Khan",
        "Klein",
        "Kovac",
        "Lang",
        "Larsen",
        "Lopez",
        "Marino",
        "Mendes",
        "Meyer",
        "Moreau",
        "Mori",
        "Nagy",
        "Novak",
        "Okafor",
        "Olsen",
        "Ortiz",
        "Park",
        "Patel",
        "Petrov",
        "Reyes",
        "Rossi",
        "Santos",
        "Sato",
        "Schmid",
        "Silva",
        "Tanaka",
        "Vogel",
        "Weber",
        "Wolf",
        "Yilmaz",
    ]
)
CITIES = (
    ("Albany", "NY"), ("Austin", "TX"), ("Boise", "ID"), ("Boston", "MA"), ("Chicago", "IL"), ("Dallas", "TX"),
    ("Denver", "CO"), ("Fresno", "CA"), ("Houston", "TX"), ("Miami", "FL"), ("Omaha", "NE"), ("Phoenix", "AZ"),
    ("Portland", "OR"), ("Reno", "NV"), ("Seattle", "WA"), ("Tampa", "FL"),
)  # fmt: skip
STREETS = ("Birch", "Canal", "Cedar", "Chapel", "Elm", "Garden", "Hill", "Lake", "Main", "Mill", "Oak", "Park", "Pine")
PRODUCTS = (
    "Backpack", "Blanket", "Bottle", "Camera", "Clock", "Desk", "Drone", "Easel", "Fan", "Grill", "Guitar", "Headset",
    "Helmet", "Kettle", "Keyboard", "Kite", "Lamp", "Mixer", "Mug", "Notebook", "Pillow", "Printer", "Puzzle", "Radio",
    "Scooter", "Speaker", "Tablet", "Tent", "Toaster", "Vase", "Wallet", "Watch",
)  # fmt: skip
OPTIONS = {
    "color": ("black", "blue", "brown", "green", "red", "white", "yellow", "purple"),
    "material": ("cotton", "glass", "leather", "metal", "plastic", "wood"),
    "size": ("small", "medium", "large"),
}
SOURCES = ("credit_card", "gift_card", "paypal")
STATUSES = {"pending": 45, "delivered": 40, "processed": 10, "cancelled": 5}  # in a hundred orders of a large store


@dataclasses.dataclass(frozen=True)
class Store:
    """A whole store: three mappings of plain Python values, as the JSON files hold them."""

    orders: Mapping[str, Any]
    products: Mapping[str, Any]
    users: Mapping[str, Any]

    def data(self) -> dict[str, Any]:
        """What the three files hold."""
        return {name: getattr(self, name) for name in FILES}


def draw(random_: random.Random, num_users: int, num_products: int, compact: bool) -> Store:
    """A store.

    Args:
      random_: of all choices; the same state gives the same store.
      num_users, num_products: how many there are.
      compact: short ids (three digits where the real store has seven or ten), products of three variants with one
        option, and per user one pending and one delivered order of one or two items; what an agent needs stands first
        in every order. So a tool's output is short enough for a policy of a few hundred tokens of context. Otherwise
        ids and sizes are those of the real store.

    Raises:
      ConfigError: more products than there are names for, or more ids than have three digits.
    """
    if num_products > len(PRODUCTS):
        raise ConfigError(f"A generated store has at most {len(PRODUCTS)} products, got {num_products}.")
    if num_products < 2:
        raise ConfigError(f"A generated store needs at least 2 products, got {num_products}.")
    if compact and num_users * 2 > 900:
        raise ConfigError(f"A compact store has order ids of three digits, for at most 450 users, got {num_users}.")
    return _Draw(random_, compact).store(num_users, num_products)


def address(random_: random.Random, compact: bool) -> dict[str, str]:
    """An address; in a compact store with a short zip code and in a street that has one name everywhere."""
    city, state = random_.choice(CITIES)
    return {
        "address1": f"{random_.randrange(100, 1000)} {STREETS[0] if compact else random_.choice(STREETS)} Street",
        "address2": "" if compact else f"Suite {random_.randrange(100, 1000)}",
        "city": city,
        "state": state,
        "country": "USA",
        "zip": str(random_.randrange(100, 1000) if compact else random_.randrange(10_000, 100_000)),
    }


class _Draw:
    """One drawing of a store."""

    def __init__(self, random_: random.Random, compact: bool):
        self._random = random_
        self._compact = compact
        self._taken: set[str] = set()

    def store(self, num_users: int, num_products: int) -> Store:
        names = sorted(self._random.sample(PRODUCTS, num_products))
        self._products = dict(self._product(name) for name in names)
        self._orders: dict[str, Any] = {}
        users = dict(self._user() for _ in range(num_users))
        return Store(self._orders, self._products, users)

    def _id(self, kind: str, digits: int) -> str:
        """A number with `digits` digits, or three in a compact store, that no other id of its kind has."""
        digits = 3 if self._compact else digits
        while True:
            number = str(self._random.randrange(10 ** (digits - 1), 10**digits))
            if f"{kind}/{number}" not in self._taken:
                self._taken.add(f"{kind}/{number}")
                return number

    def _product(self, name: str) -> tuple[str, dict[str, Any]]:
        product_id = self._id("product", 10)
        used = sorted(self._random.sample(sorted(OPTIONS), 1 if self._compact else 2))
        choices = [{}]
        for option in used:
            choices = [{**chosen, option: value} for chosen in choices for value in OPTIONS[option]]
        most = 3 if self._compact else self._random.randint(4, 10)
        variants = {}
        for options in self._random.sample(choices, min(most, len(choices))):
            item_id = self._id("item", 10)
            variants[item_id] = {
                "item_id": item_id,
                "options": options,
                "available": self._compact or self._random.random() < 0.8,
                "price": self._price(),
            }
        return product_id, {"name": name, "product_id": product_id, "variants": variants}

    def _price(self) -> float:
        if self._compact:
            return self._random.randrange(20, 200) / 2
        return round(self._random.uniform(5, 900), 2)

    def _user(self) -> tuple[str, dict[str, Any]]:
        first, last = self._random.choice(FIRST_NAMES), self._random.choice(LAST_NAMES)
        user_id = f"{first}_{last}_{self._id('user', 4)}".lower()
        methods = dict(self._payment(source) for source in self._random.sample(SOURCES, self._random.randint(2, 3)))
        if self._compact:
            statuses = self._random.sample(("pending", "delivered"), 2)
        else:
            statuses = self._random.choices(tuple(STATUSES), tuple(STATUSES.values()), k=self._random.randint(1, 4))
        user = {
            "name": {"first_name": first, "last_name": last},
            "address": address(self._random, self._compact),
            "email": f"{first}.{last}{self._id('email', 4)}@example.com".lower(),
            "payment_methods": methods,
        }
        orders = [self._order(user_id, user, status) for status in statuses]
        self._orders.update((order["order_id"], order) for order in orders)
        return user_id, user | {"orders": [order["order_id"] for order in orders]}

    def _payment(self, source: str) -> tuple[str, dict[str, Any]]:
        method_id = f"{source}_{self._id(source, 7)}"
        method: dict[str, Any] = {"source": source}
        if source == "credit_card":
            method |= {
                "brand": self._random.choice(("mastercard", "visa")),
                "last_four": str(self._random.randrange(1000, 10_000)),
            }
        elif source == "gift_card":
            method["balance"] = self._random.randrange(400, 1000) if self._compact else self._random.randrange(100)
        return method_id, method | {"id": method_id}

    def _order(self, user_id: str, user: Mapping[str, Any], status: str) -> dict[str, Any]:
        most = 2 if self._compact else min(5, len(self._products))
        products = self._random.sample(list(self._products.values()), self._random.randint(1, most))
        items = [self._item(product) for product in products]
        total = round(sum(item["price"] for item in items), 2)
        can_pay = [
            method_id
            for method_id, method in user["payment_methods"].items()
            if method["source"] != "gift_card" or self._compact
        ]
        payment = {
            "transaction_type": "payment",
            "amount": total,
            "payment_method_id": self._random.choice(can_pay),
        }
        history = [payment, payment | {"transaction_type": "refund"}] if status == "cancelled" else [payment]
        shipped = status in ("processed", "delivered")
        tracking = {"tracking_id": [self._id("tracking", 12)], "item_ids": [item["item_id"] for item in items]}
        order = {
            "order_id": f"#W{self._id('order', 7)}",
            "user_id": user_id,
            "address": dict(user["address"]),
            "items": items,
            "fulfillments": [tracking] if shipped else [],
            "status": status,
            "payment_history": history,
        }
        if not self._compact:
            return order
        first = ("order_id", "user_id", "status", "payment_history", "items")
        return {key: order[key] for key in (*first, "fulfillments", "address")}

    def _item(self, product: Mapping[str, Any]) -> dict[str, Any]:
        variant = self._random.choice(list(product["variants"].values()))
        item = {
            "name": product["name"],
            "product_id": product["product_id"],
            "item_id": variant["item_id"],
            "price": variant["price"],
            "options": dict(variant["options"]),
        }
        if self._compact:
            return {key: item[key] for key in ("name", "item_id", "product_id", "options", "price")}
        return item
