"""Sends a run to a tracker, from its folder: what a run starts beside itself for each, and a command for afterwards.

    python -m jaxagent.observe.track runs/search_r1 wandb

What the tracker was told lies in `tracking/<name>.json` of the workdir: its id, a checksum of each record, how many
alarms, how many blocks of each log of episodes. So a run that goes on is the same one there, what was sent is not sent
again, and a record that was made again after a bundle and came out otherwise is sent once more.

A process of its own, because packages wait for servers, hold the interpreter, fork, and have their say when a process
ends: none of that reaches the run. An alarm clock of the kernel's ends it where a package is silent for `SILENT_S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jaxagent.config import ConfigError
from jaxagent.config.command import Parser, exit_code
from jaxagent.config.errors import failure_line
from jaxagent.config.parse import value_at
from jaxagent.io import files
from jaxagent.observe import alarms
from jaxagent.observe.episode_store import INDEX, StoredEpisodes
from jaxagent.observe.files import CONFIG_FILE, EPISODES_FOLDER, METRICS_FILE, SUMMARY_FILE, TRACKING_FOLDER
from jaxagent.observe.trackers import TRACKERS

SILENT_S = 300  # for one thing that a tracker is told: longer than MLflow tries again
LAST_S = 10  # for all that is left when the run was killed
TABLE_EPISODES, TABLE_CHARS = 8, 2000  # of a step in a table, at most; of a prompt or an answer
TABLES = 32  # of a log, before they become half as frequent, and again after as many more
EVERY = 10  # steps between two tables of training episodes, where the config evaluates only at the end
DONE = b"done\n"  # what the run says at its end
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class Sender:
    """Tells one tracker what is new in a workdir. All of it raises whatever the package does."""

    def __init__(self, workdir: Path, name: str):
        """Opens the run there."""
        self._workdir, self._file = workdir, workdir / TRACKING_FOLDER / f"{name}.json"
        self._state = {"id": "", "calls": 0, "alarms": 0, "records": [], "blocks": {}, "tables": {}}
        self._state |= _json(self._file)
        self._config, fresh = _json(workdir / CONFIG_FILE), uuid.uuid4().hex[:8]
        self.tracker = TRACKERS[name](workdir, self._file.parent, self._state["id"], fresh, self._config)
        self._state["id"] = self.tracker.id
        files.replace(self._file, json.dumps(self._state))
        self._metrics = open(workdir / METRICS_FILE, "rb")  # noqa: SIM115  as long as the process
        self._records = self._alarms = 0  # read; told by them
        self._watch = alarms.Watch(self._config)
        self._logs: dict[str, StoredEpisodes] = {}

    def send_new(self) -> None:
        """Sends what was written since the last call, and notes that it is sent."""
        before = self._state["calls"]
        try:
            for line in _complete_lines(self._metrics):
                self._send_record(line)
            for path in sorted((self._workdir / EPISODES_FOLDER).glob(f"*{INDEX}")):
                self._send_episodes(path.stem)
        finally:
            if self._state["calls"] != before:
                files.replace(self._file, json.dumps(self._state))

    def _send_record(self, line: bytes) -> None:
        signal.alarm(SILENT_S)
        checksum, known, record = zlib.crc32(line), self._state["records"], json.loads(line)
        news, stage, step = self._watch.add(record), record.pop("stage"), record.pop("step")
        if known[self._records : self._records + 1] != [checksum]:
            numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
            self.tracker.record(stage, step, numbers, self._state["calls"])
            known[self._records : self._records + 1] = [checksum]
            self._state["calls"] += 1
        self._records += 1
        for alarm in news:
            self._alarms += 1
            if self._alarms > self._state["alarms"]:
                self.tracker.alarm(alarm.rule.name, alarm.text, step)
                self._state["alarms"] = self._alarms

    def _send_episodes(self, log: str) -> None:
        stored = self._logs.setdefault(log, StoredEpisodes(self._workdir / EPISODES_FOLDER, log))
        stored.refresh()
        known, tables, held_out = self._state["blocks"].get(log, 0), self._state["tables"], log.endswith(".eval")
        often = 1 if held_out else value_at(self._config, "eval.every") or EVERY
        for number, block in enumerate(stored.blocks[known:], known):
            signal.alarm(SILENT_S)
            first = number == 0 or stored.blocks[number - 1]["step"] != block["step"]
            steps = block["step"] + (not held_out)  # that are done
            due = number == 0 or steps % (often << tables.get(log, 0) // TABLES) == 0
            if first and due and (rows := _rows(stored, block)):
                self.tracker.episodes(log, block["step"], rows, self._state["calls"])
                self._state["calls"] += 1
                tables[log] = tables.get(log, 0) + 1
            self._state["blocks"][log] = number + 1


def _rows(stored: StoredEpisodes, block: Mapping[str, Any]) -> list[list[Any]]:
    """The first episodes of a block, as `trackers.COLUMNS` has them; none where their texts were given up."""
    rows = []
    for i, (answer, prompt, *_) in enumerate((stored.texts(block) or [])[:TABLE_EPISODES]):
        texts = [_short(text) for text in (block["tasks"][block["task"][i]], prompt, answer)]
        rows.append([block["step"], texts[0], block["sample"][i], *texts[1:], block["reward"][i], block["stop"][i]])
    return rows


def _short(text: str) -> str:
    """A text with its middle left out where it is long; halves of surrogate pairs, which no UTF-8 has, as "?"."""
    half, dropped = TABLE_CHARS // 2, len(text) - TABLE_CHARS
    text = text if dropped <= 0 else f"{text[:half]}\n[... {dropped} characters ...]\n{text[-half:]}"
    return text.encode(errors="replace").decode()


def _complete_lines(file: IO[bytes]) -> Iterator[bytes]:
    """What was appended to an open file since the last call, without a line that is still being written."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line


