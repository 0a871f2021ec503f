"""What a customer of the retail store knows: written in a task's metadata, or read out of its instruction.

A generated task has `metadata["customer"]`:

    {"identity": {"email": "..."} or {"name": "...", "zip": "..."},
     "wishes": [{"wish": "I want to cancel an order.", "order": "#W261", "reason": "no longer needed"}, ...]}

An instruction of tau-bench is free text. Its sentences, in the first person, are the wishes, one after the other; what
says who the customer is, or what he is like, is no wish; ids and the reason of a cancellation are found by their form.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

WISH = "wish"  # what a customer wants, in general; the other keys of a wish are topics that he may be asked about
TOPICS = ("order", "reason", "items", "option", "payment", "address")
ORDER_ID = re.compile(r"#W\d+")
PAYMENT_ID = re.compile(r"\b(?:credit_card|gift_card|paypal)_\d+")
REASONS = ("no longer needed", "ordered by mistake")

_EMAIL = re.compile(r"[\w.+-]+@\w[\w.-]*\w")
_NAME = re.compile(r"\b(?:Your? name is|You are|You're) ([A-Z]\w+ [A-Z]\w+)")
_ZIP = re.compile(r"(?<![\w#])\d{5}(?!\w)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_WHO = re.compile(r"(?:Your? name is|You are|You're)\b")
_WANTS = re.compile(r"\b(?:want|wish|like to|need|decide|return|exchange|cancel|modify|change|order)", re.IGNORECASE)
_PERSONS = {
    "you are": "I am", "you're": "I am", "you've": "I have", "you'd": "I would", "you'll": "I will",
    "yourself": "myself", "yours": "mine", "your": "my", "you": "I",
}  # fmt: skip
_SECOND_PERSON = re.compile(r"\b(?:" + "|".join(_PERSONS) + r")\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a customer knows.

    Attributes:
      identity: what he says when he is asked who he is, a line for each; () = nothing.
      wishes: in the order in which he names them; each has `WISH`, and topics of `TOPICS`.
    """

    identity: tuple[str, ...]
    wishes: tuple[Mapping[str, str], ...]


def of_task(metadata: Mapping[str, Any]) -> Facts:
    """The facts of a task.

    Raises:
      ValueError: there is neither an instruction nor a customer, or the customer is malformed.
    """
    customer = metadata.get("customer")
    if customer is None:
        if not isinstance(metadata.get("instruction"), str):
            raise ValueError("the task's metadata has neither 'customer' nor an 'instruction' that is text")
        return of_instruction(metadata["instruction"])
    if not isinstance(customer, Mapping) or not isinstance(customer.get("identity"), Mapping):
        raise ValueError("metadata.customer must have 'identity', a mapping")
    wishes = customer.get("wishes")
    if not isinstance(wishes, list) or not wishes or not all(_is_wish(wish) for wish in wishes):
        raise ValueError(
            f"metadata.customer.wishes must be a list of mappings with '{WISH}' and no other keys than {TOPICS}"
        )
    return Facts(tuple(map(str, customer["identity"].values())), tuple(dict(wish) for wish in wishes))


def _is_wish(wish: Any) -> bool:
    return (
        isinstance(wish, Mapping)
        and isinstance(wish.get(WISH), str)
        and all(key in (WISH, *TOPICS) and isinstance(value, str) for key, value in wish.items())
    )


def of_instruction(instruction: str) -> Facts:
    """The facts that can be told apart in free text."""
    identity = []
    if name := _NAME.search(instruction):
        identity.append(name[1])
    if email := _EMAIL.search(instruction):
        identity.append(email[0])
    if zip_code := _ZIP.search(instruction):
        identity.append(zip_code[0])
    sentences = [sentence.strip() for sentence in _SENTENCE.split(instruction) if sentence.strip()]
    wanted = [sentence for sentence in sentences if not _WHO.match(sentence) or _WANTS.search(sentence)]
    return Facts(tuple(identity), tuple(_wish(sentence) for sentence in wanted or [instruction]))


def _wish(sentence: str) -> dict[str, str]:
    wish = {WISH: first_person(sentence)}
    if order := ORDER_ID.search(sentence):
        wish["order"] = order[0]
    if payment := PAYMENT_ID.search(sentence):
        wish["payment"] = payment[0]
    if reason := next((reason for reason in REASONS if reason in sentence.lower()), ""):
        wish["reason"] = reason
    return wish | {"items": wish[WISH], "option": wish[WISH], "address": wish[WISH]}


def first_person(sentence: str) -> str:
    """ "You want your money back." as the customer says it: "I want my money back.\""""
    said = _SECOND_PERSON.sub(lambda match: _PERSONS[match[0].lower()], sentence)
    return said[:1].upper() + said[1:]
