"""The real transcripts that tau-bench publishes: what their tools said, ours say, call after call.

The transcripts show what tools answered, and not how they were called; so of every answer the call is looked for that
gives it. They were recorded on data in which a user's address had a "province", which now is a "state".
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from jaxagent.envs.tau import toolbox
from jaxagent.envs.tau.store import ShopStore
from jaxagent.envs.tau2.tables import copied
from jaxagent.envs.tau2.words import STOP

FOLDER = Path(__file__).resolve().parents[3] / "../shared/data/tau-bench-retail"
needs_data = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs tau-bench's retail files in ../shared/data")
SPEAKER = re.compile(r"(?:^|\n)(user|assistant|tool): ")
EMAIL = re.compile(r"[\w.+-]+@[\w.-]+\w")
ADDRESS = ("address1", "address2", "city", "state", "country", "zip")


def messages(text):
    """(speaker, what is said), in order."""
    parts = SPEAKER.split(text)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def at_once(order, shown):
    """Calls that turn `order` into what is shown of it."""
    order_id, now = order["order_id"], shown["status"]
    yield "get_order_details", {"order_id": order_id}
    if now == "cancelled":
        yield "cancel_pending_order", {"order_id": order_id, "reason": shown.get("cancel_reason")}
    if now == "return requested":
        method = shown["return_payment_method_id"]
        arguments = {"order_id": order_id, "item_ids": shown["return_items"], "payment_method_id": method}
        yield "return_delivered_order_items", arguments
    if now == "exchange requested":  # both lists are shown sorted: any pairing may have been called
        for new in itertools.permutations(shown["exchange_new_items"]):
            yield (
                "exchange_delivered_order_items",
                {
                    "order_id": order_id,
                    "item_ids": shown["exchange_items"],
                    "new_item_ids": list(new),
                    "payment_method_id": shown["exchange_payment_method_id"],
                },
            )
    if now == "pending (item modified)":
        pairs = zip(order["items"], shown["items"], strict=True)
        changed = [(a["item_id"], b["item_id"]) for a, b in pairs if a["item_id"] != b["item_id"]]
        kept = [
            [(item["item_id"], item["item_id"])] for item in order["items"]
        ]  # an item in its own place, as one asked
        for several in (
            itertools.permutations(changed) if changed else kept
        ):  # the sum of the differences depends on their order
            arguments = {"item_ids": [a for a, _ in several], "new_item_ids": [b for _, b in several]}
            method = shown["payment_history"][-1]["payment_method_id"]
            yield "modify_pending_order_items", {"order_id": order_id, **arguments, "payment_method_id": method}
    if len(shown["payment_history"]) == 3:
        method = shown["payment_history"][1]["payment_method_id"]
        yield "modify_pending_order_payment", {"order_id": order_id, "payment_method_id": method}
    yield "modify_pending_order_address", {"order_id": order_id, **{key: shown["address"][key] for key in ADDRESS}}


def refused(shop, seen, said, text):
    """Calls that may have been refused: of what had been shown, and of what the users had said."""
    for email in EMAIL.findall(said):
        yield "find_user_id_by_email", {"email": email}
    zips = re.findall(r"\b\d{5}\b", said)
    names = re.findall(r"\b([A-Z][\w'-]*) ([A-Z][\w'-]*)", said)
    for (first, last), code in itertools.product(names, zips):
        yield "find_user_id_by_name_zip", {"first_name": first, "last_name": last, "zip": code}
    for order_id in re.findall(r"#?W?\d{7}", said):
        yield "get_order_details", {"order_id": order_id}
    for order_id in seen:
        order = shop.orders[order_id]
        items = [item["item_id"] for item in order["items"]]
        others = re.findall(r"new item (\d+)", text)
        for method, item in itertools.product(shop.users[order["user_id"]]["payment_methods"], items):
            base = {"order_id": order_id, "item_ids": [item], "payment_method_id": method}
            yield "return_delivered_order_items", base
            for new in (*([[other] for other in others]), []):
                for name in ("exchange_delivered_order_items", "modify_pending_order_items"):
                    yield name, base | {"new_item_ids": new}


def candidates(shop, seen, said, text):
    """Calls that may have given a tool's answer."""
    if text == "":
        yield "think", {"thought": "..."}
    elif text in shop.users:
        yield "find_user_id_by_email", {"email": shop.users[text]["email"]}
    elif text == "Transfer successful":
        yield "transfer_to_human_agents", {"summary": "..."}
    elif re.fullmatch(r"-?\d+\.\d+", text):
        yield "calculate", {"expression": text}
    elif text.startswith("{"):
        shown = json.loads(text)
        if shown.get("order_id") in shop.orders:
            yield from at_once(shop.orders[shown["order_id"]], shown)
        elif "variants" in shown:
            yield "get_product_details", {"product_id": shown["product_id"]}
        elif "payment_methods" in shown:
            user_id = shop.orders[shown["orders"][0]]["user_id"]
            yield "get_user_details", {"user_id": user_id}
            yield "modify_user_address", {"user_id": user_id, **shown["address"]}
        else:
            yield "list_all_product_types", {}
    else:
        yield from refused(shop, seen, said, text)


def replayed(store, transcript):
    """Looks for the call of every tool's answer, and makes it. Returns (answers' number, those that no call gives)."""
    shop, said, seen, wrong, count = store.open(), "", [], [], 0
    for speaker, text in messages(transcript):
        said += f"\n{text}" if speaker == "user" else ""
        if speaker != "tool":
            continue
        count += 1
        text = text.replace('"province"', '"state"')
        for name, arguments in candidates(shop, seen, said, text):
            tried = store.open()
            tried.orders.changed, tried.users.changed = copied(shop.orders.changed), copied(shop.users.changed)
            if toolbox.call(tried, name, arguments) == text:
                shop = tried
                break
        else:
            wrong.append(text)
        if text.startswith("{") and "order_id" in json.loads(text):
            seen.append(json.loads(text)["order_id"])
    return count, wrong


@needs_data
def test_every_answer_in_the_published_transcripts_is_what_our_tools_say():
    store = ShopStore.load(FOLDER)
    rows = [json.loads(line) for line in (FOLDER / "few_shot.jsonl").open()]
    found = [replayed(store, row["messages_display"]) for row in rows]
    assert [wrong for _, wrong in found if wrong] == []
    assert (len(rows), sum(count for count, _ in found)) == (69, 479)


@needs_data
def test_the_transcripts_end_where_the_environment_ends_a_conversation():
    """With the customer's ###STOP### or a transfer, and never before."""
    transfers = 0
    for line in (FOLDER / "few_shot.jsonl").open():
        *before, (speaker, text) = messages(json.loads(line)["messages_display"])
        assert not any(STOP in said or said == "Transfer successful" for _, said in before)
        transfers += speaker == "tool"
        assert text == "Transfer successful" if speaker == "tool" else STOP in text and speaker == "user"
    assert transfers == 4
