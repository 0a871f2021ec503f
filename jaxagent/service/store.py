"""The service's memory: one SQLite file, one thread that writes it, several requests per commit.

`await store.do(function, ...)` runs `function(connection, now, ...)` in a transaction and returns when its outcome is
on disk (WAL, synchronous=FULL); `now` is the time when its turn comes, so that a slow disk ends no lease. Requests that
wait at the same time share one commit, each in a savepoint of its own, so that one that raises takes back only itself.
Where the disk is full or fails nothing is half done: every request of the commit gets a `StoreError`, and the same
request may be sent again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from jaxagent.config import ConfigError
from jaxagent.io import files
from jaxagent.service.states import HELD, RolloutSession, State

T = TypeVar("T")
P = ParamSpec("P")
Request = tuple[Callable[[sqlite3.Connection], Any], concurrent.futures.Future[Any]]  # what to do, what came of it
MOST_TOGETHER = 64  # requests of one commit
STOP_TIMEOUT_S = 30.0
FIELDS = tuple(field.name for field in dataclasses.fields(RolloutSession))
IN_HELD = f"state IN ({', '.join(repr(str(state)) for state in HELD)})"
Held = tuple[str, int, int]  # task id, sample, attempt
VERSION = 1
SCHEMA = """
CREATE TABLE tasks (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, task_id TEXT UNIQUE NOT NULL, digest TEXT NOT NULL, body TEXT NOT NULL,
  total INTEGER NOT NULL, needed INTEGER NOT NULL, early_stop INTEGER NOT NULL, timeout_s REAL NOT NULL,
  agent_timeout_s REAL NOT NULL, callback_url TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL,
  created REAL NOT NULL, ended REAL NOT NULL);
CREATE TABLE sessions (
  task_id TEXT NOT NULL, sample INTEGER NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
  losses INTEGER NOT NULL, node TEXT NOT NULL, process TEXT NOT NULL, lease REAL NOT NULL, deadline REAL NOT NULL,
  run_deadline REAL NOT NULL, reason TEXT NOT NULL, digest TEXT NOT NULL, ended_attempt INTEGER NOT NULL,
  stop_reason TEXT NOT NULL, reward REAL, trainable INTEGER NOT NULL, ended REAL NOT NULL,
  priority INTEGER NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (task_id, sample));
CREATE INDEX by_state ON sessions (state, priority DESC, seq, sample);
CREATE INDEX by_process ON sessions (process, state);
CREATE TABLE episodes (
  task_id TEXT NOT NULL, sample INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (task_id, sample));
CREATE TABLE nodes (
  node_id TEXT PRIMARY KEY, process TEXT NOT NULL, gateway_url TEXT NOT NULL, places TEXT NOT NULL,
  free TEXT NOT NULL, heard REAL NOT NULL, draining INTEGER NOT NULL, lost INTEGER NOT NULL);
CREATE TABLE callbacks (
  task_id TEXT PRIMARY KEY, url TEXT NOT NULL, due REAL NOT NULL, give_up REAL NOT NULL, tries INTEGER NOT NULL,
  state TEXT NOT NULL, error TEXT NOT NULL);
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
"""


class StoreError(Exception):
    """What was asked is not on disk, in no part: the disk is full, failed, or too slow. It may be asked again."""


class ServiceStore:
    """The file and its thread. Use as a context manager.

    Args:
      path: of the file, which is made where there is none; its folder must exist.
      timeout_s: longest wait for one request.
      clock: seconds since 1970.
    """

    def __init__(self, path: str | Path, timeout_s: float = 60.0, clock: Callable[[], float] = time.time):
        """Raises ConfigError: no file of this service's, or another process has it open."""
        self._timeout_s, self.clock = timeout_s, clock
        path = Path(path)
        self._lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            files.lock(self._lock, path)
            self.connection = open_database(path)
        except BaseException:
            os.close(self._lock)
            raise
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    def __enter__(self) -> ServiceStore:
        return self

    def __exit__(self, *failure: object) -> None:
        """Carries out what waits, and closes the file."""
        self._waiting.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self.connection.close()
        os.close(self._lock)

    async def do(
        self, function: Callable[Concatenate[sqlite3.Connection, float, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """The function's result, once it is on disk.

        Raises:
          StoreError: nothing was stored, or (where it took too long) perhaps.
          Exception: what the function raised; it changed nothing.
        """
        outcome = concurrent.futures.Future[T]()
        self._waiting.put((lambda connection: function(connection, self.clock(), *args, **more), outcome))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(outcome)
        except TimeoutError:
            raise StoreError(f"the store did not answer in {self._timeout_s:g} s") from None

    def _work(self) -> None:
        over = False
        while not over:
            batch = [self._waiting.get()]
            while len(batch) < MOST_TOGETHER and not self._waiting.empty():
                batch.append(self._waiting.get())
            over = None in batch
            self._commit([r for r in batch if r is not None and r[1].set_running_or_notify_cancel()])

    def _commit(self, batch: list[Request]) -> None:
        db, results = self.connection, list[Any]()
        try:
            db.execute("BEGIN IMMEDIATE")
            for function, _ in batch:
                db.execute("SAVEPOINT request")
                try:
                    results.append(function(db))
                except sqlite3.OperationalError:
                    raise  # the disk's: SQLite may have taken back everything already
                except Exception as failure:
                    results.append(failure)
                    db.execute("ROLLBACK TO request")
                db.execute("RELEASE request")
            db.execute("COMMIT")
        except sqlite3.Error as failure:
            if db.in_transaction:
                db.execute("ROLLBACK")
            results = [StoreError(f"the store cannot write: {failure}")] * len(batch)
        for (_, outcome), result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                outcome.set_exception(result)
            else:
                outcome.set_result(result)


def open_database(path: Path) -> sqlite3.Connection:
    """The file's connection, for any one thread at a time. Raises ConfigError: it is no file of this service."""
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as failure:  # a folder, say
        raise ConfigError(f"'{path}' cannot be used as a store: {failure}.") from failure
    try:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={VERSION}; COMMIT;")
        elif version != VERSION:
            raise ConfigError(f"'{path}' is no file of this service, or another version's: name another --store.")
    except sqlite3.Error as failure:
        db.close()
        raise ConfigError(f"'{path}' cannot be used as a store: {failure}.") from failure
    except ConfigError:
        db.close()
        raise
    return db


# -------------------------------------------------------------------- rows, in an open transaction


def find(db: sqlite3.Connection, task_id: str, sample: int) -> RolloutSession | None:
    """A session."""
    row = db.execute("SELECT * FROM sessions WHERE task_id = ? AND sample = ?", (task_id, sample)).fetchone()
    return None if row is None else session_of(row)


def sessions_of(db: sqlite3.Connection, task_id: str) -> list[RolloutSession]:
    """A group's sessions, in order."""
    return [session_of(r) for r in db.execute("SELECT * FROM sessions WHERE task_id = ? ORDER BY sample", (task_id,))]


def save(db: sqlite3.Connection, now: float, old: RolloutSession, new: RolloutSession) -> None:
    """Writes a session, and the event of its new state."""
    assert not old.state.is_final, (old, new)  # an end is final
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
