"""The generated store: tau-bench's schema, tasks whose actions the tools accept, users in one split only."""

import asyncio
import itertools
import json
import random
from pathlib import Path

import pytest

from data_pipelines.tau_store import __main__ as command
from data_pipelines.tau_store import demonstrations, make, store, tasks
from jaxagent.config import ConfigError
from jaxagent.config.choice import Choice
from jaxagent.data import sources
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs import TauBench
from jaxagent.envs.base import Message, Transcript
from jaxagent.envs.cast import RoleReply
from jaxagent.envs.tau import plain
from jaxagent.envs.tau.attempt import TauAttempt
from jaxagent.envs.tau.store import ShopStore
from jaxagent.rollout import demonstrations as rollout_demonstrations
from jaxagent.types import StopReason, Task

REAL = Path(__file__).parents[3] / "shared" / "data" / "tau-bench-retail"


def drawn(compact=True, users=40, seed=0):
    return store.draw(random.Random(seed), users, 16, compact)


def some_rows(a_store, number, compact=True):
    return list(itertools.islice(make.rows(a_store, list(a_store.users), "test", compact), number))


def shape(value, ids=False):
    """The kinds of values in it; keys that are ids count as one."""
    if isinstance(value, dict):
        inner = [shape(v) for v in value.values()]
        return {"*": inner[:1]} if ids else {key: shape(v) for key, v in sorted(value.items())}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.skipif(not REAL.is_dir(), reason=f"no published store at {REAL}")
def test_records_have_the_published_fields_and_types(compact):
    ours = drawn(compact).data()
    for name in store.FILES:
        real = list(json.loads((REAL / f"{name}.json").read_text()).values())
        for record in ours[name].values():
            assert set(record) == set(real[0]), name
        if name == "orders":
            items = [item for order in real for item in order["items"]]
            assert {str(shape(i["options"], True)) for i in items} == {"{'*': ['str']}"}
            mine = [item for order in ours[name].values() for item in order["items"]]
            assert {frozenset(item) for item in mine} == {frozenset(item) for item in items}
            assert {tuple(sorted(order["address"])) for order in ours[name].values()} == {
                tuple(sorted(order["address"])) for order in real
            }
            paid = [payment for order in ours[name].values() for payment in order["payment_history"]]
            assert {str(shape(p)) for p in paid} <= {str(shape(p)) for o in real for p in o["payment_history"]}
        if name == "users":
            methods = [method for user in ours[name].values() for method in user["payment_methods"].values()]
            assert {str(shape(m)) for m in methods} == {
                str(shape(m)) for user in real for m in user["payment_methods"].values()
            }


@pytest.mark.parametrize("compact", [True, False])
def test_orders_are_paid_for_and_consist_of_the_stores_items(compact):
    ours = drawn(compact)
    for order in ours.orders.values():
        assert order["payment_history"][0]["amount"] == pytest.approx(sum(item["price"] for item in order["items"]))
        user = ours.users[order["user_id"]]
        assert order["order_id"] in user["orders"]
        assert order["payment_history"][0]["payment_method_id"] in user["payment_methods"]
        for item in order["items"]:
            variant = ours.products[item["product_id"]]["variants"][item["item_id"]]
            assert (variant["options"], variant["price"]) == (item["options"], item["price"])


def test_the_same_seed_gives_the_same_store_and_another_another():
    assert drawn() == drawn()
    assert drawn() != drawn(seed=1)


def test_compact_ids_have_three_digits_and_what_matters_stands_first():
    ours = drawn()
    assert all(len(order_id) == len("#W261") for order_id in ours.orders)
    assert {tuple(order)[:5] for order in ours.orders.values()} == {
        ("order_id", "user_id", "status", "payment_history", "items")
    }


@pytest.mark.parametrize("compact", [True, False])
def test_every_kind_has_tasks_whose_actions_do_what_the_instruction_says(compact):
    ours = drawn(compact, users=80)
    its = some_rows(ours, 6 * len(tasks.KINDS), compact=False)
    assert {row["kind"] for row in its} == set(tasks.KINDS)
    make.checked(ours, {"train": its})
    for row in its:
        about = row["metadata"]
        for action in about["actions"]:
            named = [value for key, value in action["kwargs"].items() if key in ("order_id", "city", "zip", "reason")]
            assert all(value in about["instruction"] for value in named)
        if row["kind"] in ("one/foreign", "one/late"):
            assert about["actions"] == []
        if row["kind"] == "one/price":
            order = ours.orders[about["customer"]["wishes"][0]["order"]]
            assert about["outputs"] == [str(order["payment_history"][0]["amount"])]


def test_a_foreign_order_is_another_users_and_a_late_one_is_delivered():
    ours = drawn()
    for row in some_rows(ours, 5 * len(tasks.KINDS)):
        order = ours.orders.get(row["metadata"]["customer"]["wishes"][0].get("order"))
        if row["kind"] == "one/foreign":
            assert order["user_id"] != row["metadata"]["user_id"] and order["status"] == "pending"
        elif order:
            assert order["user_id"] == row["metadata"]["user_id"]
            assert row["kind"] != "one/late" or order["status"] == "delivered"


def test_a_wrong_task_is_named():
    ours = drawn()
    row = next(row for row in some_rows(ours, 30) if row["kind"] == "one/return")
    row["metadata"]["actions"][0]["kwargs"]["item_ids"] = ["no such item"]
    others = [r for r in some_rows(ours, 30) if r["kind"] != "one/return"]
    with pytest.raises(ConfigError, match=r"one/return.*refuses its actions"):
        make.checked(ours, {"train": [*others, row]})


