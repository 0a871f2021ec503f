"""What a shop sells: kinds of things by several makers, drawn from a seed; and what a task wants bought.

    shop = draw("train/17", "compact")
    goal = Goal(kind="lamp", maker="Alto", options=(("Colour", "red"),))
    [product] = [product for product in shop.products if goal.fits(product)]

Two shops of one size have other prices, other makers of a kind and another order, so nothing of one can be learnt by
heart for another.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping
from typing import Any, Literal

KINDS = str.split(
    "lamp chair table mug clock scarf glove shirt bag pen kettle vase towel rug shelf stool blanket bottle brush "
    "candle coat cushion desk drum fan frame hat jacket jar ladder mirror pan pillow plate pot purse sofa tray"
)
MAKERS = str.split(
    "Alto Berg Cord Dune Elba Fjord Gala Hugo Iris Juno Kilo Luna Mira Nova Opal Pico Quill Sol Tundra Vela"
)
MODELS = str.split("Classic Deluxe Light Plus Prime Studio Travel Urban")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "Colour": ("red", "blue", "green"),
    "Finish": ("matt", "gloss", "raw"),
    "Size": ("small", "medium", "large"),
}
QUANTITIES = ("1", "2", "3")


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large a shop is, and how much its pages show.

    Attributes:
      kinds, makers: how many of `KINDS` and `MAKERS` it has.
      per_kind: products of each kind.
      options: of each product, by name.
      prices: what products may cost.
      bounds: the prices that the shop can filter by.
      page_products: on one page of results.
      full: makers have models; pages have a header, results the search once more, and an order a page of its own.
    """

    kinds: int
    makers: int
    per_kind: int
    options: tuple[str, ...]
    prices: tuple[int, ...]
    bounds: tuple[int, ...]
    page_products: int
    full: bool


SCALES: dict[str, Scale] = {
    "compact": Scale(12, 12, 5, ("Colour",), tuple(range(10, 100, 10)), (20, 40), 3, False),
    "full": Scale(38, 20, 24, tuple(OPTIONS), tuple(range(9, 200, 5)), (25, 50, 75, 100, 150), 8, True),
}


@dataclasses.dataclass(frozen=True)
class Product:
    """One thing to buy, in any combination of its options, with the values of each in the page's order."""

    number: int  # in its shop, from 0
    kind: str
    maker: str
    model: str  # "" = it has none
    price: int
    options: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def title(self) -> str:
        """Kind, maker and model, which no other product of the shop has."""
        return " ".join(filter(None, (self.kind, self.maker, self.model)))


@dataclasses.dataclass(frozen=True)
class Wares:
    """Its products, in the order in which it shows them."""

    scale: Scale
    products: tuple[Product, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """So many of one product with these options, in a basket or an order."""

    product: int
    options: tuple[tuple[str, str], ...]
    quantity: int = 1


@dataclasses.dataclass(frozen=True)
class Goal:
    """What shall be bought, and nothing beside it.

    Attributes:
      kind: of the product.
      maker: of the product; "" = anybody's.
      most: what one may cost; 0 = anything.
      options: all that the product has, in the order of their names.
      quantity: how many.
    """

    kind: str
    maker: str = ""
    most: int = 0
    options: tuple[tuple[str, str], ...] = ()
    quantity: int = 1

    def fits(self, product: Product) -> bool:
        """Whether this product, with the right options, is what is wanted."""
        values = dict(product.options)
        return (
            product.kind == self.kind
            and self.maker in ("", product.maker)
            and (not self.most or product.price <= self.most)
            and len(self.options) == len(values)
            and all(value in values.get(name, ()) for name, value in self.options)
        )

    def is_met_by(self, order: Line, shop: Wares) -> bool:
        """Whether an order of this one line is the goal, to the letter."""
        same = (order.options, order.quantity) == (self.options, self.quantity)
        return same and self.fits(shop.products[order.product])

    def text(self) -> str:
        """The goal in words, with everything that counts."""
        maker = f" {self.maker}" if self.maker else ""
        most = f" for at most {self.most}" if self.most else ""
        options = "".join(f", {value}" for _, value in self.options)
        return f"Buy {self.quantity} {self.kind}{maker}{most}{options}."


def goal_of(fields: Any) -> Goal:
    """A goal from JSON. Raises ValueError: fields that no goal has, or of another type."""
    wanted = {"kind": str, "maker": str, "most": int, "options": dict, "quantity": int}
    if not isinstance(fields, Mapping) or "kind" not in fields or not set(fields) <= set(wanted):
        raise ValueError(f"a shop's goal has 'kind' and some of {', '.join(wanted)}, got {fields!r:.200}")
    if wrong := [name for name, value in fields.items() if type(value) is not wanted[name]]:
        raise ValueError(f"the goal's '{wrong[0]}' must be {wanted[wrong[0]].__name__}, got {fields[wrong[0]]!r:.80}")
    return Goal(**{**fields, "options": tuple(sorted(fields.get("options", {}).items()))})


@functools.lru_cache(maxsize=512)
def draw(seed: str, scale: Literal["compact", "full"]) -> Wares:
    """The shop of a seed; the same seed gives the same shop."""
    size, random_ = SCALES[scale], random.Random(f"shop/{scale}/{seed}")
    products: list[Product] = []
    for kind in KINDS[: size.kinds]:
        names = [(m, model) for m in MAKERS[: size.makers] for model in (MODELS if size.full else ("",))]
        prices = random_.sample(size.prices, size.per_kind)
        for (maker, model), price in zip(random_.sample(names, size.per_kind), prices, strict=True):
            shown = tuple((name, tuple(random_.sample(OPTIONS[name], len(OPTIONS[name])))) for name in size.options)
            products.append(Product(len(products), kind, maker, model, price, shown))
    return Wares(size, tuple(products))
