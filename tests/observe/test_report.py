"""The report: one self-contained page from whatever the workdir holds, with every token as it was."""

import html.parser
import json
import re
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

from jaxagent import types
from jaxagent.observe import charts, jsonl, report, report_episodes
from jaxagent.observe.episodes import episode_record
from jaxagent.observe.files import EPISODES_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE

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


class _Text(html.parser.HTMLParser):
    """Text inside <p class="tokens">, and all tags that load something."""

    def __init__(self):
        super().__init__()
        self.tokens, self.loads, self._inside = "", [], False

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.loads += [value for name, value in attributes.items() if name in ("src", "href")]
        self._inside = self._inside or attributes.get("class") == "tokens"

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "p"

    def handle_data(self, data):
        if self._inside:
            self.tokens += data


def test_token_texts_join_to_the_text_and_split_characters_are_kept():
    record = episode_record(_episode(), BYTES, stage="rl", step=3, split="eval")
    (columns,) = record["trajectories"]
    assert "".join(columns["text"]) == "Who? <b>\né!<i>São</i>again"
    assert len({len(column) for column in columns.values()}) == 1
    logprobs = [value for value in columns["logprob"] if value is not None]
    assert logprobs == [-0.25] * len("é!".encode())
    assert json.loads(json.dumps(record)) == record


def test_page_is_self_contained_and_shows_every_token(tmp_path):
    log = jsonl.JsonlLog(tmp_path / METRICS_FILE)
    for step in range(3):
        log.append(
            {"stage": "rl", "step": step, "reward/em": step / 3, "stop/answer": 1.0, "odd/one": step, "nan": None}
        )
    episodes = jsonl.JsonlLog(tmp_path / EPISODES_FILE)
    episodes.append(episode_record(_episode(), BYTES, stage="rl", step=3, split="eval"))
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"eval/em_before_rl": 0.25, "eval/em_after_rl": 0.75, "seed": 0}))
    text = report.write_report(tmp_path).read_text()
    page = _Text()
    page.feed(text)
    assert page.loads == [] and "http" not in text and "@import" not in text
    assert page.tokens.replace("↵", "") == "Who? <b>\né!<i>São</i>again"
    assert "+0.500" in text and "odd/one" in text and "tool &lt;died&gt;" in text
    assert not (tmp_path / "report.tmp").exists()


def test_an_empty_or_killed_run_has_a_page_too(tmp_path):
    assert report.write_report(tmp_path).exists()
    (tmp_path / METRICS_FILE).write_bytes(b'{"stage":"rl","step":1,"reward/em":0.5}\n{"sta')
    assert "Training reward" in report.write_report(tmp_path).read_text()


def test_as_a_command(tmp_path):
    command = [sys.executable, "-m", "jaxagent.observe.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(tmp_path / REPORT_FILE), done.stderr
    assert subprocess.run([*command, "x"], capture_output=True, timeout=60).returncode != 0


def _points(svg: str, css: str) -> list[tuple[float, float]]:
    path = re.search(rf'<path d="M([^"]*?)Z?" class="{css}"', svg)[1]
    return [tuple(map(float, pair.split(","))) for pair in path.split("L")]


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
