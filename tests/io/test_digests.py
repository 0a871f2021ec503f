"""Digests of files: by content, and read once."""

import hashlib
import os
import pathlib

from jaxagent.io import files


def test_a_file_is_read_once_and_again_after_it_was_written(tmp_path, monkeypatch):
    path, opened = tmp_path / "documents.jsonl", []
    own = pathlib.Path.open
    monkeypatch.setattr(pathlib.Path, "open", lambda self, mode: opened.append(mode) or own(self, mode))
    path.write_bytes(b"one")
    assert files.digest_of_file(path) == files.digest_of_file(path) == hashlib.blake2b(b"one").hexdigest()[:32]
    assert opened == ["wb", "rb"]
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert files.digest_of_file(path) == hashlib.blake2b(b"two").hexdigest()[:32]
