"""Trackers of a run: whatever a tracker's package does, the run goes on, ends soon, and says once what was wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxagent import main
from jaxagent.config import ConfigError, flags
from jaxagent.observe import jsonl, metrics, track
from jaxagent.observe.files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from jaxagent.observe.metrics import MetricsWriter
from tests.observe.test_episode_store import episode, store
from tests.tiny_run import ROOT

KEY = "0123456789abcdef"
# Notes down what it is told, and misbehaves where FAKE_MODE says so.
FAKE = """
import ctypes, json, os, time

class AlertLevel: WARN = "warn"
class Table:
    def __init__(self, columns, data): self.rows = [dict(zip(columns, row)) for row in data]

def told(what, *more):
    how, _, where = os.environ.get("FAKE_MODE", "").partition("_")
    if where == what and how == "hang": time.sleep(1000)
    if where == what and how == "hold": ctypes.PyDLL(None).sleep(1000)  # no other thread runs meanwhile
    if where == what and how == "exit": os._exit(3)
    if where == what and how == "end": os._exit(0)
    if where == what and how == "leave": raise SystemExit(0)
    if where == what and how == "raise":
        raise RuntimeError(f"no: key {os.environ['FAKE_API_KEY']} at http://me:word@host/x")
    with open(os.environ["FAKE_LOG"], "a") as file:
        print(json.dumps([what, *more]), file=file)

told("import")
class Run:
    def log(self, values, step=None):
        told("record", {name: getattr(value, "rows", value) for name, value in values.items()}, step)
    def alert(self, title, text, level, step): told("alarm", title, text, step)
    def finish(self): told("finish")
def init(project, name, resume, config, embed):
    told("init", name, config)
    return Run()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A function that reads what the fake package was told."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "trackio.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "told"))
    monkeypatch.setenv("FAKE_API_KEY", KEY)
    (tmp_path / "told").touch()
    return lambda: list(map(json.loads, (tmp_path / "told").read_text().splitlines()))


@pytest.fixture
def workdir(tmp_path):
    folder = tmp_path / "my runs" / "first"
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"seed": 3, "eval": {"every": 2}, "rl": {"steps": 9}}))
    (folder / SUMMARY_FILE).write_text(json.dumps({"reward": 0.5, "inner": {"x": 2}, "text": "t"}))
    return folder


def waited(for_what, seconds=30.0):
    end = time.monotonic() + seconds
    while not for_what():
        assert time.monotonic() < end
        time.sleep(0.05)


MISBEHAVIOUR = [
    "hang_import",
    "hold_import",
    "raise_import",
    "raise_init",
    "exit_record",
    "end_record",
    "leave_record",
    "hang_finish",
]


@pytest.mark.parametrize("mode", MISBEHAVIOUR)
def test_a_tracker_that_misbehaves_costs_a_run_little_and_is_dropped(mode, fake, workdir, monkeypatch):
    monkeypatch.setenv("FAKE_MODE", mode)
    quick = mode.startswith("hang_import")  # one with the limit that runs have
    limit = metrics.END_S if quick else 2.5
    monkeypatch.setattr(metrics, "END_S", limit)
    notes, began = [], time.monotonic()
    writer = MetricsWriter(workdir, 0, ["trackio", "tensorboard"], notes.append)
    process = writer._trackers["trackio"]._process
    for step in range(1, 200):
        writer.write("rl", step, {"x": step / 8})
    told_in = time.monotonic() - began
    hangs = mode.startswith(("hang", "hold"))
    if not hangs:
        waited(lambda: process.poll() is not None)
        writer.write("rl", 200, {"x": 25.0})
        assert "trackio" in writer.dropped
    before = time.monotonic()
    writer.end_tracking(finished=True)
    writer.close()
    cost = time.monotonic() - before
    assert told_in < 5 and (limit <= cost < limit + 1 if hangs else cost < 1)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    (note,) = [note for note in notes if "dropped" in note]
    reasons = {"hang": "not ready", "hold": "not ready", "raise": "RuntimeError: no: key ***"}
    reasons |= {"exit": "code 3", "end": "code 0"}
    reason = writer.dropped.pop("trackio")
    assert not writer.dropped and reason in note and reasons.get(mode.partition("_")[0], "SystemExit") in reason
    assert f"jaxagent.observe.track '{workdir}' trackio" in note
    assert [r["step"] for r in jsonl.read(workdir / METRICS_FILE)] == list(range(1, 200 if hangs else 201))
    everything = b"".join(path.read_bytes() for path in workdir.rglob("*") if path.is_file()) + "".join(notes).encode()
    assert KEY.encode() not in everything and b"me:word" not in everything


