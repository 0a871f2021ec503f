"""What a shop's records must look like; the first mistake is an error that names file, key and field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import show

NUMBER = (int, float)
ADDRESS = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), str)
ITEM = {"name": str, "product_id": str, "item_id": str, "price": NUMBER, "options": dict}
PAYMENT = {"transaction_type": str, "amount": NUMBER, "payment_method_id": str}
# A type, a tuple of types, {field: what it holds}, [what each element is], or {EACH: what each value is}
EACH = "*"
FORMS: Mapping[str, Any] = {
    "orders": {
        "order_id": str,
        "user_id": str,
        "address": ADDRESS,
        "items": [ITEM],
        "status": str,
        "payment_history": [PAYMENT],
    },
    "products": {
        "name": str,
        "product_id": str,
        "variants": {EACH: {"item_id": str, "options": dict, "available": bool, "price": NUMBER}},
    },
    "users": {
        "name": {"first_name": str, "last_name": str},
        "address": ADDRESS,
        "email": str,
        "payment_methods": {EACH: {"source": str, "id": str}},
        "orders": [str],
    },
}
_NAMES = {str: "text", bool: "true or false", dict: "an object", NUMBER: "a number"}


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
            for field, problem in (*_mistakes(record, form, ""), *_links(name, key, record, tables)):
                raise ConfigError(f"{files[name]}, key '{key}', field '{field}': {problem}.")


def _mistakes(value: Any, form: Any, field: str) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) of the first mistake in each part."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            yield field, f"must be an object, got {show(value)}"
        elif EACH in form:
            for key, inner in value.items():
                yield from _mistakes(inner, form[EACH], _inside(field, key))
        else:
            for key, inner in form.items():
                if key not in value:
                    yield _inside(field, key), "missing"
                else:
                    yield from _mistakes(value[key], inner, _inside(field, key))
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield field, f"must be a list, got {show(value)}"
        else:
            for number, inner in enumerate(value):
                yield from _mistakes(inner, form[0], f"{field}[{number}]")
    elif not isinstance(value, form) or (form is NUMBER and (isinstance(value, bool) or not math.isfinite(value))):
        yield field, f"must be {_NAMES[form]}, got {show(value)}"


def _links(name: str, key: str, record: Any, tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Ids that lead nowhere. Comes after `_mistakes`, which it relies upon."""
    if any(True for _ in _mistakes(record, FORMS[name], "")):
        return
    if name == "orders":
        yield from _same(record, "order_id", key)
        if record["user_id"] not in tables["users"]:
            yield "user_id", f"there is no user {record['user_id']!r}"
        if not record["payment_history"]:
            yield "payment_history", "is empty"
        for number, item in enumerate(record["items"]):
            if item["product_id"] not in tables["products"]:
                yield f"items[{number}].product_id", f"there is no product {item['product_id']!r}"
    elif name == "products":
        yield from _same(record, "product_id", key)
        for item_id, variant in record["variants"].items():
            yield from _same(variant, "item_id", item_id, f"variants.{item_id}.")
    else:
        for method_id, method in record["payment_methods"].items():
            place = f"payment_methods.{method_id}."
            yield from _same(method, "id", method_id, place)
            if method["source"] == "gift_card":
                yield from _mistakes(method, {"balance": NUMBER}, place[:-1])
        for number, order_id in enumerate(record["orders"]):
            if order_id not in tables["orders"]:
                yield f"orders[{number}]", f"there is no order {order_id!r}"


def _same(record: Mapping[str, Any], field: str, key: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    if record[field] != key:
        yield prefix + field, f"is {record[field]!r}, and the record stands under {key!r}"


def _inside(field: str, key: str) -> str:
    return f"{field}.{key}" if field else key
