"""Conversations of an agent with the scripted customer of a generated store, for a warm start.

Every observation is what the customer and the tools really say to what the agent did. A right agent finds the user,
asks for two facts at a time, looks an order up before it touches it, refuses what concerns somebody else's order, and
asks for further wishes. A flawed one makes two mistakes that are natural and cheap, independently of each other:

    it does not look the order up     item ids and amounts are made up, and another customer's order is cancelled
    it says goodbye                   after the first wish, whether or not there is a second

Neither costs anything in most tasks of one wish, so both are habits that only the reward can tell from good ones.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.data_pipelines.tau_store import store as stores
from jaxagent.envs.tau import plain, scripted_customer, toolbox
from jaxagent.envs.tau.scripted_customer import STOP, ScriptedCustomer
from jaxagent.envs.tau.store import ShopStore

AUTHENTICATED = 3  # turns: who the customer is, his id, and what he wants
LOOKED_UP = AUTHENTICATED + 1
PRACTISED = ("one/cancel", "one/return", "one/items", "one/exchange", "one/price", "one/foreign")
EXCERPTED = ("one/cancel", "one/address", "one/payment", "one/return", "one/items", "one/exchange")
_DIGITS = re.compile(r"\d+")
_NUMBERS = [f"{number:02}" for number in range(100)]
NUMBER_REPEATS = 400  # in the tokenizer's texts
WORD_REPEATS = 20
ASK = {
    "order reason": "Which order, and why?",
    "order address": "Which order, and what address?",
    "order payment": "Which order, and what payment?",
    "order items": "Which order, and what item?",
    "address": "What address?",
    "order": "Which order?",
    "option": "What new option?",
}
WHO = "Your e-mail?"
# What an agent makes up: always the same, which no id or amount is, so that nothing is learnt of it but the habit.
MADE_UP = {"item_ids": ["000"], "new_item_ids": ["000"], "payment_method_id": "paypal_000"}
NOTHING = 0.0
DONE, REFUSED, MORE, BYE = "Done.", "I cannot do that.", "Anything else?", "Goodbye."


class Episode:
    """An agent's conversation, written down while it happens."""

    def __init__(self, about: Mapping[str, Any], store: ShopStore):
        self._customer = ScriptedCustomer(*scripted_customer.of_task(about))
        self._shop = store.open()
        self.opening = self._customer.open()
        self.turns: list[dict[str, str]] = []
        self.over = False

    def say(self, text: str) -> str:
        """Speaks to the customer; his reply."""
        reply = self._customer.answer(text)
        self.over = STOP in reply
        self._turn(plain.say(text), "" if self.over else plain.customer_text(reply))
        return reply

    def call(self, name: str, **arguments: Any) -> str:
        """Calls a tool; its answer."""
        answer = toolbox.call(self._shop, name, arguments)
        self._turn(plain.call(name, arguments), plain.tool_text(answer))
        return answer

    def _turn(self, action: str, observation: str) -> None:
        self.turns.append({"action": action, "observation": observation})


def mistakes(row: Mapping[str, Any], flawed_frac: float) -> dict[str, bool]:
    """What the agent of a task's demonstration does right, each with probability 1 - `flawed_frac`.

    It depends on the task alone.
    """
    random_ = random.Random(f"mistakes/{row['id']}")
    return {name: random_.random() >= flawed_frac for name in ("looks", "asks_more")}


def demonstration(row: Mapping[str, Any], store: ShopStore, looks: bool, asks_more: bool) -> dict[str, Any]:
    """An episode of one task.

    Args:
      row: of the task, the customer of whom says his e-mail.
      store: that it is about.
      looks: whether the agent looks orders up; if not, it makes up what it would have found.
      asks_more: whether it asks for further wishes; if not, it says goodbye.
    """
    about = row["metadata"]
    episode = Episode(about, store)
    user_id = about["user_id"]
    episode.say(WHO)
    episode.call("find_user_id_by_email", email=about["customer"]["identity"]["email"])
    actions = list(about["actions"])
    for wish in about["customer"]["wishes"]:
        served = _serve(episode, wish, user_id, actions, store, looks)
        episode.say(" ".join((DONE if served else REFUSED, MORE if asks_more else BYE)))
        if episode.over:
            break
    return {
        "prompt": [dataclasses.asdict(message) for message in plain.messages(episode.opening)],
        "turns": episode.turns,
        "id": row["id"],
        "kind": row["kind"],
        "right": {"looks": looks, "asks_more": asks_more},
    }


