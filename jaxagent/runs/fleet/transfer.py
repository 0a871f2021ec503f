"""Weights from the trainer's devices into an engine's, past the files: `fleet.transfer="device"`.

    engine                                        trainer
    GET /v1/offer/{version}, with the token  ->   Offers.offer: arrays are awaited under a number drawn at random
    Puller.params: pulls them, in time       <-   jax.experimental.transfer, from devices that are laid out alike
    compares every byte with the manifest

It is a shorter way to a version that is on disk already, and nothing depends on it: whatever is wrong, the engine says
so in one line and takes the files. What has come is used only where every byte is what was published.

What jaxlib 0.10.2 asks of this module (measured: docs/asynchronous.md, "From device to device"): a server needs
transport addresses, or the first pull aborts its process; both sides need equally many, or the puller aborts; a pull
has no deadline of its own; some that are cut off by a puller that lives on stop the trainer's server for good, which
those of killed pullers do not; an offer that nobody pulls holds its arrays until another one is made after its time.
"""

from __future__ import annotations

import datetime
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxagent.fleet import leaves, manifest, weights
from jaxagent.fleet.leaves import Path
from jaxagent.fleet.manifest import DamagedError, Leaf, Manifest, WeightsError
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.wire import Sources
from jaxagent.models import params, sharding
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.fleet import trees

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # an engine process logs no more than warnings, and these lines

STREAMS = 4  # connections that share the bytes; as many in every process, see above
PIECE_BYTES = 8 << 20  # that JAX sends at once; with its own 256 MiB a pull takes longer, and much more host memory
LEAST_S, LEAST_RATE = 20.0, 64 << 20  # of a pull: what it takes at least, and bytes per second beyond that
MOST_FAILED = 3  # pulls in a row; then this process takes the files alone
CUT_OFF_S = 5.0  # for a pull to end, when its process does


class TransferError(WeightsError):
    """A version does not come from device to device: the files have it."""


class Offers:
    """The trainer's side: the versions that were published last, which its devices hold for this.

    Updates donate no parameters, so nothing is copied: a version that is kept is one that is not freed. The devices
    hold `most` versions, the newest among them, and longer what is just being pulled.

    Args:
      host: by which others reach this process.
      mesh: of the trainer, with all devices in this process.
      most: versions that are kept.

    Raises:
      TransferError: this machine, or this jaxlib, has no such server.
    """

    def __init__(self, host: str, mesh: jax.sharding.Mesh, most: int = 1):
        self._layout, self._server, self._most = layout(mesh), _server(host, mesh), most
        self._lock = threading.Lock()
        self._kept: dict[int, dict[Path, jax.Array]] = {}  # by version

    def keep(self, version: int, policy: Params) -> None:
        """What is offered from now on: weights as they were published, on the trainer's mesh."""
        with self._lock:
            self._kept[version] = trees.paths(policy)
            for older in sorted(self._kept)[: -self._most]:
                del self._kept[older]

    def offer(self, version: int) -> bytes:
        """Has a version awaited, for one pull and a limited time. Any thread.

        Raises:
          LookupError: it is none of those that are here; says which are.
        """
        with self._lock:
            if version not in self._kept:
                raise LookupError(f"version {version} is not on the trainer's devices, but {sorted(self._kept)}")
            found = self._kept[version]
        uuid = secrets.randbits(62) + 1  # whoever knows it and reaches the port gets the arrays: it is not guessed
        seconds = seconds_for(sum(leaf.nbytes for leaf in found.values()))
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        self._server.await_pull(uuid, list(found.values()), timeout=until)
        rows = [[list(path), leaf.dtype.name, list(leaf.shape)] for path, leaf in found.items()]
        return json.dumps(
            {"uuid": uuid, "address": self._server.address(), "layout": self._layout, "leaves": rows}
        ).encode()


