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
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from jaxagent.config import ConfigError
from jaxagent.observe import page
from jaxagent.observe.episode_store import StoredEpisodes
from jaxagent.view import __main__ as command
from jaxagent.view import runs
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
    assert body == content and headers["X-From"] == "0"
    follows = headers["X-Next"]
    ((_, headers, body),) = asked(root, f"/api/metrics?run=one&from={follows}")
    assert body == b"" and headers["X-From"] == headers["X-Next"] == follows
    ((_, headers, body),) = asked(root, f"/api/metrics?run=one&from={len(content) + 5}")
    assert body == content and headers["X-From"] == "0", "the run has gone back"
    ((_, headers, body),) = asked(root, "/api/index?run=one&log=rl&from=0")
    assert body == (root / "one/episodes/rl.index").read_bytes()
    rows = sum(len(json.loads(line)["sample"]) for line in body.splitlines())
    assert rows == 96 == StoredEpisodes(root / "one/episodes", "rl").rows


def test_a_file_that_has_gone_back_and_on_again_is_read_anew(tmp_path):
    made_run.write(tmp_path / "r", 6, tasks=2, group=2)
    path = tmp_path / "r/metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    ((_, headers, _),) = asked(tmp_path, "/api/metrics?run=r&from=0")
    follows = headers["X-Next"]
    path.write_bytes(b"".join(lines[:5]))
    ((_, headers, body),) = asked(tmp_path, f"/api/metrics?run=r&from={follows}")
    assert body == lines[4] and headers["X-From"] == follows
    for changed in (lines[2].replace(b"rl", b"RL"), lines[2].replace(b"rl", b"r")):  # as long, and not so
        path.write_bytes(b"".join([*lines[:2], changed, *lines[3:]]))
        ((_, headers, body),) = asked(tmp_path, f"/api/metrics?run=r&from={follows}")
        assert body == path.read_bytes() and headers["X-From"] == "0"


def test_one_damaged_run_hides_no_other(root, tmp_path):
    shutil.copytree(root / "one", tmp_path / "one")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/config.json").write_text("[" * 100_000)
    (tmp_path / "deep/run.json").write_text("{}")
    assert {line["name"]: line["status"] for line in values(tmp_path, "/api/runs")} == {
        "deep": "damaged",
        "one": "ended",
    }
    assert asked(tmp_path, "/api/run?run=deep")[0][0] == 500


def test_a_config_alone_makes_no_run(root, tmp_path):
    shutil.copytree(root / "one", tmp_path / "group/one")
    for name in ("model", "group/data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen3"}')
        (tmp_path / name / "summary.json").write_text("{}")
    assert [line["name"] for line in values(tmp_path, "/api/runs")] == ["group/one"]


LINKED = ("metrics.jsonl", "config.json", "summary.json", "run.json", "episodes", "record", "tokenizer", "policy",
          "episodes/rl.index", "episodes/rl.00000.blocks", "tokenizer/tokenizer.json", "record/rl")  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_a_link_that_leads_out_of_a_run_is_not_followed(name, root, tmp_path):
    run, secret = tmp_path / "runs/one", tmp_path / "secret"
    shutil.copytree(root / "one", run)
    for other in ("record", "tokenizer", "policy"):
        (run / other).mkdir()
    shutil.copytree(root / "one", secret)
    (secret / "metrics.jsonl").write_text('{"stage": "rl", "step": 1, "secret/number": 1}\n')
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(secret / name if (secret / name).exists() else secret)
    if name == "metrics.jsonl":
        (run / "run.json").write_text("{}")
    (line,) = values(tmp_path / "runs", "/api/runs")
    assert line["status"] == "damaged" and "leads out of the run" in line["error"]
    what = ("run?run=one", "metrics?run=one", "index?run=one&log=rl", "search?run=one&log=rl&words=a",
            "previews?run=one&log=rl&rows=0", "episode?run=one&log=rl&row=0")  # fmt: skip
    for status, _, body in asked(tmp_path / "runs", *(f"/api/{each}" for each in what)):
        assert status == 404 and b"leads out of the run" in body
    path.unlink()
    shutil.move(secret / name, run / "elsewhere") if (secret / name).exists() else (run / "elsewhere").mkdir()
    path.symlink_to(run / "elsewhere")
    assert asked(tmp_path / "runs", "/api/run?run=one")[0][0] == 200, "inside a run links may stand"


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "summary.json", "episodes/rl.index"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, root, tmp_path):
    run = tmp_path / "runs/one"
    shutil.copytree(root / "one", run)
    (run / "run.json").write_text("{}")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    (line,) = values(tmp_path / "runs", "/api/runs")
    assert line["status"] == "damaged" and "neither a file nor a folder" in line["error"]
    assert asked(tmp_path / "runs", "/api/run?run=one")[0][0] == 404


