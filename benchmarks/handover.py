"""How long does a version take from a trainer's devices to an engine's, from all processes of the trainer or from one?

    python -m benchmarks.handover [--processes=4] [--layers=27] [--repeats=3] [--compute=bfloat16]

The trainer is so many processes of one device each, which share float32 weights (`mib`; `published_mib` in the dtype of
engines). `in_step_s`: the version is cast, laid out and copied to the hosts' memory, while the step waits;
`published_s`: it is hashed, on disk and told, beside the next step. `one_in_step_s` and `one_published_s`: process 0
gathers all and writes it alone, as it was before. `copied_mib`: what each process copies, hashes and writes. Then the
seconds until an engine has the version on its device, every byte compared: `folder_s` reads the trainer's files,
`http_s` fetches them into a folder of the engine's from all processes, `one_http_s` from process 0. Medians; the last
line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np

from benchmarks import tiny_model
from configs.search_r1 import get_config
from jaxagent.config import FleetConfig, MeshConfig, parse
from jaxagent.fleet import manifest, weight_reader, weights
from jaxagent.fleet.admission import Answer, Outcome
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Sources
from jaxagent.learner import peers
from jaxagent.models import global_arrays, params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.runs import devices
from jaxagent.runs.fleet import sink, trees
from jaxagent.runs.fleet.engine_weights import VersionReader, place

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
        """See `Client`."""
        self.digests[version] = digest
        return Answer(Outcome.STORED)

    def weights(self, version: int) -> str | None:
        """See `Client`."""
        return self.digests.get(version)


class NoDriver:
    """No engine in the trainer: what it does with weights is the same in any case."""

    def update_params(self, params: Any, version: int) -> None:
        """Nothing."""


def published(folder: pathlib.Path, policy: Any, compute: str, repeats: int) -> tuple[dict[str, float], str]:
    """Seconds of the trainer, and in process 0 the digest of version 0."""
    cfg = parse(get_config().to_dict())
    model = dataclasses.replace(cfg.model, compute_dtype=compute)
    cfg, link = dataclasses.replace(cfg, model=model, fleet=FleetConfig()), Told()
    of: Any = (cfg, NoDriver(), link, folder, "run", lambda version: {}, Vitals(), print, lambda: None)
    versions = sink.VersionPublisher(*of, lambda version: None, set)
    state: Any = argparse.Namespace(policy=policy)
    versions.publish(0, state)
    versions.finish()
    names = ("in_step_s", "published_s", "one_in_step_s", "one_published_s")
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1, repeats + 1):
        state.policy = jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 1e-3, state.policy))
        peers.meet("a version of all")
        began = time.monotonic()
        versions.publish(number, state)
        times["in_step_s"].append(time.monotonic() - began)
        versions.finish()
        times["published_s"].append(time.monotonic() - began)
        peers.meet("a version of one")
        began = time.monotonic()
        cast = jax.tree.map(lambda leaf: leaf.astype(compute), state.policy)
        whole = {path: np.asarray(leaf) for path, leaf in trees.paths(global_arrays.get(cast)).items()}
        times["one_in_step_s"].append(time.monotonic() - began)
        if peers.is_first():
            weights.publish(folder / "one", manifest.shares(whole), "run", number)
            weights.delete(folder / "one", number + 1)
        times["one_published_s"].append(time.monotonic() - began)
        del cast, whole
    return {name: statistics.median(each) for name, each in times.items()}, link.digests.get(0, "")


def trainer(rank: int, address: str, args: argparse.Namespace) -> None:
    """A process of the trainer: publishes versions, and serves the first one until it is killed."""
    shape, folder = MeshConfig(1, args.processes, 1, 1), args.trainer
    with devices.distributed(rank, args.processes, address) if args.processes > 1 else contextlib.nullcontext():
        devices.provide(shape)
        spec, mesh = spec_of(args.layers, args.compute), sharding.make_mesh(shape)
        rng, specs = np.random.default_rng(0), params.param_specs(spec)
        tree = {path: rng.random(array.shape, np.float32) for path, array in trees.paths(specs).items()}
        policy = trees.placed(tree, specs, mesh, lambda path, array: array.dtype)
        size = sum(leaf.nbytes for leaf in tree.values())
        del tree
        folder.mkdir(exist_ok=True)
        shares = trees.shares(jax.tree.map(lambda leaf: leaf.astype(args.compute), policy))
        own = sum(len(piece) for share in shares for piece in share.pieces.values()) / 2**20
        del shares
        seconds, digest = published(folder, policy, args.compute, args.repeats)
        with WeightServer([folder], TOKEN) as server:
            rows = peers.meet("measured", [server.url, own])
            with weight_reader.OpenVersion(weights.path_of(folder, 0)) as held:
                sizes = {"mib": size / 2**20, "published_mib": held.manifest.size / 2**20}
            row = {**sizes, "copied_mib": [round(copied, 1) for _, copied in rows], **seconds}
            if rank == 0:
                print(json.dumps({"urls": [url for url, _ in rows], "digest": digest, "row": row}), flush=True)
            time.sleep(3600)


def engine(seen: pathlib.Path, spec: ModelSpec, repeats: int, report: dict[str, Any]) -> dict[str, Any]:
    """Takes the version in each way; medians."""
    folder, mesh = seen.parent, sharding.make_mesh(MeshConfig(1, 1, 1, 1))
    specs, nowhere = trees.of_floats(params.param_specs(spec)), folder / "nowhere"
    times: dict[str, list[float]] = {"folder_s": [], "http_s": [], "one_http_s": []}
    for repeat in range(repeats + 1):
        for name, seconds in times.items():
            urls = tuple(report["urls"][:1] if name == "one_http_s" else report["urls"])
            sources = Sources(0, report["digest"], "run", urls, len(urls))
            own = folder / f"{name}-{repeat}"
            reader = VersionReader(seen if name == "folder_s" else nowhere, own, WeightFetcher(own, TOKEN), LIMIT_S)
            began = time.monotonic()
            place(reader.read(lambda sources=sources: sources, specs)[1], spec, mesh)
            seconds.append(time.monotonic() - began)
            weights.delete(own, 1, ())
    return {name: statistics.median(each[1:]) for name, each in times.items()}  # the first ones also connect


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="of the trainer")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of engines")
    parser.add_argument("--trainer", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        return trainer(args.rank, args.address, args)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as started, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        listening.close()
        folder = pathlib.Path(name)
        flags = [f"--{name}={getattr(args, name)}" for name in ("processes", "layers", "repeats", "compute")]
        command = [sys.executable, "-m", "benchmarks.handover", f"--trainer={folder / 'w'}", f"--address={address}"]
        processes = []
        for rank in range(args.processes):
            process = subprocess.Popen([*command, *flags, f"--rank={rank}"], stdout=subprocess.PIPE, encoding="utf-8")
            processes.append(started.enter_context(process))
            started.callback(process.kill)
        watchdog = threading.Timer(12 * LIMIT_S, lambda: [process.kill() for process in processes])
        watchdog.start()
        started.callback(watchdog.cancel)
        assert processes[0].stdout is not None
        report = json.loads(next(line for line in processes[0].stdout if line.startswith("{")))  # Gloo speaks, too
        times = engine(folder / "w", spec_of(args.layers, args.compute), args.repeats, report)
    row = report["row"] | times | {"device": jax.devices()[0].device_kind}
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}))


if __name__ == "__main__":
    main()