def test_a_run_that_is_killed_goes_on_as_the_same_one_there(fake, workdir, monkeypatch):
    monkeypatch.setattr(metrics, "END_S", 60.0)  # on a busy machine, too
    code = (
        "import sys, time; from jaxagent.observe.metrics import MetricsWriter\n"
        f"writer = MetricsWriter({str(workdir)!r}, 0, ['trackio'])\n"
        "for step in range(1, 5): writer.write('rl', step, {'x': 1 / step, 'y': float('nan')})\n"
        "time.sleep(1000)"
    )
    paths = os.pathsep.join([str(workdir.parents[1] / "packages"), str(ROOT)])
    run = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    waited(lambda: len(fake()) == 6)
    run.kill()
    run.wait()
    waited(lambda: fake()[-1] == ["finish"])  # its process has seen it, and ended by itself
    first = fake()
    writer = MetricsWriter(workdir, 2, ["trackio"])
    for step, x in ((3, 1 / 3), (4, 9.0), (5, 0.2)):  # made again: one as it was, one otherwise
        writer.write("rl", step, {"x": x, "y": float("nan")})
    writer.end_tracking(finished=True)
    writer.close()
    again = fake()[len(first) :]
    assert not writer.dropped and first[1][:2] == again[1][:2]  # the name
    assert first[2:] == [*(["record", {"rl/x": 1 / step}, step] for step in range(1, 5)), ["finish"]]
    assert again[2:4] == [["record", {"rl/x": 9.0}, 4], ["record", {"rl/x": 0.2}, 5]]
    assert again[4:] == [["record", {"summary/reward": 0.5, "summary/inner.x": 2}, None], ["finish"]]
    assert again[1][2] == json.loads((workdir / CONFIG_FILE).read_text())  # and nothing else


def test_alarms_and_a_few_episodes_are_told_once(fake, workdir):
    logs = {name: store(workdir / "episodes", name=name) for name in ("rl", "rl.eval")}
    for step in range(6):
        long = [episode(f"{step}\ud800", i, text="a" * 3000 + f"end {i}") for i in range(12)]
        logs["rl"].append(step, long, {})
    logs["rl.eval"].append(2, [episode("held out")], {})
    for log in logs.values():
        log.close()
    writer = MetricsWriter(workdir, 0, [])
    for step in range(1, 9):
        writer.write("rl", step, {"policy/clip_frac": 0.75 if 2 < step < 7 else 0.0})
    writer.close()
    arguments = [sys.executable, "-m", "jaxagent.observe.track", str(workdir), "trackio"]
    paths = os.pathsep.join([str(workdir.parents[1] / "packages"), str(ROOT)])
    for _ in range(2):  # afterwards, by its command; the second time there is nothing new
        subprocess.run(arguments, check=True, timeout=60, env={**os.environ, "PYTHONPATH": paths})
    said = fake()
    assert [each[1] for each in said if each[0] == "alarm"] == ["clip_share"] * 2
    tables = [each for each in said if each[0] == "record" and any("episodes/" in name for name in each[1])]
    assert [(next(iter(values)), step) for _, values, step in tables] == [
        ("episodes/rl.eval", 2), ("episodes/rl", 0), ("episodes/rl", 1), ("episodes/rl", 3), ("episodes/rl", 5)
    ]  # fmt: skip
    rows = tables[1][1]["episodes/rl"]
    assert len(rows) == track.TABLE_EPISODES and rows[0]["task"] == "0?" and rows[3]["answer"].endswith("end 3")
    assert rows[1] | {"answer": ""} == {
        **{"step": 0, "task": "0?", "attempt": 1, "prompt": "Who is 0??", "answer": "", "reward": 1.5, "stop": "answer"}
    }
    assert len(rows[0]["answer"]) < track.TABLE_CHARS + 60
    assert len([each for each in said if each[0] == "record" and "rl/policy/clip_frac" in each[1]]) == 8


def test_a_package_that_is_silent_is_ended_by_the_kernel(fake, workdir, monkeypatch):
    """Also where it lets no other thread run, and when the run itself is long gone."""
    monkeypatch.setenv("FAKE_MODE", "hold_init")
    (workdir / METRICS_FILE).touch()
    code = f"from jaxagent.observe import track; track.SILENT_S = 1; track.main([{str(workdir)!r}, 'trackio'])"
    paths = os.pathsep.join([str(workdir.parents[1] / "packages"), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", code], timeout=60, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == -signal.SIGALRM


def test_a_package_that_is_not_installed_is_a_mistake_before_all_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb").mkdir()  # what offline runs leave in a current directory
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(ConfigError, match=f"'{name}', which is not installed: pip install {name}"):
            metrics.check_trackers(["tensorboard", name])
    metrics.check_trackers([])
    monkeypatch.undo()

    def refuse(names):
        raise ConfigError(f"asked for {names}")

    monkeypatch.setattr(metrics, "check_trackers", refuse)
    argv = ["main", "--config=search_r1:laptop", f"--config.workdir={tmp_path / 'run'}", "--config.track=wandb,trackio"]
    for more in ([], ["--dry_run"]):
        assert main.main([*argv, *more]) == 2 and "asked for ('wandb', 'trackio')" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_command_for_afterwards_says_what_is_missing(workdir, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)  # of a process of its own
    with pytest.raises(ConfigError, match="is no run's folder"):
        track.main([str(workdir), "wandb"])
    (workdir / METRICS_FILE).touch()
    with pytest.raises(ConfigError, match=r"wandb.*: pip install wandb\."):
        track.main([str(workdir), "wandb"])


@pytest.mark.parametrize(
    ("text", "names"),
    [("none", ()), ("()", ()), ("wandb", ("wandb",)), ("mlflow,tensorboard,mlflow", ("mlflow", "tensorboard"))],
)
def test_what_a_command_line_says(text, names):
    argv = ["main", "--config=search_r1:laptop"]
    assert flags.parse_argv(argv).config.trackers == ("tensorboard",)
    assert flags.parse_argv([*argv, f"--config.track={text}"]).config.trackers == names
    for wrong in ("wanbd", "off"):  # "off" would be the default, and so the contrary
        with pytest.raises(ConfigError, match=r"config\.track\[0\] must be one of 'wandb'"):
            flags.parse_argv([*argv, f"--config.track={wrong}"])
