"""Nodes and what they hold: register, take, be heard, send a result, give back, be lost.

Functions of an open transaction: `await store.do(leases.take, now, rules, ...)`. A lease is a process's, not a name's:
a node that begins anew under its name has lost what its earlier process held.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from jaxagent.fleet.wire import RefusedCallError
from jaxagent.service import states
from jaxagent.service.groups import cancel_rest, end, settle
from jaxagent.service.states import HELD, EpisodeSummary, RolloutSession, ServiceRules, State
from jaxagent.service.store import (
    IN_HELD,
    Held,
    find,
    key_of,
    note,
    save,
    session_held,
    session_of,
)
from jaxagent.types import Episode

LATE_S = 30.0  # after a session's deadline, until which its node must have ended it itself
LOST_NODE_S = 24 * 3600.0  # a node that is not heard for so long is forgotten
MOST_EVENTS = 10_000  # kept


def register(
    db: sqlite3.Connection,
    now: float,
    rules: ServiceRules,
    node_id: str,
    process: str,
    gateway_url: str,
    places: dict[str, int],
) -> None:
    """A process says that it is this node. What an earlier process of the node held is lost, and goes to others."""
    row = db.execute("SELECT process FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
    if row is not None and row["process"] != process:
        lose(db, now, rules, row["process"], f"node '{node_id}' began anew")
    db.execute(
        "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?, 0, 0)",
        (node_id, process, gateway_url, json.dumps(places), json.dumps(places), now),
    )
    note(db, now, "node", node_id=node_id, status="registered")


def beat(
    db: sqlite3.Connection,
    now: float,
    rules: ServiceRules,
    node_id: str,
    process: str,
    playing: Iterable[tuple[Held, State]],
    free: dict[str, int],
) -> dict[str, Any]:
    """A node says what it plays, and in which phase.

    Returns:
      "cancel": which of these are not the node's any more; "drain": whether to take no more and end; "moved": how
        many are in another phase than before.

    Raises:
      RefusedCallError: this process is not registered, or another one is.
    """
    draining = sign_of_life(db, now, node_id, process, free)
    cancel, moved = [], 0
    for (task_id, sample, attempt), state in playing:
        session = find(db, task_id, sample)
        if session is None or session.state not in HELD or (session.process, session.attempt) != (process, attempt):
            cancel.append([task_id, sample, attempt])
        else:
            (agent_s,) = db.execute("SELECT agent_timeout_s FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
            new = states.move(session, state, now, rules.lease_s, agent_s)
            save(db, now, session, new)
            moved += new.state is not session.state
    return {"cancel": cancel, "drain": draining, "moved": moved}


def sign_of_life(db: sqlite3.Connection, now: float, node_id: str, process: str, free: dict[str, int]) -> bool:
    """Notes that a node lives; whether it drains."""
    row = db.execute("SELECT * FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
    if row is None:
        raise RefusedCallError("missing", f"there is no node '{node_id}': register it")
    if row["process"] != process:
        raise RefusedCallError("conflict", f"another process has registered as node '{node_id}'")
    db.execute("UPDATE nodes SET heard = ?, free = ?, lost = 0 WHERE node_id = ?", (now, json.dumps(free), node_id))
    if row["lost"]:
        note(db, now, "node", node_id=node_id, status="back")
    return bool(row["draining"])


def take(
    db: sqlite3.Connection,
    now: float,
    rules: ServiceRules,
    node_id: str,
    process: str,
    have: Sequence[Held],
    free: dict[str, int],
) -> list[dict[str, Any]]:
    """Sessions for a node: those that are its already and that it does not know of, then new ones.

    Raises:
      RefusedCallError: as `beat`.
    """
    draining = sign_of_life(db, now, node_id, process, free)
    owed = [session for session in _of_process(db, process) if key_of(session) not in have]
    places = 0 if draining else max(0, free.get("init", 0) - len(owed))
    waiting = db.execute(
        "SELECT * FROM sessions WHERE state = ? ORDER BY priority DESC, seq, sample LIMIT ?",
        (State.REGISTERED, places),
    )
    work = []
    for session in [*owed, *map(session_of, waiting.fetchall())]:
        task = db.execute("SELECT * FROM tasks WHERE task_id = ?", (session.task_id,)).fetchone()
        session_now = session
        if session.state is State.REGISTERED:
            session_now = states.take(session, node_id, process, now, rules.lease_s, task["timeout_s"])
            save(db, now, session, session_now)
        body = json.loads(task["body"])
        work.append(
            {
                "task_id": session_now.task_id,
                "sample": session_now.sample,
                "attempt": session_now.attempt,
                "number": body["first_sample"] + session_now.sample,
                "group_size": task["total"],
                "timeout_s": task["timeout_s"],
                "agent_timeout_s": task["agent_timeout_s"],
                "task": body["task"],
            }
        )
    return work


def give_back(db: sqlite3.Connection, now: float, process: str, keys: Sequence[Held]) -> int:
    """A node hands sessions back that it will not end. Returns how many were its own."""
    sessions = [session_held(db, key) for key in keys]
    own = [session for session in sessions if session is not None and session.process == process]
    for session in own:
        save(db, now, session, states.give_back(session))
    return len(own)


def leave(db: sqlite3.Connection, now: float, node_id: str, process: str) -> None:
    """A node ends. What it still holds goes to others."""
    give_back(db, now, process, [key_of(session) for session in _of_process(db, process)])
    if db.execute("DELETE FROM nodes WHERE node_id = ? AND process = ?", (node_id, process)).rowcount:
        note(db, now, "node", node_id=node_id, status="left")


def drain(db: sqlite3.Connection, now: float, node_id: str) -> None:
    """Nothing more goes to the node; it ends what it has. Raises RefusedCallError: there is none."""
    if not db.execute("UPDATE nodes SET draining = 1 WHERE node_id = ?", (node_id,)).rowcount:
        raise RefusedCallError("missing", f"there is no node '{node_id}'")
    note(db, now, "node", node_id=node_id, status="draining")


def lose(db: sqlite3.Connection, now: float, rules: ServiceRules, process: str, why: str) -> None:
    """All that a process holds is lost."""
    for session in _of_process(db, process):
        lose_session(db, now, rules, session, why)


def lose_session(db: sqlite3.Connection, now: float, rules: ServiceRules, session: RolloutSession, why: str) -> None:
    """A held session is lost: it waits again, or ends."""
    new = states.lose(session, why, rules.max_losses, now)
    save(db, now, session, new)
    if new.state.is_final:
        settle(db, now, rules, session.task_id)


def finish(
    db: sqlite3.Connection,
    now: float,
    rules: ServiceRules,
    key: Held,
    episode: Episode,
    result: EpisodeSummary,
    body: bytes,
) -> bool:
    """Stores the episode of one attempt of a session. False: the session had ended already.

    Raises:
      RefusedCallError: there is no such session; nobody was given that attempt; the episode is another session's;
        or another episode of the same attempt is stored.
    """
    task_id, sample, attempt = key
    session = find(db, task_id, sample)
    if session is None:
        raise RefusedCallError("missing", f"there is no session {sample} of task '{task_id}'")
    if not 1 <= attempt <= session.attempt:
        raise RefusedCallError(
            "conflict", f"attempt {attempt} of session {sample} of task '{task_id}' was given to nobody"
        )
    if session.state.is_final:
        if session.digest and session.ended_attempt == attempt and session.digest != result.digest:
            raise RefusedCallError("conflict", f"another episode of attempt {attempt} of {task_id}/{sample} is stored")
        return False
    (row,) = db.execute("SELECT body FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    submission = json.loads(row)
    if (episode.task.id, episode.sample) != (submission["task"]["id"], submission["first_sample"] + sample):
        raise RefusedCallError(
            "conflict", f"{task_id}/{sample} is not task '{episode.task.id}', sample {episode.sample}"
        )
    db.execute("INSERT INTO episodes VALUES (?, ?, ?)", (task_id, sample, zlib.compress(body, 1)))
    save(db, now, session, states.finish(session, attempt, result, now))
    settle(db, now, rules, task_id)
    return True


def resumed(db: sqlite3.Connection, now: float, rules: ServiceRules) -> None:
    """The server begins anew: nodes that play have a lease's time to be heard, and to send what they finished."""
    until = now + rules.lease_s
    db.execute(
        "UPDATE sessions SET lease = ?, deadline = max(deadline, ?),"
        f" run_deadline = iif(run_deadline > 0, max(run_deadline, ?), 0) WHERE {IN_HELD}",
        (until, until, until),
    )
    db.execute("UPDATE nodes SET heard = ? WHERE lost = 0", (now,))