def _json(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    return {}


def without_secrets(text: str) -> str:
    """A text without the values of variables that are named as secrets are, and without passwords in URLs."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return re.sub(r"(\w://)[^/@\s]+@", r"\1***@", text)


def follow(workdir: Path, name: str, live: bool, say: Callable[[str], object]) -> None:
    """Sends what there is and, `live`, what the run writes until it ends, which it says on our standard input.

    Raises:
      ConfigError: this is no run's folder, or another process sends it.
    """
    if not (workdir / METRICS_FILE).is_file():
        raise ConfigError(f"'{workdir}' is no run's folder: it has no {METRICS_FILE}.")
    (workdir / TRACKING_FOLDER).mkdir(exist_ok=True)
    signal.alarm(SILENT_S)
    with open(workdir / TRACKING_FOLDER / f"{name}.lock", "ab") as lock:
        while live and not files.try_lock(lock.fileno()):  # of the run's start before this one
            time.sleep(1)
        if not live:
            files.lock(lock.fileno(), Path(lock.name))
        sender, run, ended = Sender(workdir, name), os.getppid(), not live
        say(without_secrets(sender.tracker.note))
        while not ended:
            signal.alarm(SILENT_S)
            sender.send_new()
            ended = bool(select.select([sys.stdin], [], [], 1)[0]) or os.getppid() != run
        finished = not live or (os.getppid() == run and os.read(sys.stdin.fileno(), len(DONE)) == DONE)
        signal.alarm(SILENT_S if finished else LAST_S)
        sender.send_new()
        sender.tracker.finish(_json(workdir / SUMMARY_FILE) or None if finished else None)
        signal.alarm(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. What it has to say goes to standard output, a line each.

    Raises ConfigError, of a person's command alone: no run is there, or the tracker is not installed.
    """
    parser = Parser(prog="python -m jaxagent.observe.track", description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("tracker", choices=sorted(TRACKERS))
    parser.add_argument("--live", action="store_true", help="until the run ends, which has started it")
    options = parser.parse_args(argv)
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", **os.environ}
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        if options.live:
            os.nice(5)  # the run goes first
            os.dup2(2, 1)  # packages have much to say
        try:
            follow(options.workdir, options.tracker, options.live, lambda line: print(line, file=out, flush=True))
        except (Exception, SystemExit) as error:  # a package may end the process
            mistake = isinstance(error, ConfigError)
            if not options.live and (mistake or isinstance(error, ModuleNotFoundError)):
                raise ConfigError(str(error) if mistake else f"{error}: pip install {options.tracker}.") from None
            print(without_secrets(str(error) if isinstance(error, ConfigError) else failure_line(error)), file=out)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
