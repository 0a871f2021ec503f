"""What a shop's records must look like; the first mistake is an error that names file, key and field.

Records may have other fields than those here: the published ones do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError, show
from jaxagent.envs.tau2.shop import ADDRESS, PAYMENT
from jaxagent.envs.tau2.tables import EACH, shaped

FORMS: Mapping[str, Any] = {
    "orders": {
        "order_id": str,
        "user_id": str,
        "address": ADDRESS,
        "items": [{"name": str, "product_id": str, "item_id": str, "price": float, "options": {}}],
        "status": str,
        "payment_history": [PAYMENT],
    },
    "products": {
        "name": str,
        "product_id": str,
        "variants": {EACH: {"item_id": str, "options": {}, "available": bool, "price": float}},
    },
    "users": {
        "name": {"first_name": str, "last_name": str},
        "address": ADDRESS,
        "email": str,
        "payment_methods": {EACH: {"source": str, "id": str}},
        "orders": [str],
    },
}


def check(tables: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Looks at every record.

    Args:
      tables: orders, products and users, as read.
      files: where each of them was read, for messages.

    Raises:
      ConfigError: of the first mistake.
    """
    for name in FORMS:
        if not isinstance(tables[name], dict) or not tables[name]:
            raise ConfigError(f"{files[name]} must be an object of {name} by their ids, got {show(tables[name])}.")
    for name, form in FORMS.items():
        for key, record in tables[name].items():
            try:
                shaped(record, form, "", strict=False)
                _check_links(name, key, record, tables)
            except RowError as error:
                field = error.column.removeprefix(".")
                raise ConfigError(f"{files[name]}, key '{key}', field '{field}': {error.problem}.") from None


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
