"""The shop as a site of the environment `browser`: a task is a shop's seed and a goal, and the order decides.

    {"id": "...", "prompt": "Buy 1 lamp Alto, red.", "answers": [], "kind": "maker/one",
     "metadata": {"shop": "train/17", "scale": "compact", "goal": {"kind": "lamp", "maker": "Alto", ...}}}

An attempt is over once something was ordered. It is solved if that is exactly what the goal says, and nothing else is
left in the basket.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping

from jaxagent.config import ConfigError
from jaxagent.envs.base import Verdict
from jaxagent.envs.browser import sites, tree
from jaxagent.envs.browser.shop import pages, shopping, wares
from jaxagent.envs.browser.shop.wares import Goal
from jaxagent.types import Task


@dataclasses.dataclass(frozen=True)
class WebShop:
    """The shop of each task's seed."""

    def visit(self, task: Task) -> ShopVisit:
        """A visitor without a basket. Raises ConfigError: the task names no shop, or a goal that it cannot have."""
        seed, scale = task.metadata.get("shop"), task.metadata.get("scale")
        if not isinstance(seed, str) or scale not in wares.SCALES:
            raise ConfigError(
                f"a task of the web shop has metadata 'shop' (a text) and 'scale' ({', '.join(wares.SCALES)}), got "
                f"{seed!r:.80} and {scale!r:.80}."
            )
        shop = wares.draw(seed, scale)
        try:
            goal = wares.goal_of(task.metadata.get("goal"))
        except ValueError as error:
            raise ConfigError(f"{error}.") from None
        if not any(map(goal.fits, shop.products)) or str(goal.quantity) not in wares.QUANTITIES:
            raise ConfigError(f"nothing in the shop {seed!r:.80} fits the goal {goal}.")
        return ShopVisit(task.prompt, shopping.Shopping(shop), goal)

    def new_task(self, failed: Task, rng: random.Random) -> Task | None:
        """The same thing wanted in another shop, with other options and, of several, another quantity.

        What is wanted decides the split (`data_pipelines/web_shop.py`), so it is never that of a held-out goal. None:
        no shop of ten sells exactly one such thing.
        """
        scale, old = failed.metadata["scale"], wares.goal_of(failed.metadata["goal"])
        for _ in range(10):
            name = f"grown/{rng.getrandbits(64):016x}"
            fitting = [product for product in wares.draw(name, scale).products if old.fits(product)]
            if len(fitting) == 1:
                options = tuple((option, rng.choice(values)) for option, values in fitting[0].options)
                quantity = old.quantity if old.quantity == 1 else rng.randint(2, len(wares.QUANTITIES))
                goal = dataclasses.replace(old, options=options, quantity=quantity)
                fields = dataclasses.asdict(goal) | {"options": dict(options)}
                return Task("", goal.text(), (), failed.kind, {"shop": name, "scale": scale, "goal": fields})
        return None


class ShopVisit:
    """One visitor."""

    url = "http://shop.test/"

    def __init__(self, prompt: str, state: shopping.Shopping, goal: Goal) -> None:
        self._prompt, self._goal = prompt, goal
        self.state = state

    def respond(self, method: str, path: str, form: Mapping[str, str]) -> sites.Response | None:
        """A page of the shop; None for what it has not."""
        page = shopping.page(self.state, method, path, form)
        return None if page is shopping.NOWHERE else sites.Response(pages.html(page))

    async def goal(self, page: sites.Page) -> str:
        """The task's prompt."""
        return self._prompt

    async def over(self, page: sites.Page) -> bool:
        """Whether something was ordered."""
        return bool(self.state.orders)

    async def judge(self, page: sites.Page, answer: str | None) -> Verdict:
        """1 for the goal's order and nothing else."""
        solved = float(self.state.has_met(self._goal))
        return Verdict(solved, {"solved": solved, "ordered": float(bool(self.state.orders))})

    async def solve(self, page: sites.Page, shown: str) -> str | None:
        """The next action of a buyer who reads the page."""
        return next_action(self._goal, shown)


def next_action(goal: Goal, shown: str) -> str | None:
    """What a buyer with this goal does on the page that he is shown; None where he is at a loss.

    A goal that leaves something open takes the first result, or what a field says at first.
    """

    def select(label: str, value: str) -> str:
        match = re.search(rf'^\[(\d+)\] (\w+) "{label}"(?: = "([^"]*)")?(?: of (.*))?$', shown, re.MULTILINE)
        if not match or match[3] == value or (match[4] and f'"{value}"' not in match[4]):
            return ""
        return f"{'select' if match[4] else 'type'} {match[1]} {value}"

    for button in ("Order", "Add"):
        if number := tree.find(shown, "button", button):
            wanted = (*goal.options, ("Quantity", str(goal.quantity)))
            return next(filter(None, (select(*option) for option in wanted)), f"click {number}")
    for number, title, price in re.findall(r'^\[(\d+)\] link "(.+) (\d+)"$', shown, re.MULTILINE):
        if goal.maker in ("", title.split()[1]) and (not goal.most or int(price) <= goal.most):
            return f"click {number}"
    for role, name in (("link", "Next"), ("link", "Checkout")):
        if number := tree.find(shown, role, name):
            return f"click {number}"
    find = tree.find(shown, "button", "Find")
    if not find or 'page "Results"' in shown:
        return None
    words = f"{goal.kind} {goal.maker}".strip()
    return select("Search", words) or select("Up to", str(goal.most)) or f"click {find}"
