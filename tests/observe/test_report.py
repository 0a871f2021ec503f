"""The report: one self-contained page from whatever the workdir holds, with every token as it was."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

from configs import search_r1
from jaxagent import types
from jaxagent.config import ConfigError, EpisodesConfig, parse, to_dict
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.observe import charts, jsonl, report, report_episodes
from jaxagent.observe.episode_store import EpisodeStore, StoredEpisodes
from jaxagent.observe.episodes import episode_record, report_record
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


# As much of a page as the script asks for; prints what it shows of the chosen episodes, and of all, opened.
DOM = """
class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, style: { setProperty() {} }, on: {} });
  }
  append(...all) { this.children.push(...all); }
  replaceChildren(...all) { this.children = all; }
  addEventListener(name, does) { this.on[name] = does; }
  querySelector(what) { return found[what] ??= new Element(what); }
  querySelectorAll() { return []; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((c) => (typeof c === "string" ? c : c.textContent)).join("|"); }
}
const found = {}, ids = {};
for (const name of ["browser", "episodes", "tip", "pairs"]) ids[name] = new Element("div");
ids.episodes.textContent = require("fs").readFileSync(process.argv[2], "utf8");
found.input = Object.assign(new Element("input"), { value: "" });
globalThis.document = Object.assign(new Element("document"), {
  getElementById: (id) => ids[id], createElement: (tag) => new Element(tag),
});
require("vm").runInThisContext(require("fs").readFileSync(process.argv[3], "utf8"));
for (const row of found[".rows"].children) { row.open = true; row.on.toggle(); }
const name = (e) => (e.className ? `${e.tag}.${e.className}` : e.tag);
const tree = (e) => (typeof e === "string" ? e : [name(e), ...e.children.map(tree)]);
console.log(JSON.stringify([ids.pairs, found[".rows"]].map(tree)));
"""


def _records(text: str) -> dict:
    """What a page holds of episodes, for its script."""
    return json.loads(re.search(r'<script type="application/json" id="episodes">(.*?)</script>', text, re.DOTALL)[1])


def _browsed(text: str) -> list[dict]:
    return _records(text)["all"]


def _shown(text: str, folder) -> list:
    """The trees ["tag.class", child, ...] that the page's script makes: of the chosen episodes, and of all."""
    if shutil.which("node") is None:
        pytest.skip("there is no node to run the page's script")
    (folder / "episodes.json").write_text(json.dumps(_records(text)))
    (folder / "dom.js").write_text(DOM)
    script = report.pathlib.Path(report.__file__).parent / "report.js"
    words = ["node", str(folder / "dom.js"), str(folder / "episodes.json"), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _texts(tree, tag: str = "") -> list[str]:
    """The texts below the elements of a "tag.class"; "" = all."""
    if isinstance(tree, str):
        return [] if tag else [tree]
    return [text for child in tree[1:] for text in _texts(child, "" if tree[0] == tag else tag)]


def test_token_texts_join_to_the_text_and_split_characters_are_kept():
    record = episode_record(_episode(), BYTES, stage="rl", step=3, split="eval")
    assert "".join(record["trajectories"][0]["texts"]) == "Who? <b>\né!<i>São</i>again"
    (columns,) = report_record(record)["trajectories"]
    assert len({len(column) for column in columns.values()}) == 1
    logprobs = [value for value in columns["logprob"] if value is not None]
    assert logprobs == [-0.25] * len("é!".encode())
    assert json.loads(json.dumps(record)) == record


def test_page_is_self_contained_and_shows_every_token(tmp_path, of_bytes):
    log = jsonl.JsonlLog(tmp_path / METRICS_FILE)
    for step in range(3):
        log.append(
            {"stage": "rl", "step": step, "reward/em": step / 3, "stop/answer": 1.0, "odd/one": step, "nan": None}
        )
    _keep(tmp_path, "rl.eval", (3, [_episode()]))
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"eval/em_before_rl": 0.25, "eval/em_after_rl": 0.75, "seed": 0}))
    text = report.write_report(tmp_path).read_text()
    assert not re.search(r"<[^>]* (src|href)=", text) and "http" not in text and "@import" not in text
    assert "+0.500" in text and "odd/one" in text and "tool <" not in text
    for shown in _shown(text, tmp_path):
        assert "".join(_texts(shown, "div.tokens")).replace("↵", "") == "Who? <b>\né!<i>São</i>again"
        assert any("tool <died>" in each for each in _texts(shown))
    assert not list(tmp_path.glob(".report*"))


