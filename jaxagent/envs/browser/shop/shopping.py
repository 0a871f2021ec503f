"""One visitor in the shop: his basket, his orders, and the page that answers each request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from jaxagent.envs.browser.shop.pages import Field, Form, Link, Page, Text
from jaxagent.envs.browser.shop.wares import QUANTITIES, Goal, Line, Product, Wares

ANY = "any"
NOWHERE = Page("Not found", (Text("There is nothing here."), Link("Home", "/")))


@dataclasses.dataclass
class Shopping:
    """What one visitor has done so far.

    Attributes:
      shop: whose visitor he is.
      basket: what he has put into it and not ordered.
      orders: what he has ordered, one tuple for each time.
      changes: of basket and orders so far. A form holds this number, so that one which is sent a second time, by a
        browser that goes back over it, changes nothing.
    """

    shop: Wares
    basket: list[Line] = dataclasses.field(default_factory=list)
    orders: list[tuple[Line, ...]] = dataclasses.field(default_factory=list)
    changes: int = 0

    def has_met(self, goal: Goal) -> bool:
        """Whether exactly what the goal says was ordered, once, and the basket is empty."""
        lines = [line for order in self.orders for line in order]
        return not self.basket and len(lines) == 1 and goal.is_met_by(lines[0], self.shop)


def page(state: Shopping, method: str, path: str, form: Mapping[str, str]) -> Page:
    """The page that answers a request; a POST changes the state.

    Args:
      state: of the visitor.
      method: "GET" or "POST".
      path: behind the host, without its query.
      form: the fields of the query and of what was sent.
    """
    place, _, rest = path.strip("/").partition("/")
    if method == "POST":
        if form.get("changes") == str(state.changes) and not _change(state, place, rest, form):
            return NOWHERE
        return _page(state, "Thank you", Text("Thank you.")) if place == "order" else _basket(state)
    if place == "find":
        return _results(state, form)
    if place == "item" and (product := _product(state.shop, rest)):
        return _item(state, product)
    if path == "/":
        return _page(state, "Shop", _search(state.shop, {}))
    return {"/basket": _basket, "/checkout": _checkout}.get(path, lambda _: NOWHERE)(state)


def _change(state: Shopping, place: str, rest: str, form: Mapping[str, str]) -> bool:
    """Does what a form asks for; False where it asks for what there is not."""
    if place == "add" and (product := _product(state.shop, rest)):
        options = tuple((name, form.get(name, "")) for name, _ in product.options)
        quantity = form.get("Quantity")
        there = all(value in values for (_, value), (_, values) in zip(options, product.options, strict=True))
        if not there or quantity not in QUANTITIES:
            return False
        state.basket.append(Line(product.number, options, int(quantity)))
    elif place == "remove" and rest.isdecimal() and int(rest) < len(state.basket):
        del state.basket[int(rest)]
    elif place == "order" and state.basket:
        state.orders.append(tuple(state.basket))
        state.basket.clear()
    else:
        return False
    state.changes += 1
    return True


def _product(shop: Wares, number: str) -> Product | None:
    return shop.products[int(number)] if number.isdecimal() and int(number) < len(shop.products) else None


def matches(shop: Wares, query: Mapping[str, str]) -> list[Product]:
    """The products whose titles have all words that were searched for, and that cost at most so much."""
    words = query.get("q", "").lower().split()
    most = query.get("most", ANY)
    return [
        product
        for product in shop.products
        if set(words) <= set(product.title.lower().split()) and (not most.isdecimal() or product.price <= int(most))
    ]


def _search(shop: Wares, query: Mapping[str, str]) -> Form:
    bounds = (ANY, *map(str, shop.scale.bounds))
    fields = [Field("Search", "q", query.get("q", "")), Field("Up to", "most", query.get("most", ANY), bounds)]
    return Form("/find", "Find", fields, method="get")


def _results(state: Shopping, query: Mapping[str, str]) -> Page:
    products, size = matches(state.shop, query), state.shop.scale.page_products
    first = size * int(query["from"]) if query.get("from", "").isdecimal() else 0
    links: list[Text | Link | Form] = [
        Link(f"{product.title} {product.price}", f"/item/{product.number}") for product in products[first:][:size]
    ]
    if len(products) > first + size:
        links.append(Link("Next", "/find?" + urlencode({**query, "from": first // size + 1})))
    search = [_search(state.shop, query)] if state.shop.scale.full else []
    return _page(state, "Results", *search, *(links or [Text("Nothing found.")]))


def _item(state: Shopping, product: Product) -> Page:
    options = (*product.options, ("Quantity", QUANTITIES))
    fields = [Field(name, name, values[0], values) for name, values in options]
    return _page(state, f"{product.title} {product.price}", _button(state, f"/add/{product.number}", "Add", fields))


def _basket(state: Shopping) -> Page:
    if not state.basket:
        return _page(state, "Basket", Text("The basket is empty."))
    elements: list[Text | Link | Form] = []
    for number, line in enumerate(state.basket):
        elements += [_line(state.shop, line), _button(state, f"/remove/{number}", "Remove")]
    order = Link("Checkout", "/checkout") if state.shop.scale.full else _button(state, "/order", "Order")
    return _page(state, "Basket", *elements, order)


def _checkout(state: Shopping) -> Page:
    if not state.basket:
        return _basket(state)
    total = sum(state.shop.products[line.product].price * line.quantity for line in state.basket)
    lines = [_line(state.shop, line) for line in state.basket]
    return _page(state, "Checkout", *lines, Text(f"Total: {total}"), _button(state, "/order", "Order"))


def _button(state: Shopping, path: str, text: str, fields: Sequence[Field] = ()) -> Form:
    return Form(path, text, fields, {"changes": str(state.changes)})


def _line(shop: Wares, line: Line) -> Text:
    product = shop.products[line.product]
    values = "".join(f", {value}" for _, value in line.options)
    return Text(f"{line.quantity} {product.title}{values}: {product.price * line.quantity}")


def _page(state: Shopping, title: str, *elements: Text | Link | Form) -> Page:
    header = (Link("Home", "/"), Link("Basket", "/basket"), Text(title)) if state.shop.scale.full else ()
    return Page(title, (*header, *elements))
