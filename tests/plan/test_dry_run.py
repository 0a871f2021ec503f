"""`--dry_run`: the plan of a sharded run, from a process that allocates no weights."""

import json
import pathlib
import subprocess
import sys

import pytest

from jaxagent.config import flags
from jaxagent.plan.chips import CHIPS

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = "--config=" + str(ROOT / "configs/search_r1.py")
TINY = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "model.head_dim": 16,
    "tokenizer.vocab_size": 256,
    "engine.slots": 8,
    "engine.prefill_tokens": 128,
    "engine.tile_rows": 0,
    "engine.pages": 16,
    "env.context_tokens": 64,
    "rl.batch.row_tokens": 64,
    "rl.batch.micro_rows": 4,
    "mesh.data": 1,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
}
# As many parameters as the largest shape of the published recipe has, with nothing read from disk. In a quarter of its
# layers, since engines write layers out, and what compiles them is what takes the time.
THREE_BILLION = {
    "model.family": "qwen2",
    "model.num_layers": 9,
    "model.embed_dim": 2048,
    "model.num_heads": 16,
    "model.num_kv_heads": 2,
    "model.head_dim": 128,
    "model.mlp_dim": 48_640,
    "model.compute_dtype": "bfloat16",
    "model.remat": "layer",
    "tokenizer.vocab_size": 151_936,
    "engine.slots": 64,
    "engine.cache_dtype": "bfloat16",
    "engine.prefill_tokens": 4096,
    "engine.pages": 4096,
    "env.context_tokens": 4096,
    "rl.batch.row_tokens": 4096,
    "rl.batch.micro_rows": 4,
    "mesh.fsdp": 4,
}


def _dry_run(tmp_path, fields, *more: str, timeout_s: float = 300) -> tuple[dict, int, str]:
    """The plan, the largest resident memory of the process in bytes, and what it printed."""
    # VmHWM and not getrusage's ru_maxrss: that one keeps, over fork and exec, what pytest's own process held.
    code = (
        "import pathlib, sys; from jaxagent.main import main; code = main(sys.argv);"
        "status = pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1];"
        "print('peak', int(status.split()[0]) * 1024); sys.exit(code)"
    )
    args = [CONFIG, "--dry_run", f"--config.workdir={tmp_path}", *(f"--config.{k}={v}" for k, v in fields.items())]
    command = [sys.executable, "-c", code, *args, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((tmp_path / "plan.json").read_text()), int(done.stdout.split()[-1]), done.stdout


@pytest.mark.slow
def test_a_tiny_model_on_four_virtual_devices(tmp_path):
    plan, _, printed = _dry_run(
        tmp_path, TINY, "--config.rl.advantage=gae", "--config.rl.kl.coefficient=0.1", "--config.fleet=on"
    )
    assert plan["devices"] == 4
    # Whole model: embed 256x32; per layer q, o 32x64 each, k, v 32x32 each, mlp 3 of 32x64, norms 2x32 + 2x16.
    layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 16
    assert plan["parameters"] == 256 * 32 + 2 * layer + 32
    # f32, a quarter of each matrix per device; norms over tensor whole.
    matrices = 256 * 32 + 2 * (layer - 2 * 32 - 2 * 16)
    resident = plan["resident_bytes"]
    assert 4 * matrices / 4 < resident["parameters"] < 4 * matrices / 4 + 4 * (plan["parameters"] - matrices) + 1
    assert resident["optimiser"] == pytest.approx(2 * resident["parameters"], rel=0.01)
    assert resident["reference"] == resident["parameters"]
    # keys and values: 2 layers x (16 pages / 2 and the one that is nobody's) x 64 positions x 2 heads / 2 x 16
    assert resident["kv cache"] == 2 * 2 * 9 * 64 * 1 * 16 * 4
    assert {"policy", "critic", "reference", "engine"} <= {p["name"].split(":")[0] for p in plan["programs"]}
    assert plan["peak_bytes"] > sum(resident.values())
    assert plan["times"]["total_s"] > 0 and plan["work"]["train_flops"] > 0
    assert "Memory of one device" in printed and "h100" in printed
    assert "fleet: the memory of a trainer that plays" in printed
    assert any("engine: tiles of 128 rows, pages of 64 tokens" in line for line in plan["assumptions"])  # an H100's


@pytest.mark.slow
def test_three_billion_parameters_without_the_memory(tmp_path):
    plan, peak, _ = _dry_run(tmp_path, THREE_BILLION, "--dry_run_chip=h200", timeout_s=900)
    assert plan["parameters"] == pytest.approx(3.09e9, rel=0.01)
    assert plan["resident_bytes"]["parameters"] == pytest.approx(4 * plan["parameters"] / 4, rel=0.01)
    assert peak < 4e9


def test_a_config_that_cannot_be_sharded_is_a_users_mistake(tmp_path):
    fields = TINY | {"mesh.tensor": 3, "mesh.fsdp": 1}
    args = [CONFIG, "--dry_run", f"--config.workdir={tmp_path}", *(f"--config.{k}={v}" for k, v in fields.items())]
    command = [sys.executable, "-m", "jaxagent.main", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_flag_names_the_chips_of_the_table():
    assert tuple(CHIPS) == flags.CHIPS
