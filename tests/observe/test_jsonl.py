"""Records survive kills: whatever happens after a checkpoint, every record is there once."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.observe import jsonl


def _steps(path) -> list[int]:
    return [record["step"] for record in jsonl.read(path)]


def test_a_torn_last_line_is_not_a_record(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":0}\n{"step":1}\n{"st')
    assert _steps(path) == [0, 1]
    with pytest.raises(ConfigError, match="2 records"):
        jsonl.JsonlLog(path, position=3)
    jsonl.JsonlLog(path, position=None).append({"step": 2})
    assert _steps(path) == [0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.binary(max_size=5)), min_size=1, max_size=6))
def test_any_kills_lose_and_double_nothing(tmp_path_factory, lives):
    """Each life runs some steps, checkpoints every few, dies with some bytes of garbage half written."""
    path = tmp_path_factory.mktemp("log") / "m.jsonl"
    saved_step = saved_position = 0
    for steps, every, garbage in lives:
        log, step = jsonl.JsonlLog(path, saved_position), saved_step
        for _ in range(steps):
            log.append({"step": step})
            step += 1
            if step % every == 0:
                saved_step, saved_position = step, log.position
        log.close()
        with open(path, "ab") as file:
            file.write(garbage.replace(b"\n", b""))
    log = jsonl.JsonlLog(path, saved_position)
    assert _steps(path) == list(range(saved_step)), "what came after the checkpoint is gone"
    for step in range(saved_step, saved_step + 3):
        log.append({"step": step})
    assert _steps(path) == list(range(saved_step + 3)) and log.position == saved_position + 3


def test_a_record_is_on_disk_when_append_returns(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import os, sys; from jaxagent.observe.jsonl import JsonlLog; log = JsonlLog(sys.argv[1]);"
        "log.append({'step': 1}); log.append({'step': 2}); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], cwd=os.getcwd(), timeout=60, check=False)
    assert done.returncode == -9
    assert _steps(path) == [1, 2]


def test_two_processes_never_write_one_log(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from jaxagent.observe.jsonl import JsonlLog; log = JsonlLog(sys.argv[1]);"
        "log.append({'step': 1}); print('open', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match="is being written by another process"):
            jsonl.JsonlLog(path)
        assert _steps(path) == [1]
    finally:
        holder.kill()  # the kernel drops its lock
        holder.communicate(timeout=60)
    jsonl.JsonlLog(path, position=None).append({"step": 2})
    assert _steps(path) == [1, 2]


def test_values_become_plain_json(tmp_path):
    path = tmp_path / "m.jsonl"
    jsonl.JsonlLog(path).append(
        {"a": np.float32(0.5), "b": np.int64(3), "c": math.nan, "d": np.float32(np.inf), "e": np.arange(2), "f": "é"}
    )
    text = path.read_text()
    assert json.loads(text) == {"a": 0.5, "b": 3, "c": None, "d": None, "e": [0, 1], "f": "é"}
    assert "NaN" not in text


@pytest.mark.parametrize("line", ["{", "7", "\\xff"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":0}\n' + line.encode().decode("unicode_escape").encode("latin1") + b'\n{"step":2}\n')
    with pytest.raises(ConfigError, match=r"m\.jsonl, line 2: not"):
        list(jsonl.read(path))
    jsonl.check(path, 1, parse=True)  # the checkpoint was taken before it
    jsonl.check(path, 3, parse=False)
    with pytest.raises(ConfigError, match=r"m\.jsonl, line 2: not"):
        jsonl.check(path, 3, parse=True)


def test_a_check_changes_nothing(tmp_path):
    path = tmp_path / "m.jsonl"
    jsonl.check(path, 0, parse=True)
    with pytest.raises(ConfigError, match="is gone, the checkpoint was taken after 2 records"):
        jsonl.check(path, 2, parse=True)
    assert not path.exists() and jsonl.count(path) == 0
    path.write_bytes(b'{"step":0}\n{"st')
    with pytest.raises(ConfigError, match="1 records"):
        jsonl.check(path, 2, parse=True)
    assert path.read_bytes() == b'{"step":0}\n{"st' and jsonl.count(path) == 1


def test_a_text_that_is_no_utf8_is_written_and_read_back(tmp_path):
    records = [{"é": "ü"}, {"half \ud800 of a pair": ["\udfff", "é"]}]
    log = jsonl.JsonlLog(tmp_path / "log.jsonl")
    log.extend(records)
    log.close()
    assert list(jsonl.read(tmp_path / "log.jsonl")) == records
    assert "é" in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()[0]
