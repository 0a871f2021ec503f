"""tau2's retail domain on tau-bench's shop: the published hashes and observations of all 114 tasks, and its rules."""

import asyncio
import hashlib
import json

import pytest
from tau2_people import RETAIL, SHOP, People, call, opened, played

from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.envs.forms import shaped
from jaxagent.envs.tau2 import retail
from jaxagent.envs.tau2.rows import AGENT, USER, ToolUse, parse
from jaxagent.envs.tau2.stock import read_stock
from jaxagent.envs.tau2.world import DOMAINS, World
from jaxagent.types import StopReason

published = pytest.mark.skipif(not (RETAIL.is_dir() and SHOP.is_dir()), reason="the shop is not on this machine")
DOMAIN = DOMAINS["retail"]
# Made by the published tools at commit a2c0247, on the published db.json
UNTOUCHED = "b25c9cb211f5efcaee5dd646054a73c4a9f43f4f5acc32c10713cd9f9ac20e9c"
HASHES = "6de03dac549750419dc0e524c5856ab07e715e1288be21d6b18f4e7a5af936c2"  # of {task id: hash of the store after it}
FEW = "85566712ebeb7538acca0e0d07d63e9274bdc6bd58527f0806f621badc02351e"  # of every 19th
SEEN = "f5eac8805349c83367c91c032d204f74b56a784404afa6a163d80247a157fcbf"  # of {task id: [[tool, error, text]]}
FAILED_CALLS = 18
CHANGED = 103  # tasks whose actions leave another hash than the untouched store's


@pytest.fixture(scope="module")
def stock():
    """tau-bench's shop in the form of tau2-bench."""
    return read_stock(DOMAIN, SHOP)


def digest(value):
    """One hash of many."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def replayed(stock, hashed):
    """({task id: [[tool, error, text]]}, {task id: hash}) of every task's actions, each task in a shop of its own."""
    seen, hashes = {}, {}
    for row in json.loads((RETAIL / "tasks.json").read_text()):
        task, world = parse(row), World(DOMAIN, stock)
        results = [(one.name, world.call(one)) for one in task.criteria.actions]
        seen[task.id] = [[name, failed, text] for name, (text, failed) in results]
        if int(task.id) in hashed:
            hashes[task.id] = world.digest(AGENT)
    return seen, hashes


@published
def test_every_tasks_actions_see_what_is_published(stock):
    assert World(DOMAIN, stock).digest(AGENT) == UNTOUCHED
    seen, hashes = replayed(stock, range(0, 114, 19))
    assert (len(seen), digest(seen), digest(hashes)) == (114, SEEN, FEW)
    assert sum(error for results in seen.values() for _, error, _ in results) == FAILED_CALLS
    assert World(DOMAIN, stock).digest(AGENT) == UNTOUCHED  # no attempt wrote into what all share


@published
@pytest.mark.slow  # each hash reads the whole shop
def test_every_tasks_actions_leave_the_published_store(stock):
    assert digest(replayed(stock, range(114))[1]) == HASHES


@published
def test_the_folder_is_a_data_set():
    train, test = (sources.load_tasks(RETAIL, split, need_answers=False) for split in ("train", "test"))
    assert (len(train), len(test), train[5].id) == (74, 40, "6")
    assert not {task.id for task in train} & {task.id for task in test}


@published
def test_gold_and_idle_agents():
    stop = "###STOP###"
    rewards = {"gold": [], "idle": []}
    settings = {"domain": "retail", "store": str(SHOP), "nl_assertions": "skip"}
    with opened(RETAIL, **settings) as attempt_at:
        for name in map(str, range(114)):
            task = attempt_at(name, People(user=["Hi"]))._task
            gold = [call(one.name, **one.arguments) for one in task.criteria.actions]
            for way, actions in (("gold", [*gold, "Done."]), ("idle", ["No."])):
                attempt = attempt_at(name, People(user=["Hi", stop]))
                verdict, reason, _ = asyncio.run(played(attempt, actions))
                assert reason == StopReason.ANSWER
                rewards[way].append(verdict.reward)
                assert attempt.counters["skipped_assertions"] == len(task.criteria.nl_assertions)
    assert rewards["gold"] == [1.0] * 114
    assert sum(rewards["idle"]) == 114 - CHANGED


@published
def test_assertions_of_retail_are_refused_without_a_word_about_them():
    with pytest.raises(ConfigError, match=r"nl_assertions.*judge"), opened(RETAIL, domain="retail", store=str(SHOP)):
        pass


@published
def test_the_shop_must_be_named():
    with pytest.raises(ConfigError, match=r"orders.json.*config.env.store"), opened(RETAIL, domain="retail"):
        pass


ADDRESS = dict.fromkeys(("address1", "address2", "city", "country", "state", "zip"), "a")


def item(name, price):
    """An item of an order."""
    return {"name": "Cup", "product_id": "p", "item_id": name, "price": price, "options": {"is": name}}


