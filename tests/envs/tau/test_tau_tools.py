"""tau-bench's shop: its data, 16 tools and digest, against the recorded replays, and whatever a policy writes."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.tau import catalog, toolbox
from jaxagent.envs.tau.store import ShopStore, digest
from jaxagent.envs.tau2 import arithmetic
from jaxagent.envs.tau2.tables import copied

FOLDER = Path(__file__).resolve().parents[3] / "../shared/data/tau-bench-retail"
needs_data = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs tau-bench's retail files in ../shared/data")
ADDRESS = {"address1": "1 A St", "address2": "", "city": "Rome", "country": "USA", "state": "NY", "zip": "10001"}


def tables():
    """A shop of one user: a pending order p, paid with a gift card, and a delivered one d, paid with a credit card."""

    def order(order_id, status, method, *items):
        paid = {"transaction_type": "payment", "amount": sum(prices[i] for i in items), "payment_method_id": method}
        listed = [
            {"name": "Cup", "product_id": "cup", "item_id": i, "price": prices[i], "options": {"color": i}}
            for i in items
        ]
        return {
            "order_id": order_id,
            "user_id": "ann_1",
            "address": dict(ADDRESS),
            "items": listed,
            "fulfillments": [],
            "status": status,
            "payment_history": [paid],
        }

    prices = {"a": 10.1, "b": 10.3, "c": 200.5, "d": 7.0}
    variants = {i: {"item_id": i, "options": {"color": i}, "available": i != "d", "price": prices[i]} for i in prices}
    methods = {
        "gift_card_1": {"source": "gift_card", "balance": 50, "id": "gift_card_1"},
        "credit_card_1": {"source": "credit_card", "brand": "visa", "last_four": "1", "id": "credit_card_1"},
        "paypal_1": {"source": "paypal", "id": "paypal_1"},
    }
    user = {
        "name": {"first_name": "Ann", "last_name": "Lee"},
        "address": dict(ADDRESS),
        "email": "ann@example.com",
        "payment_methods": methods,
        "orders": ["#p", "#d"],
    }
    return {
        "orders": {
            "#p": order("#p", "pending", "gift_card_1", "a", "a"),
            "#d": order("#d", "delivered", "credit_card_1", "a", "b"),
        },
        "products": {"cup": {"name": "Cup", "product_id": "cup", "variants": variants}},
        "users": {"ann_1": user},
    }


@pytest.fixture
def shop():
    return ShopStore(tables()).open()


def balance(shop):
    return shop.users["ann_1"]["payment_methods"]["gift_card_1"]["balance"]


def modified(shop, item_ids, new_item_ids, method="paypal_1"):
    asked = {"order_id": "#p", "item_ids": item_ids, "new_item_ids": new_item_ids, "payment_method_id": method}
    return toolbox.call(shop, "modify_pending_order_items", asked)


def say(shop, name, **arguments):
    return toolbox.call(shop, name, arguments)


@needs_data
def test_replays_of_the_tasks_actions_give_the_recorded_digests_and_answers():
    store = ShopStore.load(FOLDER)
    tasks = {s: [json.loads(x) for x in (FOLDER / f"retail_{s}_tasks.jsonl").open()] for s in ("dev", "train", "test")}
    first, *records = [json.loads(line) for line in (FOLDER / "gt_replay_hashes.jsonl").open()]
    assert store.digest == first["hash"] == digest(store.tables)
    for record in records:
        task, shop = tasks[record["split"]][record["index"]], store.open()
        answers = toolbox.replay(shop, ((a["name"], a["kwargs"]) for a in task["metadata"]["actions"]))
        shown = [a if a is None or len(a) <= 200 else hashlib.sha256(a.encode()).hexdigest()[:16] for a in answers]
        assert (shop.digest(), shown) == (record["hash"], record["observations"]), (record["split"], record["index"])
    assert len(records) == 520
    # Of the test tasks only two numbers are recorded.
    changed = errors = 0
    for task in tasks["test"]:
        shop = store.open()
        answers = toolbox.replay(shop, ((a["name"], a["kwargs"]) for a in task["metadata"]["actions"]))
        changed += shop.digest() != store.digest
        errors += sum(answer.startswith("Error") for answer in answers if answer is not None)
    assert (len(tasks["test"]), changed, errors) == (115, 104, 24)
    assert digest(store.tables) == first["hash"]  # nobody wrote into the original


def test_the_digest_of_a_changed_shop_is_that_of_its_tables():
    for names in (("#p",), ("#p", "#d"), ("#d",)):
        data = tables()
        shop = ShopStore(data).open()
        for name in names:
            say(shop, "get_order_details", order_id=name)
            shop.orders.change(name)["status"] = "ü"
            data["orders"][name] = {**data["orders"][name], "status": "ü"}
        assert shop.digest() == digest(data)
    assert digest({"a": {"x": 1}}) == hashlib.sha256(b"(('a', (('x', 1),)),)").hexdigest()
    assert digest({"a": {"x": 1}}) != digest({"a": {"x": 1.0}})
    data = tables()
    assert ShopStore(dict(reversed(data.items()))).digest == ShopStore(data).digest == digest(data)


def test_attempts_do_not_see_each_others_changes():
    store = ShopStore(tables())
    one, other = store.open(), store.open()
    assert "cancelled" in say(one, "cancel_pending_order", order_id="#p", reason="no longer needed")
    assert other.digest() == store.digest == digest(tables()) != one.digest()
    assert (
        other.orders["#p"]["status"] == "pending"
        and other.users["ann_1"]["payment_methods"]["gift_card_1"]["balance"] == 50
    )


def test_cancelling_gives_a_gift_card_its_money_and_only_once(shop):
    assert say(shop, "cancel_pending_order", order_id="#p", reason="bored") == "Error: invalid reason"
    assert not shop.orders.changed and not shop.users.changed
    order = json.loads(say(shop, "cancel_pending_order", order_id="#p", reason="ordered by mistake"))
    assert order["payment_history"][1] == {
        "transaction_type": "refund",
        "amount": 20.2,
        "payment_method_id": "gift_card_1",
    }
    assert balance(shop) == 70.2
    again = say(shop, "cancel_pending_order", order_id="#p", reason="ordered by mistake")
    assert again == "Error: non-pending order cannot be cancelled"


def test_amounts_of_modified_items_are_not_rounded_and_nothing_costs_a_whole_number(shop):
    shown = json.loads(modified(shop, ["a", "a"], ["b", "b"], "gift_card_1"))
    assert [item["item_id"] for item in shown["items"]] == ["b", "b"] and shown["status"] == "pending (item modified)"
    assert shown["payment_history"][-1]["amount"] == (10.3 - 10.1) + (10.3 - 10.1) != 0.4
    assert balance(shop) == 49.6
    nothing = ShopStore(tables()).open()
    shown = say(
        nothing, "modify_pending_order_items", order_id="#p", item_ids=[], new_item_ids=[], payment_method_id="paypal_1"
    )
    assert '{"transaction_type": "refund", "amount": 0, ' in shown
    same = ShopStore(tables()).open()
    shown = say(
        same,
        "modify_pending_order_items",
        order_id="#p",
        item_ids=["a"],
        new_item_ids=["a"],
        payment_method_id="paypal_1",
    )
    assert '"amount": 0.0, ' in shown


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("modify_pending_order_items", {"item_ids": ["a"] * 3, "new_item_ids": ["b"] * 3}, "Error: a not found"),
        (
            "modify_pending_order_items",
            {"item_ids": ["a"], "new_item_ids": []},
            "Error: the number of items to be exchanged should match",
        ),
        (
            "modify_pending_order_items",
            {"item_ids": ["a"], "new_item_ids": ["d"]},
            "Error: new item d not found or available",
        ),
        (
            "modify_pending_order_items",
            {"item_ids": ["a"], "new_item_ids": ["c"]},
            "Error: insufficient gift card balance to pay for the new item",
        ),
        (
            "modify_pending_order_items",
            {"item_ids": ["a"], "new_item_ids": ["b"], "payment_method_id": "x"},
            "Error: payment method not found",
        ),
        ("modify_pending_order_payment", {}, "Error: the new payment method should be different from the current one"),
        ("modify_pending_order_payment", {"payment_method_id": "x"}, "Error: payment method not found"),
        ("modify_pending_order_payment", {"order_id": "p"}, "Error: order not found"),
        ("modify_pending_order_payment", {"order_id": "#d"}, "Error: non-pending order cannot be modified"),
        (
            "return_delivered_order_items",
            {"order_id": "#d", "item_ids": ["a"], "payment_method_id": "paypal_1"},
            "Error: payment method should be either the original payment method or a gift card",
        ),
        ("return_delivered_order_items", {"order_id": "#d", "item_ids": ["a", "a"]}, "Error: some item not found"),
        ("return_delivered_order_items", {"item_ids": ["a"]}, "Error: non-delivered order cannot be returned"),
        (
            "exchange_delivered_order_items",
            {"order_id": "#d", "item_ids": ["a"], "new_item_ids": ["c"]},
            "Error: insufficient gift card balance to pay for the price difference",
        ),
        ("find_user_id_by_email", {"email": "nobody"}, "Error: user not found"),
        ("get_product_details", {"product_id": "a"}, "Error: product not found"),
        ("calculate", {"expression": "1 + x"}, "Error: invalid characters in expression"),
        ("no_such_tool", {}, "Unknown action no_such_tool"),
    ],
)
def test_refusals_say_the_published_words_and_change_nothing(shop, name, arguments, answer):
    asked = {"order_id": "#p", "payment_method_id": "gift_card_1"} if "order" in name else {}
    assert toolbox.call(shop, name, asked | arguments) == answer
    assert not shop.orders.changed and not shop.users.changed


def test_what_tools_answer(shop):
    assert say(shop, "find_user_id_by_email", email="ANN@example.com") == "ann_1"
    assert say(shop, "find_user_id_by_name_zip", first_name="ann", last_name="LEE", zip="10001") == "ann_1"
    assert say(shop, "list_all_product_types") == '{"Cup": "cup"}'
    assert say(shop, "think", thought="hm") == ""
    assert say(shop, "calculate", expression="(1 + 2) * 3") == "9.0"
    assert say(shop, "calculate", expression=" 10 / 3") == "3.33"
    assert say(shop, "calculate", expression="1 / 0") == "Error: division by zero"
    assert say(shop, "calculate", expression=" + ".join(["1.5"] * 800)) == "1200.0"
    exchanged = json.loads(
        say(
            shop,
            "exchange_delivered_order_items",
            order_id="#d",
            item_ids=["b", "a"],
            new_item_ids=["a", "b"],
            payment_method_id="paypal_1",
        )
    )
    assert (exchanged["exchange_items"], exchanged["exchange_new_items"]) == (["a", "b"], ["a", "b"])
    assert exchanged["exchange_price_difference"] == 0.0 and exchanged["items"][0]["item_id"] == "a"
    moved = json.loads(say(shop, "modify_user_address", user_id="ann_1", **{**ADDRESS, "city": "Bern"}))
    assert moved["address"]["city"] == "Bern" and list(moved["address"]) != sorted(moved["address"])


def test_paying_with_another_method_moves_the_money(shop):
    history = json.loads(say(shop, "modify_pending_order_payment", order_id="#p", payment_method_id="paypal_1"))[
        "payment_history"
    ]
    assert [(p["transaction_type"], p["payment_method_id"]) for p in history] == [
        ("payment", "gift_card_1"),
        ("payment", "paypal_1"),
        ("refund", "gift_card_1"),
    ]
    assert balance(shop) == 70.2
    exact = tables()
    exact["orders"]["#p"]["payment_history"] = [
        {"transaction_type": "payment", "amount": 50, "payment_method_id": "paypal_1"}
    ]
    other = ShopStore(exact).open()  # a gift card that holds just enough
    assert "Error" not in say(other, "modify_pending_order_payment", order_id="#p", payment_method_id="gift_card_1")
    assert balance(other) == 0
    again = say(shop, "modify_pending_order_payment", order_id="#p", payment_method_id="credit_card_1")
    assert again == "Error: there should be exactly one payment for a pending order"


def test_missing_and_unknown_arguments_are_told_with_the_published_names(shop):
    missing = "missing 1 required positional argument: 'reason'"
    assert say(shop, "cancel_pending_order", order_id="#p") == f"Error: CancelPendingOrder.invoke() {missing}"
    unknown = "got an unexpected keyword argument 'x'"
    assert say(shop, "find_user_id_by_email", email="", x=1) == f"Error: FindUserIdByEmail.invoke() {unknown}"
    assert "multiple values for keyword argument 'data'" in say(shop, "think", thought="", data={})


def test_whatever_a_policy_writes_is_answered(shop):
    hostile = [
        None,
        5,
        1.5,
        True,
        [],
        {},
        ["a"],
        {"a": 1},
        "",
        "x" * 50_000,
        [[]],
        "#p",
        "#d",
        "ann_1",
        ["a", "b"],
        "a",
    ]
    random_ = random.Random(0)
    forms = {form["function"]["name"]: list(form["function"]["parameters"]["properties"]) for form in catalog.short()}
    for _ in range(3_000):
        name = random_.choice(list(forms))
        arguments = {key: copied(random_.choice(hostile)) for key in forms[name] if random_.random() > 0.05}
        assert isinstance(toolbox.call(shop, name, arguments), str)
    assert len(shop.digest()) == 64


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9",
        "9**99999*9**99999",
        "2**65535*2**65535",
        "(9**9999)**9999",
        "-" * 9_000 + "1",
        "(" * 5_000,
        "1" * 6_000,
        "9" * 20_000,
    ],
)
def test_arithmetic_without_end_is_an_error(shop, expression):
    assert say(shop, "calculate", expression=expression).startswith("Error: ")


def test_arithmetic_is_pythons():
    random_ = random.Random(1)
    for _ in range(3_000):
        text = "".join(random_.choice("0123456789+-*/(). 123456789") for _ in range(random_.randint(1, 9)))
        if "**" in text or "(" in text:
            continue
        try:
            wanted = repr(eval(text))
        except Exception as error:
            wanted = str(error)
        try:
            found = repr(arithmetic.evaluate(text))
        except Exception as error:
            found = str(error)
        assert found == wanted, text


def methods(data):
    return data["users"]["ann_1"]["payment_methods"]


@pytest.mark.parametrize(
    ("table", "spoil", "told"),
    [
        ("orders", lambda d: d["orders"]["#p"].pop("status"), "key '#p', field 'status': missing"),
        (
            "orders",
            lambda d: d["orders"]["#p"]["items"][1].update(price="1"),
            "field 'items[1].price': must be a number, got str '1'",
        ),
        (
            "orders",
            lambda d: d["orders"]["#d"].update(order_id="#x"),
            "field 'order_id': is '#x', and the record stands under '#d'",
        ),
        ("orders", lambda d: d["orders"]["#d"].update(user_id="bob"), "field 'user_id': there is no user 'bob'"),
        ("orders", lambda d: d["orders"]["#d"].update(payment_history=[]), "field 'payment_history': is empty"),
        (
            "products",
            lambda d: d["products"]["cup"]["variants"]["a"].update(available=1),
            "field 'variants.a.available': must be true or false",
        ),
        (
            "users",
            lambda d: methods(d)["gift_card_1"].pop("balance"),
            "field 'payment_methods.gift_card_1.balance': missing",
        ),
        ("users", lambda d: d["users"]["ann_1"]["orders"].append("#q"), "field 'orders[2]': there is no order '#q'"),
        ("users", lambda d: d["users"].update(ann_1=[]), "must be an object, got list []"),
        ("products", lambda d: d.update(products=[]), "must be an object of products by their ids"),
    ],
)
def test_malformed_data_name_file_key_and_field(tmp_path, table, spoil, told):
    data = tables()
    spoil(data)
    write(tmp_path, data)
    with pytest.raises(ConfigError) as error:
        ShopStore.load(tmp_path)
    assert told in str(error.value) and f"{tmp_path / table}.json" in str(error.value)


def write(folder, data):
    for name, table in data.items():
        (folder / f"{name}.json").write_text(json.dumps(table))


def test_missing_and_broken_files_are_named(tmp_path):
    write(tmp_path, tables())
    assert ShopStore.load(tmp_path).digest == digest(tables())
    (tmp_path / "users.json").write_text("{")
    with pytest.raises(ConfigError, match=r"users\.json is no JSON"):
        ShopStore.load(tmp_path)
    (tmp_path / "users.json").unlink()
    with pytest.raises(ConfigError, match=r"users\.json cannot be read: No such file"):
        ShopStore.load(tmp_path)


@needs_data
def test_our_descriptions_are_of_the_published_tools_and_arguments(tmp_path):
    published = catalog.load(FOLDER)
    assert published == json.loads((FOLDER / "tools_info.json").read_text())
    ours = {tool.name: tool.parameters for tool in catalog.tools_of(catalog.short())}
    theirs = {tool.name: tool.parameters for tool in catalog.tools_of(published)}
    assert list(ours) == list(theirs) == list(toolbox.TOOLS)
    for name, schema in ours.items():
        kinds = {key: inner["type"] for key, inner in schema["properties"].items()}
        assert kinds == {key: inner["type"] for key, inner in theirs[name]["properties"].items()}
        assert schema["required"] == theirs[name]["required"]
    shutil.copy(FOLDER / "tools_info.json", tmp_path)
    (tmp_path / "tools_info.json").write_text(json.dumps(published[1:]))
    with pytest.raises(ConfigError, match="the tool calculate must be there"):
        catalog.load(tmp_path)
