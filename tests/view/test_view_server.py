"""The page's server: what it gives, to whom, and that it changes nothing."""

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest
from aiohttp.test_utils import TestClient, TestServer

from jaxagent.config import ConfigError
from jaxagent.observe import page
from jaxagent.observe.episode_store import StoredEpisodes
from jaxagent.view import command, runs
from jaxagent.view.runs import Runs
from jaxagent.view.server import View
from tests.tiny_run import ROOT
from tests.view import made_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made_run.write(root / "one", 6, tasks=4, group=4)
    made_run.write(root / "sweep/two", 3, tasks=4, group=4, seed=1)
    return root


def asked(root, *paths, token="", headers=None, post=None):
    """[(status, headers, body)] of requests, one after the other."""

    async def ask():
        async with TestClient(TestServer(View(Runs(root), token).app())) as client:
            out = []
            for path in paths:
                sent = client.post(path, **post) if post else client.get(path, headers=headers or {})
                async with sent as answer:
                    out.append((answer.status, answer.headers, await answer.read()))
            return out

    return asyncio.run(ask())


def values(root, path):
    ((status, _, body),) = asked(root, path)
    assert status == 200, body
    return json.loads(body)


def digest(folder):
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def test_runs_and_how_they_stand(root):
    lines = {line["name"]: line for line in values(root, "/api/runs")}
    assert list(lines) == ["one", "sweep/two"]
    one = lines["one"]
    assert (one["status"], one["stage"], one["step"], one["steps"], one["score"]) == ("ended", "rl", 6, 6, "em")
    told = values(root, "/api/run?run=sweep/two")
    assert told["logs"] == ["rl"] and told["tiles"][0]["title"] == "held-out em, greedy" and told["config"]["seed"] == 1


def test_a_run_that_is_locked_runs_and_one_that_has_gone_quiet_has_stopped(tmp_path):
    made_run.write(tmp_path / "r", 1, tasks=1, group=2)
    (tmp_path / "r/summary.json").unlink()
    assert runs.line(tmp_path / "r", set())["status"] == "running", "it wrote a moment ago"
    os.utime(tmp_path / "r/metrics.jsonl", (1, 1))
    assert runs.line(tmp_path / "r", set())["status"] == "stopped"
    with (tmp_path / "r/.lock").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        locks = runs.held_locks()
        inode = os.stat(tmp_path / "r/.lock").st_ino
        if not any(place[2] == inode for place in locks):
            pytest.skip("this machine does not say which files are locked")
        assert (
            runs.line(tmp_path / "r", {(os.major(d), os.minor(d), inode) for d in [os.stat(lock.name).st_dev]})[
                "status"
            ]
            == "running"
        )
    (tmp_path / "r/config.json").write_text("[")
    (line,) = Runs(tmp_path).lines()
    assert line["status"] == "damaged" and "JSONDecodeError" in line["error"]


def test_files_of_lines_are_read_on_from_where_the_last_answer_ended(root):
    path = root / "one/metrics.jsonl"
    content = path.read_bytes()
    ((_, headers, body),) = asked(root, "/api/metrics?run=one&from=0")
    assert body == content and headers["X-Next"] == str(len(content)) and headers["X-From"] == "0"
    ((_, headers, body),) = asked(root, f"/api/metrics?run=one&from={len(content) + 5}")
    assert body == content and headers["X-From"] == "0", "the run has gone back"
    ((_, headers, body),) = asked(root, "/api/index?run=one&log=rl&from=0")
    assert body == (root / "one/episodes/rl.index").read_bytes()
    rows = sum(len(json.loads(line)["sample"]) for line in body.splitlines())
    assert rows == 96 == StoredEpisodes(root / "one/episodes", "rl").rows