@pytest.fixture
def of_bytes(monkeypatch):
    """A tokenizer whose token i is byte i."""
    monkeypatch.setattr(report_episodes, "token_table", lambda workdir, config: BYTES)


def _keep(workdir, name, *steps):
    log = EpisodeStore(workdir / EPISODES_FOLDER, name, 0, EpisodesConfig(), False)
    for step, episodes in steps:
        log.append(step, episodes, {})
    log.close()


def _log(path, *records):
    log = jsonl.JsonlLog(path)
    log.extend(records)
    log.close()


def test_all_logged_episodes_can_be_browsed_those_of_training_too(tmp_path):
    """Training episodes are logged as token ids: their text comes from the run's tokenizer."""
    evil = dataclasses.replace(_episode("q0", 0.0), task=types.Task("q0", "</script><b>", ("x",), ""))
    failed = _episode("q2", 0.0, types.StopReason.TIMEOUT)
    tokenizer = Tokenizer.train(["some text"], 300, [])
    tokenizer.save(tmp_path / "tokenizer")
    ids = np.array(tokenizer.encode("Who? é! yes"), np.int32)
    kinds = np.full(len(ids), ACTION, np.uint8)
    kinds[0] = PROMPT
    logprobs, versions = np.float32(-0.12345) * kinds, np.where(kinds == ACTION, 5, -1)
    flat = types.Trajectory(ids, kinds, logprobs, versions, kinds * 0)
    trained = dataclasses.replace(_episode("q1"), trajectories=(flat,))
    evil, failed = [dataclasses.replace(e, trajectories=(flat,)) for e in (evil, failed)]
    _keep(tmp_path, "rl", (1, [trained]))
    _keep(tmp_path, "rl.eval", (2, [evil, failed]))
    text = report.write_report(tmp_path).read_text()
    newest, evil_one, of_training = _browsed(text)
    assert evil_one["prompt"] == "</script><b>" and evil_one["reward"] == 0.0
    assert newest["reward"] is None, "what failed has no reward"
    assert all("failed" in _texts(shown, "span.loss") for shown in _shown(text, tmp_path))
    (columns,) = of_training["trajectories"]
    assert (of_training["split"], of_training["task"], of_training["kind"]) == ("train", "q1", "one_hop/x")
    assert "".join(columns["text"]) == "Who? é! yes" and columns["kind"] == "0" + "1" * (len(ids) - 1)
    assert columns["logprob"] == [-0.123] * (len(ids) - 1) and columns["turn"] == [len(ids), 0]
    assert columns["version"] == [len(ids) - 1, 5]
    assert "All 3 episodes" in text
    (tmp_path / "tokenizer/tokenizer.json").unlink()
    (columns,) = _browsed(report.write_report(tmp_path).read_text())[2]["trajectories"]
    assert columns["text"] == [f" {token}" for token in ids]


