"""Rows of the store <-> sessions, and the one way to write them: every change of state leaves an event.

Functions of an open transaction. Times are seconds since 1970, given by the caller.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import Any

from jaxagent.service.states import HELD, RolloutSession, State

FIELDS = tuple(field.name for field in dataclasses.fields(RolloutSession))
IN_HELD = f"state IN ({', '.join(repr(str(state)) for state in HELD)})"
Held = tuple[str, int, int]  # task id, sample, attempt


def find(db: sqlite3.Connection, task_id: str, sample: int) -> RolloutSession | None:
    """A session."""
    row = db.execute("SELECT * FROM sessions WHERE task_id = ? AND sample = ?", (task_id, sample)).fetchone()
    return None if row is None else session_of(row)


def sessions_of(db: sqlite3.Connection, task_id: str) -> list[RolloutSession]:
    """A group's sessions, in order."""
    return [session_of(r) for r in db.execute("SELECT * FROM sessions WHERE task_id = ? ORDER BY sample", (task_id,))]


def save(db: sqlite3.Connection, now: float, old: RolloutSession, new: RolloutSession) -> None:
    """Writes a session, and the event of its new state."""
    assert not old.state.ended, (old, new)  # an end is final
    db.execute(
        f"UPDATE sessions SET {', '.join(f'{name} = ?' for name in FIELDS)} WHERE task_id = ? AND sample = ?",
        (*dataclasses.astuple(new), new.task_id, new.sample),
    )
    if new.state is not old.state:
        what = {"task_id": new.task_id, "sample": new.sample, "attempt": new.attempt, "state": new.state}
        note(db, now, "session", **what, node=new.node or old.node, reason=new.reason)


def note(db: sqlite3.Connection, now: float, kind: str, **data: Any) -> None:
    """One line of /events."""
    db.execute("INSERT INTO events (at, kind, data) VALUES (?, ?, ?)", (now, kind, json.dumps(data)))


def session_of(row: sqlite3.Row) -> RolloutSession:
    """The session of a row."""
    session = RolloutSession(*(row[name] for name in FIELDS))
    return dataclasses.replace(session, state=State(session.state))


def key_of(session: RolloutSession) -> Held:
    """What a node names a session by."""
    return session.task_id, session.sample, session.attempt


def session_held(db: sqlite3.Connection, key: Held) -> RolloutSession | None:
    """The session, where a node has it and this attempt is its present one."""
    session = find(db, key[0], key[1])
    return session if session is not None and session.state in HELD and session.attempt == key[2] else None
