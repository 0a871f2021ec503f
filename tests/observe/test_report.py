"""What a run's page has inside: the run's numbers, the index of its episodes, and as many of these as fit."""

import base64
import dataclasses
import hashlib
import html
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from configs import search_r1
from jaxagent import types
from jaxagent.config import ConfigError, EpisodesConfig, parse, to_dict
from jaxagent.data import codec
from jaxagent.observe import jsonl, report, shown_episodes
from jaxagent.observe.earlier_episodes import episodes_folder
from jaxagent.observe.episode_store import EpisodeStore, Learnt, StoredEpisodes
from jaxagent.observe.files import CONFIG_FILE, EPISODES_FOLDER, METRICS_FILE, REPORT_FILE, SUMMARY_FILE

PROMPT, ACTION, OBSERVATION, WARNING = (int(kind) for kind in types.TokenKind)
BYTES = [bytes([value]) for value in range(256)]


def _episode(task: str = "q1", reward: float = 1.0, reason=types.StopReason.ANSWER) -> types.Episode:
    parts = [("Who? <b>\n", PROMPT), ("é!", ACTION), ("<i>São</i>", OBSERVATION), ("again", WARNING)]
    tokens, kinds = [], []
    for text, kind in parts:
        tokens += list(text.encode())
        kinds += [kind] * len(text.encode())
    mask = np.array(kinds) == ACTION
    trajectory = types.Trajectory(
        np.array(tokens, np.int32),
        np.array(kinds, np.uint8),
        np.where(mask, -0.25, 0).astype(np.float32),
        np.where(mask, 4, -1).astype(np.int32),
        np.zeros(len(tokens), np.int32),
    )
    row = types.Task(task, "Who? & why", ("A & B",), "one_hop/x")
    return types.Episode(row, 0, [trajectory], reward, {"em": reward}, reason, 1, {}, "", "tool <died>")


