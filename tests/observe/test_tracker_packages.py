"""The trackers' own packages: what they show of a run is metrics.jsonl, also of one that was killed and went on.

Each is skipped where its package is not installed: pip install wandb mlflow trackio.
"""

import collections
import importlib.util
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from jaxagent.observe import jsonl, metrics
from jaxagent.observe.files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, TRACKING_FOLDER
from jaxagent.observe.metrics import MetricsWriter
from tests import tiny_run
from tests.observe.test_episode_store import episode, failed, store

NAMES = ("wandb", "mlflow", "trackio")
KEY = "0123456789abcdef0123456789abcdef01234567"
SUMMARY = {"reward": 0.5, "inner": {"steps": 4}, "words": "no number"}


def needs(name):
    if (spec := importlib.util.find_spec(name)) is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nobody's settings but those of a new user."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    for name, folder in {"HOME": "home", "TRACKIO_DIR": "trackio"}.items():
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    return tmp_path


def curves(workdir, tracker=""):
    """(stage/name, step) -> value, of metrics.jsonl."""
    return {
        (f"{record['stage']}/{name}".replace("@", "_" if tracker == "mlflow" else "@"), record["step"]): value
        for record in jsonl.read(workdir / METRICS_FILE)
        for name, value in record.items()
        if name not in ("stage", "step") and value is not None
    }


class Shown:
    """What a tracker shows: `values` by name and step, in the order in which they came, and the rest."""

    def __init__(self):
        self.values, self.tables = collections.defaultdict(list), {}
        self.config, self.alarms, self.summary = {}, [], {}
        self.runs = 1

    def curves(self):
        return {key: values[-1] for key, values in self.values.items()}


