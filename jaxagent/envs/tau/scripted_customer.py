"""A scripted customer of the retail store: deterministic, knows only the facts of the task, and says few at a time.

He opens with his first wish, in general ("I want to cancel an order."). What the agent says is read by key words, in
lower case, and the first rule that fits answers it:

    1. "goodbye", "bye", "have a nice day" and no question             ###STOP###
    2. An order, a payment method or a reason that is not his          "No." and the right one
    3. "anything else", "something else", ...                          the next wish, or ###STOP###; but his wish again
                                                                       if he has told nothing of it, nor heard it done
    4. "cannot", "unable", "transferred", and no question              the next wish, or ###STOP###
    5. "done", "has been", "cancelled", ..., and no question           the next wish, or ###STOP###
    6. "proceed", "confirm", "shall I", "is that right", ...           "Yes.", unless what is asked for is still untold
    7. Who he is, the order, reason, items, option, payment, address   at most two of these facts, a line each; untold
                                                                       ones first. "I do not know." of what he has not
    8. "how can I help", "what can I do"                               his wish again
    9. Anything else                                                   "I do not understand.", to no question "Thanks."

An order and a payment method are read by their form (#W..., paypal_...); other ids he does not know and cannot judge.
The agent may name several, as a choice: his own among them is right. Nothing that the agent says becomes a fact.
After `PATIENCE` replies in a row that told nothing new, and after `MOST_REPLIES` in all, he ends with ###STOP###.

What a customer knows is written in a task's metadata, or read out of its instruction. A generated task has
`metadata["customer"]`:

    {"identity": {"email": "..."} or {"name": "...", "zip": "..."},
     "wishes": [{"wish": "I want to cancel an order.", "order": "#W261", "reason": "no longer needed"}, ...]}

An instruction of tau-bench is free text. Its sentences, in the first person, are the wishes, one after the other; what
says who the customer is, or what he is like, is no wish; ids and the reason of a cancellation are found by their form.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.envs.base import Message
from jaxagent.envs.cast import Scripted, Speaker, TextRole
from jaxagent.types import Task

STOP = "###STOP###"
# What he says when he is asked who he is, a line for each; and his wishes in the order in which he names them, each
# with WISH and topics of TOPICS.
Facts = tuple[tuple[str, ...], tuple[Mapping[str, str], ...]]
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
PATIENCE = 4  # replies in a row without anything new
MOST_REPLIES = 30
FACTS_AT_ONCE = 2
READ_CHARS = 4_000  # of what the agent says; the rest is not heard

_BYE = re.compile(r"\b(?:good ?bye|bye|have a (?:nice|great|good|wonderful) \w+)\b")
_MORE = re.compile(
    r"\b(?:(?:any|some)thing (?:else|more)|what else|other (?:request|wish)|(?:more|further) (?:help|ass))"
)
_REFUSES = re.compile(r"\b(?:cannot|can ?not|can't|unable|not (?:able|possible|allowed|yours)|transferr?(?:ed|ing)?)\b")
_DONE = re.compile(
    r"\b(?:done|complete|completed|successful|successfully|finished|has been|have been|is now|"
    r"i(?:'ve| have) \w+ed|cancell?ed|updated|changed|modified|exchanged|returned)\b"
)
_CONFIRM = re.compile(
    r"\b(?:proceed|go ahead|confirm|confirmation|shall i|should i|do you want me to|would you like me to|"
    r"yes or no|yes/no|(?:is|are) (?:that|this|these|it|all) (?:right|correct|ok|okay))\b|\((?:yes|y)\b"
)
_HELP = re.compile(r"\b(?:how (?:can|may) i (?:help|assist)|what can i do|what do you want|what would you like)\b")
_ASKED = {
    "identity": re.compile(
        r"\b(?:your (?:full |first |last )?name|zip|e-?mail|who (?:are you|i am)|authenticat|verif|identi)"
    ),
    "order": re.compile(r"\b(?:order|orders|order's)\b"),
    "reason": re.compile(r"\b(?:reason|why)\b"),
    "items": re.compile(r"\b(?:item|items|product|products)\b"),
    "option": re.compile(r"\b(?:new|option|options|variant|variants|color|size|material|instead|for what)\b"),
    "payment": re.compile(r"\b(?:payment|pay|refund|refunded|card|method)\b"),
    "address": re.compile(r"\b(?:address|street|city|state|shipping|where to)\b"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetailCustomer(TextRole):
    """The scripted customer; the docstring of this module says how he answers."""

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh customer, who opens the conversation: the same for every attempt."""
        customer = ScriptedCustomer(*of_task(task.metadata))

        def write(messages: Sequence[Message]) -> str:
            has_spoken = any(message.role == "assistant" for message in messages)
            return customer.answer(messages[-1].content) if has_spoken else customer.open()

        return Scripted(write)


