"""What a shop's records must look like; the first mistake is an error that names file, key and field.

Records may have other fields than those here: the published ones do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError, show
from jaxagent.envs.forms import shaped
from jaxagent.envs.tau2.shop import ORDER, PRODUCT, USER

FORMS: Mapping[str, Any] = {  # a user's id is its key; nobody here asks for an order's fulfillments
    "orders": {name: form for name, form in ORDER.items() if name != "fulfillments" and name[-1] != "?"},
    "products": PRODUCT,
    "users": {name: form for name, form in USER.items() if name != "user_id"},
}


def check(tables: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Looks at every record. Raises ConfigError: of the first mistake."""
    for name in FORMS:
        if not isinstance(tables[name], dict) or not tables[name]:
            raise ConfigError(f"{files[name]} must be an object of {name} by their ids, got {show(tables[name])}.")
    for name, form in FORMS.items():
        for key, record in tables[name].items():
            try:
                shaped(record, form, "", strict=False)
                _check_links(name, key, record, tables)
            except RowError as error:
                raise ConfigError(f"{files[name]}, key '{key}', field '{error.column}': {error.problem}.") from None


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
