"""One optimiser step of the learner against the same step in torch, and the share of the machine's peak it reaches.

    python -m benchmarks.train_vs_torch [--torch] [--repetitions=5] [--rows=64] [--tokens=256]

The step: [rows, tokens] tokens, cross-entropy on every next token, gradients, AdamW, of the model in `tiny_model`, in
float32. Ours is the RL learner's own path: packed `Batch`es through `make_update`, which also computes entropies and
the gradient's norm. Torch: transformers' model with sdpa attention, cross entropy, `torch.optim.AdamW`. Each side cuts
the rows into micro-batches as suits it best: ours over one or two virtual devices; torch also chooses its threads, and
torch.compile is taken where it works within a minute and wins. Each side lives in a process of its own, as its users
run it, waits without work while the other takes its turn, and takes one step unmeasured after the wait.
`python -m benchmarks.engine --only=train --peers` is the same.

The last line is JSON. `train_step_vs_torch`: torch's seconds / ours, medians of interleaved repetitions.
`train_mfu`: 6 * matmul parameters * tokens + causal attention, per second, over the peak, which is the best of
several jitted float32 products of 2048 x 2048 taken before and after the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tiny_model, workloads
from benchmarks.peers import fastest_threads
from benchmarks.sides import Side, reply_with, requests
from benchmarks.tiny_model import TinyModel
from jaxagent.config import OptimizerConfig
from jaxagent.learner.forward import policy_forward
from jaxagent.learner.state import Batch, init_state
from jaxagent.learner.update import make_optimizer, make_update
from jaxagent.models.spec import ModelSpec

ADAMW = OptimizerConfig(
    learning_rate=1e-4,
    schedule="constant",
    warmup_steps=0,
    b2=0.999,
    weight_decay=0.01,
    grad_clip=0.0,
)
OUR_WAYS = ((1, 16), (2, 32), (2, 64))  # virtual devices (data parallel), rows at once
TORCH_MICRO_ROWS = (8, 16, 64)
COMPILE_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 600.0  # the first answer holds all compilations
_PEAK_SIZE, _PEAK_TIMES = 2048, 6

Step = Callable[[np.ndarray], float]  # tokens i32[rows, tokens + 1] -> seconds


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured."""

    seconds: dict[str, list[float]]  # per contender, ours first
    ways: dict[str, str]
    values: dict[str, float | None]


def measure(
    model: TinyModel, rows: int, tokens: int, repetitions: int, with_torch: bool, note: Callable[[str], None]
) -> Result:
    """Chooses each side's best way, then takes turns."""
    peak = peak_flops()
    names = ["ours"]
    if with_torch and not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        note("train: torch and transformers are not both installed here: not compared")
    elif with_torch:
        names.append("torch")
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(contender(name, model.folder, rows, tokens)) for name in names]
        ways = {}
        for side in sides:  # one after the other: nobody chooses while another computes
            ways[side.name] = side.call(0)["way"]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for repetition in range(1, repetitions + 1):
            for side in sides:
                seconds[side.name].append(side.call(repetition)["seconds"])
                note(f"train, repetition {repetition}, {side.name}: {seconds[side.name][-1]:.2f} s")
    peak = max(peak, peak_flops())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    flops = model_flops(model.spec, rows, tokens)
    values = {
        "train_step_s": round(median["ours"], 4),
        "train_step_vs_torch": round(median["torch"] / median["ours"], 3) if "torch" in median else None,
        "train_mfu": round(flops / median["ours"] / peak, 3),
        "train_peak_gflops": round(peak / 1e9, 1),
    }
    return Result(seconds, ways, values)


def model_flops(spec: ModelSpec, rows: int, tokens: int) -> float:
    """Of forward and backward; attention counts the causal half."""
    attention = spec.num_heads * spec.head_dim
    layer = spec.embed_dim * (2 * attention + 2 * spec.num_kv_heads * spec.head_dim + 3 * spec.mlp_dim)
    matmul_params = spec.num_layers * layer + spec.padded_vocab_size * spec.embed_dim
    return 6.0 * rows * tokens * (matmul_params + spec.num_layers * attention * tokens)


def peak_flops() -> float:
    """The best rate of a large product in float32."""
    a = jnp.ones((_PEAK_SIZE, _PEAK_SIZE), jnp.float32)
    product = jax.jit(jnp.dot)
    product(a, a).block_until_ready()
    best = 0.0
    for _ in range(_PEAK_TIMES):
        began = time.perf_counter()
        product(a, a).block_until_ready()
        best = max(best, 2.0 * _PEAK_SIZE**3 / (time.perf_counter() - began))
    return best


def contender(name: str, folder: Path, rows: int, tokens: int) -> Side:
    """One side; repetition 0 chooses the way, the others are measured."""
    options = ["--contender", name, str(folder), f"--rows={rows}", f"--tokens={tokens}"]
    return Side(name, ["-m", "benchmarks.train_vs_torch", *options], ANSWER_TIMEOUT_S)


def serve(name: str, folder: Path, rows: int, tokens: int) -> None:
    """The other end of a `contender`."""
    note = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    step = None
    reply = reply_with()
    for repetition in requests():
        text = workloads.prompts(repetition, rows, tokens + 1, tiny_model.SPEC.vocab_size)
        if step is None:
            if name == "ours":
                steps = our_steps(tiny_model.load(folder), rows)
            else:
                steps = torch_steps(folder, rows, tokens, note)
            way, step = _fastest(name, steps, text, note)
            reply({"way": way})
        else:
            step(text)  # while this side waited, the machine may have taken its idle memory back: 4 s of page faults
            reply({"seconds": step(text)})


