"""A role as the judge of answers that are not letter for letter the gold one.

The judged answer is hostile: it is quoted as data, and only a reply of exactly the asked form counts (see
rewards/judge.py).
Any other reply is a failure of the episode, and no score.
"""

from __future__ import annotations

import hashlib

from jaxagent.envs.base import Message
from jaxagent.envs.cast import RoleError, Talk
from jaxagent.rewards.judge import Item, ReplyError, Rubric, messages, parse_reply
from jaxagent.types import Task

RUBRIC = Rubric(
    (Item("correct", "Does the answer say the same as one of the references? 1 if it does, else 0."),), 0, 1
)
MAX_CHARS = 4_000  # of each text that the judge is shown


async def right(talk: Talk, task: Task, answer: str) -> bool:
    """Whether the judge takes the answer for right.

    Raises:
      RoleError: its reply is not of the form that it was asked for.
      TimeoutError: it did not reply in its time.
    """
    material = {"question": task.prompt, "references": "\n".join(task.answers), "answer": answer}
    # A digest of all that is judged stands in none of it, and a run repeats with the same one.
    nonce = hashlib.blake2b("\0".join((task.id, *material.values())).encode(), digest_size=8).hexdigest()
    asked = messages(RUBRIC, material, nonce, MAX_CHARS)
    said = await talk.say(*(Message(message["role"], message["content"]) for message in asked))
    try:
        return parse_reply(said.text.strip(), RUBRIC, nonce)["correct"] == 1
    except ReplyError as failure:
        raise RoleError(f"the judge's reply: {failure}") from failure
