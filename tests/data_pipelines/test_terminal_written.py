"""Tasks that a model writes, against a real HTTP server that plays good and bad writers, in real sandboxes."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data_pipelines import harbor
from data_pipelines.terminal_written import __main__ as pipeline
from data_pipelines.terminal_written import prompts
from data_pipelines.terminal_written.task import _seed
from jaxagent.envs.terminal import folders
from jaxagent.observe import jsonl
from jaxagent.rewards.chat_client import REMEDIES

# As much of pytest as the tests below need: the machine's own Python may have none.
PYTEST = """\
#!/usr/bin/python3
import runpy, sys, traceback
failed = 0
for name, test in runpy.run_path(sys.argv[-1]).items():
    if name.startswith("test"):
        try:
            test()
        except Exception:
            traceback.print_exc()
            failed = 1
sys.exit(failed)
"""
DEFINITION = f"""\
Here it is:
```
Bootstrap: docker
From: something/else

%post
    mkdir -p /home/user /opt/bin
    cat > /opt/bin/pytest <<'END'
{PYTEST}END
    chmod 755 /opt/bin/pytest
    echo 3 > /home/user/apples

%environment
    export PATH=/opt/bin:$PATH
```
"""
INITIAL = "```python\ndef test_apples():\n    assert open('/home/user/apples').read() == '3\\n'\n```"
FINAL = "```python\ndef test_twice():\n    assert open('/home/user/twice').read().strip() == '6'\n```"
GOOD = {
    "task": "<task>Write twice the number in apples to twice.</task>\n<truth>6</truth>",
    "initial": INITIAL,
    "final": FINAL,
    "definition": DEFINITION,
    "commands": ["<command>echo $((2 * $(cat apples))) > twice</command>", "<action>done</action>"],
}
# Index -> what is wrong with it; the rest is good. "commands": what the solver says in attempts 0 and 1.
IDEAS = {
    0: {},
    1: {"task": "<task>No truth.</task>"},
    2: {"initial": "```python\ndef test_(:\n```"},
    3: {"final": "```python\ndef test_lazy():\n    pass\n```"},
    4: {"definition": DEFINITION.replace("echo 3", "echo oh no; false; echo 3")},
    5: {"definition": DEFINITION.replace("echo 3", "echo 4")},
    6: {"task": GOOD["task"].replace("Write", "Please write"), "commands": ["<action>done</action>"]},
    7: {"task": 400},
}
STAGES = ["kept", "task", "initial test", "idle agent", "image", "initial test", "solve", "model"]
WHY = [
    "",
    "no <truth>",
    "does not compile",
    "gives 1 to an agent",
    "oh no",
    "initial test ended",
    "none of 2",
    "answered 400",
]


class Model(BaseHTTPRequestHandler):
    """The writer, known by its seed, and the solver, which succeeds in its first attempt only."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer secret"
        first, turn = body["messages"][0], (len(body["messages"]) - 2) // 2
        if first["role"] == "system":
            assert body["model"] == "solver" and body["temperature"] == 0.7
            hopeless = "Please" in body["messages"][1]["content"] or body["seed"] > 0
            said = "<action>done</action>" if hopeless else GOOD["commands"][turn]
        else:
            assert body["model"] == "writer"
            (index,) = [i for i in IDEAS if _seed(0, i) == body["seed"]]
            said = (GOOD | IDEAS[index])[_asked(first["content"])]
        self.server.requests.append(body)
        status, content = (said, "") if isinstance(said, int) else (200, said)
        reply = json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