def test_a_big_log_does_not_make_the_page_big(tmp_path):
    _keep(tmp_path, "rl.eval", *((i, [_episode(f"q{i}")]) for i in range(200)))
    size = StoredEpisodes(tmp_path / EPISODES_FOLDER, "rl.eval").blocks[0]["body"] * 200
    found, said = report_episodes.browsed(tmp_path, BYTES, limit=20_000)
    assert 10 < len(found) < 100 and said.startswith(f"The newest {len(found)} of 200 episodes")
    assert [record["step"] for record in found] == list(range(199, 199 - len(found), -1))
    ends = [record["step"] for record in report_episodes.evaluations(tmp_path, BYTES, limit=size // 4)]
    assert ends[0] == 0 and ends[-1] == 199 and 40 < len(ends) < 52, "the first try and the last of a task"
    assert report_episodes.browsed(tmp_path / "nowhere", None)[0] == []


def test_the_end_of_a_long_episode_is_not_hidden(tmp_path):
    columns = {"text": [f"<{i}>" for i in range(1000)], "kind": [1] * 1000, "logprob": [-1.0] * 1000}
    record = report_record(episode_record(_episode(), BYTES, stage="rl", step=3, split="eval"))
    record["trajectories"] = [columns | {"turn": [0] * 1000, "version": [0] * 1000}]
    for shown in _shown(report_episodes.markup([[record]], [report_episodes.compact(record)], ""), tmp_path):
        tokens = _texts(shown, "div.tokens")
        assert tokens == [*columns["text"][:60], "700 tokens", *columns["text"][60:]]
        assert _texts(shown, "details") == ["700 tokens", *columns["text"][60:-240]]
    css = (report.pathlib.Path(report.__file__).parent / "report.css").read_text()
    assert "max-height" not in css, "nothing scrolls inside the page"


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
    text = report.write_report(tmp_path, {"first_failure": "no <server>"}).read_text()
    assert "+0.500" in text and "held-out em, two hop <span" in text and "nothing was measured" in text
    assert "rl 4, rl.eval 1" in text and "no &lt;server&gt;" in text
    assert ">None<" not in text


def test_the_kind_of_a_task_is_text_and_no_markup(tmp_path):
    kind = "<img src=x onerror=alert(1)>"
    scores = [{"eval/em": em, f"eval/em_{kind}": em, f"eval/em/{kind}/b": em} for em in (0.25, 0.75)]
    _log(tmp_path / METRICS_FILE, *[{"stage": "rl", "step": step} | found for step, found in enumerate(scores)])
    text = report.write_report(tmp_path).read_text()
    assert "<img" not in text and f"held-out em, {html.escape(kind)} <span" in text


def test_a_kind_of_tasks_may_have_the_words_of_the_summary_in_its_name(tmp_path):
    scores = [{"eval/em": 0.25, "eval/em_day_after_tomorrow": 0.5}, {"eval/em": 0.25, "eval/em_day_after_tomorrow": 1}]
    _log(tmp_path / METRICS_FILE, *[{"stage": "rl", "step": step} | found for step, found in enumerate(scores)])
    text = report.write_report(tmp_path).read_text()
    assert re.search("0.500 →</span> 1.000</b><span>held-out em, day after tomorrow", text)


def test_the_score_is_drawn_against_what_a_task_costs(tmp_path):
    costs = ((0, 0.75, 8.0), (5, None, 4.0), (10, 0.875, 2.0))
    records = [{"stage": "rl", "step": step, "eval/em": em, "eval/cost": cost} for step, em, cost in costs]
    chart = report._against_cost(records, "em")
    assert "Held-out em against cost" in chart and ">cost of a task</text>" in chart
    data = json.loads(html.unescape(re.search('data-series="(.*?)"', chart)[1]))
    evaluations = [[8.0, 0.75], [2.0, 0.875]]
    assert data["series"] == [["evaluations", evaluations], ["first", evaluations[:1]], ["last", evaluations[1:]]]
    assert report._against_cost([{"stage": "rl", "step": 0, "eval/em": 0.75}], "em") == ""
    _log(tmp_path / METRICS_FILE, *records)
    assert "Held-out em against cost" in report.write_report(tmp_path).read_text()


def test_failures_that_only_the_summary_knows_are_shown(tmp_path):
    _log(tmp_path / METRICS_FILE, {"stage": "rl", "step": 2, "episode/count": 8.0, "stop/env_error": 0.5})
    summary = {"failed_episodes": {"warm_start.gate": 5, "rl": 3}}  # of the run before it was told to go on
    (tmp_path / SUMMARY_FILE).write_text(json.dumps(summary))
    assert "episodes failed (warm_start.gate 5, rl 4)" in report.write_report(tmp_path).read_text()


def test_axes_have_names():
    svg = charts.line_chart("t", {"a": [(0, 1.0), (1, 2.0)]}, x="k", y="score <1>")
    xml.etree.ElementTree.fromstring(svg)
    assert ">k</text>" in svg and ">score &lt;1&gt;</text>" in svg
    names = ("eval/em", "policy/entropy", "tokens_per_s", "time/step_s", "groups/zero_signal_frac", "reward/em")
    expected = ["score", "nats per token", "per second", "seconds", "fraction", "reward"]
    assert [report._unit(name) for name in names] == expected


def test_an_empty_or_killed_run_has_a_page_too(tmp_path):
    assert report.write_report(tmp_path).exists()
    (tmp_path / METRICS_FILE).write_bytes(b'{"stage":"rl","step":1,"reward/mean":0.5}\n{"sta')
    assert "Training reward" in report.write_report(tmp_path).read_text()


def test_as_a_command(tmp_path):
    for folder, why in ((tmp_path / "nope", "no such folder."), (tmp_path, "it has neither config.json nor")):
        with pytest.raises(ConfigError, match=re.escape(f"There is no run in '{folder}': {why}")):
            report.main(["report", str(folder)])
    (tmp_path / METRICS_FILE).write_text('{"stage":"rl","step":1}\n')
    command = [sys.executable, "-m", "jaxagent.observe.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(tmp_path / REPORT_FILE), done.stderr
    assert subprocess.run([*command, "x"], capture_output=True, timeout=60).returncode != 0


def _points(svg: str, css: str) -> list[tuple[float, float]]:
    path = re.search(rf'<path d="M([^"]*?)Z?" class="{css}"', svg)[1]
    return [tuple(map(float, pair.split(","))) for pair in path.split("L")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (SUMMARY_FILE, "[1]"),
        (METRICS_FILE, '{"stage": null, "step": 0}\n'),
        (f"{EPISODES_FOLDER}/rl.index", "[]\n"),
    ],
)
def test_a_damaged_workdir_is_told_in_one_line(tmp_path, name, content):
    (tmp_path / EPISODES_FOLDER).mkdir()
    (tmp_path / SUMMARY_FILE).write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}: [^\n]*$"):
        report.main(["report", str(tmp_path)])


def test_a_line_goes_through_its_points():
    svg = charts.line_chart("t <x>", {"a": [(0, 0.0), (10, 1.0), (20, 0.5)]}, unit=True)
    (x0, y0), (x1, y1), (x2, y2) = _points(svg, "line")
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 > y2 > y1, "y grows downwards in SVG"
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.2)
    xml.etree.ElementTree.fromstring(svg)


