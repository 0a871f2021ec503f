"""A process that publishes one version and offers it from its devices, well or badly: see test_transfer.py.

python -m tests.fleet.transfer_trainer FOLDER whole|flipped|silent|dies DATA FSDP
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import jax
import numpy as np

from jaxagent.config import MeshConfig
from jaxagent.fleet import weights
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.models import params, sharding
from jaxagent.models.params import Params
from jaxagent.runs.fleet import trees
from jaxagent.runs.fleet.transfer import Offers
from tests.models import tiny

TOKEN = "a secret of the run"
VERSION = 3
SPEC = tiny.spec(compute_dtype="bfloat16")  # published in another dtype than engines compute in


def policy_of(mesh: jax.sharding.Mesh, flipped: bool = False) -> Params:
    """Random weights; nothing is compiled for them. `flipped`: with one other bit in the last leaf."""
    rng, specs = np.random.default_rng(7), params.param_specs(SPEC)
    tree = {path: rng.normal(size=array.shape).astype(array.dtype) for path, array in trees.paths(specs).items()}
    if flipped:
        list(tree.values())[-1].view(np.uint8).flat[-1] ^= 1
    return trees.placed(tree, specs, mesh, lambda path, array: array.dtype)


def main(folder: str, how: str, data: str, fsdp: str) -> None:
    mesh = sharding.make_mesh(MeshConfig(int(data), int(fsdp), 1, 1))
    digest = weights.publish(folder, trees.to_host(policy_of(mesh)), "run", VERSION).digest
    offers = Offers("127.0.0.1", mesh)
    offers.keep(VERSION, policy_of(mesh, how == "flipped"))

    def offer(version: int) -> bytes:
        given = json.loads(offers.offer(version))
        if how in ("silent", "dies"):
            given["uuid"] += 1  # nothing is awaited under it: the pull waits
        if how == "dies":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return json.dumps(given).encode()

    with WeightServer([folder], TOKEN, offer=offer) as server:
        print(json.dumps([server.url, digest]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