def of_wandb(workdir):
    """Of all offline folders, by the framing of LevelDB's logs and the package's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    shown, ids = Shown(), set()
    for path in sorted((workdir / TRACKING_FOLDER / "wandb").glob("offline-run-*/*.wandb")):
        ids.add(path.stem)
        data, at, parts = path.read_bytes(), 7, []
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
            _, length, kind = struct.unpack_from("<IHB", data, at)
            parts.append(data[at + 7 : at + 7 + length])
            at += 7 + length
            if kind not in (1, 4):  # whole, or the last part
                continue
            record, parts = Record.FromString(b"".join(parts)), []
            items = {}
            for item in record.history.item:
                first, *inner = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                items[first] = items.get(first, {}) | {inner[0]: value} if inner else value
            stage = next((name.partition("/")[0] for name in items if name.endswith("/step")), "")
            for name, value in items.items():
                if name.startswith("episodes/"):
                    file = path.parent / "files" / value["path"]
                    shown.tables[name] = json.loads(file.read_text())["data"]
                elif stage and name.startswith(stage) and name != f"{stage}/step":
                    shown.values[name, items[f"{stage}/step"]].append(value)
            run = record.run.config.update if record.HasField("run") else []
            for update in [*run, *record.config.update]:
                shown.config["/".join(update.nested_key) or update.key] = json.loads(update.value_json)
            for update in record.summary.update:
                shown.summary["/".join(update.nested_key) or update.key] = json.loads(update.value_json)
            if record.HasField("alert"):
                shown.alarms.append(record.alert.title)
    shown.runs = len(ids)
    return shown


def of_mlflow(workdir):
    from mlflow import MlflowClient

    client, shown = MlflowClient(f"sqlite:///{workdir.parent}/mlflow.db"), Shown()
    experiment = client.get_experiment_by_name("jaxagent").experiment_id
    runs = client.search_runs([experiment])
    shown.runs, run = len(runs), runs[0]
    for name in run.data.metrics:
        for point in sorted(client.get_metric_history(run.info.run_id, name), key=lambda point: point.timestamp):
            if name.startswith("summary/"):
                shown.summary[name] = point.value
            else:
                shown.values[name, point.step].append(point.value)
    shown.config = {name: json.loads(text) for name, text in run.data.params.items() if text.isdigit()}
    shown.alarms = [tag.removeprefix("alarm.") for tag in run.data.tags if tag.startswith("alarm.")]
    for file in client.list_artifacts(run.info.run_id, "episodes"):
        folder = pathlib.Path(run.info.artifact_uri.removeprefix("file://"))
        shown.tables[file.path.rpartition(".")[0].rpartition(".")[0]] = json.loads((folder / file.path).read_text())[
            "data"
        ]
    assert run.info.status in ("FINISHED", "KILLED")
    return shown


def of_trackio(workdir):
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "runs = S.get_runs('jaxagent')\n"
        "print(json.dumps([runs, S.get_logs('jaxagent', runs[0]), S.get_run_config('jaxagent', runs[0]),"
        " S.get_alerts('jaxagent', runs[0])], default=str))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    runs, rows, config, alarms = json.loads(done.stdout.splitlines()[-1])
    shown = Shown()
    shown.runs, shown.config, shown.alarms = len(runs), config, [alarm["title"] for alarm in alarms]
    for row in rows:
        for name, value in row.items():
            if name.startswith("episodes/"):
                shown.tables[name] = [list(each.values()) for each in value["_value"]]
            elif name.startswith("summary/"):
                shown.summary[name] = value
            elif "/" in name:
                shown.values[name, row["step"]].append(value)
    return shown


SHOWN = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_goes_back_and_on_is_one_run_with_the_numbers_of_its_metrics(name, home, monkeypatch):
    needs(name)
    monkeypatch.setattr(metrics, "END_S", 60.0)  # on a busy machine, too
    workdir = home / "runs" / "first"
    workdir.mkdir(parents=True)
    (workdir / CONFIG_FILE).write_text(json.dumps({"seed": 3, "eval": {"every": 2}, "stages": ["rl"], "path": None}))
    notes = []

    def play(position, steps, factor=1.0):
        writer = MetricsWriter(workdir, position, [name], notes.append)
        for step in steps:
            numbers = {"loss": step / 3 * factor, "policy/clip_frac": step / 8, "odd @ name": step / 7}
            writer.write("rl", step, numbers | {"nothing": float("nan")})
        end, before = time.monotonic() + 60, len(notes)
        while len(notes) == before:  # it has begun, and says where to look
            assert time.monotonic() < end
            writer._trackers[name].record({})
            time.sleep(0.1)
        return writer

    logs = store(workdir / "episodes"), store(workdir / "episodes", name="rl.eval")
    logs[0].append(0, [episode("a\ud800", 0), failed("b")], {})
    logs[1].append(2, [episode("c", 0, 0.25, text="<b>\x00\x1b" + "x" * 5000)], {})
    for log in logs:
        log.close()
    writer = play(0, range(1, 11))
    writer.write("warm_start", 1, {"loss": 0.125})
    writer.close()  # as a signal has it
    assert not writer.dropped and SHOWN[name](workdir).curves() == curves(workdir, name)
    before = sum(map(len, SHOWN[name](workdir).values.values()))
    play(8, [9, 10]).close()  # made again, to the bit
    (workdir / SUMMARY_FILE).write_text(json.dumps(SUMMARY))
    writer = play(9, [10, 11, 12], 2.0)  # one of them otherwise
    writer.end_tracking(finished=True)
    writer.close()
    shown = SHOWN[name](workdir)
    wanted = curves(workdir, name) | {("warm_start/loss", 1): 0.125}  # a tracker keeps what it was told
    assert not writer.dropped and shown.runs == 1 and shown.curves() == wanted
    again = len({key for key in shown.values if key[1] in (10, 11, 12) and key[0] != "warm_start/loss"})
    assert sum(map(len, shown.values.values())) == before + again
    assert shown.config["seed"] == 3 and "policy_leaps" not in shown.alarms and "clip_share" in shown.alarms
    assert shown.summary["summary/reward"] == 0.5 and shown.summary["summary/inner.steps"] == 4
    assert set(shown.tables) == {"episodes/rl", "episodes/rl.eval"}
    (first, second), (held_out,) = shown.tables["episodes/rl"], shown.tables["episodes/rl.eval"]
    assert first == [0, "a?", 0, "Who is a??", "text of a? 0", 1.5, "answer"] and second[5:] == [None, "timeout"]
    assert held_out[4].startswith("<b>") and len(held_out[4]) < 2100 and held_out[5] == 0.75
    assert len([note for note in notes if note.startswith(name)]) == 3  # where to look, once for each start


@pytest.mark.slow
def test_runs_that_begin_together_beside_each_other_are_all_in_mlflow(home):
    """None has made its tables, nor its experiment, when the others look."""
    needs("mlflow")
    workdirs = [home / "all my runs" / name for name in ("first", "second", "third")]
    for workdir in workdirs:
        workdir.mkdir(parents=True)
        (workdir / CONFIG_FILE).write_text("{}")
        (workdir / METRICS_FILE).write_text('{"stage": "rl", "step": 1, "loss": 0.5}\n')
    command = [sys.executable, "-m", "jaxagent.observe.track"]
    senders = [
        subprocess.Popen([*command, workdir, "mlflow"], cwd=tiny_run.ROOT, stdout=subprocess.PIPE, text=True)
        for workdir in workdirs
    ]
    said = [sender.communicate(timeout=120)[0] for sender in senders]
    assert [sender.returncode for sender in senders] == [0, 0, 0], said
    assert f"'sqlite:///{home}/all my runs/mlflow.db'" in said[0] and of_mlflow(workdirs[0]).runs == 3


@pytest.mark.slow
def test_a_server_that_never_answers_costs_a_run_less_than_5_s_and_learns_no_key(home, monkeypatch):
    """While wandb waits for its first word; later it has gone on offline by itself, and nothing is lost."""
    needs("wandb")
    server, connections = socket.create_server(("127.0.0.1", 0)), []
    threading.Thread(target=lambda: [connections.append(server.accept()) for _ in range(99)], daemon=True).start()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    workdir, notes = home / "runs" / "first", []
    workdir.mkdir(parents=True)
    (workdir / CONFIG_FILE).write_text("{}")
    for position, seconds in ((0, 3), (3, 30)):
        began = time.monotonic()
        writer = MetricsWriter(workdir, position, ["wandb"], notes.append)
        for step in range(position + 1, position + 4):
            writer.write("rl", step, {"loss": 1 / step})
            time.sleep(seconds / 3)
        writer.end_tracking(finished=True)
        writer.close()
        assert time.monotonic() - began < seconds + 5
        assert bool(writer.dropped) is (position == 0) and connections
    assert "goes on offline" in notes[-1] and of_wandb(workdir).curves() == curves(workdir)
    kept = b"".join(path.read_bytes() for path in workdir.rglob("*") if path.is_file()) + "".join(notes).encode()
    assert KEY.encode() not in kept


@pytest.mark.nightly
def test_a_run_that_is_killed_and_goes_on_is_one_run_in_all_trackers(home):
    for name in NAMES:
        needs(name)
    workdir = home / "runs" / "first"
    workdir.parent.mkdir()
    flags = "--config.track=wandb,mlflow,trackio,tensorboard", "--config.rl.steps=8", "--config.checkpoint.every=3"
    run = tiny_run.start(workdir, *flags)
    end = time.monotonic() + 300
    while not any(r["stage"] == "rl" and r["step"] >= 4 for r in jsonl.read(workdir / METRICS_FILE)):
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.1)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert tiny_run.start(workdir, *flags).wait(400) == 0, (home / "runs" / "first.log").read_text()
    summary = json.loads((workdir / SUMMARY_FILE).read_text())
    for name, reason in summary.get("dropped_trackers", {}).items():  # slow to start, on a busy machine
        assert "not ready" in reason
        command = [sys.executable, "-m", "jaxagent.observe.track", str(workdir), name]
        subprocess.run(command, check=True, timeout=120, cwd=tiny_run.ROOT)
    wanted = curves(workdir)
    assert {("rl/reward/mean", step) for step in range(1, 9)} <= set(wanted)
    for name, of_tracker in SHOWN.items():
        shown = of_tracker(workdir)
        assert shown.runs == 1 and shown.curves() == wanted, name
        assert {"episodes/rl", "episodes/rl.eval"} <= set(shown.tables), name
        assert shown.summary["summary/reward/mean" if "reward/mean" in summary else "summary/seed"] is not None