def test_episodes_previews_and_search(root):
    shown = values(root, "/api/episode?run=one&log=rl&row=3")
    assert shown["step"] == 0 and shown["trajectories"][0]["windows"][0]["mask"]
    found = values(root, "/api/search?run=one&log=rl&words=QUESTION+where")
    assert found == list(range(96))
    previews = values(root, "/api/previews?run=one&log=rl&rows=0,95")
    assert previews["95"]["prompt"].startswith("Question") and len(previews) == 2
    assert values(root, "/api/verdict?run=one&step=3") == {"state": "none"}


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        ("/api/run?run=nope", 404, "There is no run 'nope'"),
        ("/api/run?run=../..", 404, "There is no run"),
        ("/api/metrics?run=one/../one", 404, "There is no run"),
        ("/api/index?run=one&log=../../x", 404, "has no log of episodes"),
        ("/api/episode?run=one&log=rl&row=96", 404, "has no episode 96"),
        ("/api/episode?run=one&log=rl&row=x", 500, "ValueError"),
        ("/api/episode?run=one", 500, "KeyError"),
        ("/api/window?run=one&log=rl&row=1&trajectory=5&from=0", 404, "no token 0 of trajectory 5"),
        ("/page.css", 404, ""),
        ("/api/verify", 405, ""),
    ],
)
def test_what_is_not_there(root, path, status, why):
    ((got, headers, body),) = asked(root, path)
    assert got == status and why in json.loads(body)["error"] and headers["X-Content-Type-Options"] == "nosniff"


def test_every_answer_forbids_what_the_page_does_not_need(root):
    for status, headers, _ in asked(root, "/", "/app.js", "/app.css", "/api/runs", "/api/nope"):
        policy = headers["Content-Security-Policy"]
        assert policy == page.POLICY and status in (200, 404)
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    text = page.served()
    assert "style=" not in text and not re.search(r"\son\w+=", text) and text.count("<script") == 1


def test_another_sites_page_reads_nothing(root):
    """A name that another site has pointed at this machine; a form that it has a browser send."""
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example:8090"):
        ((status, _, body),) = asked(root, "/api/runs", headers={"Host": host})
        assert status == 403 and b"one" not in body
    for host in ("localhost:1234", "[::1]:80", "127.0.0.1"):
        assert asked(root, "/api/runs", headers={"Host": host})[0][0] == 200
    ((status, _, body),) = asked(root, "/api/verify", post={"data": b'{"run":"one","step":0,"stage":"rl"}'})
    assert status == 415


def test_elsewhere_a_token_is_needed(root):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        status, _, body = asked(root, "/api/runs", token="secret-token", headers=headers)[0]
        assert status == 401 and b"token" in body
    good = {"Authorization": "Bearer secret-token", "Host": "any.example"}
    assert [status for status, _, _ in asked(root, "/api/runs", "/", token="secret-token", headers=good)] == [200, 200]
    assert asked(root, "/", token="secret-token")[0][0] == 200, "the page itself says nothing"


def test_nothing_that_is_asked_changes_a_run(root):
    before = digest(root)
    asked(root, "/", "/api/runs", "/api/run?run=one", "/api/metrics?run=one", "/api/index?run=one&log=rl",
          "/api/search?run=one&log=rl&words=a", "/api/episode?run=one&log=rl&row=1")  # fmt: skip
    assert digest(root) == before


def test_a_step_without_a_record_is_not_made_again(root):
    ((status, _, body),) = asked(root, "/api/verify", post={"json": {"run": "one", "step": 0, "stage": "rl"}})
    assert status == 404 and "has no record" in json.loads(body)["error"]


