"""A prompt of texts and tokens: the template renders marks, and the tokens take the marks' places as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message
from jaxagent.envs.cast import Spliced, Tokens
from jaxagent.rollout.templates import Template


def encode_prompt(tokenizer: Tokenizer, template: Template, messages: Sequence[Message | Spliced]) -> list[int]:
    """The token ids of a prompt. A boundary between a text and spliced tokens is a boundary between tokens.

    Raises:
      ValueError: the template does not show a message's tokens, or shows them twice.
    """
    mark = _unused([message.content for message in messages])
    tokens: list[Tokens] = []

    def plain(message: Message | Spliced) -> Message:
        if isinstance(message, Message):
            return message
        parts = []
        for piece in message.pieces:
            if isinstance(piece, str):
                parts.append(piece)
            else:
                parts.append(f"{mark}{len(tokens)}{mark}")
                tokens.append(piece)
        return Message(message.role, "".join(parts))

    text = template.prompt([plain(message) for message in messages])
    if not tokens:
        return tokenizer.encode(text)
    # re.split keeps what stands in the group: text, number, text, number, ..., text
    pieces = re.split(f"{re.escape(mark)}([0-9]+){re.escape(mark)}", text)
    if [int(number) for number in pieces[1::2]] != list(range(len(tokens))):
        raise ValueError("The chat template does not show each spliced piece of the prompt once and in its place.")
    ids: list[int] = []
    for at, piece in enumerate(pieces):
        ids += tokens[int(piece)].ids if at % 2 else tokenizer.encode(piece)
    return ids


def _unused(texts: Sequence[str]) -> str:
    """Plain letters that occur in none of the texts: no template trims, escapes or strips them."""
    number = 0
    while any((mark := f"SPLICED{number}X") in text for text in texts):
        number += 1
    return mark