def _fastest(name: str, steps: dict[str, Step], text: np.ndarray, note: Callable[[str], None]) -> tuple[str, Step]:
    """The fastest of two tries each, after a first one that compiles."""
    seconds = {}
    for way, step in steps.items():
        step(text)
        seconds[way] = min(step(text), step(text))
        note(f"train, {name}, {way}: {seconds[way]:.2f} s")
    way = min(seconds, key=seconds.__getitem__)
    return way, steps[way]


# -------------------------------------------------------------------- ours


def our_steps(model: TinyModel, rows: int) -> dict[str, Step]:
    """Ways to cut the step."""
    return {
        f"{devices} device(s), {min(micro, rows)} rows at once": _our_step(tiny_model.spread(model, devices), micro)
        for devices, micro in OUR_WAYS
        if devices <= len(jax.devices())
    }


def _our_step(model: TinyModel, micro_rows: int) -> Step:
    optimizer = make_optimizer(ADAMW, 1000)
    update = make_update(policy_forward(model.spec), optimizer, model.mesh)
    with jax.set_mesh(model.mesh):
        state = init_state(model.params, optimizer)

    def step(text: np.ndarray) -> float:
        nonlocal state
        began = time.perf_counter()
        state, metrics = update(state, batches(text, micro_rows))
        jax.block_until_ready(state.params)
        seconds = time.perf_counter() - began
        assert metrics["policy/update_applied"] == 1.0
        return seconds

    return step


def batches(text: np.ndarray, micro_rows: int) -> list[Batch]:
    """Micro-batches whose every token but the first is a target of weight 1 / (all targets)."""
    rows, tokens = text.shape[0], text.shape[1] - 1
    out = []
    for first in range(0, rows, micro_rows):
        part = text[first : first + micro_rows]
        zeros = np.zeros((len(part), tokens), np.float32)
        positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), zeros.shape)
        other = dict.fromkeys((f.name for f in dataclasses.fields(Batch) if f.default is dataclasses.MISSING), zeros)
        own = {
            "tokens": part[:, :-1],
            "positions": positions,
            "segments": np.ones(zeros.shape, np.int32),
            "head_positions": positions,
            "targets": part[:, 1:],
            "ce_weights": zeros + np.float32(1 / (rows * tokens)),
            "sequence": np.broadcast_to(np.arange(first, first + len(part), dtype=np.int32)[:, None], zeros.shape),
            "offset": positions + 1,
        }
        out.append(Batch(**other | own))
    return out


# -------------------------------------------------------------------- torch


def torch_steps(folder: Path, rows: int, tokens: int, note: Callable[[str], None]) -> dict[str, Step]:
    """Ways to cut the step, on the threads that are fastest for one small part of it, and compiled ones."""
    text = workloads.prompts(0, 4, tokens + 1, tiny_model.SPEC.vocab_size)
    threads = fastest_threads(lambda threads: torch_step(folder, 4, threads, False)(text))
    sizes = sorted({min(n, rows) for n in TORCH_MICRO_ROWS})
    steps = {f"{n} rows at once, {threads} thread(s)": torch_step(folder, n, threads, False) for n in sizes}
    micro_rows = min(16, rows)
    if _compiles(folder, micro_rows, tokens, threads, note):
        way = f"{micro_rows} rows at once, {threads} thread(s), torch.compile"
        steps[way] = torch_step(folder, micro_rows, threads, True)
    return steps


def torch_step(folder: Path, micro_rows: int, threads: int, compiled: bool) -> Step:
    """The step in torch."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=ADAMW.learning_rate, betas=(0.9, ADAMW.b2), weight_decay=ADAMW.weight_decay
    )

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = network(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    run = torch.compile(loss_of) if compiled else loss_of

    def step(text: np.ndarray) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        tokens = torch.from_numpy(text.astype(np.int64))
        for part in tokens.split(micro_rows):
            (run(part[:, :-1], part[:, 1:]) * (len(part) / len(tokens))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def _compiles(folder: Path, micro_rows: int, tokens: int, threads: int, note: Callable[[str], None]) -> bool:
    """Whether torch.compile gets through one step in a minute: tried in a process of its own, whose cache stays."""
    sizes = [str(n) for n in (micro_rows, tokens, threads)]
    command = [sys.executable, "-m", "benchmarks.train_vs_torch", "--try_compile", str(folder), *sizes]
    try:
        done = subprocess.run(
            command, timeout=COMPILE_TIMEOUT_S, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except subprocess.TimeoutExpired:
        note(f"train, torch.compile: not within {COMPILE_TIMEOUT_S:.0f} s")
        return False
    if done.returncode:
        note(f"train, torch.compile: {done.stderr.strip().splitlines()[-1][:200]}")
    return done.returncode == 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="also torch and transformers, where importable")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--try_compile", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    tiny_model.two_devices()
    if args.try_compile:
        folder, (micro_rows, tokens, threads) = Path(args.try_compile[0]), map(int, args.try_compile[1:])
        text = workloads.prompts(0, micro_rows, tokens + 1, tiny_model.SPEC.vocab_size)
        torch_step(folder, micro_rows, threads, True)(text)
        return
    if args.contender:
        serve(args.contender[0], Path(args.contender[1]), args.rows, args.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            tiny_model.make(Path(folder)),
            args.rows,
            args.tokens,
            args.repetitions,
            args.torch,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    for name, seconds in result.seconds.items():
        print(f"{name:<6} {statistics.median(seconds):8.3f} s  ({result.ways[name]})")
    print(json.dumps(result.values))


if __name__ == "__main__":
    main()
