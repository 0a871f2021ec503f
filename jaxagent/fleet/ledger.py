"""The ledger: what a coordinator must not forget, line by line on disk, and back again after any death.

    ledger = Ledger(folder)
    state = replayed(ledger.recovered())
    ledger.append([{...}, {...}]).result(timeout)      # now they are on disk, in this order

One thread writes. What waits while it writes goes into the next write, so that many appends share one fsync; the future
of an append has its result after that fsync. There is one writer: opening a folder ends whoever wrote it before
(fence.py), and how lines are kept is segments.py's.

A failure is final: whoever appends has decided on the strength of lines that are not on disk, so this object writes
nothing more, and every later call fails like the first. The process ends, and the next one begins at what is on disk.
Lines that nobody was told of may be there; the same request is then answered as a repeated one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxagent.fleet import fence, segments
from jaxagent.io import files

Record = Mapping[str, Any]
MOST_WAITING = 10_000  # appends; more means that the disk hangs
MOST_TOGETHER = 1_000  # appends of one write
STOP_TIMEOUT_S = 30.0


@dataclasses.dataclass
class _Request:
    """Lines to append; or, with `keep`, a compaction."""

    records: list[Record]
    keep: Callable[[Record], bool] | None = None
    outcome: concurrent.futures.Future[Any] = dataclasses.field(default_factory=concurrent.futures.Future)


class Ledger:
    """The open ledger of a folder, which is made where there is none. Use as a context manager.

    Attributes:
      epoch: of this writer, from 1.
      notes: what was left out of the files that were found, one line each.
    """

    def __init__(self, folder: str | pathlib.Path):
        """Takes the folder over and reads it.

        Raises:
          ConfigError: a line is damaged, named by file and line, or two processes start at once.
          OSError: the disk is full, or failed.
        """
        folder = pathlib.Path(folder)
        self._folder = folder / segments.FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        files.sync_folder(folder)
        files.sync_folder(folder.parent)
        newest_epoch = max((int(name[:8]) for name in segments.names(self._folder)), default=0)
        self._fence = fence.take(folder, newest_epoch + 1)
        self.epoch = self._fence.epoch
        content = segments.read(self._folder)
        self.notes = content.notes
        self._recovered = content.records
        self._next, self._takes, self._index = content.next, content.takes, 0
        self._failure: BaseException | None = None
        self._closed = False
        self._file = self._begin(content.takes, [])
        self._remove(content.dead)
        self._waiting: queue.Queue[_Request | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def recovered(self) -> list[dict[str, Any]]:
        """What the folder held when it was opened, in order. Handed out once, and not kept."""
        records, self._recovered = self._recovered, []
        return records

    def append(self, records: Iterable[Record]) -> concurrent.futures.Future[None]:
        """Adds lines. The future is done when they, and all lines before them, are on disk: also for no lines.

        The future's exception: OSError (the disk is full, or failed), FencedError (another process has taken over),
        or the TypeError or ValueError of a record that is no JSON. All of them are final.

        Raises:
          RuntimeError: it is closed, or the disk hangs.
        """
        return self._ask(_Request(list(records)))

    def compact(self, keep: Callable[[Record], bool]) -> concurrent.futures.Future[int]:
        """Forgets the lines that `keep` does not want; the others stay as they are. The future has their number.

        `keep` is called in the writer's thread, with every line that was appended before this call, or read; it must
        not look at what goes on changing. Where the disk is full (OSError), nothing is forgotten, and the ledger goes
        on.
        """
        return self._ask(_Request([], keep))

    def check_fence(self) -> None:
        """Raises FencedError: another process has taken the folder over. For any thread."""
        self._fence.check()

    def close(self) -> None:
        """Writes what waits and ends the thread. A second call does nothing."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(queue.Full):  # the disk hangs, and the thread with it
                self._waiting.put(None, timeout=STOP_TIMEOUT_S)
            self._thread.join(STOP_TIMEOUT_S)
            if not self._thread.is_alive():
                os.close(self._file)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # ---------------------------------------------------------------- the thread

    def _ask(self, request: _Request) -> concurrent.futures.Future[Any]:
        if self._closed:
            raise RuntimeError("the ledger is closed.")
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            self._failure = RuntimeError(f"{MOST_WAITING} appends wait for the disk: it hangs.")
            raise self._failure from None
        return request.outcome

    def _work(self) -> None:
        while True:
            batch, request = list[_Request](), self._waiting.get()
            while request and not request.keep and len(batch) < MOST_TOGETHER - 1 and not self._waiting.empty():
                batch.append(request)
                request = self._waiting.get()
            if request and not request.keep:
                batch.append(request)
            if batch:
                self._do(lambda batch=batch: self._append(batch), [append.outcome for append in batch])
            if request is None:
                return
            if keep := request.keep:
                self._do(lambda keep=keep: self._compact(keep), [request.outcome])

    def _do(self, action: Callable[[], int | OSError | None], outcomes: list[concurrent.futures.Future[Any]]) -> None:
        """The action's result for all of them, or its exception; after a failure, that failure.

        An OSError that the action returns, and does not raise, has left everything as it was: it is not final.
        """
        pending = [outcome for outcome in outcomes if outcome.set_running_or_notify_cancel()]
        try:
            if self._failure is not None:
                raise self._failure
            result = action()
        except BaseException as failure:
            self._failure = result = failure
        for outcome in pending:
            if isinstance(result, BaseException):
                outcome.set_exception(result)
            else:
                outcome.set_result(result)

    def _append(self, batch: list[_Request]) -> None:
        lines = []
        for append in batch:
            for record in append.records:
                lines.append(segments.encode(self._next, record))
                self._next += 1
        if lines:
            _write(self._file, b"".join(lines))
            os.fsync(self._file)
        self._fence.check()  # after the write: a line that the next writer may not have read is told to nobody

    def _compact(self, keep: Callable[[Record], bool]) -> int | OSError:
        content = segments.read(self._folder)
        raw_lines = [line.raw for line in content.lines if keep(line.record)]
        self._index += 1
        try:
            file = self._begin({}, raw_lines)
        except OSError as failure:
            if (self._folder / segments.name_of(self.epoch, self._index)).exists():
                raise  # it may be what the next writer reads, so the segment before it must not go on
            return failure
        os.close(self._file)
        self._file, self._takes = file, {}
        self._remove([*content.takes, *content.dead])
        return len(content.lines) - len(raw_lines)

    def _begin(self, takes: Mapping[str, int], raw_lines: list[bytes]) -> int:
        """A new segment, whole or not at all; open for what is appended next."""
        path = self._folder / segments.name_of(self.epoch, self._index)
        head = segments.encode(self._next, segments.header(self.epoch, takes, compacts=not takes))
        files.replace(path, b"".join([head, *raw_lines]))
        files.sync_folder(self._folder)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _remove(self, names: Iterable[str]) -> None:
        """Removes segments that a newer one has made superfluous, if this is still the writer."""
        self._fence.check()
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
