"""metrics.jsonl and TensorBoard hold the same numbers, also after a resume."""

import errno
import os
import struct

import pytest

from jaxagent.observe import jsonl
from jaxagent.observe.files import METRICS_FILE, TENSORBOARD_FOLDER
from jaxagent.observe.metrics import MetricsWriter


def _events(folder) -> list[tuple[str, int, float]]:
    """Scalars of all event files, read through the record framing and TensorBoard's own message type."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[12 + length + 4 :]
    return found


def test_records_and_events(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("warm_start", 1, {"loss": 2.5})
    writer.write("rl", 1, {"reward/em": 0.25, "policy/kl": float("nan")})
    writer.close()
    assert list(jsonl.read(tmp_path / METRICS_FILE)) == [
        {"stage": "warm_start", "step": 1, "loss": 2.5},
        {"stage": "rl", "step": 1, "reward/em": 0.25, "policy/kl": None},
    ]
    assert _events(tmp_path / TENSORBOARD_FOLDER) == [("warm_start/loss", 1, 2.5), ("rl/reward/em", 1, 0.25)]


def test_a_resumed_run_has_each_step_once_in_both(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write("rl", step, {"x": step})
    writer.close()
    writer = MetricsWriter(tmp_path, position=2)
    assert writer.position == 2
    writer.write("rl", 3, {"x": 30})
    writer.close()
    assert [record["x"] for record in jsonl.read(tmp_path / METRICS_FILE)] == [1, 2, 30]
    assert [value for _, _, value in _events(tmp_path / TENSORBOARD_FOLDER)] == [1, 2, 30]


def test_a_full_disk_is_told_by_the_file_s_name_and_the_file_goes_on(small_disk):
    """No matter which of the two meets it; after it no half record is there, and closing says nothing more."""
    writer = MetricsWriter(small_disk / "run")
    writer.write("rl", 1, {"x": 1.0})
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError):
        while True:
            ballast.write(b"0" * 4096)
    with pytest.raises(OSError) as raised:
        for step in range(2, 5000):
            writer.write("rl", step, {"x": float(step)})
    assert raised.value.errno == errno.ENOSPC and str(small_disk / "run") in raised.value.filename
    writer.close()
    os.truncate(small_disk / "ballast", 0)
    records = list(jsonl.read(small_disk / "run" / METRICS_FILE))
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    again = MetricsWriter(small_disk / "run", position=len(records))
    again.write("rl", len(records) + 1, {"x": 0.0})
    again.close()
