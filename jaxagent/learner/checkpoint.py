"""Checkpoints: one atomic bundle per step of everything a run needs to go on. The only file that knows orbax.

In: the `TrainState` on the mesh and a JSON-able dict of what the host owns (stage, task position, RNG seeds, config,
metrics position). Out: `DIRECTORY/STEP/`, written in the background and renamed into place when complete, so that a
killed run finds the last complete bundle; older ones beyond `keep` are deleted, but for those that are pinned.
Last, before the renaming, a digest of every file is written (digests.py), and a bundle is compared with it before it is
read. A damaged bundle is an error of one line that names the file and the bundle before. A full disk is an `OSError`
with ENOSPC, whichever library met it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import absl.flags
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxagent.config import ConfigError
from jaxagent.config.errors import is_full_disk
from jaxagent.config.fleet import FOLDER as FLEET_FOLDER
from jaxagent.learner import digests, peers
from jaxagent.learner.state import TrainState

Host = dict[str, Any]  # JSON-able
# Written into a bundle after its digests: orbax's times of beginning and end. Nothing of the run is in them.
_AFTER_DIGESTS = ("_CHECKPOINT_METADATA", "commit_success.txt")
_TEMPORARY = ".orbax-checkpoint-tmp"


class Checkpointer:
    """Saves and restores bundles of one run. Use from the main thread, as a context manager."""

    def __init__(
        self, directory: str | pathlib.Path, keep: int = 1, verified: Collection[int] = (), only: int | None = None
    ):
        """Opens (and creates) the directory; leftovers of a save that was killed are removed.

        Args:
          directory: of the bundles.
          keep: bundles kept, at least 1.
          verified: bundles that `check` has compared with their digests already.
          only: the one bundle that is read, as if it were the newest; nothing is saved, since another process may be
            saving there, whose leftovers stay.
        """
        if peers.count() > 1:
            _barriers_with_a_time_limit()
        self._directory = pathlib.Path(directory).absolute()
        self._pending: Any = None  # the save that was started last, until its end was looked at
        self._only = only
        self.pinned: set[int] = set()  # bundles that are kept whatever their age
        self._checked = set(verified)  # bundles whose files were compared with their digests
        logging.getLogger("absl").addFilter(_not_raised_again)
        self._checkpointer = ocp.training.Checkpointer(
            self._directory,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # the caller decides when
            preservation_policy=_NewestAndPinned(max(keep, 1), self.pinned),
            cleanup_tmp_directories=only is None,
            context=ocp.Context(async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal)),
        )

    @property
    def latest(self) -> int | None:
        """The step of the newest complete bundle; None when there is none."""
        newest = None if self._only is not None else self._checkpointer.latest
        return self._only if newest is None else newest.step

    def save(self, step: int, state: TrainState, host: Host, past: Mapping[int, Any] | None = None) -> None:
        """Starts writing a bundle. Returns once `state` is copied, so its buffers may be donated next.

        Weights under LoRA adapters (`state.frozen`) are left out: they do not change, and lie in a folder of their own.

        A step that is saved already is left alone (SIGTERM right after a periodic save). `past`: what was trained of
        earlier versions (`TrainState.params`), by version.

        Raises:
          OSError: ENOSPC: the disk is full, or was when the bundle before was written.
        """
        if step == self.latest:
            return
        self.wait()
        parts = {"state": _saved_fields(state), "host": {"json": json.dumps(host)}}
        if past:
            parts["past"] = {str(version): params for version, params in past.items()}
        with _disk_errors(self._directory):
            self._pending = self._checkpointer.save_checkpointables_async(step, parts)

    def look(self) -> bool:
        """Whether no bundle is being written; takes no time.

        Raises OSError: ENOSPC: the disk was full when it was written, which `save` would tell an interval later.
        """
        if self._pending is None:
            return True
        with _disk_errors(self._directory), contextlib.suppress(TimeoutError):
            self._pending.result(timeout=0)
            self._pending = None
        return self._pending is None

    def restore(self, target: TrainState) -> TrainState:
        """Reads the newest bundle's state.

        Args:
          target: arrays or `jax.ShapeDtypeStruct`s with the shardings to restore into (of any mesh). Its `frozen` is
            handed back as it is: what it holds of the adapters has to be made again.

        Raises:
          ConfigError: there is no bundle, it is damaged, or it holds another model or optimiser; names the first file
            or array that differs.
        """
        step = self._verified_newest()
        frozen, target = target.frozen, _saved_fields(target)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
        with _reading(self._directory, step):
            saved = _arrays(self._checkpointer.checkpointables_metadata(step).metadata["state"])
            _check_shapes(_shapes(target), _shapes(saved), f"{self._directory}/{step}")
            return TrainState(
                **self._checkpointer.load_checkpointables(step, {"state": target})["state"], frozen=frozen
            )

    def past(self, like: Any) -> dict[int, Any]:
        """What was trained of earlier versions, by version, oldest first; {} in a bundle without.

        `like`: tree of arrays with the shardings to restore into. Raises as `restore` does.
        """
        step = self._verified_newest()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        with _reading(self._directory, step):
            versions = self._checkpointer.checkpointables_metadata(step).metadata.get("past")
            if not versions:
                return {}
            target = {version: like for version in versions}
            _check_shapes(_shapes(target), _shapes(versions), f"{self._directory}/{step}")
            loaded = self._checkpointer.load_checkpointables(step, {"past": target})["past"]
            return {int(version): loaded[version] for version in sorted(loaded, key=int)}

    def wait(self) -> None:
        """Blocks until the bundle being written is complete. Raises OSError (ENOSPC) where the disk is full."""
        with _disk_errors(self._directory):
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.result()
            self._checkpointer.wait()

    def close(self) -> None:
        """Finishes writing and releases the directory."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # what `wait` has raised
                self._checkpointer.close()
            logging.getLogger("absl").removeFilter(_not_raised_again)

    def _seal(self) -> None:
        """Called by orbax, in its thread, when all files of a bundle are written and before it gets its name."""
        for folder in self._directory.glob(f"*{_TEMPORARY}*"):  # one: leftovers were removed, and saves never overlap
            digests.write_digests(folder, _AFTER_DIGESTS)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verified_newest(self) -> int:
        """The newest bundle's number, after a look at its digests."""
        if (step := self.latest) is None:
            raise ConfigError(f"No checkpoint in {self._directory}.")
        if step not in self._checked:
            check(self._directory, step)
            self._checked.add(step)
        return step


