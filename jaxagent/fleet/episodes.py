"""Episodes as files: each written whole or not at all, once, and known by the digest of its result.

    episodes/00000012/0-3-1-5f2c....json.z      step 12, round 0, group 3, attempt 1, beginning of the digest

A file is on disk before the ledger says so, and only what the ledger says counts. A file that it does not know is of a
process that died in between: opening the folder removes it. Since the name has the digest, two results of one episode
never share a file.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterable, Mapping

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.io import files
from jaxagent.types import Episode

Group = tuple[int, int, int]  # step, round, index within the round
Key = tuple[Group, int]  # of one attempt
FOLDER = "episodes"


class DamagedEpisodeError(ConfigError):
    """A stored episode's file is not there, or not what was stored; names the file."""


class EpisodeFiles:
    """The files of a folder's stored episodes. Every method may be called from several threads at once.

    Attributes:
      removed: files that were of no known episode.
      missing: known episodes without a file, in order.
    """

    def __init__(self, folder: str | pathlib.Path, digests: Mapping[Key, str]):
        """Opens the folder, as its one writer (the ledger's fence says who that is).

        Args:
          folder: beside the ledger's files.
          digests: the digests of all episodes that the ledger has.
        """
        self._folder = pathlib.Path(folder) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        keys_by_path = {path_of(self._folder, key, digest): key for key, digest in digests.items()}
        there = {path for path in self._folder.rglob("*") if not path.is_dir()}
        self.missing = sorted(keys_by_path[path] for path in keys_by_path.keys() - there)
        self.removed = sorted(there - keys_by_path.keys())
        for path in self.removed:
            path.unlink(missing_ok=True)
        for step in self._folder.iterdir():
            with contextlib.suppress(OSError):  # not empty
                step.rmdir()
        files.sync_folder(self._folder)
        self._steps = set(self._folder.iterdir())  # folders whose names are on disk
        self._making = threading.Lock()

    def put(self, key: Key, packed: Packed) -> None:
        """Stores an episode that `codec.check` has seen; when this returns, it is on disk.

        Raises:
          OSError: the disk is full, or failed; nothing is stored, and it may be handed in again.
        """
        path = path_of(self._folder, key, packed.digest)
        with self._making:
            if path.parent not in self._steps:
                path.parent.mkdir(exist_ok=True)
                files.sync_folder(self._folder)
                self._steps.add(path.parent)
        files.replace(path, packed.body)
        files.sync_folder(path.parent)

    def forget(self, digests: Iterable[tuple[Key, str]]) -> None:
        """Removes results that no step will read again, after the ledger says so (its `kept` line, or a compaction).

        In this order a death in between leaves files that nobody knows, which the next opening removes, as it does with
        what cannot be removed now.
        """
        for key, digest in digests:
            with contextlib.suppress(OSError):
                path_of(self._folder, key, digest).unlink()


def read(folder: str | pathlib.Path, key: Key, digest: str) -> Episode:
    """An episode's file, checked: for processes that only read, and know what the coordinator told them.

    Raises:
      DamagedEpisodeError: it is not there, or damaged; names the file.
    """
    path = path_of(pathlib.Path(folder) / FOLDER, key, digest)
    try:
        return codec.unpack(Packed(digest, path.read_bytes()), str(path))
    except FileNotFoundError:
        raise DamagedEpisodeError(f"{path} is not there, and the ledger has it.") from None
    except OSError as error:
        raise DamagedEpisodeError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ConfigError as error:
        raise DamagedEpisodeError(str(error)) from None


def name_of(key: Key) -> str:
    """For messages."""
    (step, round_, index), sample = key
    return f"episode {sample} of group {index} (round {round_}) for step {step}"


def path_of(folder: pathlib.Path, key: Key, digest: str) -> pathlib.Path:
    """Where an episode's file lies."""
    (step, round_, index), sample = key
    return folder / f"{step:08d}" / f"{round_}-{index}-{sample}-{digest[:32]}.json.z"