BAD = ("", "run=", "run=nobody", "run=../one", "run=%00", "run=one%0a", "run=%ff", "run=%ed%a0%80", "run[]=one",
       "run=one&run=two")  # fmt: skip
NUMBERS = ("", "x", "-1", "1.5", "1e3", "0x10", "%00", "9" * 30, "9" * 17, "\u0663", " 1", "1_0", "nan", "1&row=y")


def test_no_address_makes_the_server_fail(root):
    names = ("run", "metrics", "index", "previews", "search", "episode", "window", "verdict", "verify", "nothing", "")
    paths = [f"/api/{name}{mark}{rest}" for name in names for mark in ("", "?") for rest in BAD]
    log = "run=one&log=rl"
    numbered = (
        *(f"episode?{log}&row=", f"previews?{log}&rows=", f"previews?{log}&rows=1,", f"index?{log}&from="),
        *("metrics?run=one&from=", "metrics?run=one&from=1-", "verdict?run=one&stage=rl&step="),
        *(f"window?{log}&row=0&trajectory=0&from=", f"window?{log}&row=0&from=0&trajectory="),
        f"window?{log}&trajectory=0&from=0&row=",
    )
    paths += [f"/api/{rest}{number}" for number in NUMBERS for rest in numbered]
    paths += ["/api/index?run=one&log=../rl", "/api/index?run=one&log=", "/../etc/passwd", "/%2e%2e/x", "/app.js/x"]
    paths += ["//", "/%"]
    answers = {path: answer[:2] for path, answer in zip(paths, asked(root, *paths), strict=True)}
    assert {path: status for path, (status, _) in answers.items() if status not in (200, 400, 404, 405)} == {}
    assert all("Content-Security-Policy" in headers for _, headers in answers.values())
    refused = [path for path in answers if path.endswith(("row=x", "step=-1", "rows=1.5", "from=1e3"))]
    assert [answers[path][0] for path in refused] == [400] * len(refused) and len(refused) == 7


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b"[" * 4000, b"\xff\xfe", b'{"run": "one"}',
             b'{"run": [], "step": 1, "stage": "rl"}', b'{"run": "one", "step": 1e999, "stage": "rl"}',
             b'{"run": "one", "step": 1, "stage": {}}', b'{"run": "one", "step": null, "stage": "rl"}']
)  # fmt: skip
def test_no_body_makes_the_server_fail(root, body):
    ((status, _, answer),) = asked(
        root, "/api/verify", post={"data": body, "headers": {"Content-Type": "application/json"}}
    )
    assert status == 400 and json.loads(answer)["error"]


def test_a_folder_that_is_not_for_this_user_hides_no_run(root, tmp_path, monkeypatch):
    shutil.copytree(root / "one", tmp_path / "one")
    (tmp_path / "a-private").mkdir()
    is_file = Path.is_file

    def of_this_user(path):
        if path.parent.name == "a-private":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", of_this_user)
    assert list(Runs(tmp_path).folders()) == ["one"]


def test_a_line_of_the_list_is_read_again_when_its_files_have_changed(root, tmp_path, monkeypatch):
    shutil.copytree(root / "one", tmp_path / "one")
    listed, read = Runs(tmp_path), []
    monkeypatch.setattr(runs, "line", lambda *given, line=runs.line: read.append(1) or line(*given))
    assert [listed.lines()[0]["step"] for _ in range(3)] == [6] * 3 and len(read) == 1
    with (tmp_path / "one/metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 7}\n')
    os.utime(tmp_path / "one/summary.json", (1, 1))
    (one,) = listed.lines()
    assert one["step"] == 7 and one["status"] == "running" and len(read) == 2


def test_episodes_previews_and_search(root):
    shown = values(root, "/api/episode?run=one&log=rl&row=3")
    assert shown["step"] == 0 and shown["trajectories"][0]["windows"][0]["mask"]
    found = values(root, "/api/search?run=one&log=rl&words=QUESTION+where")
    assert found == list(range(96))
    previews = values(root, "/api/previews?run=one&log=rl&rows=0,95")
    assert previews["95"]["prompt"].startswith("Question") and len(previews) == 2
    assert values(root, "/api/verdict?run=one&stage=rl&step=3") == {"state": "none"}


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        ("/api/run?run=nope", 404, "There is no run 'nope'"),
        ("/api/run?run=../..", 404, "There is no run"),
        ("/api/metrics?run=one/../one", 404, "There is no run"),
        ("/api/index?run=one&log=../../x", 404, "has no log of episodes"),
        ("/api/episode?run=one&log=rl&row=96", 404, "has no episode 96"),
        ("/api/episode?run=one&log=rl&row=x", 400, "row must be a whole number"),
        ("/api/episode?run=one", 400, "say log"),
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
                async with client.get("/api/verdict?run=one&stage=rl&step=2") as answer:
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