@dataclasses.dataclass(frozen=True)
class _NewestAndPinned:
    """Orbax asks it which bundles stay: the newest, and those that are pinned."""

    newest: int
    pinned: set[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Of each bundle, oldest first."""
        others = [bundle.step for bundle in checkpoints if bundle.step not in self.pinned]
        return [bundle.step in self.pinned or bundle.step in others[-self.newest :] for bundle in checkpoints]


def bundles(directory: str | pathlib.Path) -> list[int]:
    """Numbers of the complete bundles in a directory, oldest first; [] when there is none. Changes nothing on disk."""
    directory = pathlib.Path(directory)
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(path.name) for path in paths if path.name.isdigit() and path.is_dir())


def read_host(directory: str | pathlib.Path, number: int) -> Host:
    """The host's part of a bundle. The call only reads, so another process may be training in that directory."""
    path = pathlib.Path(directory).absolute() / str(number)
    with _reading(path.parent, number):
        return json.loads(ocp.load_checkpointables(path, {"host": None})["host"]["json"])


def has_past(directory: str | pathlib.Path, number: int) -> bool:
    """Whether a bundle holds earlier versions of what is trained."""
    return (pathlib.Path(directory) / str(number) / "past").is_dir()


def read_field(directory: str | pathlib.Path, number: int, field: str, target: Any) -> Any:
    """One field of the `TrainState` in a bundle, such as "params"; the others are not read. As `read_host`.

    `target`: tree of `jax.ShapeDtypeStruct`s with the shardings to restore into (of any mesh). Raises ConfigError for
    a bundle that cannot be read, or holds arrays of other shapes; names the first that differs.
    """
    path = pathlib.Path(directory).absolute() / str(number)
    with _reading(path.parent, number):
        saved = _arrays(ocp.checkpointables_metadata(path).metadata["state"])
        _check_shapes(_shapes({field: target}), _shapes({field: saved[field]}), str(path))
        targets = jax.tree.map(lambda _: ocp.PLACEHOLDER, saved, is_leaf=_is_array) | {field: target}
        return ocp.load_checkpointables(path, {"state": targets})["state"][field]


def check(directory: str | pathlib.Path, number: int) -> bool:
    """Compares a bundle's files with their digests. Only reads, as `read_host`.

    False where an older version of this code left no digests. Raises ConfigError where a file is missing or differs.
    """
    directory = pathlib.Path(directory).absolute()
    try:
        return digests.check_files(directory / str(number), _AFTER_DIGESTS)
    except ConfigError as error:
        raise _unreadable(directory, number, str(error)) from None


@contextlib.contextmanager
def _reading(directory: pathlib.Path, number: int) -> Iterator[None]:
    """Turns every other error that a library raises about a bundle into a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not (directory / str(number)).is_dir():  # deleted meanwhile by its run: the caller's to tell
            raise
        message = " ".join(str(error).split())
        raise _unreadable(directory, number, f"{type(error).__name__}: {message[:200]}") from error


def _unreadable(directory: pathlib.Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"Checkpoint {directory / str(number)} cannot be read ({why}). {_advice(directory, number)}")


def _advice(directory: pathlib.Path, number: int) -> str:
    """What to do about a bundle that cannot be read."""
    older = [other for other in bundles(directory) if other < number]
    fleet = (directory.parent / FLEET_FOLDER).is_dir()
    if not older and fleet:
        return "Put it back from a copy, or use another workdir: there is no older one."
    if not older:
        return "Delete that folder and metrics.jsonl to begin anew: there is no older one."
    if fleet and set(older) <= _pinned(directory, older):
        return (
            f"Put it back from a copy. The coordinator has forgotten the steps since the older one, {older[-1]}: "
            "without a copy delete that folder and go on from there without config.fleet, which plays them again, or "
            "use another workdir."
        )
    return f"Delete that folder to go on from {older[-1]}."


def _pinned(directory: pathlib.Path, numbers: Sequence[int]) -> set[int]:
    """The bundles that stay whatever their age, as the newest of these that can be read tells it.

    By itself, since another one may be damaged too, and orbax would have the other processes of a trainer take part.
    """
    for number in reversed(numbers):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            host = json.loads((directory / str(number) / "host" / "_strings.json").read_bytes())["json"]
            return set(json.loads(host).get("pinned", ()))
    return set()


@contextlib.contextmanager
def _disk_errors(directory: pathlib.Path) -> Iterator[None]:
    """A full disk becomes an OSError that says so, whatever the library calls it."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory)) from error


def _not_raised_again(record: logging.LogRecord) -> bool:
    """Drops what orbax logs of an exception, a traceback per thread: it is raised where we wait for the bundle."""
    return not (record.exc_info and "orbax" in record.pathname)


def _barriers_with_a_time_limit() -> None:
    """Has orbax's processes wait at the coordination service; by default it is a collective, without a limit."""
    flag = absl.flags.FLAGS["experimental_orbax_use_distributed_barrier"]
    flag.value = True
    flag.present = max(flag.present, 1)  # else it is not read before somebody parses absl's flags


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _arrays(saved: Any) -> Any:
    if not _shapes(saved):
        raise ValueError("it names no array")
    return saved


def _saved_fields(state: TrainState) -> dict[str, Any]:
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


def _check_shapes(expected: dict[str, tuple], saved: dict[str, tuple], where: str) -> None:
    names = [*expected, *(name for name in saved if name not in expected)]
    for name in sorted(names, key=lambda name: not name.startswith("params.")):  # a user knows the model's arrays
        if expected.get(name) != saved.get(name):
            ours, theirs = (f"{x[1]}{list(x[0])}" if x else "none" for x in (expected.get(name), saved.get(name)))
            raise ConfigError(
                f"Checkpoint {where} does not fit this config: array '{name}' is {theirs} there and {ours} here. "
                "Use another workdir, or the config it was made with."
            )