class Puller:
    """The engine's side. One thread at a time may ask. Use as a context manager, which ends with the process.

    Args:
      spec, mesh: of the engine.
      fetcher: asks the trainer for manifests and offers.
      host: by which others reach this process.
      most_s: for a pull, however large.
    """

    def __init__(self, spec: ModelSpec, mesh: jax.sharding.Mesh, fetcher: WeightFetcher, host: str, most_s: float):
        self._spec, self._mesh, self._fetcher, self._host, self._most_s = spec, mesh, fetcher, host, most_s
        self._server: Any = None
        self._in_a_row = 0
        self._left: list[tuple[threading.Thread, Any]] = []  # what is given up, and its connection
        self._counts = {"weights_pulled_bytes": 0.0, "weights_pulls_failed": 0.0}

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *failure: object) -> None:
        """Cuts off what is still waited for: a process that ends inside JAX aborts."""
        for thread, connection in self._left:
            if thread.is_alive() and (cut := getattr(connection, "_poison_connection", None)):
                cut()
                thread.join(CUT_OFF_S)

    def numbers(self) -> dict[str, float]:
        """Bytes that came and were right, and versions that were taken from files instead."""
        return dict(self._counts)

    def params(self, sources: Sources) -> Params | None:
        """A version on the engine's devices, in compute dtype; None: it does not come this way, which was told.

        Every byte on every device is what the manifest with the published digest says.
        """
        if self._in_a_row >= MOST_FAILED:
            return None
        specs, began = params.param_specs(self._spec), time.monotonic()
        try:
            value, offer = self._offer(sources, specs)
            arrays = self._pulled(value, offer, specs)
            check(value, arrays)
        except Exception as failure:  # jaxlib has no class of its own for what may go wrong
            self._counts["weights_pulls_failed"] += 1
            if isinstance(failure, _LateError | _OtherLayoutError):
                self._in_a_row = MOST_FAILED
            self._in_a_row += not isinstance(failure, _RefusedError)
            given_up = " This process takes files from now on." if self._in_a_row >= MOST_FAILED else ""
            logger.warning(
                "Version %d does not come from the trainer's devices, and is taken from files: %s.%s",
                sources.version,
                " ".join(str(failure).split()).rstrip(".") or type(failure).__name__,
                given_up,
            )
            return None
        self._in_a_row = 0
        self._counts["weights_pulled_bytes"] += value.size
        logger.info(
            "Version %d: %d bytes came from the trainer's devices in %.2f s, and are what was published.",
            value.version,
            value.size,
            time.monotonic() - began,
        )
        with jax.set_mesh(self._mesh):
            return jax.tree.unflatten(
                jax.tree.structure(specs),
                [
                    jax.block_until_ready(arrays.pop(path).astype(self._spec.compute_dtype))
                    for path in trees.paths(specs)
                ],
            )

    def _offer(self, sources: Sources, specs: Any) -> tuple[Manifest, Mapping[str, Any]]:
        """What was published, and how it is pulled. Raises _RefusedError where there is none, or none that fits."""
        if not sources.urls:
            raise _RefusedError("no source is known")
        try:
            value = self._fetcher.manifest_of(sources, "", trees.paths(specs))
            offer = json.loads(self._fetcher.offer(sources.urls[-1], sources.version))
        except WeightsError as failure:
            raise _RefusedError(str(failure)) from None
        if offer["layout"] != layout(self._mesh):
            raise _OtherLayoutError(f"the trainer's devices are {offer['layout']}, and these are {layout(self._mesh)}")
        offered = {tuple(path): (dtype, tuple(shape)) for path, dtype, shape in offer["leaves"]}
        if offered != {leaf.path: (leaf.dtype, leaf.shape) for leaf in value.leaves}:
            raise _RefusedError("the trainer offers other leaves than it has published")
        return value, offer

    def _pulled(self, value: Manifest, offer: Mapping[str, Any], specs: Any) -> dict[Path, jax.Array]:
        """What is offered, unchecked. Raises _LateError when its time is over, and TransferError with what JAX says."""
        if self._server is None:
            self._server = _server(self._host, self._mesh)
        where = trees.paths(params.shardings_of(specs, self._mesh, sharding.TRAIN))
        shapes = [
            jax.ShapeDtypeStruct(tuple(shape), leaves.named(dtype), sharding=where[tuple(path)])
            for path, dtype, shape in offer["leaves"]
        ]
        connection, done = self._server.connect(offer["address"]), queue.SimpleQueue[Any]()  # it waits for nothing

        def pull() -> None:
            try:
                done.put(jax.block_until_ready(connection.pull(offer["uuid"], shapes)))
            except Exception as failure:
                done.put(failure)

        # It may block outside Python for ever: the thread is given up then, and nobody sees what comes late.
        thread = threading.Thread(target=pull, name="pulls weights", daemon=True)
        thread.start()
        seconds = min(self._most_s, seconds_for(value.size))
        try:
            found = done.get(timeout=seconds)
        except queue.Empty:
            self._left.append((thread, connection))
            raise _LateError(f"{offer['address']} did not give {value.size} bytes within {seconds:.2g} s") from None
        if isinstance(found, Exception):
            raise TransferError(f"{offer['address']}: {found}") from None
        return {tuple(path): array for (path, _, _), array in zip(offer["leaves"], found, strict=True)}