def _data(path) -> dict:
    """What a page holds for its script."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())[1])


def _keep(workdir, name, *steps):
    log = EpisodeStore(workdir / EPISODES_FOLDER, name, 0, EpisodesConfig(), False)
    for step, episodes in steps:
        log.append(step, episodes, {})
    log.close()


def _log(path, *records):
    log = jsonl.JsonlLog(path)
    log.extend(records)
    log.close()


def test_a_running_run_shows_what_it_has_measured(tmp_path):
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"eval/em_after_rl": 0.1}))  # of before it went on
    old = {"stage": "rl", "episode/count": 8.0, "stop/env_error": 0.25, "stop/timeout": 0.0}
    _log(
        tmp_path / METRICS_FILE,
        {"stage": "rl", "step": 0, "eval/em": 0.25, "eval/n": 4.0, "eval/em/one_hop/x": 1.0},
        old | {"step": 1},
        old | {"step": 2, "eval/em": 0.75, "eval/em_two_hop": None, "eval/n": 4.0, "eval/failed": 1.0},
    )
    found = report.so_far(list(jsonl.read(tmp_path / METRICS_FILE)))
    assert found["failed_episodes"] == {"rl": 4, "rl.eval": 1}
    assert found["eval/em_before_rl"] == 0.25 and found["eval/em_after_rl"] == 0.75 and found["eval/n"] == 4.0
    told = _data(report.write_report(tmp_path, {"first_failure": "no <server>"}))
    tiles = {tile["title"]: tile for tile in told["facts"]["tiles"]}
    assert tiles["held-out em, greedy"] == {"title": "held-out em, greedy", "value": 0.75, "from": 0.25}
    assert tiles["held-out em, two hop"]["value"] is None
    assert tiles["episodes failed (rl 4, rl.eval 1)"]["more"] == "no <server>"
    assert [json.loads(line)["step"] for line in told["metrics"].splitlines()] == [0, 1, 2]


def test_a_kind_of_tasks_may_have_the_words_of_the_summary_in_its_name(tmp_path):
    scores = [{"eval/em": 0.25, "eval/em_day_after_tomorrow": 0.5}, {"eval/em": 0.25, "eval/em_day_after_tomorrow": 1}]
    _log(tmp_path / METRICS_FILE, *[{"stage": "rl", "step": step} | found for step, found in enumerate(scores)])
    tiles = {tile["title"]: (tile.get("from"), tile["value"]) for tile in report.facts(tmp_path, tmp_path)["tiles"]}
    assert tiles["held-out em, day after tomorrow"] == (0.5, 1)


def test_failures_that_only_the_summary_knows_are_shown(tmp_path):
    _log(tmp_path / METRICS_FILE, {"stage": "rl", "step": 2, "episode/count": 8.0, "stop/env_error": 0.5})
    summary = {"failed_episodes": {"warm_start.gate": 5, "rl": 3}}  # of the run before it was told to go on
    (tmp_path / SUMMARY_FILE).write_text(json.dumps(summary))
    assert "episodes failed (warm_start.gate 5, rl 4)" in report.write_report(tmp_path).read_text()


def test_an_empty_or_killed_run_has_a_page_too(tmp_path):
    assert report.write_report(tmp_path).exists()
    (tmp_path / METRICS_FILE).write_bytes(b'{"stage":"rl","step":1,"reward/mean":0.5}\n{"sta')
    assert _data(report.write_report(tmp_path))["metrics"].count("reward/mean") == 1


def test_as_a_command(tmp_path):
    for folder, why in ((tmp_path / "nope", "no such folder."), (tmp_path, "it has neither config.json nor")):
        with pytest.raises(ConfigError, match=re.escape(f"There is no run in '{folder}': {why}")):
            report.main(["report", str(folder)])
    (tmp_path / METRICS_FILE).write_text('{"stage":"rl","step":1}\n')
    command = [sys.executable, "-m", "jaxagent.observe.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(tmp_path / REPORT_FILE), done.stderr
    assert subprocess.run([*command, "x"], capture_output=True, timeout=60).returncode != 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (SUMMARY_FILE, "[1]"),
        (METRICS_FILE, "[1]\n"),
        (f"{EPISODES_FOLDER}/rl.index", "[]\n"),
    ],
)
def test_a_damaged_workdir_is_told_in_one_line(tmp_path, name, content):
    (tmp_path / EPISODES_FOLDER).mkdir()
    (tmp_path / SUMMARY_FILE).write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}: [^\n]*$"):
        report.main(["report", str(tmp_path)])


def test_what_a_recipes_own_config_is_about(tmp_path):
    stored = to_dict(parse(search_r1.get_config("laptop-echo")))
    (tmp_path / CONFIG_FILE).write_text(json.dumps(stored))
    assert report.facts(tmp_path, tmp_path)["about"].startswith("search: group_mean_std, ppo_clip + ECHO")


def test_the_page_lets_nothing_run_but_its_own_script(tmp_path):
    evil = dataclasses.replace(_episode(), task=types.Task("</script><script>x", "<!-- <script>", ("&",), ""))
    _keep(tmp_path, "rl.eval", (3, [evil]))
    path = report.write_report(tmp_path)
    text = path.read_text()
    scripts = re.findall(r"<script(.*?)>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2 and scripts[0][0] == ' type="application/json" id="data"' and "<" not in scripts[0][1]
    digest = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    policy = html.unescape(re.search('Content-Security-Policy" content="(.*?)"', text)[1])
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy and "http:" not in policy
    assert not re.search(r"<[^>]* (src|href|on\w+|style)=", text.replace('href="#main"', ""))
    assert _data(path)["logs"]["rl.eval"]["episodes"]["0"]["task"] == "</script><script>x"


def test_the_page_holds_the_newest_episodes_and_the_first_evaluation(tmp_path, monkeypatch):
    _keep(tmp_path, "rl.eval", *((i, [_episode(f"q{i}")]) for i in range(200)))
    _keep(tmp_path, "rl", *((i, [_episode(f"q{i}")]) for i in range(3)))
    monkeypatch.setattr(report, "EMBEDDED_BYTES", 60_000)
    logs = _data(report.write_report(tmp_path))["logs"]
    rows = sorted(map(int, logs["rl.eval"]["episodes"]))
    assert rows[0] == 0 and rows[1:] == list(range(201 - len(rows), 200)) and 20 < len(rows) < 100
    assert sorted(logs["rl"]["episodes"]) == ["0", "1", "2"] and logs["rl"]["rows"] == 3
    assert logs["rl.eval"]["index"].count("\n") == 200 and logs["rl.eval"]["first"] == 0
    monkeypatch.setattr(report, "INDEX_BYTES", 2_000)
    logs = _data(report.write_report(tmp_path))["logs"]
    lines = [json.loads(line) for line in logs["rl.eval"]["index"].splitlines()]
    assert lines[0]["step"] == logs["rl.eval"]["first"] and lines[-1]["step"] == 199 and len(lines) < 20


def test_an_episode_as_the_page_has_it(tmp_path):
    one = _episode()
    conversation = types.UntrainedConversation
    heard = (
        conversation("guide", (("Who is <he>?", "He & she"), ("More", "L" * 20_000)), one.trajectories[0], 0),
        conversation("critic", (("Is it so?", "yes"),), None, 2),
    )
    trajectory = one.trajectories[0]
    learnt = Learnt(
        np.where(trajectory.action_mask, 0.5, 0).astype(np.float32),
        np.where(trajectory.action_mask, -0.125, np.nan).astype(np.float32),
        trajectory.action_mask & (np.arange(len(trajectory)) % 2 == 0),
    )
    log = EpisodeStore(tmp_path, "rl", 0, EpisodesConfig(), False)
    log.append(3, [dataclasses.replace(one, trajectories=[trajectory] * 2, heard=heard)], {id(trajectory): learnt})
    log.close()
    stored = StoredEpisodes(tmp_path, "rl")
    shown = shown_episodes.shown(stored, 0, BYTES)
    assert shown["prompt"] == ["Who? & why"] and shown["reward"] == 1.0 and shown["step"] == 3
    first, _ = shown["trajectories"]
    (window,) = first["windows"]
    assert "".join(window["text"]) == "Who? <b>\né!<i>São</i>again" and first["length"] == len(window["text"])
    assert window["kind"].count("1") == len(window["logprob"]) == len(window["mask"]) == len("é!".encode())
    assert window["gap"] == [0.125] * 3 and window["advantage"] == [0.5] * 3 and window["mask"] == "010"
    assert window["version"] == [3, 4] and window["turn"] == [len(trajectory), 0]
    assert [(talk["role"], talk["after"]) for talk in shown["heard"]] == [("guide", 0), ("critic", 2)]
    head, left, tail = shown["heard"][0]["turns"][1][1]
    assert len(head) + left + len(tail) == 20_000 and left == 8_000
    assert shown_episodes.shown(stored, 0, None)["trajectories"][0]["windows"][0]["text"][0] == " 87"
    assert json.loads(json.dumps(shown)) == shown


def test_a_long_trajectory_is_cut_and_can_be_read_on(tmp_path):
    tokens = np.arange(10_000, dtype=np.int32) % 256
    zeros = np.zeros(len(tokens))
    long = types.Trajectory(
        tokens, zeros.astype(np.uint8), zeros.astype(np.float32), zeros.astype(np.int32) - 1, zeros.astype(np.int32)
    )
    _keep(tmp_path, "rl", (0, [dataclasses.replace(_episode(), trajectories=[long])]))
    stored = StoredEpisodes(tmp_path / EPISODES_FOLDER, "rl")
    head, tail = shown_episodes.shown(stored, 0, BYTES)["trajectories"][0]["windows"]
    end = head["first"] + len(head["text"])
    assert end < tail["first"] and tail["first"] + len(tail["text"]) == 10_000
    more = shown_episodes.window(stored, 0, 0, end, BYTES)
    assert more["first"] == end and len(more["text"]) == shown_episodes.MOST_TOKENS and "logprob" in more
    for number, first in ((1, 0), (0, 10_000), (0, -1)):
        with pytest.raises(ConfigError, match=f"no token {first} of trajectory {number}"):
            shown_episodes.window(stored, 0, number, first, BYTES)


def test_search_finds_all_words_whatever_their_case(tmp_path):
    texts = ["Paris is it", "PARIS, Texas", "London", "is paris"]
    _keep(tmp_path, "rl", (0, [dataclasses.replace(_episode(f"q{i}"), text=text) for i, text in enumerate(texts)]))
    stored = StoredEpisodes(tmp_path / EPISODES_FOLDER, "rl")
    assert shown_episodes.search(stored, "paris IT") == [0] and shown_episodes.search(stored, "Texas") == [1]
    assert shown_episodes.search(stored, "why q2") == [2] and shown_episodes.search(stored, "<died>") == [0, 1, 2, 3]
    assert shown_episodes.previews(stored, [1]) == {1: {"prompt": "Who? & why", "end": "PARIS, Texas"}}


def test_runs_of_earlier_versions_are_shown_and_left_as_they_are(tmp_path):
    """Evaluations stood in episodes.jsonl, with a text beside each token, and with log_episodes once more."""
    rows = {step: codec.encode_episode(_episode(f"q{step}")) for step in (0, 1)}
    shown = [{"stage": "rl", "step": step, "split": "eval", **row} for step, row in rows.items()]
    for row in shown:
        row["trajectories"] = [{**t, "texts": ["x"] * len(t["tokens"])} for t in row["trajectories"]]
    oldest = {"stage": "rl", "step": 0, "task": "q", "trajectories": []}
    _log(tmp_path / "episodes.jsonl", oldest, *shown)
    (tmp_path / EPISODES_FOLDER).mkdir()
    for name in ("rl", "rl.eval"):
        _log(tmp_path / EPISODES_FOLDER / f"{name}.jsonl", {"stage": "rl", "step": 4, **rows[1]})
    before = sorted(tmp_path.rglob("*"))
    logs = _data(report.write_report(tmp_path))["logs"]
    assert {name: [e["step"] for e in log["episodes"].values()] for name, log in logs.items()} == {
        "rl": [4],
        "rl.eval": [0, 1],
    }
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / REPORT_FILE])


def test_a_run_that_an_earlier_version_began_shows_both_parts(tmp_path):
    rows = [codec.encode_episode(_episode(f"q{step}")) for step in range(3)]
    _log(tmp_path / "run/episodes.jsonl", *({"stage": "rl", "step": step, **row} for step, row in enumerate(rows[:2])))
    spare = tmp_path / "spare"
    assert shown_episodes.logs(episodes_folder(tmp_path / "run", spare)) == ["rl.eval"]
    own = tmp_path / "run" / EPISODES_FOLDER
    log = EpisodeStore(own, "rl.eval", 0, EpisodesConfig(keep="newest", megabytes=1), False)
    log.append(2, [_episode("q2")], {})
    log.wait()
    folder = episodes_folder(tmp_path / "run", spare)
    assert shown_episodes.logs(folder) == ["rl.eval", "earlier.rl.eval"]
    (tmp_path / "run/metrics.jsonl").write_text("")
    shown = _data(report.write_report(tmp_path / "run"))["logs"]
    steps = {name: [e["step"] for e in log["episodes"].values()] for name, log in shown.items()}
    assert steps == {"rl.eval": [2], "earlier.rl.eval": [0, 1]}
    assert list(_data(report.write_report(tmp_path / "run", {}))["logs"]) == ["rl.eval"], "written by the run itself"
    log._file += 1
    log.append(3, [_episode("q3")], {})
    log.wait()
    log.close()
    (own / "rl.eval.00000.blocks").unlink()  # as a bound does
    stored = StoredEpisodes(episodes_folder(tmp_path / "run", spare), "rl.eval")
    assert [len(stored.of(block)) for block in stored.blocks] == [0, 1]


def test_a_page_of_a_run_of_earlier_versions_is_whole_or_not_there(tmp_path, monkeypatch):
    row = codec.encode_episode(_episode("q"))
    (tmp_path / EPISODES_FOLDER).mkdir()
    _log(tmp_path / EPISODES_FOLDER / "rl.jsonl", *({"stage": "rl", "step": step, **row} for step in range(3)))
    calls = []

    def full(*_):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            episodes_folder(tmp_path, tmp_path / "spare")
    for _ in range(2):
        assert StoredEpisodes(episodes_folder(tmp_path, tmp_path / "spare"), "rl").rows == 3


def test_a_log_whose_last_line_is_cut_in_a_character_has_a_report(tmp_path):
    _keep(tmp_path, "rl", (0, [dataclasses.replace(_episode("Ö"), error="Ö")]))
    index = tmp_path / EPISODES_FOLDER / "rl.index"
    line = index.read_bytes()
    index.write_bytes(line + line[: line.index("Ö".encode()) + 1])
    assert _data(report.write_report(tmp_path))["logs"]["rl"]["index"].encode() == line