def sweep(db: sqlite3.Connection, now: float, rules: ServiceRules) -> bool:
    """Finds what time has ended: leases, deadlines, nodes, tasks that are kept no longer. Whether there was any."""
    before = db.total_changes
    rows = db.execute(
        f"SELECT * FROM sessions WHERE {IN_HELD} AND"
        " (lease < ? OR deadline < ? OR (run_deadline > 0 AND run_deadline < ?))",
        (now, now - LATE_S, now - LATE_S),
    )
    for session in map(session_of, rows.fetchall()):
        if session.lease < now:
            lose_session(db, now, rules, session, f"node '{session.node}' was not heard for {rules.lease_s:g} s")
        else:
            late = "its time" if session.deadline < now - LATE_S else "the agent's time"
            why = f"{late} was over and node '{session.node}' did not end it"
            save(db, now, session, states.end(session, State.TIMEOUT, why, now))
            settle(db, now, rules, session.task_id)
    for node in db.execute("SELECT * FROM nodes WHERE lost = 0 AND heard < ?", (now - rules.lease_s,)).fetchall():
        db.execute("UPDATE nodes SET lost = 1 WHERE node_id = ?", (node["node_id"],))
        note(db, now, "node", node_id=node["node_id"], status="lost")
    db.execute("DELETE FROM nodes WHERE heard < ?", (now - LOST_NODE_S,))
    _forget(db, now, rules)
    return db.total_changes > before


def _forget(db: sqlite3.Connection, now: float, rules: ServiceRules) -> None:
    before = now - rules.keep_s
    for task in db.execute("SELECT * FROM tasks WHERE status = 'running' AND created < ?", (before,)).fetchall():
        reason = f"it did not end in {rules.keep_s:g} s"
        cancel_rest(db, now, task["task_id"], reason)
        end(db, now, rules, task, "failed", reason)
    old = db.execute("SELECT task_id FROM tasks WHERE ended > 0 AND ended < ?", (before,)).fetchall()
    for (task_id,) in old:
        for table in ("episodes", "sessions", "callbacks", "tasks"):
            db.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))
    db.execute("DELETE FROM events WHERE seq <= (SELECT max(seq) FROM events) - ?", (MOST_EVENTS,))


def _of_process(db: sqlite3.Connection, process: str) -> list[RolloutSession]:
    """What a process holds, the most urgent first."""
    order = "ORDER BY priority DESC, seq, sample"
    rows = db.execute(f"SELECT * FROM sessions WHERE process = ? AND {IN_HELD} {order}", (process,))
    return [session_of(row) for row in rows]
