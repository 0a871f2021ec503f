"""What the service tells of itself: JSON objects read from the store, without changing it."""

from __future__ import annotations

import json
import sqlite3
import zlib
from typing import Any

from jaxagent.fleet.wire import RefusedCallError
from jaxagent.service.states import RolloutSession
from jaxagent.service.store import find, sessions_of

MOST_ROWS = 1000  # of one answer


def task(db: sqlite3.Connection, now: float, task_id: str) -> dict[str, Any]:
    """A group with its sessions; the episodes themselves are asked for one by one. Raises RefusedCallError."""
    row = db.execute("SELECT * FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if row is None:
        raise RefusedCallError("missing", f"there is no task '{task_id}'")
    sessions = sessions_of(db, task_id)
    return {
        "task_id": task_id,
        "status": row["status"],
        "reason": row["reason"],
        "total_sessions": row["total"],
        "completed_sessions": sum(session.state.is_final for session in sessions),
        "usable_sessions": sum(session.usable for session in sessions),
        "needed_sessions": row["needed"],
        "results": [session_object(session) for session in sessions],
    }


def session_object(session: RolloutSession) -> dict[str, Any]:
    """A session, as clients see it."""
    return {
        "sample": session.sample,
        "state": session.state,
        "attempt": session.attempt,
        "losses": session.losses,
        "node": session.node,
        "reason": session.reason,
        "stop_reason": session.stop_reason,
        "reward": session.reward,
        "trainable_tokens": session.trainable,
        "usable": session.usable,
        "digest": session.digest,
        "episode": f"/tasks/{session.task_id}/sessions/{session.sample}/episode" if session.digest else "",
    }


def tasks(db: sqlite3.Connection, now: float, before: int) -> dict[str, Any]:
    """The newest tasks, or those before the one with number `before`; the next page is `before` its last number."""
    rows = db.execute(
        "SELECT seq, task_id, status, total, reason, created, ended FROM tasks WHERE seq < ? ORDER BY seq DESC LIMIT ?",
        (before, MOST_ROWS),
    )
    return {"tasks": [dict(row) for row in rows]}


def status(db: sqlite3.Connection, now: float) -> dict[str, Any]:
    """Counts over everything that is kept."""

    def counts(table: str, column: str) -> dict[str, int]:
        return dict(tuple(row) for row in db.execute(f"SELECT {column}, count(*) FROM {table} GROUP BY {column}"))

    return {
        "tasks": counts("tasks", "status"),
        "sessions": counts("sessions", "state"),
        "callbacks": counts("callbacks", "state"),
        "nodes": db.execute("SELECT count(*) FROM nodes WHERE lost = 0").fetchone()[0],
    }


def nodes(db: sqlite3.Connection, now: float) -> dict[str, Any]:
    """Every node: when it was heard, what it holds, how much more it could take."""
    session_counts = dict(
        tuple(r) for r in db.execute("SELECT process, count(*) FROM sessions WHERE ended = 0 GROUP BY process")
    )
    return {
        "nodes": [
            {
                "node_id": row["node_id"],
                "gateway_url": row["gateway_url"],
                "places": json.loads(row["places"]),
                "free": json.loads(row["free"]),
                "heard_s_ago": round(now - row["heard"], 3),
                "sessions": session_counts.get(row["process"], 0),
                "status": "lost" if row["lost"] else "draining" if row["draining"] else "active",
            }
            for row in db.execute("SELECT * FROM nodes ORDER BY node_id")
        ]
    }


def events(db: sqlite3.Connection, now: float, after: int) -> list[tuple[int, float, str, str]]:
    """(number, time, kind, JSON) of the events after a number, the oldest first."""
    rows = db.execute("SELECT seq, at, kind, data FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after, MOST_ROWS))
    return [tuple(row) for row in rows]


def newest_event(db: sqlite3.Connection, now: float) -> int:
    """The number of the newest event; 0 = there is none."""
    return db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]


def episode(db: sqlite3.Connection, now: float, task_id: str, sample: int) -> tuple[bytes, str]:
    """An episode's bytes as its node sent them, and their sha256. Raises RefusedCallError."""
    row = db.execute("SELECT body FROM episodes WHERE task_id = ? AND sample = ?", (task_id, sample)).fetchone()
    session = find(db, task_id, sample)
    if row is None or session is None:
        raise RefusedCallError("missing", f"session {sample} of task '{task_id}' has no episode")
    return zlib.decompress(row["body"]), session.digest
