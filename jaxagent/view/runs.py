"""The runs below a folder: which there are, how each stands, and its logs of episodes, read as they grow."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.observe import headline, report, shown_episodes
from jaxagent.observe.earlier_episodes import episodes_folder
from jaxagent.observe.episode_store import StoredEpisodes
from jaxagent.observe.files import (
    CONFIG_FILE,
    EPISODES_FILE,
    EPISODES_FOLDER,
    LOCK_FILE,
    METRICS_FILE,
    POLICY_FOLDER,
    RECORD_FOLDER,
    RUN_FILE,
    SUMMARY_FILE,
)

DEPTH = 4  # folders below the one that was named
SCAN_S = 2.0  # the list of runs is no older
FRESH_S = 120.0  # a run without a lock that is seen trains if it has written so lately
TAIL_BYTES = 200_000  # of metrics.jsonl, for the list
READ = (  # of a workdir: what the page reads
    *(METRICS_FILE, CONFIG_FILE, SUMMARY_FILE, RUN_FILE, EPISODES_FILE),
    *(EPISODES_FOLDER, RECORD_FOLDER, POLICY_FOLDER, "tokenizer"),
)


class Runs:
    """The runs below a folder, by their names: paths below it, "." for the folder itself."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._found: dict[str, Path] = {}
        self._scanned = -SCAN_S
        self._lock = threading.Lock()
        self._spare = tempfile.TemporaryDirectory()  # for runs of earlier versions
        self._logs: dict[tuple[Path, str], StoredEpisodes] = {}
        self._tables: dict[str, shown_episodes.Table] = {}
        self._lines: dict[str, tuple[Any, dict[str, Any]]] = {}  # and of what state of its files each is

    def folders(self) -> dict[str, Path]:
        """Workdirs by name, in order."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_S:
                self._found = {str(path.relative_to(self.root)): path for path in sorted(_below(self.root, DEPTH))}
                self._scanned = time.monotonic()
            return dict(self._found)

    def folder(self, name: str) -> Path:
        """Raises ConfigError: there is no such run, or it has a link that leads out of it."""
        folder = self.folders().get(name)
        if folder is None:
            raise ConfigError(f"There is no run '{name[:200]}' below {self.root}.")
        check_links(folder)
        return folder

    def episodes(self, name: str) -> Path:
        """The folder of a run's logs of episodes. Raises ConfigError: there is no such run."""
        folder = self.folder(name)
        with self._lock:
            return episodes_folder(folder, Path(self._spare.name) / str(abs(hash(name))))

    def log(self, name: str, log: str) -> StoredEpisodes:
        """A run's log as it is now. Raises ConfigError: there is none."""
        folder = self.episodes(name)
        if log not in shown_episodes.logs(folder):
            raise ConfigError(f"The run '{name[:200]}' has no log of episodes '{log[:200]}'.")
        with self._lock:
            if (folder, log) not in self._logs:
                self._logs[folder, log] = StoredEpisodes(folder, log)
            stored = self._logs[folder, log]
            stored.refresh()
            return stored

    def table(self, name: str) -> shown_episodes.Table:
        """The bytes of the run's tokens."""
        if self._tables.get(name) is None:
            folder = self.folder(name)
            self._tables[name] = shown_episodes.token_table(folder, _object(folder / CONFIG_FILE))
        return self._tables[name]

    def lines(self) -> list[dict[str, Any]]:
        """A line of the list for each run; a damaged one says so in it."""
        locks = held_locks()
        out = []
        for name, folder in self.folders().items():
            try:
                check_links(folder)
                files = [folder / file for file in (METRICS_FILE, CONFIG_FILE, SUMMARY_FILE)]
                state = [(path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file()]
                if self._lines.get(name, ([], {}))[0] != state:
                    self._lines[name] = state, line(folder, locks)
                shown = self._lines[name][1]
                out.append({"name": name, **shown, "status": _status(folder, shown["written"], locks)})
            except report.DAMAGED as error:
                out.append({"name": name, "status": "damaged", "error": f"{type(error).__name__}: {error}"[:400]})
        return out


def _below(folder: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # a folder that is not for this user, or is gone by now, hides no other
        # A config alone is that of a model, or of anything.
        if (folder / METRICS_FILE).is_file() or all((folder / name).is_file() for name in (CONFIG_FILE, RUN_FILE)):
            yield folder
        elif depth:
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                    yield from _below(path, depth - 1)


def check_links(folder: Path) -> None:
    """Raises ConfigError: something that is read of a run is a link that leads out of the run's folder, or a pipe, a
    socket or a device, for which a reader could wait without end."""
    read = [folder / name for name in READ]
    for path in [*read, *(inner for each in read if each.is_dir() for inner in each.iterdir())]:
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{path} is a link that leads out of the run's folder: nothing of the run is shown.")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path} is neither a file nor a folder: nothing of the run is shown.")


def line(folder: Path, locks: set[tuple[int, int, int]]) -> dict[str, Any]:
    """How a run stands: status, stage, step, the newest reward and score. Raises what `report.DAMAGED` names."""
    metrics, summary_file = folder / METRICS_FILE, folder / SUMMARY_FILE
    written = metrics.stat().st_mtime if metrics.is_file() else folder.stat().st_mtime
    config, summary = _object(folder / CONFIG_FILE), _object(summary_file)
    records = list(_tail(metrics))
    last = records[-1] if records else {}
    score = headline.score_of(name for record in records for name in record)
    scores = [record[f"eval/{score}"] for record in records if record.get(f"eval/{score}") is not None]
    rewards = [record["reward/mean"] for record in records if record.get("reward/mean") is not None]
    stage = str(last.get("stage", ""))
    section = config.get(stage)
    section = section if isinstance(section, Mapping) else {}
    return {
        "status": _status(folder, written, locks),
        "stage": stage,
        "step": last.get("step"),
        "steps": section.get("steps") or section.get("updates") or section.get("max_steps"),
        "environment": config.get("env", {}).get("name", ""),
        "score": score,
        "value": scores[-1] if scores else summary.get(f"eval/{score}_after_rl"),
        "reward": rewards[-1] if rewards else None,
        "failed": sum((summary.get("failed_episodes") or {}).values()),
        "written": written,
    }


def _status(folder: Path, written: float, locks: set[tuple[int, int, int]]) -> str:
    lock, summary = folder / LOCK_FILE, folder / SUMMARY_FILE
    if lock.exists() and (os.major((s := lock.stat()).st_dev), os.minor(s.st_dev), s.st_ino) in locks:
        return "running"
    if summary.is_file() and summary.stat().st_mtime >= written - 1:
        return "ended"
    return "running" if time.time() - written < FRESH_S else "stopped"


def held_locks() -> set[tuple[int, int, int]]:
    """Device (major, minor) and inode of every file that a process of this machine has locked; {} where none says so.

    Read and not tried: a lock that is tried is held for a moment, and a run that begins just then would not.
    """
    try:
        fields = [row.split() for row in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return set()
    places = [part.split(":") for row in fields for part in row if part.count(":") == 2]
    return {(int(major, 16), int(minor, 16), int(inode)) for major, minor, inode in places}


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """The last records of a file of lines."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        if size > TAIL_BYTES:
            file.readline()
        for row in file:
            if row.endswith(b"\n") and isinstance(record := json.loads(row), dict):
                yield record


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes()) if path.is_file() else {}
    return value if isinstance(value, dict) else {}
