"""Tells clients that their groups have ended: a POST to `callback_url`, at least once, tried until its deadline.

What is still to be told is in the store, so a restarted server tells it. A receiver that has heard it answers with a
status from 200 to 299. One that does not is asked again after 1, 2, 4, ... at most 60 s; after the rules' `callback_s`
it is given up, with the last failure beside it in the store and an event.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from jaxagent.fleet.wire import RefusedCallError
from jaxagent.io.http import HttpClient, HttpError, HttpStatus
from jaxagent.service import views
from jaxagent.service.store import ServiceStore, StoreError, note

logger = logging.getLogger(__name__)
TIMEOUT_S = 10.0  # of one try
MAX_REPLY_BYTES = 64 * 1024
AT_ONCE = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
Due = tuple[str, str, int]  # task id, URL, tries so far


async def tell(store: ServiceStore, pause_s: float = 1.0) -> None:
    """Sends what is due, for ever; looks every `pause_s` seconds."""
    async with HttpClient(TIMEOUT_S, MAX_REPLY_BYTES) as client:
        while True:
            try:
                waiting = await store.do(due_callbacks)
                await asyncio.gather(*[_tell(store, client, *callback) for callback in waiting])
            except StoreError as failure:
                logger.warning("callbacks wait: %s", failure)
            await asyncio.sleep(pause_s)


async def _tell(store: ServiceStore, client: HttpClient, task_id: str, url: str, tries: int) -> None:
    try:
        body = await store.do(views.task, task_id)
    except RefusedCallError:  # forgotten since
        return
    error = ""
    try:
        await client.request("POST", url, json=body)
    except HttpStatus as answer:
        error = "" if 200 <= answer.status < 300 else str(answer)
    except HttpError as failure:
        error = str(failure)
    await store.do(record_try, task_id, tries + 1, error)


def due_callbacks(db: sqlite3.Connection, now: float) -> list[Due]:
    """What is to be told now."""
    rows = db.execute(
        "SELECT task_id, url, tries FROM callbacks WHERE state = 'waiting' AND due <= ? ORDER BY due LIMIT ?",
        (now, AT_ONCE),
    )
    return [tuple(row) for row in rows]


def record_try(db: sqlite3.Connection, now: float, task_id: str, tries: int, error: str) -> None:
    """Notes what came of a try."""
    row = db.execute("SELECT * FROM callbacks WHERE task_id = ?", (task_id,)).fetchone()
    if row is None:
        return
    after = now + min(FIRST_PAUSE_S * 2 ** min(tries - 1, 30), LONGEST_PAUSE_S)
    state = "told" if not error else "waiting" if after <= row["give_up"] else "given up"
    db.execute(
        "UPDATE callbacks SET state = ?, tries = ?, due = ?, error = ? WHERE task_id = ?",
        (state, tries, after, error, task_id),
    )
    if state != "waiting":
        note(db, now, "callback", task_id=task_id, status=state, tries=tries, reason=error)