def small(status="pending", paid="credit_card_1", balance=5):
    """A shop with one user, one order of two cups (a, b), and the cups a to d."""
    prices = {"a": 10, "b": 20, "c": 12.5, "d": 30}
    variants = {k: {"item_id": k, "options": {"is": k}, "available": k != "e", "price": v} for k, v in prices.items()}
    methods = {"credit_card_1": {"source": "credit_card", "id": "credit_card_1", "brand": "b", "last_four": "1"}}
    methods["gift_card_1"] = {"source": "gift_card", "id": "gift_card_1", "balance": balance}
    methods["paypal_1"] = {"source": "paypal", "id": "paypal_1"}
    payment = {"transaction_type": "payment", "amount": 30, "payment_method_id": paid}
    names = {"first_name": "Mia", "last_name": "Li"}
    user = {"user_id": "u", "name": names, "address": ADDRESS, "email": "M@x.com", "payment_methods": methods}
    order = {"order_id": "#W1", "user_id": "u", "address": ADDRESS, "items": [item("a", 10), item("b", 20)]}
    order |= {"status": status, "fulfillments": [], "payment_history": [payment]}
    tables = {
        "products": {"p": {"name": "Cup", "product_id": "p", "variants": variants}},
        "users": {"u": {**user, "orders": ["#W1"]}},
        "orders": {"#W1": order},
    }
    forms = retail.AGENT.forms
    shop = {n: {k: shaped(r, forms[n], k) for k, r in t.items()} for n, t in tables.items()}
    return World(DOMAIN, {AGENT: shop, USER: {}})


def use(world, name, **arguments):
    """What a tool says: a record, or a text."""
    text, _ = world.call(ToolUse(AGENT, name, arguments))
    return json.loads(text) if text.startswith("{") else text


def test_of_several_changed_items_all_take_the_last_ones_price():
    """The published mistake: both cups get the price and the options of d."""
    changed = {"order_id": "#W1", "item_ids": ["a", "b"], "new_item_ids": ["c", "d"]}
    order = use(small(), "modify_pending_order_items", **changed, payment_method_id="paypal_1")
    assert [(one["item_id"], one["price"], one["options"]) for one in order["items"]] == [
        ("c", 30.0, {"is": "d"}),
        ("d", 30.0, {"is": "d"}),
    ]
    assert order["payment_history"][1] == {
        "transaction_type": "payment",
        "amount": 12.5,
        "payment_method_id": "paypal_1",
    }
    assert order["status"] == "pending (item modified)"


def test_an_order_with_changed_items_may_still_get_an_address_and_no_other_items():
    world, changed = small(), {"order_id": "#W1", "item_ids": ["a"], "new_item_ids": ["c"]}
    use(world, "modify_pending_order_items", **changed, payment_method_id="paypal_1")
    order = use(world, "modify_pending_order_address", order_id="#W1", **{**ADDRESS, "city": "Oslo"})
    assert order["address"]["city"] == "Oslo"
    told = use(world, "modify_pending_order_items", **changed, payment_method_id="paypal_1")
    assert told == "Error: Non-pending order cannot be modified"
    told = use(world, "cancel_pending_order", order_id="#W1", reason="no longer needed")
    assert told == "Error: Non-pending order cannot be cancelled"


def test_a_gift_card_gets_the_money_of_a_cancelled_order_at_once():
    world = small(paid="gift_card_1")
    use(world, "cancel_pending_order", order_id="#W1", reason="ordered by mistake")
    assert use(world, "get_user_details", user_id="u")["payment_methods"]["gift_card_1"]["balance"] == 35.0


# Of the refusals those that tau-bench's shop, which has the same functions, cannot show or that it says otherwise; the
# others are test_tau_tools's.
@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("cancel_pending_order", {"reason": "bored"}, "Error: Invalid reason"),
        ("modify_pending_order_payment", {"payment_method_id": "gift_card_1"}, "Error: Insufficient gift card balance"),
        ("return_delivered_order_items", {"item_ids": ["a"], "payment_method_id": "paypal_1"}, "original"),
        ("modify_pending_order_items", {"item_ids": ["a"], "new_item_ids": ["a"]}, "should be different from the old"),
        ("modify_pending_order_items", {"item_ids": ["a"], "new_item_ids": ["z"]}, "Error: Variant not found"),
    ],
)
def test_refusals_change_nothing(name, arguments, told):
    world = small("delivered" if "delivered" in name else "pending")
    paid = {"payment_method_id": "gift_card_1"} if "modify" in name and "items" in name else {}
    assert told in use(world, name, order_id="#W1", **arguments, **paid)
    assert world.differences() == {}


def test_reading():
    world = small()
    assert use(world, "find_user_id_by_email", email="m@X.com") == "u"
    assert use(world, "find_user_id_by_name_zip", first_name="mia", last_name="LI", zip="a") == "u"
    assert use(world, "get_item_details", item_id="c")["price"] == 12.5
    assert use(world, "list_all_product_types") == {"Cup": "p"}
    assert use(world, "transfer_to_human_agents", summary="s") == "Transfer successful"
    assert use(world, "think", thought="t") == "Error: Tool 'think' not found."
    assert world.differences() == {}
