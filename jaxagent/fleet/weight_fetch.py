"""Weights from other processes: each chunk from whoever has it, checked, until the version is whole in an own folder.

The coordinator names sources: other engines that have the version or are fetching it, and last the trainer's
processes. For every chunk a hash makes one of the engines responsible, this one among them. An engine first fetches
what it is responsible for, from one of the trainer's processes, over which another hash spreads the chunks, and then
the rest from those who are responsible for it. So the trainer sends each chunk a few times at most, however many
engines there are; and a source that does not have a chunk (404), lies, breaks off or is gone costs an attempt at
another one. Chunks that
came are kept when a fetch fails or its process dies: the next one asks for the others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import http.client
import logging
import os
import pathlib
import shutil
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.fleet import manifest, weight_reader, weights
from jaxagent.fleet.line import Line, Reply
from jaxagent.fleet.manifest import Chunk, DamagedError, Manifest, WeightsError
from jaxagent.fleet.weights import ConflictError
from jaxagent.fleet.wire import Sources
from jaxagent.io import files

logger = logging.getLogger(__name__)

CONNECT_S = 5.0  # also between two pieces of an answer
ANSWER_S = 10.0  # for a small answer, and for a chunk beside its bytes
LEAST_RATE = 1 << 17  # bytes per second; a source that is slower is given up for another one
MOST_MANIFEST_BYTES = 1 << 28
LEAST_ANSWER_BYTES = 4096  # that any answer may have: it says what is wrong
FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 5.0  # between two rounds, while no source has what is wanted
ASKED_FIRST = 2  # engines that are asked for a chunk before the trainer is
ASK_AGAIN_S = 3.0  # between two questions where a version is, while it is fetched
AVOID_S = 5.0  # a source that failed is asked last for so long


class SourceError(WeightsError):
    """A source does not give what it was asked for."""


class GivenUpError(WeightsError):
    """Who wanted a version does not want it any more. Its chunks that came are kept."""


class WeightFetcher:
    """Fetches versions into a folder.

    Args:
      folder: of versions, this process's own.
      own_url: under which this process's server is named as a source; "" = it has none.
      manifests: where servers have what it fetches: "manifest" = versions, "base" = frozen weights.
    """

    def __init__(self, folder: str | pathlib.Path, token: str, own_url: str = "", manifests: str = "manifest"):
        self._folder = pathlib.Path(folder)
        self._token, self._own, self._manifests = token, own_url, manifests
        self._headers = {"Authorization": f"Bearer {token}"}
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._avoided: dict[str, float] = {}  # by source, until when
        self._received = 0
        self._failed: dict[str, int] = {}  # attempts, by what went wrong

    def of_base(self) -> WeightFetcher:
        """Another one, for the frozen weights that these versions change; they come to lie among them."""
        return WeightFetcher(self._folder / weights.BASE, self._token, self._own, manifests="base")

    def numbers(self) -> dict[str, float]:
        """Bytes that came, and attempts that failed."""
        with self._lock:
            return {
                "weights_got_bytes": float(self._received),
                "weights_attempts_failed": float(sum(self._failed.values())),
            }

    def fetch(
        self,
        ask: Callable[[], Sources],
        deadline_s: float,
        base: str | None = "",
        like: Mapping[manifest.Path, Any] | None = None,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> pathlib.Path:
        """Fetches a version; when this returns, it lies whole in the folder.

        What came is kept when this fails, and the next call goes on with it.

        Args:
          ask: where the version is, asked again before every round.
          deadline_s: for all of it.
          base, like: what the version must be, as in `weight_reader.hold`.
          still_wanted: asked before every chunk: it is still to be fetched.

        Raises:
          GivenUpError: it is not wanted any more.
          WeightsError: it could not be had in time, with what every source said last; or it is another one than asked.
          OSError: the disk is full, or failed.
        """
        deadline = time.monotonic() + deadline_s
        pause_s = FIRST_PAUSE_S
        while True:
            sources = ask()
            try:
                value = self.manifest_of(sources, base, like)
                with _asking_again(ask, sources) as now:

                    def read(chunk: Chunk, now: Callable[[], Sources] = now) -> bytes:
                        if not still_wanted():
                            raise GivenUpError(f"version {now().version} is not wanted any more.")
                        sources_now = now()  # asked once: the next answer may name more engines, or fewer
                        engines = responsible(chunk, sources_now.engines)
                        trainers = responsible(chunk, sources_now.urls[len(engines) :])
                        return self.chunk(chunk, [*engines[:ASKED_FIRST], *trainers, *engines[ASKED_FIRST:]])

                    copy(value, read, self._folder, order(value.chunks.values(), sources.engines, self._own))
                return self._folder
            except (weight_reader.MismatchError, GivenUpError):
                raise
            except WeightsError as failure:
                if isinstance(failure, ConflictError | DamagedError):  # what lies here is of another history, or bad
                    self.drop(sources.version)
                if time.monotonic() + pause_s > deadline:
                    raise
                logger.info("Version %d: %s; it is tried again", sources.version, failure)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def drop(self, version: int) -> None:
        """Removes a version that lies here and is not what it should be."""
        path = weights.path_of(self._folder, version)
        trash = path.with_name(f".deleting-{path.name}-{os.getpid()}-{threading.get_native_id()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def small(self, urls: Iterable[str], name: str, most_bytes: int = 1 << 20) -> bytes | None:
        """A small file that a source shares; None: no source has it."""
        for url in urls:
            with contextlib.suppress(SourceError):
                return self._get(url, f"/v1/file/{name}", most_bytes, ANSWER_S)
        return None

    # ---------------------------------------------------------------- one version

    def manifest_of(self, sources: Sources, base: str | None, like: Mapping[manifest.Path, Any] | None) -> Manifest:
        """The published manifest, from the first source that has the right one.

        Args:
          sources: who has the version.
          base, like: what it must be, as in `weight_reader.hold`.

        Raises:
          MismatchError: all sources have another one.
          SourceError: no source has it.
        """
        failures = []
        for url in self.in_order(sources.urls):
            try:
                content = self._get(url, f"/v1/{self._manifests}/{sources.version}", MOST_MANIFEST_BYTES, ANSWER_S)
                value = manifest.decode(content, f"{url}, version {sources.version}")
                weight_reader.check(value, sources.version, sources.lineage, base, like)
                if value.digest == sources.digest:
                    return value
                raise weight_reader.MismatchError(f"{url} has digest {value.digest}, {sources.digest} was published.")
            except WeightsError as failure:
                self.fail(url, failure)
                failures.append(failure)
        mismatches = [failure for failure in failures if isinstance(failure, weight_reader.MismatchError)]
        if mismatches and len(mismatches) == len(failures):
            raise mismatches[0]
        raise SourceError(_failure_text(f"version {sources.version}", failures))

    def chunk(self, chunk: Chunk, urls: Sequence[str]) -> bytes:
        """A chunk from the first source that has it.

        Raises:
          SourceError: none has; says what each said.
        """
        failures = []
        for url in self.in_order(urls):
            try:
                data = self._get(url, f"/v1/chunk/{chunk.digest}", chunk.size, ANSWER_S + chunk.size / LEAST_RATE)
                if manifest.chunk_of(data) != chunk:
                    raise DamagedError(f"{url} gave {len(data)} bytes of another digest for chunk {chunk.digest}")
                with self._lock:
                    self._received += len(data)
                return data
            except WeightsError as failure:
                self.fail(url, failure)
                failures.append(failure)
        raise SourceError(_failure_text(f"chunk {chunk.digest}", failures))

    def in_order(self, urls: Sequence[str]) -> list[str]:
        """Sources but for this process itself, those that failed a moment ago last."""
        now = time.monotonic()
        with self._lock:
            return sorted((url for url in urls if url != self._own), key=lambda url: self._avoided.get(url, 0.0) > now)

    def fail(self, url: str, failure: WeightsError) -> None:
        """A source failed. That it does not have something yet is no fault."""
        absent = isinstance(failure, _AbsentError)
        with self._lock:
            if not absent:
                self._avoided[url] = time.monotonic() + AVOID_S
                kind = type(failure).__name__
                self._failed[kind] = self._failed.get(kind, 0) + 1
        if isinstance(failure, DamagedError | weight_reader.MismatchError):
            logger.warning("A source of weights is wrong: %s", failure)

    # ---------------------------------------------------------------- one request

    def _get(self, url: str, path: str, most_bytes: int, deadline_s: float) -> bytes:
        """The body of an answer.

        Raises:
          SourceError: there is none; says why, in one line.
        """
        lines = self._threads.__dict__  # the connections of this thread
        try:
            if (line := lines.get(url)) is None:
                parts = urllib.parse.urlsplit(url)
                line = lines[url] = Line(parts.hostname or "", parts.port or 80, CONNECT_S)
            reply = _reply_of(line, path, self._headers, max(most_bytes, LEAST_ANSWER_BYTES), deadline_s)
        except (OSError, http.client.HTTPException, ValueError) as failure:
            raise SourceError(f"{url}{path}: {type(failure).__name__}: {failure}") from None
        if reply.status == 200:
            return reply.body
        error = _AbsentError if reply.status in (404, 503) else SourceError
        raise error(f"{url}{path} answered {reply.status}: {reply.body[:100].decode('utf-8', 'replace')}")


def _reply_of(line: Line, path: str, headers: Mapping[str, str], most: int, seconds: float) -> Reply:
    """Asks; once more where the other side has closed the connection since it was used last."""
    try:
        return line.ask("GET", path, b"", headers, seconds, most)
    except (OSError, http.client.HTTPException) as failure:
        if not line.used or isinstance(failure, TimeoutError):
            raise
    return line.ask("GET", path, b"", headers, seconds, most)


def copy(value: Manifest, read: Callable[[Chunk], bytes], folder: pathlib.Path, chunks: Sequence[Chunk]) -> None:
    """Makes the version in `folder` what the manifest says, going on where an earlier copy broke off.

    Args:
      value: compared with what was asked for (`weight_reader.check`).
      read: gives a chunk's bytes, compared with its digest, or raises; called from several threads at once.
      folder: of all versions; this one appears there when all of it is there.
      chunks: the manifest's, as they are to be read.

    Raises:
      WeightsError: another process, or thread, is copying the version into this folder: look for it again later.
      ConflictError: the version is there, and differs.
      OSError: the disk is full, or failed.
      Exception: what `read` raised first.
    """
    stage = folder / f".copying-{value.version:08d}-{value.digest[:16]}"
    stage.mkdir(parents=True, exist_ok=True)

    def fetch(chunk: Chunk) -> None:
        path = weights.file_of(stage, chunk)
        if not (path.exists() and manifest.chunk_of(path.read_bytes()) == chunk):
            files.replace(path, read(chunk))

    fd = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: two copies do the work twice
            if not files.try_lock(fd):
                raise WeightsError(f"{stage} is filled by another copy: version {value.version} will be there soon.")
        target = weights.path_of(folder, value.version)
        if target.exists():
            weights.compare(target, value)
            shutil.rmtree(stage, ignore_errors=True)
            return
        for path in set(stage.iterdir()) - {weights.file_of(stage, chunk) for chunk in chunks}:
            path.unlink()  # begun by a process that was killed
        with weights.threads() as pool:
            for future in concurrent.futures.as_completed([pool.submit(fetch, chunk) for chunk in chunks]):
                future.result()
        weights.finish(folder, stage, value)
    finally:
        os.close(fd)


class _AbsentError(SourceError):
    """The source does not have it, or not yet, or is busy."""


@contextlib.contextmanager
def _asking_again(ask: Callable[[], Sources], first: Sources) -> Iterator[Callable[[], Sources]]:
    """Gives the newest answer to where a version is: while it is fetched, other engines come to have parts of it."""
    newest, over = [first], threading.Event()

    def keep_asking() -> None:
        while not over.wait(ASK_AGAIN_S):
            with contextlib.suppress(Exception):  # the coordinator is away: what it said last still holds
                sources = ask()
                newest[0] = sources if sources.urls else newest[0]

    threading.Thread(target=keep_asking, name="sources", daemon=True).start()
    try:
        yield lambda: newest[0]
    finally:
        over.set()


def order(chunks: Iterable[Chunk], peers: Sequence[str], own: str) -> list[Chunk]:
    """What an engine is responsible for comes first; each engine has the rest in another order."""
    others = [*peers, own]
    return sorted(chunks, key=lambda chunk: (responsible(chunk, others)[:1] != [own], _hash(own, chunk)))


def responsible(chunk: Chunk, urls: Iterable[str]) -> list[str]:
    """Engines in the order in which they are responsible for a chunk: the same for all who ask."""
    return sorted(urls, key=lambda url: _hash(url, chunk))


def _hash(url: str, chunk: Chunk) -> bytes:
    return hashlib.blake2b(f"{url} {chunk.digest}".encode(), digest_size=8).digest()


def _failure_text(what: str, failures: Sequence[Exception]) -> str:
    reasons = "; ".join(dict.fromkeys(map(str, failures))) or "nobody has it"
    return f"{what} cannot be had from {len(failures)} sources: {reasons[:600]}"
