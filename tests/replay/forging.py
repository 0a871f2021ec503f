"""What somebody can do who owns a finished run's folder: change it, and renew every digest and seal that code can."""

import dataclasses
import json
import pathlib
import shutil
import zlib
from collections.abc import Callable

import jax
import numpy as np
import safetensors.numpy
from orbax.checkpoint import v1 as ocp

from jaxagent.data import codec
from jaxagent.learner import digests
from jaxagent.runs import record
from jaxagent.types import Episode, Group


def episodes(run: pathlib.Path, number: int, change: Callable[[int, Episode], Episode | None]) -> None:
    """Changes the episodes of a step, by their place in it (None: leaves one out), and seals the record anew."""

    def changed(step: record.RecordedStep) -> record.RecordedStep:
        at, rounds = iter(range(1000)), []
        for round_ in step.rounds:
            groups = [[change(next(at), episode) for episode in group.episodes] for group in round_]
            kept = [tuple(filter(None, group)) for group in groups]
            rounds.append(tuple(Group(group[0].task, group) for group in kept))
        return dataclasses.replace(step, rounds=tuple(rounds))

    sealed(run, lambda step: changed(step) if step.number == number else step)


def write(folder: pathlib.Path, step: record.RecordedStep) -> None:
    """Writes a step as it is said to be, with digests and seal of its own."""
    header = {"record": record.FORMAT, "step": step.number, "config": step.config, "code": step.code}
    header |= {"before": step.before, "after": step.after, "previous": step.previous}
    packed = [[[codec.pack(episode) for episode in group.episodes] for group in round_] for round_ in step.rounds]
    record._write(folder, header, step.rounds, packed)


def sealed(run: pathlib.Path, change: Callable[[record.RecordedStep], record.RecordedStep]) -> None:
    """Changes the steps of a record, and seals it anew."""
    folder, seal = run / "record/rl", ""
    for number in record.steps(folder):
        step = change(record.read(folder, number))
        write(folder, dataclasses.replace(step, previous=seal))
        seal = record.read(folder, number).seal


def bundle(path: pathlib.Path, change: Callable[[dict], None]) -> None:
    """Changes the state that a bundle holds, as a tree of NumPy arrays, and its digests with it."""
    loaded = ocp.load_checkpointables(path, {"state": None, "host": None})
    loaded["state"] = jax.tree.map(np.array, loaded["state"])
    change(loaded["state"])
    shutil.rmtree(path)
    ocp.save_checkpointables(path, loaded)
    digests.write_digests(path, ("_CHECKPOINT_METADATA", "commit_success.txt"))


def policy(path: pathlib.Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Changes the tensors of an exported policy."""
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def lines(path: pathlib.Path, change: Callable[[dict], dict]) -> None:
    """Changes every record of a log."""
    rows = [json.dumps(change(json.loads(line)), separators=(",", ":")) for line in path.read_text().splitlines()]
    path.write_text("".join(row + "\n" for row in rows))


def places(leaf: np.ndarray, name: str) -> np.ndarray:
    """u32[N]: what `digests.digest` mixes into the bits of each element of a leaf."""

    def mixed(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    begin = zlib.crc32(f"{name} {leaf.dtype} {leaf.shape}".encode())
    return mixed((np.arange(leaf.size, dtype=np.uint64) + begin).astype(np.uint32))


def colliding(leaf: np.ndarray, name: str) -> None:
    """Exchanges two elements so that `digests.digest` stays what it was, and their bits nearly so."""
    place = places(leaf, name)
    order = np.argsort(place)
    near = int(np.argmin(place[order][1:] ^ place[order][:-1]))
    one, other = order[near], order[near + 1]
    bits, by = leaf.reshape(-1).view(np.uint32), place[one] ^ place[other]
    bits[one], bits[other] = bits[other] ^ by, bits[one] ^ by


def digest_of(path: pathlib.Path) -> str:
    """`digests.digest` of the weights in a bundle."""
    return digests.digest(jax.tree.map(np.array, ocp.load_checkpointables(path, {"state": None})["state"]["params"]))
