"""A file is written whole or not at all, and one process at a time holds a lock."""

import errno
import os
import threading
import time

import pytest

from jaxagent.config import ConfigError
from jaxagent.io import files


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    files.replace(path, "old")

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_two_processes_do_not_take_each_other_s_file(tmp_path, monkeypatch):
    """A report that is asked for while its run writes the same one."""
    path, replace = tmp_path / "report.html", os.replace

    def meanwhile(*paths):
        monkeypatch.setattr(files.os, "replace", replace)
        monkeypatch.setattr(files.os, "getpid", lambda: -1)
        files.replace(path, "the other's")
        assert path.read_text() == "the other's"
        replace(*paths)

    monkeypatch.setattr(files.os, "replace", meanwhile)
    files.replace(path, "whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_a_lock_has_one_holder_until_it_is_closed(tmp_path):
    with open(tmp_path / "log", "ab") as first, open(tmp_path / "log", "ab") as second:
        assert files.try_lock(first.fileno())
        assert not files.try_lock(second.fileno())
        with pytest.raises(ConfigError, match=f"'{tmp_path}/log' is being written by another process"):
            files.lock(second.fileno(), tmp_path / "log")
        first.close()
        files.lock(second.fileno(), tmp_path / "log")
        with open(tmp_path / "log", "ab") as third:
            assert not files.try_lock(third.fileno())


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def none(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with open(tmp_path / "log", "ab") as log:
        files.lock(log.fileno(), tmp_path / "log")
        with pytest.raises(OSError, match="No locks"):  # whoever must have it learns of that
            files.try_lock(log.fileno())


def test_a_relative_cache_directory_is_ignored(monkeypatch, tmp_path):
    """As its standard says: programs would be looked for below wherever a process happens to be."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, where in ((str(tmp_path / "c"), "c"), ("cache", ".cache"), ("./c", ".cache"), ("", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert files.cache_directory() == tmp_path / where / "jaxagent"


def test_one_at_a_time_also_where_the_one_before_has_gone_meanwhile(tmp_path):
    """The second waits at the file that the first removes; the third comes when that is gone."""
    path, inside, most, first_is_in = tmp_path / "lock", 0, 0, threading.Event()

    def enter(leaves: threading.Event) -> None:
        nonlocal inside, most
        with files.one_at_a_time(path):
            inside += 1
            most = max(most, inside)
            first_is_in.set()
            leaves.wait(5)
            inside -= 1

    first, now = threading.Event(), threading.Event()
    threads = [threading.Thread(target=enter, args=(leaves,)) for leaves in (first, now, now)]
    threads[0].start()
    assert first_is_in.wait(5)
    threads[1].start()
    time.sleep(0.1)  # it waits
    first.set()
    threads[0].join()
    time.sleep(0.1)  # it is in
    threads[2].start()
    time.sleep(0.1)
    now.set()
    for thread in threads:
        thread.join()
    assert most == 1 and list(tmp_path.iterdir()) == []