def _asked(request: str) -> str:
    if request.startswith("Write one task"):
        return "task"
    what = {"before the agent begins: what": "initial", "after the agent has": "final", "definition": "definition"}
    return next(part for text, part in what.items() if text in request)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_what_can_be_solved_is_kept_and_the_rest_is_named(tmp_path, images, server, monkeypatch, capsys):
    monkeypatch.setenv("CHAT_API_KEY", "secret")
    out = tmp_path / "written"
    flags = [
        f"--out={out}", f"--url=http://127.0.0.1:{server.server_port}/v1", "--model=writer", "--solver=solver",
        "--temperature=0.7", "--attempts=2", f"--images={images}", "--base=ubuntu:22.04=host",
    ]  # fmt: skip
    assert pipeline.main([*flags, "--num=3"]) == 0
    assert "3 ideas: 1 kept in" in capsys.readouterr().out
    (out / pipeline.PARTIAL / "left").mkdir(parents=True)  # a killed call
    (out / "task_000004_00000000").mkdir()
    asked = len(server.requests)
    assert pipeline.main([*flags, "--num=8"]) == 0
    printed = capsys.readouterr().out
    assert "5 ideas to write, 3 are done" in printed
    assert "lost at: 1 model, 1 task, 2 initial test, 1 image, 1 idle agent, 1 solve" in printed
    again = {body["seed"] for body in server.requests[asked:] if body["model"] == "writer"}
    assert again == {_seed(0, index) for index in range(3, 8)}

    records = {record["index"]: record for record in jsonl.read(out / pipeline.LOG)}
    assert [records[index]["stage"] for index in IDEAS] == STAGES
    for index, why in enumerate(WHY):
        assert why in records[index].get("why", ""), records[index]
    assert records[0]["num_success"] == 1 and records[0]["num_runs"] == 2
    (folder,) = [path for path in out.iterdir() if re.fullmatch(r"task_000000_[0-9a-f]{8}", path.name)]
    assert not (out / pipeline.PARTIAL).exists()
    said = json.loads((folder / "solutions" / "solver_summary.json").read_text())
    assert (said["num_runs"], said["num_success"], said["pass_at_k"]) == (2, 1, {"1": 0.5, "2": 1.0})
    assert [result["turns"] for result in said["results"]] == [2, 1]
    task = folders.read_task(folder)
    assert task.instruction == "Write twice the number in apples to twice."
    assert json.loads((folder / "task.json").read_text())["truth"] == "6"
    assert "From: ubuntu:22.04\n" in (folder / "container.def").read_text()
    # An idea of which the endpoint answered nothing is asked for again, and no other; what was made can be trained on.
    asked = len(server.requests)
    monkeypatch.setitem(IDEAS, 7, {"task": "<task>No truth.</task>"})
    capsys.readouterr()
    assert pipeline.main([*flags, "--num=8"]) == 0 and len(server.requests) == asked + 1
    printed = capsys.readouterr().out
    assert "1 ideas to write, 7 are done" in printed and "8 ideas: 1 kept" in printed
    assert "lost at: 2 task, 2 initial test, 1 image, 1 idle agent, 1 solve" in printed
    assert pipeline.main([*flags, "--num=8"]) == 0 and len(server.requests) == asked + 1
    made = harbor.main(["write", str(out), f"--out={tmp_path / 'dataset'}", "--heldout=1"])
    assert made == 2 and "less than the 1 tasks with a test" in capsys.readouterr().err


def test_fields_that_an_endpoint_refuses_are_left_out():
    start = ["--out=o", "--url=http://localhost:1/v1", "--model=m", "--images=i"]
    plain = pipeline.endpoint(pipeline.parser().parse_args(start), "m", "")
    assert (plain.send_seed, plain.send_temperature, plain.limit_field) == (True, True, "max_tokens")
    flags = [f"--{remedy}" for remedy in (REMEDIES["seed"], REMEDIES["temperature"], REMEDIES["max_tokens"])]
    other = pipeline.endpoint(pipeline.parser().parse_args(start + flags), "m", "")
    assert (other.send_seed, other.send_temperature, other.limit_field) == (False, False, "max_completion_tokens")


def test_ideas_differ_and_repeat():
    ideas = [prompts.draw(0, index) for index in range(200)]
    assert ideas == [prompts.draw(0, index) for index in range(200)] and len(set(ideas)) > 190
    assert ideas != [prompts.draw(1, index) for index in range(200)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base=x"], "'x' must be NAME=SOURCE"),
        ([], "--base NAME=SOURCE says"),
        (["--base=a=host", "--url=localhost:80"], "url='localhost:80' must start with http"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, flags, message):
    start = [f"--out={tmp_path / 'o'}", "--url=http://localhost:1/v1", "--model=m", f"--images={tmp_path}"]
    assert pipeline.main([*start, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
