"""What an environment may ask in a conversation, and what of it is a misuse, in words.

Of a misuse nothing is sent and nothing becomes part of the conversation. It is remembered as the episode's failure, so
that an environment that swallows the exception cannot make an honest reward of what follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.envs.base import Message, check_texts
from jaxagent.envs.cast import Spliced


def misuse(
    messages: Sequence[Message | Spliced],
    begun: bool,
    vocab_size: int,
    stop_strings: Sequence[str],
    max_tokens: int | None,
) -> str:
    """What is wrong with a question; "" = nothing.

    Args:
      messages, stop_strings, max_tokens: as `envs.cast.Talk.say` has them.
      begun: whether the conversation has a reply.
      vocab_size: of the policy's tokenizer, whose ids spliced tokens are.
    """
    if not messages or (begun and len(messages) != 1):
        return "a conversation begins with one message or more, and goes on with one"
    for message in messages:
        if wrong := _of_message(message, begun, vocab_size):
            return wrong
    try:
        check_texts("stop_strings", stop_strings)
    except ValueError as error:
        return str(error)
    if max_tokens is not None and max_tokens < 1:
        return f"max_tokens={max_tokens}, and a reply has at least one token"
    return ""


def _of_message(message: Message | Spliced, begun: bool, vocab_size: int) -> str:
    if isinstance(message, Spliced):
        if begun:
            return "only a conversation's prompt can be spliced: what follows a reply is text"
        ids = (i for piece in message.pieces if not isinstance(piece, str) for i in piece.ids)
        if any(not 0 <= (wrong := i) < vocab_size for i in ids):
            return f"spliced tokens have the id {wrong}, and the tokenizer has {vocab_size} ids"
    if not isinstance(message.content, str):
        return f"a message's content must be text, got {type(message.content).__name__}"
    return "" if whole(message.content) == message.content else "a message has half of a surrogate pair: it is no text"


def whole(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair, which no tokenizer and no log can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
