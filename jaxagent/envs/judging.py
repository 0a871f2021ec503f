"""A role that is asked to score what a policy wrote. The judged texts are hostile: see `rewards.judge`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from jaxagent.envs.base import Message
from jaxagent.envs.cast import RoleError, Talk
from jaxagent.rewards.judge import ReplyError, Rubric, messages, parse_reply


async def ask_judge(talk: Talk, rubric: Rubric, material: Mapping[str, str], max_chars: int, key: str = "") -> dict:
    """The score of each item of the rubric, by its name.

    The nonce that quotes the material is a digest of all that is judged: it stands in none of it, and a run repeats
    with the same one.

    Raises:
      RoleError: the reply is not of the form that was asked for: a failure of the episode, and no score.
      TimeoutError: there was none in its time.
    """
    texts = "\0".join((*([key] if key else []), *material.values()))
    nonce = hashlib.blake2b(texts.encode(errors="replace"), digest_size=8).hexdigest()
    prompt = messages(rubric, material, nonce, max_chars)
    reply = await talk.say(*(Message(message["role"], message["content"]) for message in prompt))
    try:
        return parse_reply(reply.text.strip(), rubric, nonce)
    except ReplyError as failure:
        raise RoleError(f"judge: {failure}") from failure
