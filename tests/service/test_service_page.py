"""docs/rollout_service.md: its commands work with a real curl, its Python is what a node and a config take, and every
row of its table of failures names a test that there is."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from jaxagent.service.request import FIELDS
from jaxagent.service.states import ORDER
from tests.service.cluster import ROOT, TOKEN, Process, free_port, start_server, until
from tests.service.test_kills import Cluster, cluster

PAGE = (ROOT / "docs/rollout_service.md").read_text(encoding="utf-8")
SHELL = re.findall(r"```(?:ba)?sh\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_commands_of_the_page(tmp_path, monkeypatch):
    start, submit, _ = SHELL
    port, package = free_port(), tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_module.py").write_text(PYTHON[0])
    (tmp_path / "TOKEN").write_text(TOKEN)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    server, node = start.strip().replace(":8080", f":{port}").replace("--port=8080", f"--port={port}").splitlines()
    started = []
    try:
        for command in (server, node):
            command = ["exec", sys.executable, *command.split()[1:]]
            started.append(subprocess.Popen(["sh", "-c", " ".join(command)], cwd=tmp_path, stdout=subprocess.DEVNULL))
        script = submit.replace(":8080", f":{port}")
        waits = f"until curl -s -o /dev/null http://127.0.0.1:{port}/health; do sleep 0.1; done\n"
        bash = ["bash", "-ec", waits + script.replace("\ncurl", "\necho; curl")]
        done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        for process in started:
            process.kill()
            process.wait(30)
    submitted, ended, episode, *events, cancelled = [line for line in done.stdout.splitlines() if line]
    assert json.loads(submitted) == {"task_id": "first", "status": "running"}
    ended = json.loads(ended)
    # The page's player samples no tokens: nothing is usable, and one of four would be needed.
    assert (ended["status"], ended["needed_sessions"], ended["completed_sessions"]) == ("failed", 1, 4)
    assert json.loads(episode)["task"]["prompt"] == "make the failing test pass"
    assert json.loads(cancelled) == {"task_id": "first", "status": "failed"}
    kinds = [line.removeprefix("event: ") for line in events if line.startswith("event: ")]
    assert kinds.count("task") == 2 and kinds.count("session") >= 8 and "node" in kinds


def test_the_environment_of_the_page_is_a_config(tmp_path, monkeypatch):
    from configs import code_agent
    from jaxagent import config as schema

    (tmp_path / "remote_environment.py").write_text(PYTHON[1])
    monkeypatch.syspath_prepend(tmp_path)
    given = code_agent.get_config()
    given.env = {**given.env.to_dict(), "name": "remote_environment:Remote"}
    given.env.service = {"url": "http://10.0.0.5:8080", "token_file": "TOKEN", "min_complete_accept_fraction": 0.25}
    env = schema.parse(given).env
    assert (env.service.url, env.service.timeout_s) == ("http://10.0.0.5:8080", 600.0)
    assert env.rollout == "jaxagent.service.remote_rollout:RemoteRollout"
    given.env.service.min_complete_accept_fraction = 2.0
    with pytest.raises(schema.ConfigError, match="min_complete_accept_fraction"):
        schema.parse(given)


def test_every_row_of_the_table_of_failures_has_its_test():
    table = PAGE.split("## What may fail")[1].split("\n\n")[1]
    rows = table.splitlines()[2:]
    assert len(rows) >= 12
    for row in rows:
        last = row.split("|")[-2]
        file = ""
        for name in re.findall(r"`(\w+(?:\.py)?)`", last):
            file = name if name.endswith(".py") else file
            text = (ROOT / "tests/service" / file).read_text()
            assert name.endswith(".py") or f"def {name}(" in text, name
        assert file, row


def test_the_page_names_every_field_and_every_state():
    for name in FIELDS:
        assert f"`{name}`" in PAGE, name
    for state in ORDER:
        assert state in PAGE


def test_the_server_imports_no_jax():
    code = (
        "import sys, jaxagent.service.server, jaxagent.service.client, jaxagent.service.node\n"
        "sys.exit(str([m for m in ('jax', 'jaxlib', 'flax', 'optax') if m in sys.modules] or ''))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--token_file=none"], "none"),
        (["--lease_s=0.3"], "--lease_s"),
        (["--port=99999"], "--port"),
        (["--store=/dev/null/x"], "/dev/null"),
    ],
)
def test_a_mistake_at_the_servers_start_is_one_line(tmp_path, flags, told):
    server = start_server(tmp_path, 0, *flags)
    assert server.wait() == 2
    (line,) = server.log.read_text().splitlines()
    assert line.startswith("error: ") and told in line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--player=tests.service.players:none"], "--player"),
        (["--player=no_such_module:x"], "no_such_module"),
        (["--playr=x"], "--playr"),
        (["--config=none.py"], "none.py"),
    ],
)
def test_a_mistake_at_a_nodes_start_is_one_line(tmp_path, flags, told):
    (tmp_path / "token").write_text(TOKEN)
    first = [
        f"--token_file={tmp_path / 'token'}",
        "--server=http://127.0.0.1:1",
        "--player=tests.service.players:patient",
    ]
    node = Process(tmp_path / "node.log", "jaxagent.service.node", *first, *flags)
    assert node.wait() == 2
    line = node.log.read_text().splitlines()[-1]
    assert line.startswith("error: ") and told in line


async def test_a_second_server_on_one_store_is_refused_and_a_wrong_token_ends_a_node(tmp_path):
    async with cluster(tmp_path) as c:
        await c.server()
        second = start_server(tmp_path, 0)
        assert second.wait() == 2 and "another process" in second.log.read_text()
        (tmp_path / "wrong").write_text("wrong" * 10)
        node = c.node("node", f"--token_file={tmp_path / 'wrong'}", "--patience_s=0.5")
        assert node.wait() == 2 and "the token is wrong" in node.log.read_text()
        assert isinstance(c, Cluster)
        await until(c.there)