def test_a_step_is_made_again_by_a_process_and_its_verdict_is_told(root, tmp_path, monkeypatch):
    shutil.copytree(root / "one", tmp_path / "runs/one")
    (tmp_path / "runs/one/record/rl").mkdir(parents=True)
    (tmp_path / "runs/one/record/rl/00000002.step").touch()
    # In the replay's place a program that prints as it does: what a replay says is tested in tests/replay.
    (tmp_path / "jaxagent/replay").mkdir(parents=True)
    (tmp_path / "jaxagent/__init__.py").touch()
    (tmp_path / "jaxagent/replay/__init__.py").touch()
    last = {"verdict": "failed", "asked": {}, "checked": {"episodes": 8}, "differences_in_all": 2, "why": []}
    code = f"import sys\nprint(sys.argv[1:])\nprint({json.dumps(last)!r})\nsys.exit(1)\n"
    (tmp_path / "jaxagent/replay/__main__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    async def verify():
        async with TestClient(TestServer(View(Runs(tmp_path / "runs"), "").app())) as client:
            wanted = {"run": "one", "step": 2, "stage": "rl"}
            async with client.post("/api/verify", json=wanted) as answer:
                assert answer.status == 200 and (await answer.json())["state"] == "running"
            for _ in range(200):
                async with client.get("/api/verdict?run=one&step=2") as answer:
                    verdict = await answer.json()
                if verdict["state"] == "ended":
                    return verdict
                await asyncio.sleep(0.05)

    verdict = asyncio.run(verify())
    assert verdict["verdict"] == "failed" and verdict["code"] == 1 and verdict["differences"] == 2
    assert "--step=2" in verdict["lines"][0] and f"--config.workdir={tmp_path / 'runs/one'}" in verdict["lines"][0]


def test_the_command(root, tmp_path):
    with pytest.raises(ConfigError, match="There is no folder"):
        command.run(command.arguments([str(tmp_path / "nope")]))
    with pytest.raises(ConfigError, match="There is no run in"):
        command.run(command.arguments([str(tmp_path)]))
    for host, wanted in (
        ("127.0.0.1", r"http://127\.0\.0\.1:\d+/"),
        ("0.0.0.0", r"http://0\.0\.0\.0:\d+/#token=\S{32}"),
    ):
        words = [sys.executable, "-m", "jaxagent.view", str(root), "--port=0", f"--host={host}"]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            shown = process.stdout.readline().strip()
            assert re.fullmatch(wanted, shown)
            urllib.request.urlopen(shown.replace("0.0.0.0", "127.0.0.1").partition("#")[0], timeout=20).close()
        finally:
            process.terminate()
            assert process.wait(20) == 0


def test_nine_thousand_episodes_are_searched_and_listed_quickly(tmp_path):
    made_run.write(tmp_path / "r", 10)
    folder = tmp_path / "r/episodes"
    index = (folder / "rl.index").read_bytes()
    (folder / "rl.index").write_bytes(index * 7)  # the same blocks again
    log = StoredEpisodes(folder, "rl")
    assert log.rows == 8960
    from jaxagent.observe import shown_episodes

    started = time.process_time()
    assert len(shown_episodes.search(log, "capital river")) > 10
    assert time.process_time() - started < 3.0  # 0.1 s alone


def test_hostile_episodes_are_answered_with_bounded_json(tmp_path):
    made_run.write(tmp_path / "h", 1, tasks=1, group=2, evil=50)
    rows = ",".join(map(str, range(50)))
    paths = [f"/api/episode?run=h&log=evil&row={row}" for row in (7, 0, 13, 29, 42)]
    answers = asked(tmp_path, f"/api/previews?run=h&log=evil&rows={rows}", "/api/index?run=h&log=evil", *paths)
    for status, headers, body in answers:
        assert status == 200 and len(body) < 1_000_000 and headers["X-Content-Type-Options"] == "nosniff"
        body.decode("utf-8")  # whatever an episode holds
    shown = json.loads(answers[2][2])
    assert shown["prompt"][1] > 4_900_000 and shown["trajectories"][0]["length"] > 100_000


def test_the_page_makes_texts_and_no_markup():
    """What runs have written reaches the page by one function, as text; tests/view/test_view_page.py attacks it."""
    own = "".join((page.FOLDER / name).read_text(encoding="utf-8") for name in page.SCRIPTS if name != "uplot.js")
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
        "import(",
    ):
        assert way not in own, way
    if shutil.which("node"):
        program = subprocess.run(
            ["node", "--check", "-"], input=page.script(), text=True, capture_output=True, timeout=60
        )
        assert program.returncode == 0, program.stderr
