"""A file of a workdir is written whole or not at all."""

import errno
import os

import pytest

from jaxagent.observe import files


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