def test_areas_stack():
    svg = charts.area_chart("t", {"a": [(0, 1.0), (1, 1.0)], "b": [(0, 1.0), (1, 3.0)]})
    xml.etree.ElementTree.fromstring(svg)
    areas = re.findall(r'<path d="M([^"]*)Z" class="area"', svg)
    top_a, top_b = ([tuple(map(float, p.split(","))) for p in area.split("L")] for area in areas)
    assert top_b[2:] == list(reversed(top_a[:2])), "b stands on a"


def test_a_logarithmic_axis_puts_equal_factors_equally_far_apart():
    points = [(512, 0.9), (1024, 0.8), (4096, 0.7)]
    svg = charts.line_chart("t", {"a": points}, unit=True, log_x=True)
    xs = [float(x) for x in re.findall(r'<circle cx="([0-9.]+)"', svg)]
    assert (xs[2] - xs[1]) == pytest.approx(2 * (xs[1] - xs[0]), abs=0.2)
    data = json.loads(html.unescape(re.search(r'data-series="([^"]*)"', svg)[1]))
    assert data["log"] and data["x"] == [512, 4096]
    assert [label in svg for label in (">512<", ">1.024k<", ">4.096k<")] == [True] * 3  # the points' own
    assert "&quot;log&quot;:false" in charts.line_chart("t", {"a": points})


