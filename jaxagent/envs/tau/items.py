"""Items of an order, and what it costs to have others in their place."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.envs.tau.store import Record, Shop


def missing(order: Record, item_ids: Sequence[str]) -> list[str]:
    """The ids that are asked for more often than the order has them."""
    there = [item["item_id"] for item in order["items"]]
    return [item_id for item_id in item_ids if item_ids.count(item_id) > there.count(item_id)]


def in_order(order: Record, item_id: str) -> Record:
    """The order's first item with this id."""
    return next(item for item in order["items"] if item["item_id"] == item_id)


def price_difference(data: Shop, order: Record, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> float | str:
    """What the new items cost more, in cents that were not rounded; the integer 0 where there are none.

    Returns:
      the difference, or a text "Error: ..." where an item cannot be had.
    """
    if unknown := missing(order, item_ids):
        return f"Error: {unknown[0]} not found"
    if len(item_ids) != len(new_item_ids):
        return "Error: the number of items to be exchanged should match"
    difference = 0
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = in_order(order, item_id)
        variants = data.products[item["product_id"]]["variants"]
        if not (new_item_id in variants and variants[new_item_id]["available"]):
            return f"Error: new item {new_item_id} not found or available"
        difference += variants[new_item_id]["price"] - item["price"]
    return difference
