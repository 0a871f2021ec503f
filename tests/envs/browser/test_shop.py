"""The web shop: its pages, and that only the goal's own order meets it, whatever else is tried."""

import asyncio
import itertools
import random

import pytest

from jaxagent.config import ConfigError
from jaxagent.data_pipelines import web_shop
from jaxagent.data_pipelines.web_shop_reader import Reader
from jaxagent.envs.browser import sites
from jaxagent.envs.browser.shop import pages, site, wares
from jaxagent.envs.browser.shop.shopping import Shopping, page
from jaxagent.envs.browser.shop.site import WebShop
from jaxagent.envs.browser.shop.wares import Goal, Line
from jaxagent.types import Task

RIGHT = (("Colour", "red"),)
PLAIN = {"kind": "lamp", "maker": "", "most": 0, "options": {"Colour": "red"}, "quantity": 2}


def a_shop():
    return wares.draw("test", "compact")


def a_goal(number=0):
    product = a_shop().products[number]
    return Goal(product.kind, product.maker, product.price, RIGHT, 2)


def post(state, path, **form):
    return page(state, "POST", path, {"changes": str(state.changes), **form})


def buy(state, number=0, colour="red", quantity="2"):
    post(state, f"/add/{number}", Colour=colour, Quantity=quantity)
    return post(state, "/order")


def test_the_goals_own_order_meets_it():
    state = Shopping(a_shop())
    assert buy(state).title == "Thank you"
    assert state.orders == [(Line(0, RIGHT, 2),)] and state.has_met(a_goal())


def hostile(name):
    """What a policy does that has not bought what it should."""
    state = Shopping(a_shop())
    if name == "nothing":
        pass
    elif name == "bought twice":
        buy(state), buy(state)
    elif name == "right product, wrong option":
        buy(state, colour="blue")
    elif name == "another product":
        buy(state, number=1)
    elif name == "too few":
        buy(state, quantity="1")
    elif name == "in two lines":
        post(state, "/add/0", Colour="red", Quantity="1")
        buy(state, quantity="1")
    elif name == "something beside it":
        post(state, "/add/1", Colour="red", Quantity="1")
        buy(state)
    elif name == "something else is left in the basket":
        buy(state)
        post(state, "/add/1", Colour="red", Quantity="1")
    elif name == "put into the basket, not ordered":
        post(state, "/add/0", Colour="red", Quantity="2")
    elif name == "ordered by an address alone":
        post(state, "/add/0", Colour="red", Quantity="2")
        page(state, "GET", "/order", {"changes": "1"})
    elif name == "options that there are not":
        buy(state, colour="gold")
    elif name == "a quantity that there is not":
        buy(state, quantity="-2")
    elif name == "an empty basket is ordered":
        post(state, "/order")
    elif name == "a product that there is not":
        buy(state, number=10**6)
    return state


ATTEMPTS = [
    "nothing", "bought twice", "right product, wrong option", "another product", "too few", "in two lines",
    "something beside it", "something else is left in the basket", "put into the basket, not ordered",
    "ordered by an address alone", "options that there are not", "a quantity that there is not",
    "an empty basket is ordered", "a product that there is not",
]  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
def test_any_other_order_does_not_meet_the_goal(name):
    assert not hostile(name).has_met(a_goal())


def test_a_goal_names_kind_maker_price_options_and_quantity():
    state = Shopping(a_shop())
    buy(state)
    [line] = state.orders[0]
    goal, product = a_goal(), a_shop().products[0]
    assert goal.is_met_by(line, a_shop())
    assert Goal(product.kind, options=RIGHT, quantity=2).is_met_by(line, a_shop())
    others = (
        Goal("chair", options=RIGHT, quantity=2),
        Goal(product.kind, "Nobody", 0, RIGHT, 2),
        Goal(product.kind, "", product.price - 1, RIGHT, 2),
        Goal(product.kind, "", 0, (("Colour", "blue"),), 2),
        Goal(product.kind, "", 0, RIGHT, 1),
        Goal(product.kind, "", 0, (), 2),
    )
    assert not any(other.is_met_by(line, a_shop()) for other in others)


def test_a_form_that_is_sent_twice_changes_nothing_the_second_time():
    state = Shopping(a_shop())
    form = {"changes": "0", "Colour": "red", "Quantity": "2"}
    assert page(state, "POST", "/add/0", form) == page(state, "POST", "/add/0", form)
    assert state.basket == [Line(0, RIGHT, 2)]
    order = {"changes": "1"}
    page(state, "POST", "/order", order)
    page(state, "POST", "/order", order)
    assert state.has_met(a_goal())


