"""What the coordinator writes down: the facts from which its state is built again. Plain values, a line each.

What is not here can be lost: who is playing what. A coordinator that starts again learns it from the workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from jaxagent.fleet.plan import GroupId


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeStored:
    """An episode's result is on disk; its sender may forget it."""

    group: GroupId
    sample: int
    digest: str  # of the result
    version: int  # of its oldest token
    lease: str  # under which it was played


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeDamaged:
    """A stored result can no longer be read; the next `Stored` of the episode mends that. Its group stays judged."""

    group: GroupId
    sample: int


@dataclasses.dataclass(frozen=True, slots=True)
class GroupClosed:
    """All attempts of a group are stored and judged."""

    group: GroupId
    usable: bool  # False: without signal, and dynamic sampling replaces it


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFormed:
    """What a step trains on, written before a trainer may read it."""

    step: int
    groups: tuple[GroupId, ...]  # to learn from
    left_out: tuple[GroupId, ...] = ()  # played for this step, without signal or more than were wanted


@dataclasses.dataclass(frozen=True, slots=True)
class VersionPublished:
    """A version exists, and workers may fetch it."""

    version: int
    digest: str  # of its weights


@dataclasses.dataclass(frozen=True, slots=True)
class StateKept:
    """The trainer's state before a step is saved: no earlier step will be asked for again."""

    step: int


Event: TypeAlias = EpisodeStored | EpisodeDamaged | GroupClosed | BatchFormed | VersionPublished | StateKept
KINDS: dict[str, type[Event]] = {
    "stored": EpisodeStored,
    "damaged": EpisodeDamaged,
    "closed": GroupClosed,
    "formed": BatchFormed,
    "published": VersionPublished,
    "kept": StateKept,
}
NAMES = {kind: name for name, kind in KINDS.items()}


def to_line(event: Event) -> dict[str, Any]:
    """An event as JSON values, with its `kind`."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {"kind": NAMES[type(event)], **fields}


def from_line(line: Mapping[str, Any]) -> Event:
    """Reads an event from its line.

    Raises:
      ValueError: the line is of no known kind, or has other fields.
    """
    fields = dict(line)
    kind = KINDS.get(fields.pop("kind", None))
    if kind is None or set(fields) != {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"This is no line of the coordinator's: {str(dict(line))[:200]}.")
    if "group" in fields:
        fields["group"] = GroupId(*fields["group"])
    for name in ("groups", "left_out"):
        if name in fields:
            fields[name] = tuple(GroupId(*group) for group in fields[name])
    return kind(**fields)