def excerpt(row: Mapping[str, Any], store: ShopStore) -> dict[str, Any]:
    """The second half of a right agent's episode: from where the customer has said which order it is about.

    Short, and with what a tool shows of an order twice, before and after it is changed: so a policy that predicts
    observations, too, learns first of all to copy.
    """
    whole = demonstration(row, store, looks=True, asks_more=True)
    *_, answer = turns = whole["turns"][:AUTHENTICATED]
    rest = whole["turns"][len(turns) :]
    return whole | {"prompt": [{"role": "user", "content": answer["observation"]}], "turns": rest}


def practice(row: Mapping[str, Any], store: ShopStore, asks_more: bool) -> dict[str, Any]:
    """What a right agent does once it has looked an order up; all before that is the prompt, and no habit is taught.

    An order in the prompt ends where the items do, since only observations are cut to the environment's limit.
    """
    whole = demonstration(row, store, looks=True, asks_more=asks_more)
    before, rest = whole["turns"][:LOOKED_UP], whole["turns"][LOOKED_UP:]
    *spoken, looked_up = [turn["action"] + turn["observation"] for turn in before]
    shown = looked_up[: looked_up.index(', "fulfillments"')]
    (system, opening) = whole["prompt"]
    content = "".join((system["content"], opening["content"], *spoken, shown))
    turns = [dict(turn) for turn in rest[:-1] or rest]
    turns[-1]["observation"] = ""
    return whole | {"prompt": [{"role": "user", "content": content}], "turns": turns}


def _serve(
    episode: Episode,
    wish: Mapping[str, str],
    user_id: str,
    actions: list[Mapping[str, Any]],
    store: ShopStore,
    looks: bool,
) -> bool:
    """Does what one wish asks for; False where it is refused. Takes the wish's own action off `actions`."""
    topics = [topic for topic in ("order", "reason", "items", "payment", "address") if topic in wish]
    episode.say(ASK[" ".join(topics[:2])])
    if "order" in wish:
        order = store.tables["orders"][wish["order"]]
        if looks:
            episode.call("get_order_details", order_id=wish["order"])
        if "reason" in wish and (order["user_id"] != user_id or order["status"] != "pending"):
            if not looks:
                episode.call("cancel_pending_order", order_id=wish["order"], reason=wish["reason"])
            return not looks
        if topics == ["order"]:
            paid = order["payment_history"][0]["amount"] if looks else NOTHING
            episode.say(f"You paid {paid}.")
            return True
        if "option" in wish:
            episode.say(ASK["option"])
            (product,) = (item["product_id"] for item in order["items"] if item["name"] == wish["items"])
            if looks:
                episode.call("get_product_details", product_id=product)
    action = actions.pop(0)
    made_up = (
        {} if looks or "items" not in wish else {name: MADE_UP[name] for name in action["kwargs"] if name in MADE_UP}
    )
    episode.call(action["name"], **(action["kwargs"] | made_up))
    return True


def tokenizer_texts(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """What occurs in episodes, every word often enough to be one token, and numbers of two digits at most.

    An id of three digits is so two tokens, out of a hundred that occur everywhere: a policy learns to copy them soon,
    where a thousand rare ones take it ten times as long.
    """
    texts = []
    for row in shown:
        parts = [part for turn in row["turns"] for part in (turn["action"], turn["observation"]) if part]
        texts += [*(message["content"] for message in row["prompt"]), *parts]
    names = [*stores.FIRST_NAMES, *stores.LAST_NAMES]
    cities = [word for city in stores.CITIES for word in city]
    words = [*cities, *stores.PRODUCTS, *(f" {street}" for street in stores.STREETS)]
    values = [value for option in stores.OPTIONS.values() for value in option]
    without = [_DIGITS.sub("", text) for text in texts]
    return without + _NUMBERS * NUMBER_REPEATS + [*map(str.lower, names), *words, *values] * WORD_REPEATS