def test_values_that_are_not_finite_leave_a_gap_and_empty_series_no_chart():
    nan = float("nan")
    assert charts.line_chart("t", {"a": [(0, nan)]}) == ""
    assert charts.area_chart("t", {}) == ""
    assert "nan" not in charts.line_chart("t", {"a": [(0, 1.0), (1, nan), (2, 2.0)]})
    assert charts.line_chart("constant", {"a": [(0, 0.0), (1, 0.0)]}, zero=True)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 100, [0, 20, 40, 60, 80, 100]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_labels():
    assert [charts.label(v) for v in (0, 0.25, 2000, 1.5e-6, 3e-6, 2.5e6)] == [
        "0",
        "0.25",
        "2k",
        "1.5e-06",
        "3e-06",
        "2.5M",
    ]


def test_chosen_episodes_pair_first_and_last_and_keep_failures():
    def record(task, step, reward):
        return {"task": task, "step": step, "reward": reward, "turns": 1}

    records = [record(f"t{i}", 0, 0.0) for i in range(20)] + [record(f"t{i}", 9, float(i < 15)) for i in range(20)]
    pairs = report_episodes.choose(records, 9)
    assert len(pairs) == 9
    assert all((a["task"], a["step"], b["step"]) == (b["task"], 0, 9) for a, b in pairs)
    assert any(b["reward"] == 0 for _, b in pairs), "a report of successes alone misleads"


def test_the_subtitle_of_a_recipes_own_config(tmp_path):
    stored = to_dict(parse(search_r1.get_config("laptop-echo")))
    (tmp_path / CONFIG_FILE).write_text(json.dumps(stored))
    text = report.write_report(tmp_path).read_text()
    assert "search: group_mean_std, ppo_clip + ECHO" in text


def _several() -> types.Episode:
    """Two conversations of the policy, a guide before them, one only shown between them, and a critic after both."""
    one = _episode()
    conversation = types.UntrainedConversation
    heard = (
        conversation("guide", (("Who is <he>?", "He & she"), ("More", "L" * 2000)), one.trajectories[0], 0),
        conversation("policy", (("only shown", "here"),), one.trajectories[0], 1),
        conversation("critic", (("Is it so?", "yes"),), None, 2),
    )
    return dataclasses.replace(one, trajectories=[*one.trajectories] * 2, heard=heard)


def test_conversations_with_roles_are_shown_in_their_order_each_with_whose_it_is(tmp_path, of_bytes):
    _keep(tmp_path, "rl.eval", (3, [_several()]))
    text = report.write_report(tmp_path).read_text()
    for shown in _shown(text, tmp_path):
        assert _texts(shown, "h5") == [
            "guide ", "not trained", "policy, conversation 1 ", "trained", "policy ", "not trained",
            "policy, conversation 2 ", "trained", "critic ", "not trained",
        ]  # fmt: skip
        tokens = "".join(_texts(shown, "div.tokens")).replace("↵", "")
        assert tokens == "Who? <b>\né!<i>São</i>again" * 2, "only trained tokens have colours"
        assert _texts(shown, "p.shown")[:2] == ["Who is <he>?", "More"] and _texts(shown, "p.said")[0] == "He & she"
        assert "800 characters" in _texts(shown, "p.said")
    (browsed,) = _browsed(text)
    assert [(talk["role"], talk["after"]) for talk in browsed["heard"]] == [("guide", 0), ("policy", 1), ("critic", 2)]
    assert browsed["heard"][0]["turns"][0] == ["Who is <he>?", "He & she"] and "trajectory" not in browsed["heard"][0]


def test_one_conversation_without_roles_is_shown_as_it_is(tmp_path):
    _keep(tmp_path, "rl.eval", (3, [_episode()]))
    text = report.write_report(tmp_path).read_text()
    assert not any(_texts(shown, "h5") or _texts(shown, "div.talks") for shown in _shown(text, tmp_path))
    assert "heard" not in _browsed(text)[0]
