"""Groups: a submission becomes sessions; it ends when they have, when enough are usable, or when it is cancelled.

Functions of an open transaction: `await store.do(groups.submit, now, rules, request)`.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import Any

from jaxagent.data import codec
from jaxagent.fleet.wire import RefusedCallError
from jaxagent.service import states
from jaxagent.service.request import TaskRequest
from jaxagent.service.states import RolloutSession, ServiceRules, State
from jaxagent.service.store import FIELDS, note, save, sessions_of

ENOUGH = "enough sessions of its group were usable without it"
CANCELLED = "its group was cancelled"


def submit(db: sqlite3.Connection, now: float, rules: ServiceRules, request: TaskRequest) -> dict[str, Any]:
    """Registers a group, once.

    Raises:
      RefusedCallError: there is another submission of this id, or too many sessions wait.
    """
    row = db.execute("SELECT * FROM tasks WHERE task_id = ?", (request.task_id,)).fetchone()
    if row is not None:
        if row["digest"] not in (request.digest, ""):  # "": cancelled before it came
            raise RefusedCallError("conflict", f"there is another task '{request.task_id}': its body was not this one")
        return {"task_id": request.task_id, "status": row["status"]}
    (waiting,) = db.execute("SELECT count(*) FROM sessions WHERE state = ?", (State.REGISTERED,)).fetchone()
    if waiting + request.num_samples > rules.max_waiting:
        raise RefusedCallError(
            "busy", f"{waiting} sessions wait for a node, and {rules.max_waiting} may: try again later"
        )
    body = {"task": codec.encode_task(request.task), "first_sample": request.first_sample}
    values = (
        request.task_id, request.digest, json.dumps(body), request.num_samples, request.needed, request.early_stop,
        request.timeout_s, request.agent_timeout_s, request.callback_url, "running", "", now, 0.0,
    )  # fmt: skip
    seq = db.execute(
        "INSERT INTO tasks (task_id, digest, body, total, needed, early_stop, timeout_s, agent_timeout_s,"
        " callback_url, status, reason, created, ended) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
        values,
    ).lastrowid
    columns = (*FIELDS, "priority", "seq")
    db.executemany(
        f"INSERT INTO sessions ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
        [
            (*dataclasses.astuple(RolloutSession(request.task_id, sample)), request.dispatch_priority, seq)
            for sample in range(request.num_samples)
        ],
    )
    note(db, now, "task", task_id=request.task_id, status="running", sessions=request.num_samples)
    return {"task_id": request.task_id, "status": "running"}


def cancel(
    db: sqlite3.Connection, now: float, rules: ServiceRules, task_id: str, register_if_missing: bool
) -> dict[str, Any]:
    """Ends what is not over of a group. A group that is not there yet can be cancelled ahead of its coming.

    Raises:
      RefusedCallError: there is none, and none is to be registered.
    """
    row = db.execute("SELECT * FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if row is None:
        if not register_if_missing:
            raise RefusedCallError("missing", f"there is no task '{task_id}'")
        db.execute(
            "INSERT INTO tasks (task_id, digest, body, total, needed, early_stop, timeout_s, agent_timeout_s,"
            " callback_url, status, reason, created, ended) VALUES (?, '', '{}', 0, 0, 0, 0, 0, '', ?, ?, ?, ?)",
            (task_id, "failed", CANCELLED, now, now),
        )
        note(db, now, "task", task_id=task_id, status="failed", reason=CANCELLED)
        return {"task_id": task_id, "status": "failed"}
    if row["status"] == "running":
        cancel_rest(db, now, task_id, CANCELLED)
        end(db, now, rules, row, "failed", CANCELLED)
    return {"task_id": task_id, "status": "failed" if row["status"] == "running" else row["status"]}


def cancel_rest(db: sqlite3.Connection, now: float, task_id: str, reason: str) -> None:
    """Ends every session of a group that has not ended."""
    for session in sessions_of(db, task_id):
        if not session.state.is_final:
            save(db, now, session, states.end(session, State.CANCELLED, reason, now))


def settle(db: sqlite3.Connection, now: float, rules: ServiceRules, task_id: str) -> None:
    """After the end of a session: stops the group early where enough are usable, and ends it where all ended."""
    task = db.execute("SELECT * FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if task["status"] != "running":
        return
    sessions = sessions_of(db, task_id)
    usable = sum(session.usable for session in sessions)
    if task["early_stop"] and usable >= task["early_stop"]:
        cancel_rest(db, now, task_id, ENOUGH)
    elif not all(session.state.is_final for session in sessions):
        return
    if usable >= task["needed"]:
        end(db, now, rules, task, "completed", "")
    else:
        first = next((s.reason for s in sessions if s.reason), "a session without sampled tokens")
        why = f"{usable} of {task['total']} sessions are usable, {task['needed']} are needed; first: {first}"
        end(db, now, rules, task, "failed", why)


def end(db: sqlite3.Connection, now: float, rules: ServiceRules, task: sqlite3.Row, status: str, reason: str) -> None:
    """Ends a group, and has its callback sent."""
    db.execute(
        "UPDATE tasks SET status = ?, reason = ?, ended = ? WHERE task_id = ?",
        (status, reason, now, task["task_id"]),
    )
    if task["callback_url"]:
        db.execute(
            "INSERT INTO callbacks VALUES (?, ?, ?, ?, 0, 'waiting', '')",
            (task["task_id"], task["callback_url"], now, now + rules.callback_s),
        )
    note(db, now, "task", task_id=task["task_id"], status=status, reason=reason)
