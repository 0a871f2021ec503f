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
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import unique
from jaxagent.envs.tau import records
from jaxagent.envs.tau2 import shop
from jaxagent.envs.tau2.tables import Record

TABLES = ("orders", "products", "users")


def to_hashable(value: Any) -> Any:
    """JSON values as tuples: an object becomes its (key, value) pairs in the order of the keys."""
    if isinstance(value, dict):
        return tuple((key, to_hashable(value[key])) for key in sorted(value))
    if isinstance(value, list):
        return tuple(map(to_hashable, value))
    return value


def digest(data: Mapping[str, Any]) -> str:
    """The published digest of whole tables, computed the long way."""
    return hashlib.sha256(str(to_hashable(dict(data))).encode()).hexdigest()


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
      digest: of all of it.
    """

    tables: Mapping[str, Mapping[str, Record]]
    digest: str = dataclasses.field(init=False)
    _text: bytes = dataclasses.field(init=False, repr=False)
    _spans: Mapping[tuple[str, str], tuple[int, int]] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Writes down the text that the digest is made of, and where in it each record stands."""
        pieces, spans, length = [], {}, 0

        def write(piece: str) -> None:
            nonlocal length
            pieces.append(piece.encode())
            length += len(pieces[-1])

        for number, (name, table) in enumerate(sorted(self.tables.items())):
            write(f"{', ' if number else '('}({name!r}, (")
            for place, (key, record) in enumerate(sorted(table.items())):
                write(f"{', ' if place else ''}({key!r}, ")
                begin = length
                write(str(to_hashable(record)))
                spans[name, key] = (begin, length)
                write(")")
            write(",))" if len(table) == 1 else "))")
        write(",)" if len(self.tables) == 1 else ")")
        object.__setattr__(self, "_text", b"".join(pieces))
        object.__setattr__(self, "_spans", spans)
        object.__setattr__(self, "digest", hashlib.sha256(self._text).hexdigest())

    @classmethod
    def load(cls, folder: Path) -> ShopStore:
        """Reads orders.json, products.json and users.json.

        Raises:
          ConfigError: a file is missing or no JSON, or a record is malformed; names file, key and field.
        """
        tables = {name: _read(folder / f"{name}.json") for name in TABLES}
        records.check(tables, {name: str(folder / f"{name}.json") for name in TABLES})
        return cls(tables)

    def open(self) -> Shop:
        """A shop for one attempt."""
        return Shop(self)

    def digest_with(self, changed: Mapping[tuple[str, str], Record]) -> str:
        """The digest with other contents of some records, named by table and id."""
        if not changed:
            return self.digest
        original = memoryview(self._text)
        sha, at = hashlib.sha256(), 0
        for begin, end, record in sorted((*self._spans[place], record) for place, record in changed.items()):
            sha.update(original[at:begin])
            sha.update(str(to_hashable(record)).encode())
            at = end
        sha.update(original[at:])
        return sha.hexdigest()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=unique)
    except FileNotFoundError:
        files = ", ".join(f"{name}.json" for name in TABLES)
        raise ConfigError(f"{path} is missing: a shop is a folder with {files}.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}.") from None
