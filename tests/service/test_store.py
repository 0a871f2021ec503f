"""The file and its thread: shared commits, a full disk, who may open it."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from jaxagent.config import ConfigError
from jaxagent.service.store import ServiceStore, StoreError


def put(db, now, key, size=1):
    db.execute("INSERT INTO nodes VALUES (?, ?, '', '{}', '{}', 0, 0, 0)", (key, "x" * size))
    if key == "refused":
        raise KeyError(key)
    return key


def keys(db, now=0.0):
    return [row[0] for row in db.execute("SELECT node_id FROM nodes ORDER BY node_id")]


async def test_one_that_raises_takes_back_only_itself(tmp_path):
    with ServiceStore(tmp_path / "s") as store:
        names = ["a", "refused", "b", "a", "c"]  # the second "a" breaks the table's key
        found = await asyncio.gather(*[store.do(put, name) for name in names], return_exceptions=True)
        assert found[0] == "a" and found[2] == "b" and found[4] == "c"
        assert isinstance(found[1], KeyError) and isinstance(found[3], sqlite3.IntegrityError)
    with ServiceStore(tmp_path / "s") as store:
        assert await store.do(keys) == ["a", "b", "c"]


async def test_a_full_disk_stores_nothing_in_part_and_is_got_over(tmp_path):
    with ServiceStore(tmp_path / "s") as store:
        await store.do(put, "first")
        (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
        store.connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(StoreError, match="full"):
            await store.do(put, "large", 100_000)
        assert await store.do(keys) == ["first"]
        store.connection.execute("PRAGMA max_page_count = 1000000")
        assert await store.do(put, "large", 100_000) == "large"


async def test_a_corrupt_file_is_told_and_what_is_asked_is_refused(tmp_path):
    """Neither the server ends nor is anything acknowledged; a file without a beginning is no store at all."""
    path = tmp_path / "s"

    with ServiceStore(path) as store:
        await store.do(put, "first", 200_000)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        for page in range(25, size // 4096):  # behind the schema
            file.seek(page * 4096)
            file.write(b"\xff" * 4096)
    with ServiceStore(path) as store:
        for _ in range(2):
            with pytest.raises(StoreError, match="malformed"):
                await store.do(lambda db, now: db.execute("SELECT * FROM nodes").fetchall())
    path.write_bytes(b"no store")
    with pytest.raises(ConfigError, match="cannot be used as a store"):
        ServiceStore(path)


async def test_a_real_full_disk(small_disk):
    with ServiceStore(small_disk / "s") as store:
        stored = []
        with pytest.raises(StoreError):
            for i in range(100):
                stored.append(await store.do(put, f"{i:03d}", 50_000))
        assert 0 < len(stored) < 40 and await store.do(keys) == stored
    with ServiceStore(small_disk / "s") as store:
        assert await store.do(keys) == stored


async def test_what_waits_at_the_end_is_carried_out_and_a_slow_disk_is_told(tmp_path):
    begun = threading.Event()

    def take_long(db, now):
        begun.set()
        time.sleep(0.5)

    with ServiceStore(tmp_path / "s", timeout_s=0.05) as store:
        slow = asyncio.create_task(store.do(take_long))
        await asyncio.to_thread(begun.wait, 20)
        with pytest.raises(StoreError, match=r"0\.05 s"):
            await store.do(put, "late")
        with pytest.raises(StoreError):
            await slow
        store._waiting.put(None)
        store._thread.join(20)
        assert keys(store.connection) == []  # nobody waited for it any more when its turn came


def test_one_process_at_a_time_and_only_files_of_this_service(tmp_path):
    code = f"from jaxagent.service.store import ServiceStore\nwith ServiceStore({str(tmp_path / 's')!r}): pass"
    with ServiceStore(tmp_path / "s"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert "is being written by another process" in done.stderr
    (tmp_path / "text").write_text("no database " * 1000)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE t (a)")
    for name in ("text", "other"):
        with pytest.raises(ConfigError, match=name):
            ServiceStore(tmp_path / name)


def test_it_is_durable(tmp_path):
    with ServiceStore(tmp_path / "s") as store:
        assert store.connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert store.connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL: fsync at every commit
