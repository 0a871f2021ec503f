"""The card of an exported model, read by the hub's own library, without a network."""

from __future__ import annotations

import base64
import http.server
import json
import threading

import pytest

from configs import search_r1
from jaxagent.config import parse, to_dict
from jaxagent.observe import jsonl, model_card
from jaxagent.observe.files import CONFIG_FILE, OUTDATED_FILE, RUN_FILE, SUMMARY_FILE

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub reads the cards")
COMMAND = (
    "/venv/bin/python /venv/jaxagent/main.py --config=configs/search_r1.py:laptop --config.workdir=/home/me/runs/a"
    ' \'--config.stages=("warm_start","rl")\' --config.rl.steps 7'
)


@pytest.fixture
def workdir(tmp_path):
    config = jsonl.plain(to_dict(parse(search_r1.get_config("laptop").to_dict())))
    scores = {"eval/em_before_rl": 0.47, "eval/em_after_rl": 0.93, "eval/searches_after_rl": None, "eval/n": 8}
    start = {"command": COMMAND, "commit": "abc", "devices": ["2 x cpu"]}
    for name, content in ((CONFIG_FILE, config), (SUMMARY_FILE, scores), (RUN_FILE, {"starts": [start, {}]})):
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "policy").mkdir()
    return tmp_path


def begin_with(workdir, folder, card: str = "", **files: str) -> None:
    """Has the run's config begin with a model that lies in `folder`."""
    folder.mkdir(parents=True)
    for name, content in ({"README.md": card} | files).items():
        (folder / name).write_text(content) if content else None
    config = json.loads((workdir / CONFIG_FILE).read_text())
    config["model"]["path"] = str(folder)
    (workdir / CONFIG_FILE).write_text(json.dumps(config))


def written(workdir):
    model_card.write(workdir)
    return hub.ModelCard.load(workdir / "policy/README.md")


def test_the_hub_reads_results_and_command(workdir):
    card = written(workdir)
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("em", 0.93, "geography")
    assert card.data.library_name == "transformers" and {"jaxagent", "search"} <= set(card.data.tags)
    assert card.data.license is None and "choose one" in card.text
    assert "| `eval/em` | 0.47 | 0.93 |" in card.text and "searches" not in card.text
    recipe = '--config=configs/search_r1.py:laptop \'--config.stages=("warm_start","rl")\' --config.rl.steps=7'
    assert f"\njaxagent train {recipe}\n" in card.text and "/home/me" not in card.content and "2 x cpu" in card.text
    assert "Not yet." in card.text


def test_licence_and_name_of_the_model_it_began_with_come_along(workdir, tmp_path):
    folder = tmp_path / "hub/models--Qwen--Qwen2.5-3B/snapshots/0a1b"
    terms = "license: other\nlicense_name: 'qwen-research'\nlicense_link: LICENSE\nbase_model: Qwen/older\n"
    card = f"---\n{terms}---\n# Qwen\n"
    begin_with(workdir, folder, card, LICENSE="their terms", NOTICE="theirs", **{"licenses.csv": "x"})
    data = written(workdir).data
    assert (data.license, data.license_name, data.base_model) == ("other", "qwen-research", "Qwen/Qwen2.5-3B")
    assert sorted(path.name for path in (workdir / "policy").iterdir()) == ["LICENSE", "NOTICE", "README.md"]
    assert (workdir / "policy/LICENSE").read_text() == "their terms"


def test_a_folder_with_a_licence_and_no_card_is_other_by_that_file(workdir, tmp_path):
    begin_with(workdir, tmp_path / "Model", **{"LICENSE.md": "their terms"})
    data = written(workdir).data
    assert (data.license, data.license_link, data.base_model) == ("other", "LICENSE.md", None)


def test_an_export_that_is_trained_further_keeps_its_licence(workdir, tmp_path):
    begin_with(workdir, tmp_path / "Model", "---\nlicense: apache-2.0\n---\n", LICENSE="their terms")
    written(workdir)
    config = json.loads((workdir / CONFIG_FILE).read_text())
    config["model"]["path"] = str(workdir / "policy")
    (tmp_path / "second/policy").mkdir(parents=True)
    (tmp_path / "second" / CONFIG_FILE).write_text(json.dumps(config))
    assert written(tmp_path / "second").data.license == "apache-2.0"
    assert (tmp_path / "second/policy/LICENSE").read_text() == "their terms"


def test_verdicts_of_replays_are_told(workdir):
    (workdir / "replay").mkdir()
    digests = {"record": "5ea1"}
    run = {"steps_recorded": 70}
    content = {"verdict": "incomplete", "why": ["no bundle"], "run": run, "digests": digests}
    (workdir / "replay/verify-5-a.json").write_text(json.dumps(content))
    assert "70 recorded steps: **incomplete** (no bundle); seal of the record `5ea1`" in written(workdir).text


def test_a_card_of_somebody_s_own_stays_and_an_export_of_fewer_steps_gets_none(workdir):
    own = workdir / "policy/README.md"
    own.write_text("mine")
    model_card.write(workdir)
    assert own.read_text() == "mine"
    own.unlink()
    (workdir / "policy" / OUTDATED_FILE).touch()
    model_card.write(workdir)
    assert not own.exists()


@pytest.mark.parametrize("text", ['a: "b"', "é\n---\nx: 1", "- [", "{{jinja}}", "# no", "'"])
def test_no_name_breaks_the_card(workdir, text):
    config = json.loads((workdir / CONFIG_FILE).read_text())
    config["data"]["source"], config["env"]["name"] = text, text
    (workdir / CONFIG_FILE).write_text(json.dumps(config))
    card = written(workdir)
    assert card.data.tags[-1] == text and card.data.eval_results[0].dataset_name == f"held-out tasks of {text}"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload asks for; keeps what it was sent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, body))
        if self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            answer = {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
        elif "/commit/" in self.path:
            answer = {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"http://{self.headers['Host']}/me/x/commit/0",
            }
        else:
            answer = {}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def test_the_folder_is_uploaded_as_it_is(workdir):
    (workdir / "policy/config.json").write_text("{}")
    (workdir / "policy/model.safetensors").write_bytes(b"weights")
    model_card.write(workdir)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.posts = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            api = hub.HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_x")
            api.upload_folder(repo_id="me/x", folder_path=workdir / "policy", create_pr=False)
        finally:
            server.shutdown()
    posts = dict(server.posts)
    operations = [json.loads(line) for line in posts["/api/models/me/x/commit/main"].splitlines()]
    files = {one["value"]["path"]: one["value"]["content"] for one in operations if one["key"] == "file"}
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    card = (workdir / "policy/README.md").read_text()
    assert base64.b64decode(files["README.md"]).decode() == card
    assert json.loads(posts["/api/validate-yaml"]) == {"repoType": "model", "content": card}
