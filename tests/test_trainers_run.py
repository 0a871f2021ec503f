"""A whole run whose trainer is two processes: what process 0 plays and all train is what one process does."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from tests import tiny_run

PROGRAM = """
import sys
from jaxagent.config import flags
from jaxagent.runs import devices
process, processes, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = flags.parse_argv(["main", *sys.argv[4:]]).config
with devices.distributed(process, processes, address):
    devices.provide(config.mesh)
    from jaxagent import loop
    loop.run(config)
"""
# Clocks, and what an engine on fewer devices does otherwise: more sessions share a device's cache.
APART = ("time/", "engine/", "tokens_per_s", "episode/cached_tokens")
FLAGS = ("--config.mesh.data=2", "--config.rl.steps=2", "--config.rl.batch.micro_rows=4",
         "--config.warm_start.max_steps=2", "--config.warm_start.curriculum_steps=0")  # fmt: skip


def run(processes: int, workdir: pathlib.Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    args = tiny_run.argv(workdir, *FLAGS)[1:]
    started = []
    for i in range(processes):
        with open(f"{workdir}.log.{i}", "ab") as log:
            command = [sys.executable, "-c", PROGRAM, str(i), str(processes), address, *args]
            started.append(subprocess.Popen(command, cwd=tiny_run.ROOT, env=env, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + 900
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for process in started:
            process.wait(60)
    finally:
        for process in started:
            process.kill()
    said = "".join(pathlib.Path(f"{workdir}.log.{i}").read_text()[-3000:] for i in range(processes))
    assert [p.returncode for p in started] == [0] * processes, said


@pytest.mark.slow
def test_two_processes_train_and_play_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    run(1, one)
    run(2, two)
    first, second = ([json.loads(line) for line in (w / "metrics.jsonl").read_text().splitlines()] for w in (one, two))
    assert [(r["stage"], r["step"]) for r in first] == [(r["stage"], r["step"]) for r in second]
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name in [name for name in a if not name.startswith(APART) and not name.endswith("_s")]:
            if isinstance(a[name], float):
                assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6), (a["stage"], a["step"], name)
            else:
                assert b[name] == a[name], (a["stage"], a["step"], name)
    assert (two / "policy" / "config.json").is_file() and (two / "summary.json").is_file()
    assert not list(two.glob("*.orbax-checkpoint-tmp"))
