"""The coordinator's calls as methods: for engines, for the trainer, and for whoever starts and watches them.

    client = Client(url, token)
    joined = client.join("engine", facts, holding=())
    jobs = client.take(joined.name, places=8, holding=[], wait_s=20)

Every call may be repeated, and is repeated while the coordinator is away, until `patience_s`. What is sent and what is
answered carries its SHA-256: a bit that flips on the way costs a repetition. Any thread may call. No asyncio, no JAX.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import pathlib
import random
import secrets
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.errors import WaitedInVainError
from jaxagent.data.codec import Packed
from jaxagent.fleet import wire
from jaxagent.fleet.admission import Answer, Batch, LeasedEpisode, Outcome, UnknownWorkerError
from jaxagent.fleet.line import Line, Reply
from jaxagent.fleet.plan import EpisodeId
from jaxagent.fleet.wire import BadMessageError, Beat, Job, Joined, Sources, TaskRef

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
TELL_EVERY_S = 30.0  # that the coordinator is away
STOPPED_S = 5.0  # by which an attempt may be late without the process having been stopped
BYTES_PER_S = 1 << 20  # the slowest link on which an episode still arrives


class CoordinatorGoneError(WaitedInVainError):
    """The coordinator has not taken a call for as long as the caller is ready to wait; names the last failure."""


class CallError(RuntimeError):
    """The coordinator refuses the call. The message is its reason."""


class ReplacedError(CallError):
    """Another trainer process has joined in place of this one: it must end."""


class Client:
    """A process's calls. Its name, its key and the run's id, which `join` tells, go along with the calls that follow.

    A trainer that the coordinator does not know any more joins again by itself, under its name.

    Args:
      url: of the coordinator, "http://host:port".
      patience_s: how long a call is repeated while it fails.
      address: the file in which a coordinator that starts again writes where it listens then, and of which run it is.
        It is not used where it names another coordinator than `url` now.

    Methods raise, beside what each says: CoordinatorGoneError, CallError, and ConfigError (the token is wrong, and was
    from the first call on until `patience_s` were over).
    """

    def __init__(self, url: str, token: str, patience_s: float = 600.0, address: pathlib.Path | None = None):
        self._go_to(url)
        self._address = address if address is not None and url_in(address) == self.url else None
        self._accepted = False  # whether a call was ever answered as it was meant
        self._token, self._patience_s = token, patience_s
        self._run = "" if self._address is None else run_in(self._address)
        self._name, self._key = "", secrets.token_hex(16)
        self._trains: Mapping[str, Any] | None = None  # facts of a trainer, which joins again
        self._joining = threading.Lock()
        self._damaged = 0  # answers that came in damaged
        self._warnings = set[str]()  # what was said already
        self._taking = threading.Lock()  # one `take` at a time: a second one would give back what the first one gets
        self._lines: list[Line] = []  # that no call uses now
        self._closed = threading.Event()

    def close(self) -> None:
        """No call begins any more, and none is repeated; those under way end within their deadlines."""
        self._closed.set()
        with contextlib.suppress(IndexError):
            while True:
                self._lines.pop().close()

    # ---------------------------------------------------------------- who is there

    def join(self, role: str, facts: Mapping[str, Any], holding: Iterable[tuple[str, EpisodeId]] = ()) -> Joined:
        """Begins, or comes back.

        Args:
          role: "trainer" or "engine".
          facts: of the process, JSON values; `members.COMPARED` are those that must be equal, "config" is the digest of
            its settings, "source" an address from which it serves weights, "host" for people, "rank" of a trainer.
          holding: lease and episode of all that it plays.

        Raises:
          ConfigError: it does not belong to the run; says why.
        """
        plays = [[lease, *wire.flat(which)] for lease, which in holding]
        row = {"role": role, "facts": dict(facts), "holding": plays, "wire": wire.WIRE}
        row |= {"run": self._run, "was": self._name}
        joined = wire.plain(Joined, wire.json_object(self._ask("POST", "/v1/join", _body(row), wire.CALL_S).body))
        self._run, self._name, self._key = joined.run, joined.name, joined.key
        self._trains = facts if role == "trainer" else None
        return joined

    def beat(
        self,
        name: str,
        holding: Iterable[str],
        phase: str = "",
        phase_s: float = 0.0,
        numbers: Mapping[str, Any] | None = None,
    ) -> Beat:
        """Shows that the process lives.

        Args:
          holding: leases of all that it plays.
          phase, phase_s: what it does, and for how long.
          numbers: for people; "versions": the list of those that it serves from its "source"; "sending": how many
            processes fetch from it now.

        Raises:
          UnknownWorkerError: it is an engine, and must join again.
          ReplacedError: it is a trainer, and another one has joined in its place.
        """
        row = {"name": name, "holding": list(holding), "phase": phase, "phase_s": phase_s}
        row["numbers"] = {**(numbers or {}), "damaged_answers": self._damaged}
        return wire.plain(Beat, self._call("POST", "/v1/beat", row))

    def leave(self, name: str) -> bool:
        """A process ends, or was seen to end. False: nobody has the name."""
        return self._call("POST", "/v1/leave", {"name": name}).get("left") is True

    def drain(self, name: str) -> bool:
        """Tells a process, with its next beat, to finish what it has and leave. False: nobody has the name."""
        return self._call("POST", "/v1/drain", {"name": name}).get("drains") is True

    # ---------------------------------------------------------------- engines

    def take(self, name: str, places: int, holding: Iterable[str], wait_s: float = 0.0) -> list[Job]:
        """Episodes to play: a group's attempts at most. None may come sooner than `wait_s`: then ask again.

        Args:
          places: how many more can be played.
          holding: leases of all that is played, or not handed in yet.
          wait_s: for so long the coordinator waits for something to play; `wire.LONGEST_POLL_S` at most.

        Raises:
          UnknownWorkerError: it must join again.
        """
        with self._taking:
            row = {"name": name, "places": places, "holding": list(holding), "wait_s": wait_s}
            answer = self._call("POST", "/v1/take", row, wait_s)
        return list(wire.entries(answer, "jobs", wire.job_of))

    def put(self, work: LeasedEpisode, version: int, packed: Packed) -> Answer:
        """Hands a result in. When this returns, it is on disk, or the answer says why it is not wanted.

        Args:
          version: of its oldest token.
        """
        path = f"{_path(work.episode)}?lease={work.lease}&version={version}"
        seconds = wire.CALL_S + len(packed.body) / BYTES_PER_S
        return wire.answer_of(
            wire.json_object(self._ask("PUT", path, packed.body, seconds, {wire.DIGEST: packed.digest}).body)
        )

    # ---------------------------------------------------------------- the trainer

    def batch(self, step: int, wait_s: float = 0.0) -> Batch | None:
        """What a step trains on; None: not all of it is there yet. Asked again, it is the same.

        Raises:
          ConfigError: an episode of it is lost; says why.
          ReplacedError: another trainer has joined.
        """
        batch = self._call("POST", "/v1/batch", {"step": step, "wait_s": wait_s}, wait_s).get("batch")
        return None if batch is None else wire.batch_of(batch)

    def episode(self, which: EpisodeId) -> Packed:
        """A stored result, for who does not see the coordinator's folder. Raises CallError: it is not there."""
        reply = self._ask("GET", _path(which), b"", wire.CALL_S + wire.BODY_S, most=wire.MAX_EPISODE_BYTES)
        return Packed(reply.headers.get(wire.DIGEST, ""), reply.body)

    def damaged(self, which: EpisodeId, digest: str) -> Answer:
        """A stored result of this digest cannot be read: it is played again, and its batch waits for that.

        Raises:
          ReplacedError: another trainer has joined.
        """
        return wire.answer_of(self._call("POST", "/v1/damaged", {"episode": wire.flat(which), "digest": digest}))

    def publish(
        self, version: int, digest: str, lineage: str, tasks: Mapping[int, Sequence[Sequence[TaskRef]]]
    ) -> Answer:
        """A version's weights can be fetched.

        Args:
          version: 0 starts the run.
          lineage: of all versions that this history of training makes.
          tasks: by step, those of its rounds: of the steps that the version admits, version + staleness, and with
            version 0 all up to that one. Each round has a task for each of its groups (with dynamic sampling, further
            rounds as many as they can have).

        Raises:
          ReplacedError: another trainer has joined.
          CallError: the coordinator has kept something else.
        """
        row = {"version": version, "digest": digest, "lineage": lineage, "tasks": wire.tasks_to(tasks)}
        reply_row = self._call("POST", "/v1/publish", row)
        answer, stored_digest = wire.answer_of(reply_row), reply_row.get("digest")
        if answer.outcome in (Outcome.STORED, Outcome.DUPLICATE) and stored_digest != digest:
            raise CallError(
                f"{self.url} has kept digest {stored_digest} for version {version}, and was told {digest}: that "
                "machine's memory or disk errs, and engines would refuse the version. Begin anew in another workdir, "
                "elsewhere."
            )
        return answer

    def keep(self, step: int) -> Answer:
        """The trainer's state before `step` is saved: what earlier steps were trained on is forgotten."""
        return wire.answer_of(self._call("POST", "/v1/keep", {"step": step}))

    def end(self, reason: str) -> None:
        """The run is over: everybody learns it with the next answer."""
        self._call("POST", "/v1/end", {"reason": reason})

    # ---------------------------------------------------------------- what can be read

    def weights(self, version: int) -> Sources | None:
        """Where a version's weights are; None: it is not published."""
        reply = self._ask("GET", f"/v1/weights/{version}", b"", wire.CALL_S, also=(404,))
        return None if reply.status == 404 else wire.plain(Sources, wire.json_object(reply.body))

    def status(self) -> dict[str, Any]:
        """What the coordinator tells people."""
        return wire.json_object(self._ask("GET", "/v1/status", b"", wire.CALL_S).body)

    # ---------------------------------------------------------------- inside

    def _call(self, method: str, path: str, row: Mapping[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        key = self._key
        try:
            return wire.json_object(self._ask(method, path, _body(row), wire.CALL_S + wait_s).body)
        except UnknownWorkerError:
            if self._trains is None:
                raise
        with self._joining:
            if key == self._key:  # no other thread has joined since
                self.join("trainer", self._trains)
        return self._call(method, path, row, wait_s)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        most: int = wire.MAX_CALL_BYTES,
        also: tuple[int, ...] = (),
    ) -> Reply:
        """Asks until it is answered."""
        waited, warned_s, pause_s, attempt = 0.0, 0.0, FIRST_PAUSE_S, 0
        while True:
            if self._closed.is_set():
                raise CoordinatorGoneError("the client is closed.")
            attempt += 1
            begun, line, reply = time.monotonic(), self._idle(), None
            try:
                call_headers = self._headers(method, path, body, attempt, headers)
                reply = line.ask(method, path, body, call_headers, seconds, most)
                self._check(reply, method, path, call_headers, line)
                self._lines.append(line)
                if reply.status == 200 or reply.status in also:
                    self._accepted = True
                    return reply
                length_damaged = reply.status == 413 and len(body) <= wire.MAX_CALL_BYTES
                if not length_damaged and not wire.may_pass(reply.status, waited, self._patience_s, self._accepted):
                    raise _error(reply, self.url + path, self._run)
                failed = f"{reply.status} {_refusal(reply)[1]}"
                if reply.status == 401:
                    failed = f"{failed}{_of_another_run(reply, self._run)}"
                    self._warn("token", f"{failed}. It is asked again for {self._patience_s:g} s (fleet.patience_s)")
            except (OSError, http.client.HTTPException) as error:
                failed = str(error) or type(error).__name__
                if line.used:
                    waited += self._attempt_s(begun, seconds)
                    if waited < self._patience_s:
                        continue  # the server closes connections that have been idle: this says nothing of it
                    begun = time.monotonic()
            self._closed.wait(pause_s * (0.5 + random.random()))
            if self._address is not None and (moved := url_in(self._address)) not in ("", self.url):
                self._go_to(moved)
            waited += self._attempt_s(begun, seconds + 2 * pause_s)
            if waited > warned_s + TELL_EVERY_S:
                warned_s = waited
                logger.warning(
                    "%s has not taken the call for %.0f s (%s); it is asked for %g s (fleet.patience_s)",
                    self.url, waited, failed, self._patience_s,
                )  # fmt: skip
            if waited > self._patience_s and (reply is None or reply.status != 401 or self._accepted):
                limit = f"(fleet.patience_s={self._patience_s:g})"
                raise CoordinatorGoneError(f"{self.url} has failed for {waited:.0f} s {limit}: {failed.rstrip('.')}.")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @staticmethod
    def _attempt_s(begun: float, most: float) -> float:
        """Seconds of an attempt, which ends by its own limit: in what is beyond, this process itself was stopped."""
        return min(time.monotonic() - begun, most + STOPPED_S)

    def ask(self, method: str, path: str, row: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Any call, whose answer is waited for no longer than so."""
        body = b"" if row is None else json.dumps(row).encode()
        return wire.json_object(self._ask(method, path, body, seconds).body)

    def _go_to(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/"):
            raise ConfigError(f"'{url}' is no address of a coordinator: write http://HOST:PORT.")
        self.url, self._host, self._port = url.rstrip("/"), parts.hostname, port

    def _idle(self) -> Line:
        """A connection that no other thread uses now."""
        try:
            return self._lines.pop()
        except IndexError:
            return Line(self._host, self._port)

    def _check(self, reply: Reply, method: str, path: str, call_headers: Mapping[str, str], line: Line) -> None:
        """Raises HTTPException where an answer is not what was sent, or is another call's."""
        call_sum, digest = wire.sum_of_call(method, path, call_headers), reply.headers.get(wire.DIGEST, "")
        if reply.headers.get(wire.SUM) == wire.sum_of_answer(call_sum, reply.status, digest, reply.body):
            return
        line.close()  # whatever else comes over it is no answer to the next call either
        self._damaged += 1
        excerpt = f"{reply.status} {_refusal(reply)[1][:200]}".strip()
        if wire.SUM in reply.headers:
            why = (
                "came in damaged: a link or a memory on the way errs, or a proxy changes addresses, headers or bodies, "
                "which it must leave as they are"
            )
        else:
            server = reply.headers.get("Server", "which does not say what it is")[:80]
            why = f"is none of a coordinator of this code: a proxy or another program ({server}) sent it"
        self._warn(why, f"the answer to {method} {path} ({excerpt}) {why}. It is asked for again")
        raise http.client.HTTPException(f"the answer ({excerpt}) is damaged, of other code, or of a proxy")

    def _warn(self, what: str, line: str) -> None:
        """Says something once for this process."""
        if what not in self._warnings:
            self._warnings.add(what)
            logger.warning("%s: %s. Said once for this process.", self.url, line)

    def _headers(self, method: str, path: str, body: bytes, attempt: int, more: Mapping[str, str] | None):
        """The headers of a request. No two are equal, so no answer to an earlier request passes for this one's."""
        own = {wire.RUN: self._run, wire.NAME: self._name, wire.KEY: self._key, **(more or {})}
        own[wire.ATTEMPT] = f"{attempt}-{secrets.token_hex(4)}"
        checksum = wire.sum_of_call(method, path, own)
        checksum.update(body)
        own[wire.SUM] = checksum.hexdigest()
        return {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", **own}


def _body(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode()


def url_in(address: pathlib.Path) -> str:
    """Where a coordinator says that it listens; "" where it does not, or somebody has changed the file."""
    return _field_of(address, "url")


def run_in(address: pathlib.Path) -> str:
    """The id of the run that a coordinator says it serves; "" where it says none."""
    return _field_of(address, "run")


def _field_of(address: pathlib.Path, name: str) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(address.read_text(encoding="utf-8"))[name])
    return ""


def _of_another_run(reply: Reply, run: str) -> str:
    """What to add to a refusal by a coordinator that says that it is another run's; "" where it does not."""
    other = reply.headers.get(wire.RUN, "")
    return f" (it is the coordinator of run {other:.40}; this process is of run {run})" if run and other != run else ""


def _path(which: EpisodeId) -> str:
    return "/v1/episodes/" + "/".join(map(str, wire.flat(which)))


def _refusal(reply: Reply) -> tuple[str, str]:
    """The kind and the line of a refusal."""
    with contextlib.suppress(BadMessageError):
        row = wire.json_object(reply.body)
        return str(row.get("kind", "")), " ".join(str(row.get("error", "")).split())[:2000]
    return "", "".join(c if c.isprintable() else "?" for c in reply.body[:200].decode("utf-8", "replace"))


def _error(reply: Reply, url: str, run: str) -> Exception:
    kind, line = _refusal(reply)
    if kind == "unknown_worker":
        return UnknownWorkerError(line)
    if kind == "replaced":
        return ReplacedError(line)
    if kind == "refused":
        return ConfigError(f"The coordinator at {url} refuses this process: {line}")
    if kind == "lost":
        return ConfigError(f"The coordinator at {url} needs a stored episode that is lost: {line}")
    if kind == "token":
        return ConfigError(
            f"{url}: the token is wrong{_of_another_run(reply, run)}: the environment variable JAXAGENT_FLEET_TOKEN "
            "must be what the run's other processes have; the command that starts a run keeps it in WORKDIR/fleet/token"
        )
    return CallError(f"{url} answered {reply.status}: {line}")
