"""The two prompts of MemAgent: a chunk to read, and the question to answer; the published texts and compact ones.

A prompt is a template with {prompt}, {memory} and {chunk}. What is put there stays the token ids that it is: between
a piece of the template and what is put in there is always a boundary between tokens.
"""

from __future__ import annotations

import dataclasses
import re

from jaxagent.envs.cast import Spliced, Tokens

_SLOT = re.compile(r"\{([a-z]+)\}")


@dataclasses.dataclass(frozen=True)
class Style:
    """The texts of one kind of prompt."""

    update: str  # shows {prompt}, {memory} and {chunk}
    final: str  # shows {prompt} and {memory}
    no_memory: str  # the memory before the first chunk
    gap: str = ""  # what a question and a document begin with: behind a colon, words follow a space


STYLES = {
    "memagent": Style(  # as published, the space behind <problem> too
        update=(
            "You are presented with a problem, a section of an article that may contain the answer to the problem, and "
            "a previous memory. Please read the provided section carefully and update the memory with the new "
            "information that helps to answer the problem. Be sure to retain all relevant details from the previous "
            "memory while adding any new, useful information.\n\n"
            "<problem> \n{prompt}\n</problem>\n\n<memory>\n{memory}\n</memory>\n\n<section>\n{chunk}\n</section>\n\n"
            "Updated memory:\n"
        ),
        final=(
            "You are presented with a problem and a previous memory. Please answer the problem based on the previous "
            "memory and put the answer in \\boxed{}.\n\n"
            "<problem> \n{prompt}\n</problem>\n\n<memory>\n{memory}\n</memory>\n\nYour answer:\n"
        ),
        no_memory="No previous memory",
    ),
    # For a tiny policy that learns from demonstrations. The memory stands behind the chunk: attempts at a task differ
    # in nothing before it, so an engine reads question and chunk once, and so does a trainer with batch.share_prefix.
    "compact": Style(
        update="Question:{prompt}\nText:{chunk}\nMemory:{memory}\nNew memory:",
        final="Question:{prompt}\nMemory:{memory}\nAnswer:",
        no_memory=" nothing",
        gap=" ",
    ),
}


def message(template: str, **put: Tokens) -> Spliced:
    """A user message: the template with tokens in their places."""
    parts = _SLOT.split(template)  # text, name, text, name, ..., text
    pieces = [put[part] if at % 2 else part for at, part in enumerate(parts)]
    return Spliced("user", tuple(piece for piece in pieces if piece != ""))


def text(template: str, **put: str) -> str:
    """The template with texts in their places, for demonstrations."""
    return _SLOT.sub(lambda slot: put[slot[1]], template)
