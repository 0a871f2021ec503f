"""What comes in at the service's routes, read and checked: bodies, addresses, the words of nodes."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jaxagent.fleet.wire import BadMessageError, RefusedCallError, json_object, whole_number
from jaxagent.io.connections import read_body
from jaxagent.service.request import NO_NAME, TASK_ID
from jaxagent.service.states import State
from jaxagent.service.store import Held

MAX_BODY_BYTES = 4 * 2**20  # of everything but an episode
MAX_EPISODE_BYTES = 64 * 2**20
BODY_TIMEOUT_S = 120.0
LONGEST_POLL_S = 20.0
PHASES = ("init", "run", "postrun")


async def row(request: web.Request) -> dict[str, Any]:
    """The JSON object that a body is."""
    return json_object(await read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S))


def task_id(request: web.Request) -> str:
    """Of the address."""
    value = request.match_info["task"]
    if not TASK_ID.fullmatch(value):
        raise RefusedCallError("missing", f"no task can be called {value!r:.80}")
    return value


def node_id(request: web.Request) -> str:
    """Of the address."""
    return name(request.match_info["node"], "node_id")


def name(value: Any, what: str) -> str:
    """A task, a node or a process."""
    if not isinstance(value, str) or not TASK_ID.fullmatch(value):
        raise BadMessageError(NO_NAME % what)
    return value


def process(row: dict[str, Any]) -> str:
    """Which process of a node speaks."""
    return name(row.get("process"), "process")


def entries(row: dict[str, Any], name: str) -> list[list[Any]]:
    """A list of lists."""
    value = row.get(name, [])
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise BadMessageError(f"'{name}' must be a list of lists")
    return value


def key(entry: list[Any]) -> Held:
    """One attempt at a session."""
    if len(entry) != 3:
        raise BadMessageError(f"a session is [task id, sample, attempt], got {entry!r:.80}")
    return (
        name(entry[0], "task_id"),
        whole_number({"sample": entry[1]}, "sample"),
        whole_number({"attempt": entry[2]}, "attempt"),
    )


def keys(row: dict[str, Any], name: str) -> list[Held]:
    """Several attempts."""
    return [key(entry) for entry in entries(row, name)]


def state(entry: list[Any]) -> State:
    """A phase."""
    if len(entry) != 1 or entry[0] not in list(State):
        raise BadMessageError(f"a session's phase is one of {', '.join(State)}, got {entry!r:.80}")
    return State(entry[0])


def free(row: dict[str, Any]) -> dict[str, int]:
    """A node's free places, by phase."""
    places = row.get("free", {})
    if not isinstance(places, dict):
        raise BadMessageError("'free' must be an object")
    return {phase: whole_number(places, phase, 0) for phase in PHASES}
