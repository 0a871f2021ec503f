"""Checkpoints: one atomic bundle per step of everything a run needs to go on. The only file that knows orbax.

In: the `TrainState` on the mesh and a JSON-able dict of what the host owns (stage, task position, RNG seeds, config,
metrics position). Out: `DIRECTORY/STEP/`, written in the background and renamed into place when complete, so that a
killed run finds the last complete bundle; older ones beyond `keep` are deleted.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxagent.config import ConfigError
from jaxagent.learner.state import TrainState

Host = dict[str, Any]  # JSON-able


class Checkpointer:
    """Saves and restores bundles of one run. Use from the main thread, as a context manager."""

    def __init__(self, directory: str | pathlib.Path, keep: int):
        """Opens (and creates) the directory; leftovers of a save that was killed are removed.

        Args:
          directory: of the bundles.
          keep: bundles kept, at least 1.
        """
        policies = ocp.training.save_decision_policies, ocp.training.preservation_policies
        self._checkpointer = ocp.training.Checkpointer(
            pathlib.Path(directory).absolute(),
            save_decision_policy=policies[0].FixedIntervalPolicy(1),  # the caller decides when
            preservation_policy=policies[1].LatestN(max(keep, 1)),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """The step of the newest complete bundle; None when there is none."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: TrainState, host: Host) -> None:
        """Starts writing a bundle. Returns once `state` is copied, so its buffers may be donated next.

        Weights under LoRA adapters (`state.frozen`) are left out: they do not change, and lie in a folder of their own.

        A step that is saved already is left alone (SIGTERM right after a periodic save).
        """
        if step == self.latest:
            return
        self._checkpointer.save_checkpointables_async(step, {"state": _kept(state), "host": {"json": json.dumps(host)}})

    def host(self, step: int | None = None) -> Host:
        """What the host saved in the bundle of `step` (None = newest): enough to know what state to expect."""
        loaded = self._checkpointer.load_checkpointables(self._step(step), {"host": None})
        return json.loads(loaded["host"]["json"])

    def restore(self, target: TrainState, step: int | None = None) -> tuple[TrainState, Host]:
        """Reads a bundle.

        Args:
          target: arrays or `jax.ShapeDtypeStruct`s with the shardings to restore into (of any mesh). Its `frozen` is
            handed back as it is: what it holds of the adapters has to be made again.
          step: None = newest.

        Raises:
          ConfigError: there is no bundle, or it holds another model or optimiser; names the first array that differs.
        """
        step = self._step(step)
        frozen, target = target.frozen, _kept(target)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
        saved = self._checkpointer.checkpointables_metadata(step).metadata["state"]
        _check_shapes(_shapes(target), _shapes(saved), f"{self._checkpointer.directory}/{step}")
        loaded = self._checkpointer.load_checkpointables(step, {"state": target, "host": None})
        return TrainState(**loaded["state"], frozen=frozen), json.loads(loaded["host"]["json"])

    def wait(self) -> None:
        """Blocks until the bundle being written is complete."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Finishes writing and releases the directory."""
        self._checkpointer.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, step: int | None) -> int:
        step = self.latest if step is None else step
        if step is None:
            raise ConfigError(f"No checkpoint in {self._checkpointer.directory}.")
        return step


def bundles(directory: str | pathlib.Path) -> list[int]:
    """Numbers of the complete bundles in a directory, oldest first; [] when there is none. Changes nothing on disk."""
    directory = pathlib.Path(directory)
    found = [path for path in directory.iterdir() if path.name.isdigit()] if directory.is_dir() else []
    return sorted(int(path.name) for path in found)


def read_host(directory: str | pathlib.Path, number: int) -> Host:
    """What the host saved in a bundle. Only reads, so another process may be training in that directory."""
    path = pathlib.Path(directory).absolute() / str(number)
    return json.loads(ocp.load_checkpointables(path, {"host": None})["host"]["json"])


def read_field(directory: str | pathlib.Path, number: int, field: str, target: Any) -> Any:
    """One field of the `TrainState` in a bundle, such as "params"; the others are not read. As `read_host`.

    Args:
      directory, number: of the bundle.
      field: of `TrainState`.
      target: tree of `jax.ShapeDtypeStruct`s with the shardings to restore into (of any mesh).

    Raises:
      ConfigError: the bundle holds arrays of other shapes; names the first that differs.
    """
    path = pathlib.Path(directory).absolute() / str(number)
    saved = ocp.checkpointables_metadata(path).metadata["state"]
    _check_shapes(_shapes({field: target}), _shapes({field: saved[field]}), str(path))
    wanted = jax.tree.map(lambda _: ocp.PLACEHOLDER, saved, is_leaf=_is_array) | {field: target}
    return ocp.load_checkpointables(path, {"state": wanted})["state"][field]


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _kept(state: TrainState) -> dict[str, Any]:
    """What a bundle holds of a state, by name of the field."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "frozen"}


def _shapes(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> (shape, dtype) of every array of a tree of arrays or of orbax metadata."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_array)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (tuple(leaf.shape), np.dtype(leaf.dtype).name)
        for path, leaf in leaves
        if _is_array(leaf)
    }


def _check_shapes(wanted: dict[str, tuple], found: dict[str, tuple], where: str) -> None:
    names = [*wanted, *(name for name in found if name not in wanted)]
    for name in sorted(names, key=lambda name: not name.startswith("params.")):  # a user knows the model's arrays
        if wanted.get(name) != found.get(name):
            said, has = (f"{x[1]}{list(x[0])}" if x else "none" for x in (wanted.get(name), found.get(name)))
            raise ConfigError(
                f"Checkpoint {where} does not fit this config: array '{name}' is {has} there and {said} here. "
                "Use another workdir, or the config it was made with."
            )
