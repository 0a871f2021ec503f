"""How long does a version take from a trainer's device to an engine's: by files, or by HTTP?

    python -m benchmarks.handover [--layers=7] [--repeats=5]

Two processes on this machine, one device each, float32 weights (`mib`). `publish_s`: the trainer writes the version to
disk, which comes first in any case. Then the seconds until the engine has it on its device, every byte compared:
`folder_s` reads the trainer's files, `http_s` copies them into a folder of the engine's and reads that. Medians; the
last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks import tiny_model
from jaxagent.config import MeshConfig
from jaxagent.fleet import weights
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Sources
from jaxagent.models import params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.fleet import trees
from jaxagent.runs.fleet.held import place
from jaxagent.runs.fleet.places import Places

TOKEN, LIMIT_S = "a token", 300.0


def spec_of(layers: int) -> ModelSpec:
    """Wide enough that leaves are of several chunks."""
    sizes = {"num_heads": 16, "num_kv_heads": 8, "mlp_dim": 2048}
    return dataclasses.replace(tiny_model.SPEC, num_layers=layers, embed_dim=1024, **sizes)


def trainer(folder: pathlib.Path, layers: int) -> None:
    """Publishes a version, and serves it until it is told to end."""
    spec, mesh = spec_of(layers), sharding.make_mesh(MeshConfig(1, 1, 1, 1))
    rng, specs = np.random.default_rng(0), params.param_specs(spec)
    tree = {path: rng.random(array.shape, np.float32) for path, array in trees.paths(specs).items()}
    policy = place(tree, spec, mesh)
    del tree
    began = time.monotonic()
    value = weights.publish(folder, trees.to_host(policy), "run", 0)
    seconds = time.monotonic() - began
    with WeightServer([folder], TOKEN) as server:
        told = {"url": server.url, "digest": value.digest, "size": value.size, "publish_s": seconds}
        print(json.dumps(told), flush=True)
        sys.stdin.readline()


def engine(seen: pathlib.Path, folder: pathlib.Path, layers: int, repeats: int, told: dict[str, Any]) -> dict[str, Any]:
    """Takes the version in each way; medians."""
    spec, mesh = spec_of(layers), sharding.make_mesh(MeshConfig(1, 1, 1, 1))
    sources = Sources(0, told["digest"], "run", (told["url"],))
    specs, nowhere = trees.paths(params.param_specs(spec)), folder / "nowhere"
    found: dict[str, list[float]] = {"folder_s": [], "http_s": []}
    for repeat in range(repeats + 1):
        for name, times in found.items():
            own = folder / f"{name}-{repeat}"
            places = Places(seen if name == "folder_s" else nowhere, own, WeightFetcher(own, TOKEN), LIMIT_S)
            began = time.monotonic()
            place(places.read(lambda: sources, specs)[1], spec, mesh)
            times.append(time.monotonic() - began)
    return {name: statistics.median(times[1:]) for name, times in found.items()}  # the first ones also connect


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trainer", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        return trainer(args.trainer, args.layers)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [sys.executable, "-m", "benchmarks.handover", f"--trainer={folder / 'w'}", f"--layers={args.layers}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
        ) as process:
            try:
                assert process.stdin is not None and process.stdout is not None
                told = json.loads(process.stdout.readline())
                found = engine(folder / "w", folder, args.layers, args.repeats, told)
            finally:
                process.kill()
    row = {"mib": told["size"] / 2**20, "publish_s": told["publish_s"], **found}
    row |= {"device": jax.devices()[0].device_kind}
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}))


if __name__ == "__main__":
    main()