class ScriptedCustomer:
    """The state of one customer: which wish he is at, what he has told, how patient he still is."""

    def __init__(self, identity: Sequence[str], wishes: Sequence[Mapping[str, str]]):
        self._identity, self._wishes = identity, wishes
        self._at = 0  # index of the wish
        self._told: set[str] = set()  # topics of this wish; "identity" once for all
        self._idle = 0  # replies in a row that told nothing new
        self._replies = 0

    def open(self) -> str:
        """His first words."""
        self._replies += 1
        return self._wish[WISH]

    def answer(self, text: str) -> str:
        """What he says to the agent."""
        self._replies += 1
        if self._replies > MOST_REPLIES:
            return STOP
        topics_before, wish_before = len(self._told), self._at
        reply = self._by_rules(text[:READ_CHARS])
        new = len(self._told) > topics_before or self._at > wish_before
        self._idle = 0 if new else self._idle + 1
        return STOP if self._idle >= PATIENCE else reply

    @property
    def _wish(self):
        return self._wishes[self._at]

    def _by_rules(self, text: str) -> str:
        low, question = text.lower(), "?" in text
        if not question and _BYE.search(low):
            return STOP
        if wrong := self._wrong(text):
            return "\n".join(["No.", *self._tell(wrong)])
        says_done = bool(_DONE.search(low))
        if _MORE.search(low):
            return self._next() if says_done or _REFUSES.search(low) or self._has_told else self._wish[WISH]
        if not question and (says_done or _REFUSES.search(low)):
            return self._next()
        topics = [topic for topic, words in _ASKED.items() if words.search(low)]
        untold = [topic for topic in topics if topic not in self._told and self._value(topic)]
        if not untold and _CONFIRM.search(low):
            return "Yes."
        if lines := self._tell(untold or topics):
            return "\n".join(lines)
        if _HELP.search(low):
            return self._wish[WISH]
        if topics and question:
            return "I do not know."
        return "I do not understand." if question else "Thanks."

    @property
    def _has_told(self) -> bool:
        """Whether he has told anything of this wish, or it has nothing to tell."""
        topics = [topic for topic in self._wish if topic != WISH]
        return not topics or any(topic in self._told for topic in topics)

    def _value(self, topic: str) -> str:
        return "\n".join(self._identity) if topic == "identity" else self._wish.get(topic, "")

    def _tell(self, topics: Sequence[str]) -> list[str]:
        """At most two facts of these topics, without repetition."""
        topics_to_tell = [topic for topic in topics if self._value(topic)][:FACTS_AT_ONCE]
        self._told.update(topics_to_tell)
        return list(dict.fromkeys(map(self._value, topics_to_tell)))

    def _wrong(self, text: str) -> list[str]:
        """Topics of which the agent names something, and nothing that is the customer's."""
        named = {
            "order": ORDER_ID.findall(text),
            "payment": PAYMENT_ID.findall(text),
            "reason": [reason for reason in REASONS if reason in text.lower()],
        }
        mine = {topic: self._wish.get(topic, "") for topic in named}
        return [topic for topic in named if mine[topic] and named[topic] and mine[topic] not in named[topic]]

    def _next(self) -> str:
        """The next wish, or the end."""
        if self._at + 1 == len(self._wishes):
            return STOP
        self._at += 1
        self._told &= {"identity"}
        return self._wish[WISH]


def of_task(metadata: Mapping[str, Any]) -> Facts:
    """What the customer of a task knows. Raises ValueError: there is neither an instruction nor a customer, or the
    customer is malformed."""
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
    return tuple(map(str, customer["identity"].values())), tuple(dict(wish) for wish in wishes)


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
    wish_sentences = [sentence for sentence in sentences if not _WHO.match(sentence) or _WANTS.search(sentence)]
    return tuple(identity), tuple(_wish(sentence) for sentence in wish_sentences or [instruction])


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
    text = _SECOND_PERSON.sub(lambda match: _PERSONS[match[0].lower()], sentence)
    return text[:1].upper() + text[1:]
