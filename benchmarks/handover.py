"""How long does a version take from a trainer's device to an engine's: by files, or by HTTP?

    python -m benchmarks.handover [--layers=7] [--repeats=5] [--compute=bfloat16]

Two processes on this machine, one device each, float32 weights (`mib`, and `published_mib` in the dtype of engines).
`in_step_s`: the trainer casts the version and copies it to the host, while its step waits; `published_s`: it is hashed,
on disk and told, beside the next step; `at_once_s`: both in the step and in float32, as it was before. Then the seconds
until the engine has the version on its device, every byte compared: `folder_s` reads the trainer's files, `http_s`
copies them into a folder of the engine's and reads that. Medians; the last line is JSON.
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
from configs.search_r1 import get_config
from jaxagent.config import FleetConfig, MeshConfig, parse
from jaxagent.fleet import weight_reader, weights
from jaxagent.fleet.admission import Answer, Outcome
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Sources
from jaxagent.models import params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.fleet import sink, trees
from jaxagent.runs.fleet.held import place
from jaxagent.runs.fleet.places import Places

TOKEN, LIMIT_S = "a token", 300.0


def spec_of(layers: int, compute: str) -> ModelSpec:
    """Wide enough that leaves are of several chunks."""
    sizes = {"num_heads": 16, "num_kv_heads": 8, "mlp_dim": 2048}
    return dataclasses.replace(tiny_model.SPEC, num_layers=layers, embed_dim=1024, compute_dtype=compute, **sizes)


class Told:
    """A coordinator that keeps digests."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def publish(self, version: int, digest: str, lineage: str, tasks: sink.Tasks) -> Answer:
        """See `Link`."""
        self.digests[version] = digest
        return Answer(Outcome.STORED)

    def weights(self, version: int) -> str | None:
        """See `Link`."""
        return self.digests.get(version)

    def keep(self, step: int) -> Answer:
        """See `Link`."""
        return Answer(Outcome.STORED)


class NoDriver:
    """No engine in the trainer: what it does with weights is the same in any case."""

    def update_params(self, params: Any, version: int) -> None:
        """Nothing."""


def published(folder: pathlib.Path, policy: Any, compute: str, repeats: int) -> tuple[dict[str, float], str]:
    """Seconds of the trainer, and the digest of version 0."""
    cfg = parse(get_config().to_dict())
    model = dataclasses.replace(cfg.model, compute_dtype=compute)
    cfg, link = dataclasses.replace(cfg, model=model, fleet=FleetConfig()), Told()
    of: Any = (cfg, NoDriver(), link, folder, "run", lambda version: {}, Vitals(), print, lambda: None)
    versions = sink.Versions(*of, lambda version: None, set)
    state: Any = argparse.Namespace(policy=policy)
    versions.publish(0, state)
    times: dict[str, list[float]] = {"in_step_s": [], "published_s": [], "at_once_s": []}
    for number in range(1, repeats + 1):
        state.policy = jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 1e-3, state.policy))
        began = time.monotonic()
        versions.publish(number, state)
        times["in_step_s"].append(time.monotonic() - began)
        versions.finish()
        times["published_s"].append(time.monotonic() - began)
        began = time.monotonic()
        weights.publish(folder / "before", trees.to_host(state.policy), "run", number)
        times["at_once_s"].append(time.monotonic() - began)
        weights.delete(folder / "before", number + 1)
    return {name: statistics.median(each) for name, each in times.items()}, link.digests[0]


def trainer(folder: pathlib.Path, layers: int, repeats: int, compute: str) -> None:
    """Publishes versions, and serves the first one until it is told to end."""
    spec, mesh = spec_of(layers, compute), sharding.make_mesh(MeshConfig(1, 1, 1, 1))
    rng, specs = np.random.default_rng(0), params.param_specs(spec)
    tree = {path: rng.random(array.shape, np.float32) for path, array in trees.paths(specs).items()}
    policy = trees.placed(tree, specs, mesh, lambda path, array: array.dtype)
    size = sum(leaf.nbytes for leaf in tree.values())
    del tree
    folder.mkdir()
    seconds, digest = published(folder, policy, compute, repeats)
    with weight_reader.Held(weights.path_of(folder, 0)) as held:
        sizes = {"mib": size / 2**20, "published_mib": held.manifest.size / 2**20}
    with WeightServer([folder], TOKEN) as server:
        print(json.dumps({"url": server.url, "digest": digest, "found": {**sizes, **seconds}}), flush=True)
        sys.stdin.readline()


def engine(seen: pathlib.Path, spec: ModelSpec, repeats: int, told: dict[str, Any]) -> dict[str, Any]:
    """Takes the version in each way; medians."""
    folder, mesh = seen.parent, sharding.make_mesh(MeshConfig(1, 1, 1, 1))
    sources = Sources(0, told["digest"], "run", (told["url"],))
    specs, nowhere = trees.of_floats(params.param_specs(spec)), folder / "nowhere"
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
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of engines")
    parser.add_argument("--trainer", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        return trainer(args.trainer, args.layers, args.repeats, args.compute)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        flags = [f"--{name}={getattr(args, name)}" for name in ("layers", "repeats", "compute")]
        command = [sys.executable, "-m", "benchmarks.handover", f"--trainer={folder / 'w'}", *flags]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
        ) as process:
            try:
                assert process.stdin is not None and process.stdout is not None
                told = json.loads(process.stdout.readline())
                found = engine(folder / "w", spec_of(args.layers, args.compute), args.repeats, told)
            finally:
                process.kill()
    row = told["found"] | found | {"device": jax.devices()[0].device_kind}
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}))


if __name__ == "__main__":
    main()
