"""NL_ASSERTION: the role "judge" is asked whether statements about a conversation are true."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from jaxagent.envs.base import Message
from jaxagent.envs.cast import RoleError, Talk
from jaxagent.rewards.judge import Item, ReplyError, Rubric, messages, parse_reply

MAX_CHARS = 60_000  # of the conversation: what is longer is cut in its middle


async def ask_judge(talk: Talk, assertions: Sequence[str], conversation: str) -> bool:
    """Whether all statements are true of the conversation.

    The conversation is quoted as data between marks that whoever wrote it could not know: a digest of itself.

    Raises:
      RoleError: the judge's reply is not in the form that was asked for. That is no score.
    """
    questions = (f"1 if this is true of the conversation, 0 if it is not: {one}" for one in assertions)
    rubric = Rubric(tuple(Item(f"statement_{i}", one) for i, one in enumerate(questions, 1)), low=0, high=1)
    nonce = hashlib.blake2b(conversation.encode(errors="replace"), digest_size=8).hexdigest()
    asked = messages(rubric, {"conversation": conversation}, nonce, MAX_CHARS)
    said = await talk.say(*(Message(one["role"], one["content"]) for one in asked))
    try:
        scores = parse_reply(said.text.strip(), rubric, nonce)
    except ReplyError as error:
        raise RoleError(f"judge: {error}") from None
    return all(scores.values())