class OnlyTheCustomer:
    """A cast whose one role is the scripted customer of a task."""

    names = ("user",)

    def __init__(self, task):
        self.speaker = Choice("jaxagent.roles:ROLES").make("retail_customer").speaker(task, 0, 0)
        self.messages = []

    def talk(self, role, trained=True):
        assert role == "user"
        return self

    async def say(self, *messages, stop_strings=(), max_tokens=None):
        self.messages += messages
        reply = await self.speaker.reply(self.messages, stop_strings, 512)
        self.messages.append(Message("assistant", reply.text))
        return RoleReply(reply.text, reply.finish, None, 0, 0, 0.0, None)


async def played(row, shops, shown):
    """The environment's verdict on a demonstration; what it shows must be what the demonstration says."""
    task = Task(row["id"], row["prompt"], (), row["kind"], row["metadata"])
    attempt = TauAttempt(task, OnlyTheCustomer(task), TauBench(tools="plain", max_turns=12), shops, ("", ()))
    prompt = await attempt.start()
    assert [vars(message) for message in prompt] == shown["prompt"]
    for turn in shown["turns"]:
        step = await attempt.step(turn["action"])
        assert (step.observation.text if step.observation else "") == turn["observation"]
    assert step.stop_reason == StopReason.ANSWER
    assert attempt.counters["invalid_actions"] == 0
    return (await attempt.verify(Transcript("", ()))).reward


def test_right_demonstrations_are_rewarded_and_flawed_ones_where_it_does_not_matter():
    ours = drawn()
    shops = ShopStore(ours.data())
    for row in some_rows(ours, 4 * len(tasks.KINDS)):
        for looks, asks_more in itertools.product((True, False), repeat=2):
            shown = demonstrations.demonstration(row, shops, looks=looks, asks_more=asks_more)
            blind = row["kind"] in ("one/items", "one/return", "one/exchange", "one/price", "one/foreign")
            blind |= row["kind"] in ("two/return_cancel", "two/return_payment")
            short = row["kind"].startswith("two/")
            meant = float((looks or not blind) and (asks_more or not short))
            assert asyncio.run(played(row, shops, shown)) == meant, (row["kind"], looks, asks_more)


def test_flaws_are_as_frequent_as_wished():
    shown = list(make.shown(0, 400, 0.65))
    assert len(shown) == 400
    for flaw in ("looks", "asks_more"):
        assert sum(not row["right"][flaw] for row in shown) / 400 == pytest.approx(0.65, abs=0.07)
    assert all(all(row["right"].values()) for row in make.shown(0, 28, 0.0))


def test_a_dataset_is_read_back(tmp_path, capsys):
    out = tmp_path / "store"
    arguments = ["--out", str(out), "--num=280", "--users=80", "--compact", "--demonstrations=56"]
    arguments += ["--curriculum=12", "--flawed_frac=0.5"]
    assert command.main(arguments) == 0
    assert command.main(arguments) == 2 and "exists" in capsys.readouterr().err
    owners = {order_id: order["user_id"] for order_id, order in json.loads((out / "orders.json").read_text()).items()}
    users = {}
    for split in ("train", "heldout"):
        its = sources.load_tasks(out, split, need_answers=False)
        assert {task.kind for task in its} == set(tasks.KINDS)
        named = {wish["order"] for task in its for wish in task.metadata["customer"]["wishes"] if "order" in wish}
        users[split] = {task.metadata["user_id"] for task in its} | {owners[order_id] for order_id in named}
    assert not users["train"] & users["heldout"]
    ShopStore.load(out)
    episodes = rollout_demonstrations.load(out / "full.jsonl")
    assert len(episodes) == 56 + 28
    assert {row["kind"] for row in episodes} == set(tasks.KINDS)
    excerpts = rollout_demonstrations.load(out / "curriculum.jsonl")
    assert {row["kind"] for row in excerpts} == set(demonstrations.EXCERPTED)
    for row in excerpts:  # everything that is written stands before it
        (asked,) = row["prompt"]
        assert row["turns"][0]["action"].startswith("<call>get_order_details")
        assert asked["content"].split("\n")[0].removeprefix("<user>") in row["turns"][0]["action"]


def test_ids_names_and_the_stores_json_are_few_tokens():
    shown = list(make.shown(0, 140, 0.5))
    tokenizer = Tokenizer.train(demonstrations.tokenizer_texts(shown), 1024, plain.TOKENS)
    assert len(tokenizer.encode("907")) == 2 and len(tokenizer.encode("Lamp")) == 1
    orders = [turn["observation"] for row in shown for turn in row["turns"] if "get_order" in turn["action"]]
    heads = [text[: text.index('"fulfillments"')] for text in orders]  # what an agent needs of them
    assert max(len(tokenizer.encode(text)) for text in heads) <= 64


def test_too_small_a_store_says_so():
    with pytest.raises(ConfigError, match="too few tasks or users"):
        make.write(Path("/nonexistent/x"), 20, 0, 8, True, 0, 0)
    with pytest.raises(ConfigError, match="450 users"):
        store.draw(random.Random(0), 451, 16, True)
    with pytest.raises(ConfigError, match="2 products"):
        store.draw(random.Random(0), 4, 1, True)


def test_doing_nothing_solves_what_must_be_refused_and_nothing_else():
    """docs/recipes.md says how many tasks that is."""
    by_kind = {row["kind"]: row["metadata"] for row in some_rows(drawn(), 60)}
    idle = {kind for kind, about in by_kind.items() if not about["actions"] and not about["outputs"]}
    assert len(by_kind) == 14 and idle == {"one/foreign", "one/late"}
