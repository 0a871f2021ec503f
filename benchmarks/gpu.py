"""What can be said of one GPU in ten minutes: every open question, each part in its own process under its own limit.

    python -m benchmarks.gpu [--minutes=10] [--out=runs/gpu] [--only=decode-3b,train-3b] [--dry]

Parts run in the order of `PARTS`, the ceilings first: fractions of the other parts are of what this card reaches. A
part whose limit does not fit into the time that is left gets what is left, and is skipped below a third of its limit.
Whatever happens, each part's whole output is in OUT/<part>.log, and OUT/result.json holds what is known so far; the
same is printed last, as a table and as one line of JSON. A part that fails says so with its last line, and the others
go on; the command then exits with 1.

`--dry` runs every part at sizes that a laptop's processor takes, on whatever device JAX finds: it shows that the script
works, and its figures mean nothing. docs/gpu.md says what was measured on which card.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from jaxagent.runs import devices

TINY_CEILINGS = ("--gib=0.0625", "--size=512")
CEILINGS = ("copy_gb_per_s", "product_tflops")  # what `ceilings` measures and other parts are given
NOTHING_RAN = 5  # pytest: every test was skipped


@dataclasses.dataclass(frozen=True)
class Part:
    """One process: what follows the interpreter, how many seconds it may take, and how it is made tiny."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    tiny: tuple[str, ...] = ()  # later flags win
    ceilings: tuple[str, ...] = ()  # of CEILINGS, which the part is told
    exact: bool = False  # with the flags that exact numerics set
    needs: tuple[str, ...] = ()  # packages


def _bench(module: str, *flags: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{module}", *flags)


_TINY_DECODE = ("--shape=tiny", "--batches=1,4", "--context=100", "--repetitions=1")
_EXACT_DECODE = ("--shape=3b", "--numerics=exact", "--batches=64,256")
_TINY_TRAIN = ("--shape=tiny", "--tokens=64", "--rows=2", "--repetitions=1")
_TINY_TORCH = ("--shape=tiny", "--context=32", "--new_tokens=4", "--batches=2", "--tokens=32", "--rows=1")

PARTS = (
    Part("ceilings", 40, _bench("gpu_ceilings"), TINY_CEILINGS),
    Part("exactness", 90, _bench("gpu_exactness", "--episodes=96"), ("--episodes=2", "--engines=1"), exact=True),
    Part("decode-3b", 75, _bench("gpu_decode", "--shape=3b"), _TINY_DECODE, CEILINGS[:1]),
    Part("train-3b", 60, _bench("gpu_train", "--shape=3b"), _TINY_TRAIN, CEILINGS[1:]),
    Part("step-0.5b", 90, _bench("gpu_step", "--shape=0.5b"), (
        "--shape=tiny", "--groups=2", "--group=2", "--turns=2", "--prompt=20", "--sampled=5", "--observation=7",
        "--row_tokens=64", "--micro_rows=2",
    )),
    Part("prefill-3b", 60, _bench("gpu_prefill", "--shape=3b"), (
        "--shape=tiny", "--prompts=100", "--groups=1", "--group=2", "--repetitions=1", "--tile_rows=8",
    ), CEILINGS[1:]),
    Part("decode-0.5b", 60, _bench("gpu_decode", "--shape=0.5b"), _TINY_DECODE, CEILINGS[:1]),
    Part("train-0.5b", 40, _bench("gpu_train", "--shape=0.5b"), _TINY_TRAIN, CEILINGS[1:]),
    Part("tests", 90, ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"), needs=("pytest",)),
    *(
        Part(f"decode-3b-exact-{products}", 60, _bench("gpu_decode", *_EXACT_DECODE, f"--products={products}"),
             (*_TINY_DECODE, "--tile_rows=4"), CEILINGS[:1], exact=True)
        for products in ("kernels", "xla")
    ),
    Part("exactness-xla", 60, _bench("gpu_exactness", "--products=xla"), ("--episodes=2", "--engines=1"), exact=True),
    Part("torch-3b", 120, _bench("gpu_torch", "--shape=3b"), _TINY_TORCH, needs=("torch", "transformers")),
)  # fmt: skip


def run_part(part: Part, limit_s: float, folder: pathlib.Path, flags: list[str]) -> dict[str, Any]:
    """Runs a part to its end or its limit: its figures, or `error`, the first words of why there are none."""
    environment = dict(os.environ)
    if part.exact:
        exact_flags = [f"--{flag}" for flag in devices.EXACT_GPU_FLAGS]
        environment["XLA_FLAGS"] = " ".join([*exact_flags, environment.get("XLA_FLAGS", "")]).strip()
    log = folder / f"{part.name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *part.command, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    took = {"seconds": round(time.monotonic() - started, 1)}
    if code is None:
        return took | {"error": f"not done after {limit_s:.0f} s; its last line: {lines[-1][:200]}"}
    if code == NOTHING_RAN and "pytest" in part.needs:
        return took | {"skipped": lines[-1][:200]}
    if code:
        return took | {"error": f"exit status {code}: {lines[-1][:200]}"}
    try:
        figures = json.loads(lines[-1])
    except ValueError:
        figures = {"said": lines[-1][:200]}
    return took | figures


def flags_of(part: Part, measured: dict[str, Any], dry: bool) -> list[str]:
    """What is added to a part's command: ceilings that are known, tiny sizes."""
    ceilings = [f"--{name}={measured[name]}" for name in part.ceilings if name in measured]
    tiny = [*part.tiny, *(TINY_CEILINGS if part.ceilings else ())] if dry else []
    return [*tiny, *ceilings]


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line per figure, one heading per part."""
    lines = []
    for name, figures in results.items():
        lines.append(f"{name} ({figures.get('seconds', 0)} s)")
        shown = {key: value for key, value in figures.items() if key not in ("seconds", "device", "shape")}
        lines += [f"    {key:<32} {value}" for key, value in shown.items()]
    return "\n".join(lines)


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpu"))
    parser.add_argument("--only", default="", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on any device")
    args = parser.parse_args()
    chosen = [name for name in args.only.split(",") if name]
    if unknown := sorted(set(chosen) - {part.name for part in PARTS}):
        parser.error(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(p.name for p in PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    results: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        if chosen and part.name not in chosen:
            continue
        left_s = ends - time.monotonic()
        missing = [package for package in part.needs if importlib.util.find_spec(package) is None]
        if missing:
            results[part.name] = {"skipped": f"needs {', '.join(missing)}"}
        elif left_s < part.limit_s / 3:
            results[part.name] = {"skipped": f"{left_s:.0f} s were left, and it may take {part.limit_s:.0f}"}
        else:
            limit_s = min(left_s, part.limit_s * (10 if args.dry else 1))
            flags = flags_of(part, results.get("ceilings", {}), args.dry)
            results[part.name] = run_part(part, limit_s, args.out, flags)
        print(f"{part.name}: {json.dumps(results[part.name])}", flush=True)
        (args.out / "result.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    print(json.dumps(results))
    return int(any("error" in figures for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