def test_what_a_page_says_is_escaped():
    made = pages.Page(
        "<b>", (pages.Text('<i>"&'), pages.Link("<u>", '/"><script>'), pages.Form('/"', "<", method="get"))
    )
    text = pages.html(made)
    assert "<b>" not in text and "<i>" not in text and "<u>" not in text and "<script>" not in text


@pytest.mark.parametrize("scale", wares.SCALES)
def test_a_search_shows_what_has_the_words_and_costs_so_much_on_all_its_pages(scale):
    shop = wares.draw("test", scale)
    kind, bound = shop.products[0].kind, shop.scale.bounds[-1]
    reader = Reader(Shopping(shop))
    number = 3 if shop.scale.full else 1  # the header has two links
    reader.act(f"type {number} {kind}")
    reader.act(f"select {number + 1} {bound}")
    reader.act(f"click {number + 2}")
    seen = []
    while True:
        lines = reader.shown().splitlines()
        seen += [line.split('"')[1] for line in lines if "] link" in line and line.split('"')[1][-1].isdecimal()]
        following = [line for line in lines if '"Next"' in line]
        if not following:
            break
        reader.act(f"click {following[0][1:].partition(']')[0]}")
    assert seen == [f"{p.title} {p.price}" for p in shop.products if p.kind == kind and p.price <= bound]
    assert 0 < len(seen) < shop.scale.per_kind and kind in seen[0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "'shop'"),
        ({"shop": "a", "scale": "huge", "goal": PLAIN}, "'scale'"),
        ({"shop": "a", "scale": "compact"}, "goal"),
        ({"shop": "a", "scale": "compact", "goal": PLAIN | {"price": 3}}, "goal"),
        ({"shop": "a", "scale": "compact", "goal": PLAIN | {"quantity": True}}, "'quantity' must be int"),
        ({"shop": "a", "scale": "compact", "goal": PLAIN | {"kind": "yacht"}}, "fits"),
        ({"shop": "a", "scale": "compact", "goal": PLAIN | {"options": {"Colour": "gold"}}}, "fits"),
    ],
)
def test_a_task_that_nobody_can_solve_is_refused(metadata, message):
    with pytest.raises(ConfigError, match=message):
        site.WebShop().visit(Task("t", "Buy.", (), metadata=metadata))


def test_a_visit_answers_pages_and_refuses_what_there_is_not():
    visit = site.WebShop().visit(Task("t", "Buy.", (), metadata={"shop": "a", "scale": "compact", "goal": PLAIN}))
    assert isinstance(visit.respond("GET", "/", {}), sites.Response)
    for path in ("/favicon.ico", "/item/999", "/item/x", "/basket/1", "/find/../../etc/passwd"):
        answer = visit.respond("GET", path, {})
        assert answer is None or path.startswith("/find")
    verdict = asyncio.run(visit.judge(None, "I have bought it."))
    assert verdict.reward == verdict.components["solved"] == 0.0


@pytest.mark.parametrize("scale", ["compact", "full"])
def test_a_failed_task_begets_one_that_wants_the_same_in_another_shop(scale):
    failed = [Task(**row | {"answers": ()}) for row in itertools.islice(web_shop.rows("0", scale, "train"), 40)]
    made = [WebShop().new_task(task, random.Random(number)) for number, task in enumerate(failed)]
    assert made == [WebShop().new_task(task, random.Random(number)) for number, task in enumerate(failed)]
    assert sum(task is not None for task in made) > 35
    changed = 0
    for old, new in zip(failed, made, strict=True):
        if new is None:
            continue
        goal = wares.goal_of(new.metadata["goal"])
        assert web_shop.split_of(goal) == "train" and web_shop.split_of(wares.goal_of(old.metadata["goal"])) == "train"
        assert new.kind == old.kind and new.prompt == goal.text() and new.metadata["shop"] != old.metadata["shop"]
        changed += new.prompt != old.prompt
        visit = WebShop().visit(new)
        reader = Reader(visit.state)
        while not visit.state.orders:
            reader.act(site.next_action(goal, reader.shown()))
        assert visit.state.has_met(goal)
    assert changed > 10
