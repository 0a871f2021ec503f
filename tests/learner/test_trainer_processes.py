"""A trainer of two processes equals one of one: same mesh, same updates, bundles for each other, and clear ends."""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Trainer:
    """Processes of `code` (a module's name, or a program); nobody outlives the test."""

    def __init__(self, processes: int, code: list[str], *args: str, log: pathlib.Path):
        address = f"127.0.0.1:{free_port()}"
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
        self.log = log
        self.processes = []
        for i in range(processes):
            with open(f"{log}.{i}", "ab") as output:
                command = [sys.executable, *code, str(i), str(processes), address, *args]
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait(30)

    def wait(self) -> list[int]:
        """Exit codes; once one has failed the others have ten seconds, as a supervisor would not even give them."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            if any(p.poll() for p in self.processes):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.05)
        return [p.poll() for p in self.processes]

    def said(self) -> str:
        return "".join(pathlib.Path(f"{self.log}.{i}").read_text() for i in range(len(self.processes)))


def records(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def assert_same(one: pathlib.Path, other: pathlib.Path, steps: range) -> None:
    """Metrics of the steps within 1e-6 relative, and the last parameters."""
    first, second = ({r["step"]: r for r in records(folder)} for folder in (one, other))
    assert set(steps) == set(second)
    for step in steps:
        assert first[step].keys() == second[step].keys()
        losses = [name for name in first[step] if name.startswith("loss/") or name == "size"]
        assert losses and any(abs(first[step][name]) > 1e-3 for name in losses)
        for name in first[step]:
            if isinstance(first[step][name], float):
                # Single numbers of single tokens (a ratio, a gap) see more of the rounding than sums do.
                tolerance = 1e-6 if name in losses else 1e-4
                np.testing.assert_allclose(
                    second[step][name], first[step][name], rtol=tolerance, atol=1e-7, err_msg=f"{step} {name}"
                )
    with np.load(one / "params.npz") as a, np.load(other / "params.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_allclose(b[name], a[name], rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_two_processes_of_four_devices_equal_one_of_eight_and_read_each_others_bundles(tmp_path):
    two, one, one_after_two, two_after_one = (tmp_path / name for name in ("2", "1", "1after2", "2after1"))
    code = ["-m", "tests.learner.trainer_process"]
    with (
        Trainer(2, code, f"{two}:3", f"{two_after_one}:3:{one}:1", log=tmp_path / "log2") as of_two,
        Trainer(1, code, f"{one}:3", f"{one_after_two}:3:{two}:1", log=tmp_path / "log1") as of_one,
    ):
        for trainer in (of_two, of_one):
            assert not any(trainer.wait()), trainer.said()[-4000:]
    assert_same(one, two, range(1, 4))
    assert_same(one, one_after_two, range(2, 4))
    assert_same(one, two_after_one, range(2, 4))
    assert len(list((two / "3").glob("digests.json"))) == 1


SAVES = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from jaxagent.config import MeshConfig
from jaxagent.runs import devices
process, processes, address, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
mesh_config = MeshConfig(1, 2, 1, 1)
with devices.distributed(process, processes, address):
    devices.provide(mesh_config)
    import jax, jax.numpy as jnp, numpy as np
    from jaxagent.learner import peers
    from jaxagent.learner.checkpoint import Checkpointer, bundles, read_host
    from jaxagent.learner.state import TrainState
    from jaxagent.models import global_arrays, sharding
    mesh = sharding.make_mesh(mesh_config)
    rows, same = (jax.NamedSharding(mesh, jax.P(axis)) for axis in ("fsdp", None))
    def state(step):
        a = np.full((64, 64), step, np.float32)
        return TrainState(global_arrays.put(np.int32(step), jax.NamedSharding(mesh, jax.P())),
                          {"a": global_arrays.put(a, rows)}, ())
    with Checkpointer(folder, keep=2) as checkpointer:
        if len(sys.argv) > 5:
            found, host = checkpointer.restore(state(0)), read_host(folder, bundles(folder)[-1])
            a = global_arrays.get(found.params["a"])
            assert (a == int(found.step)).all() and host == {"step": int(found.step)} , (a, found.step, host)
            print("restored", int(found.step), flush=True)
        else:
            for step in range(10_000):
                checkpointer.save(step, state(step), {"step": step})
                peers.meet("a save")
                print("saved", step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_either_process_during_saves_leaves_a_whole_bundle(tmp_path, victim):
    """The others do not go on alone either, and both kinds of trainer restore what is there."""
    folder, log = tmp_path / "bundles", tmp_path / "log"
    with Trainer(2, ["-c", SAVES], str(folder), log=log) as trainer:
        deadline = time.monotonic() + TIMEOUT_S
        while "saved 3" not in pathlib.Path(f"{log}.{victim}").read_text() and time.monotonic() < deadline:
            assert trainer.processes[1 - victim].poll() is None, trainer.said()[-4000:]
            time.sleep(0.01)
        time.sleep(random.random() * 0.3)
        trainer.processes[victim].send_signal(signal.SIGKILL)
    restored = []
    for processes in (1, 2):
        with Trainer(processes, ["-c", SAVES], str(folder), "restore", log=tmp_path / f"log{processes}") as trainer:
            assert trainer.wait() == [0] * processes, trainer.said()[-4000:]
            restored.append(next(line for line in trainer.said().splitlines() if line.startswith("restored")))
    assert restored[0] == restored[1] and int(restored[0].split()[1]) >= 2


PARTS_WAYS = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from jaxagent.config import MeshConfig
from jaxagent.runs import devices
process, processes, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with devices.distributed(process, processes, address):
    devices.provide(MeshConfig(1, 2, 1, 1))
    import numpy as np
    from jaxagent.learner.update import same_plan
    from jaxagent.learner.batching import Packer
    from jaxagent.config import BatchConfig
    batch = Packer(BatchConfig(8, 2, targets_multiple=4, share_prefix=False), 4, 2).empty()
    same_plan("an update", [batch])
    print("agreed", flush=True)
    if process == 1:
        batch = batch.replace(tokens=batch.tokens + 1)
    same_plan("an update", [batch])
    print("went on", flush=True)
"""


@pytest.mark.slow
def test_processes_that_packed_differently_stop_before_a_collective(tmp_path):
    with Trainer(2, ["-c", PARTS_WAYS], log=tmp_path / "log") as trainer:
        codes, said = trainer.wait(), trainer.said()
    # Process 0 has the coordination service: where it is gone first, JAX aborts the other one on its way out.
    assert codes[0] == 1 and codes[1] in (1, -signal.SIGABRT)
    assert said.count("agreed") == 2 and "went on" not in said
    assert "The trainer's processes disagree about the batches of an update: process 0 says " in said
