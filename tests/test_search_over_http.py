"""The example in which another process plays with the openai package: the trainer's tokens are still the engine's."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

pytest.importorskip("openai", reason="the openai SDK is not installed")
pytestmark = pytest.mark.slow  # three processes, one of which compiles

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = ["--config.warm_start.max_steps=60", "--config.rl.steps=2", "--config.rl.tasks_per_step=2"]
SMALL += ["--config.data.num_eval=8", "--config.data.source.num_demonstrations=600"]
SMALL += ["--config.rl.advantage.drop_zero_signal=false"]  # also where every reward is 0
SMALL += ["--config.data.source.num_curriculum=400", "--config.data.source.num_cities=60"]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def started(command, log, env):
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def test_another_process_plays_and_the_tokens_are_the_engines(tmp_path):
    token, server_port, gateway_port = tmp_path / "TOKEN", free_port(), free_port()
    token.write_text("0123456789abcdef0123")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    server = f"http://127.0.0.1:{server_port}"
    config = [f"--config={ROOT / 'examples/search_over_http.py'}", f"--config.workdir={tmp_path / 'run'}", *SMALL]
    config += [f"--config.env.service.url={server}", f"--config.env.service.gateway_port={gateway_port}"]
    config += [f"--config.env.service.{name}={token}" for name in ("token_file", "gateway_token_file")]
    serve = ["-m", "jaxagent.service.server", f"--store={tmp_path / 's.sqlite'}", f"--token_file={token}"]
    node = ["-m", "jaxagent.service.node", f"--server={server}", f"--token_file={token}", *config]
    node += ["--player=search_over_http:player", f"--gateway_url=http://127.0.0.1:{gateway_port}"]
    node += [f"--gateway_token_file={token}", "--max_run_workers=16"]
    with (
        started([sys.executable, *serve, f"--port={server_port}"], tmp_path / "server.log", env),
        started([sys.executable, *node], tmp_path / "node.log", env),
    ):
        trainer = subprocess.run(
            [sys.executable, "-m", "jaxagent.main", *config], env=env, timeout=600, capture_output=True, text=True
        )
    assert trainer.returncode == 0, trainer.stderr[-2000:] + (tmp_path / "node.log").read_text()[-2000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["failed_episodes"] == {} and summary["compiles_after_warmup"] == 0
    assert summary["logprob_gap_max"] == 0.0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 2 and all(row["rollout/action_tokens"] > 0 for row in steps)