class _RefusedError(TransferError):
    """The trainer gives no offer, or none that fits: this says nothing about the next version."""


class _OtherLayoutError(TransferError):
    """This engine's devices are not laid out as the trainer's, and never will be: each offer would hold a version."""


class _LateError(TransferError):
    """A pull did not end in time. It goes on, with memory for what it waits for: there may be no second one."""


def seconds_for(size: int) -> float:
    """How long a pull of so many bytes may take, and an offer waits for it."""
    return LEAST_S + size / LEAST_RATE


def layout(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What must be equal on both sides: a pull moves each device's part as it is."""
    device = mesh.devices.flat[0]
    return {"kind": device.device_kind, "mesh": [list(axis) for axis in mesh.shape.items()], "jax": jax.__version__}


def check(value: Manifest, arrays: Mapping[Path, jax.Array]) -> None:
    """Compares every byte on every device with a manifest.

    Raises:
      DamagedError: one is another; names the leaf.
    """
    with weights.threads() as pool:
        for leaf in value.leaves:
            data = leaves.to_bytes(_on_host(leaf, arrays[leaf.path]))
            if tuple(pool.map(manifest.chunk_of, manifest.cut(data))) != leaf.chunks:
                raise DamagedError(f"leaf {leaves.name_of(leaf.path)} came with bytes that differ from its digest")


def _on_host(leaf: Leaf, array: jax.Array) -> np.ndarray:
    """A leaf from the devices that hold it first; those that hold it again must hold the same."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.replica_id)
    if len(shards) == 1:
        return np.asarray(shards[0].data)
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        part = np.asarray(shard.data)
        if not shard.replica_id:
            whole[shard.index] = part
        elif not np.array_equal(_bits(part), _bits(whole[shard.index])):
            raise DamagedError(f"leaf {leaves.name_of(leaf.path)} came with other bytes to {shard.device}")
    return whole


def _bits(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(leaves.to_bytes(array), np.uint8)


def _server(host: str, mesh: jax.sharding.Mesh) -> Any:
    """A transfer server of this process. Raises TransferError where there is none to be had."""
    try:
        from jax.experimental import transfer  # not in every build of jaxlib

        address = f"{socket.gethostbyname(host or '127.0.0.1')}:0"
        client = mesh.devices.flat[0].client
        return transfer.start_transfer_server(client, address, [address] * STREAMS, transfer_size=PIECE_BYTES)
    except Exception as failure:
        raise TransferError(f"no transfer server on '{host}': {type(failure).__name__}: {failure}") from None
