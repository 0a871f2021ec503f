"""What a session answered, by the ids that it gave: Responses' items and histories, and the threads of Messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.gateway.chat import BadRequest

KEPT_HISTORIES = 16  # of a session, as many as answers that can be given again

Item = Mapping[str, Any]


class AnswerHistory:
    """A session's items and histories. Nothing of other sessions is in it."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._histories: dict[str, tuple[Item, ...]] = {}  # input and output, by the id of the response

    def keep(self, response: str, request: Sequence[Item], output: Sequence[Item]) -> None:
        """Notes an answer, and the items that were its input."""
        self._items |= {item["id"]: item for item in output if "id" in item}
        self._histories[response] = (*request, *output)
        if len(self._histories) > KEPT_HISTORIES:
            del self._histories[next(iter(self._histories))]

    def items_up_to(self, response: str, param: str, **refusal: Any) -> tuple[Item, ...]:
        """All items up to the end of a response. Raises BadRequest, with the refusal's code, where it is not known."""
        if (items := self._histories.get(response)) is None:
            why = f"'{param}' is none of the last {KEPT_HISTORIES} responses of this session; send the whole history"
            raise BadRequest(why, param, **refusal)
        return items

    def item(self, name: str, at: str) -> Item:
        """An item that was part of an answer. Raises BadRequest where it is not known."""
        if (item := self._items.get(name)) is None:
            why = f"'{at}' refers to '{name[:80]}', which this session did not answer; send the item itself"
            raise BadRequest(why, at)
        return item
