"""Tools that change nothing: they find users, show records, calculate, think, and hand over to a human.

A tool is a function of the attempt's shop and the arguments of the call. What it cannot do it says in a text that
begins with "Error:"; an exception is shown as "Error: {exception}" by `toolbox.call`.
"""

from __future__ import annotations

import json

from jaxagent.envs.tau.arithmetic import evaluate
from jaxagent.envs.tau.store import Shop

NO_USER, NO_ORDER, NO_PRODUCT = (f"Error: {thing} not found" for thing in ("user", "order", "product"))
_ARITHMETIC = "0123456789+-*/(). "


def calculate(data: Shop, expression: str) -> str:
    """The value, rounded to cents and always written as a float."""
    if not all(char in _ARITHMETIC for char in expression):
        return "Error: invalid characters in expression"
    try:
        return str(round(float(evaluate(expression)), 2))
    except Exception as error:
        return f"Error: {error}"


def find_user_id_by_email(data: Shop, email: str) -> str:
    """The id; letters' case does not count."""
    for user_id, user in data.users.items():
        if user["email"].lower() == email.lower():
            return user_id
    return NO_USER


def find_user_id_by_name_zip(data: Shop, first_name: str, last_name: str, zip: str) -> str:
    """The id; letters' case does not count."""
    for user_id, user in data.users.items():
        name = user["name"]
        named = name["first_name"].lower() == first_name.lower() and name["last_name"].lower() == last_name.lower()
        if named and user["address"]["zip"] == zip:
            return user_id
    return NO_USER


def get_order_details(data: Shop, order_id: str) -> str:
    """The order as JSON."""
    return json.dumps(data.orders[order_id]) if order_id in data.orders else NO_ORDER


def get_product_details(data: Shop, product_id: str) -> str:
    """The product and all its items as JSON."""
    return json.dumps(data.products[product_id]) if product_id in data.products else NO_PRODUCT


def get_user_details(data: Shop, user_id: str) -> str:
    """The user as JSON."""
    return json.dumps(data.users[user_id]) if user_id in data.users else NO_USER


def list_all_product_types(data: Shop) -> str:
    """Names and ids as JSON, in the order of the names."""
    products = {product["name"]: product["product_id"] for product in data.products.values()}
    return json.dumps(dict(sorted(products.items())))


def think(data: Shop, thought: str) -> str:
    """Nothing: the thought stands in the conversation."""
    return ""


def transfer_to_human_agents(data: Shop, summary: str) -> str:
    """Ends the conversation; `toolbox.TERMINATING`."""
    return "Transfer successful"
