"""A shop's orders, products and users: one original in memory, and for each attempt what it sees and changes of it.

    store = ShopStore.load(folder)            # once per run
    shop = store.open()                   # once per attempt: costs nothing
    shop.orders["#W1"]["status"]          # reads
    shop.orders.change("#W1")["status"] = "cancelled"      # writes: the attempt's own copy of that one record
    shop.digest() == store.digest

The digest is the published one: SHA-256 of how Python writes the sorted data. So it tells 1 from 1.0.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError, show
from jaxagent.envs.forms import shaped
from jaxagent.envs.tau2 import shop, stock
from jaxagent.envs.tau2.shop import ORDER, PRODUCT, USER
from jaxagent.envs.tau2.tables import Record

# What records must have; they may have other fields, as the published ones do.
_FORMS: Mapping[str, Any] = {  # a user's id is its key; nobody here asks for an order's fulfillments
    "orders": {name: form for name, form in ORDER.items() if name != "fulfillments" and name[-1] != "?"},
    "products": PRODUCT,
    "users": {name: form for name, form in USER.items() if name != "user_id"},
}
TABLES = tuple(_FORMS)


def to_hashable(value: Any) -> Any:
    """JSON values as tuples: an object becomes its (key, value) pairs in the order of the keys."""
    if isinstance(value, dict):
        return tuple((key, to_hashable(value[key])) for key in sorted(value))
    if isinstance(value, list):
        return tuple(map(to_hashable, value))
    return value


def digest(data: Mapping[str, Any]) -> str:
    """The published digest of whole tables."""
    return hashlib.sha256(str(to_hashable(dict(data))).encode()).hexdigest()


def _tuple(texts: Sequence[str]) -> str:
    """The tuple of what is written so, as Python writes it."""
    return f"({', '.join(texts)}{',' * (len(texts) == 1)})"


class Shop(shop.Shop):
    """The shop of one attempt, with tau-bench's rules."""

    address_fields = ("address1", "address2", "city", "state", "country", "zip")
    distinct = False

    def __init__(self, store: ShopStore) -> None:
        super().__init__(store.tables)
        self._store = store
        self.orders, self.products, self.users = (self[name] for name in TABLES)

    def digest(self) -> str:
        """The digest of everything that the attempt sees."""
        changed = {(name, key): record for name in TABLES for key, record in self[name].changed.items()}
        return self._store.digest_with(changed)

    def is_pending(self, order: Record) -> bool:
        """An order whose items were changed is not."""
        return order["status"] == "pending"

    def is_gift_card(self, method: Record) -> bool:
        """Its id says it."""
        return "gift_card" in method["id"]

    def charge(self, difference: float) -> float:
        """Neither rounded nor made a float: its digits are part of the digest."""
        return abs(difference)

    def refund(self, user_id: str, method_id: str, amount: float) -> None:
        """Asks the id alone, so that the user need not have any other method that was paid with."""
        if "gift_card" in method_id:
            method = self.users.change(user_id)["payment_methods"][method_id]
            method["balance"] = round(method["balance"] + amount, 2)

    def replace(self, order: Record, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> None:
        """Puts new items in the place of an order's, each with its own price and options."""
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = shop.item_of(order, item_id)  # looked for again: it may be one that was changed just now
            variant = self.products[item["product_id"]]["variants"][new_item_id]
            item |= {"item_id": new_item_id, "price": variant["price"], "options": variant["options"]}


@dataclasses.dataclass(frozen=True)
class ShopStore:
    """The original, which nobody writes into.

    Attributes:
      tables: by the names in `TABLES`; of each the records by their ids, in the order of the file.
    """

    tables: Mapping[str, Mapping[str, Record]]

    @functools.cached_property
    def _texts(self) -> Mapping[tuple[str, str], str]:
        """Each record as the digest has it: of a changed shop only what was changed is written anew."""
        return {
            (name, key): str(to_hashable(record))
            for name, table in self.tables.items()
            for key, record in table.items()
        }

    @functools.cached_property
    def digest(self) -> str:
        """The digest of all of it."""
        return self.digest_with({})

    @classmethod
    def load(cls, folder: Path) -> ShopStore:
        """Reads orders.json, products.json and users.json. Raises ConfigError: a file is missing or no JSON, or a
        record is malformed; names file, key and field."""
        files = {name: folder / f"{name}.json" for name in TABLES}
        tables = {name: stock.read_json(file) for name, file in files.items()}
        for name, file in files.items():
            if not isinstance(tables[name], dict) or not tables[name]:
                raise ConfigError(f"{file} must be an object of {name} by their ids, got {show(tables[name])}.")
        for name, form in _FORMS.items():
            for key, record in tables[name].items():
                try:
                    shaped(record, form, "", strict=False)
                    _check_links(name, key, record, tables)
                except RowError as error:
                    raise ConfigError(f"{files[name]}, key '{key}', field '{error.column}': {error.problem}.") from None
        return cls(tables)

    def open(self) -> Shop:
        """A shop for one attempt."""
        return Shop(self)

    def digest_with(self, changed: Mapping[tuple[str, str], Record]) -> str:
        """The digest with other contents of some records, named by table and id."""
        texts = {**self._texts, **{place: str(to_hashable(record)) for place, record in changed.items()}}
        tables = {
            name: _tuple([f"({key!r}, {texts[name, key]})" for key in sorted(table)])
            for name, table in sorted(self.tables.items())
        }
        return hashlib.sha256(_tuple([f"({name!r}, {text})" for name, text in tables.items()]).encode()).hexdigest()


def _check_links(name: str, key: str, record: Any, tables: Mapping[str, Any]) -> None:
    """Raises RowError for an id that leads nowhere. The record has its form."""
    if name == "orders":
        _check_id(record, "order_id", key)
        if record["user_id"] not in tables["users"]:
            raise RowError("user_id", f"there is no user {record['user_id']!r}")
        if not record["payment_history"]:
            raise RowError("payment_history", "is empty")
        for number, item in enumerate(record["items"]):
            if item["product_id"] not in tables["products"]:
                raise RowError(f"items[{number}].product_id", f"there is no product {item['product_id']!r}")
    elif name == "products":
        _check_id(record, "product_id", key)
        for item_id, variant in record["variants"].items():
            _check_id(variant, "item_id", item_id, f"variants.{item_id}.")
    else:
        for method_id, method in record["payment_methods"].items():
            _check_id(method, "id", method_id, f"payment_methods.{method_id}.")
            if method["source"] == "gift_card":
                shaped(method, {"balance": float}, f"payment_methods.{method_id}", strict=False)
        for number, order_id in enumerate(record["orders"]):
            if order_id not in tables["orders"]:
                raise RowError(f"orders[{number}]", f"there is no order {order_id!r}")


def _check_id(record: Mapping[str, Any], field: str, key: str, prefix: str = "") -> None:
    if record[field] != key:
        raise RowError(prefix + field, f"is {record[field]!r}, and the record stands under {key!r}")
