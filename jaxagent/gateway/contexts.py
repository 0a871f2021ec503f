"""The tokens of a request's context: what a trajectory has, spliced turns, and what is rendered anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxagent.gateway.recall import KnownRequest
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.threads import End, Thread
from jaxagent.types import TokenKind


@dataclasses.dataclass(frozen=True)
class Context:
    """A request's context."""

    copied: Sequence[int]  # tokens of a trajectory, from its beginning
    ids: list[int]  # behind them
    kinds: list[int]  # of `ids`

    def __len__(self) -> int:
        return len(self.copied) + len(self.ids)


def build(renderer: Renderer, request: KnownRequest, base: tuple[Thread, End] | None) -> Context:
    """The context of a request that begins as `base` does, or as no trajectory does.

    Assistant messages that the session sampled are spliced with their ids, wherever they stand.

    Raises:
      BadRequest: the chat template refuses the conversation.
    """
    ask = request.ask
    if base is None:
        rendered = renderer.prompt(ask.messages, ask.tools, request.stored(0))
        return Context((), list(rendered.ids), list(rendered.kinds))
    thread, end = base
    at, ended_by = end.taken - 1, end.ended_by
    ids: list[int] = []
    kinds: list[int] = []
    for number, stored in request.stored(end.taken).items():
        rendered = renderer.continuation(ask.messages[:number], ask.tools, at, ended_by)
        ids += [*rendered.ids, *stored.ids]
        kinds += [*rendered.kinds, *[int(TokenKind.PROMPT)] * len(stored.ids)]
        at, ended_by = number, stored.ended_by
    rendered = renderer.continuation(ask.messages, ask.tools, at, ended_by)
    return Context(thread.tokens[: end.tokens], [*ids, *rendered.ids], [*kinds, *rendered.kinds])
