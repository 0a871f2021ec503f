"""The page's server: what runs have written, as they have written it, and nothing of it is changed.

    GET  /, /app.js, /app.css
    GET  /api/runs                                   a line for each run
    GET  /api/run?run=                               config, summary, first numbers, logs, recorded steps
    GET  /api/metrics?run=&from=                     metrics.jsonl, from where an answer's X-Next says that it ended
    GET  /api/index?run=&log=&from=                  the index of a log of episodes (observe/episode_store.py), likewise
    GET  /api/previews?run=&log=&rows=1,2            beginnings and ends of texts
    GET  /api/search?run=&log=&words=                the rows that hold all the words
    GET  /api/episode?run=&log=&row=                 an episode, long parts cut
    GET  /api/window?run=&log=&row=&trajectory=&from=   more of its tokens
    GET  /api/verdict?run=&stage=&step=, POST /api/verify   {"run", "step", "stage"}: has a step made again

Answers are JSON but for the two files of lines, which come as bytes, whole lines only. On loopback it asks for no token
and answers only to names of this machine, so that no page of another site reads it; elsewhere every /api/ request must
carry the token.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.io import connections
from jaxagent.observe import jsonl, page, report, shown_episodes
from jaxagent.observe.episode_store import INDEX, StoredEpisodes
from jaxagent.observe.files import METRICS_FILE
from jaxagent.view.runs import Runs
from jaxagent.view.verify import Verifier

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
MOST_ROWS = 200  # of one request for previews
MOST_BYTES = 32_000_000  # of one answer from a file of lines; the next request goes on
MARK_BYTES = 256  # before the next answer from a file of lines: where they are others, it begins anew
MOST_WORDS = 400  # characters
BODY_BYTES, BODY_S = 4096, 10.0
HEADERS = {
    "Content-Security-Policy": page.POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Asked:
    """What a request asks for. What it lacks or says wrongly is answered with 400, by name."""

    def __init__(self, values: Any):
        if not isinstance(values, Mapping):
            raise web.HTTPBadRequest(reason="say what you ask for as an object")
        self._values: Mapping[str, Any] = values

    def __getitem__(self, name: str) -> str:
        if not isinstance(value := self._values.get(name), str | int):
            raise web.HTTPBadRequest(reason=f"say {name}")
        return str(value)

    def number(self, name: str) -> int:
        """A number of at most 18 digits, as of bytes and of rows."""
        if not re.fullmatch(r"[0-9]{1,18}", self[name]):
            raise web.HTTPBadRequest(reason=f"{name} must be a whole number")
        return int(self[name])


class View:
    """The application. `token`: "" on loopback."""

    def __init__(self, runs: Runs, token: str):
        self._runs, self._token, self._verifier = runs, token, Verifier()

    def app(self) -> web.Application:
        """Routes, with the guard in front."""
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES)
        texts = {"/": ("text/html", page.served), "/app.js": ("text/javascript", page.script)}
        texts["/app.css"] = ("text/css", page.style)
        for path, (kind, text) in texts.items():
            app.router.add_get(path, _constant(kind, text()))
        answers: dict[str, Callable[[Asked], Any]] = {
            "runs": lambda asked: self._runs.lines(),
            "run": lambda asked: report.facts(self._runs.folder(asked["run"]), self._runs.episodes(asked["run"])),
            "previews": self._previews,
            "search": lambda asked: shown_episodes.search(self._log(asked), asked["words"][:MOST_WORDS]),
            "episode": lambda asked: shown_episodes.shown(self._log(asked), asked.number("row"), self._table(asked)),
            "window": self._window,
        }
        for name, answer in answers.items():
            app.router.add_get(f"/api/{name}", _values(answer))
        app.router.add_get("/api/metrics", self._metrics)
        app.router.add_get("/api/index", self._index)
        app.router.add_get("/api/verdict", self._verdict)
        app.router.add_post("/api/verify", self._verify)
        app.on_cleanup.append(lambda _: self._verifier.close())
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who may ask; what a user's mistake or a damaged run becomes; the headers of every answer."""
        try:
            answer = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            answer = _error(error.status, error.reason)
        except report.DAMAGED as error:
            known = isinstance(error, ConfigError)
            answer = _error(404 if known else 500, str(error) if known else f"{type(error).__name__}: {error}")
        answer.headers.update(HEADERS)
        if self._token:  # from another machine: on this one it would only take time
            answer.enable_compression()
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._token:
            if request.path.startswith("/api/") and not connections.has_token(request.headers, self._token.encode()):
                return _error(401, "the token is missing or wrong: open the address that the command printed")
        elif re.sub(r":\d*$", "", request.host).lower() not in LOOPBACK_NAMES:
            return _error(403, "this address is no name of this machine")
        return None

    def _log(self, asked: Asked) -> StoredEpisodes:
        return self._runs.log(asked["run"], asked["log"])

    def _table(self, asked: Asked) -> shown_episodes.Table:
        return self._runs.table(asked["run"])

    def _previews(self, asked: Asked) -> Any:
        rows = [Asked({"rows": row}).number("rows") for row in asked["rows"].split(",")[:MOST_ROWS] if row]
        return shown_episodes.previews(self._log(asked), rows)

    def _window(self, asked: Asked) -> Any:
        row, number, first = (asked.number(name) for name in ("row", "trajectory", "from"))
        return shown_episodes.window(self._log(asked), row, number, first, self._table(asked))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        folder = await asyncio.to_thread(self._runs.folder, Asked(request.query)["run"])
        return await _lines(request, folder / METRICS_FILE)

    async def _index(self, request: web.Request) -> web.StreamResponse:
        log = await asyncio.to_thread(self._log, Asked(request.query))
        return await _lines(request, log.folder / f"{log.name}{INDEX}")

    async def _verdict(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(request.query)
        return web.json_response(self._verifier.verdict(asked["run"], asked["stage"], asked.number("step")))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        # A form of another site cannot send this type, and a script of one is not let through.
        if request.content_type != "application/json":
            return _error(415, "say what to verify as application/json")
        try:
            asked = Asked(json.loads(await connections.read_body(request, BODY_BYTES, BODY_S)))
        except (ValueError, RecursionError):
            raise web.HTTPBadRequest(reason="the body is no JSON") from None
        run, step, stage = asked["run"], asked.number("step"), asked["stage"]
        folder = self._runs.folder(run)
        if step not in report.recorded_steps(folder).get(stage, ()):
            raise ConfigError(f"Step {step} of '{stage}' has no record: it cannot be made again (docs/replay.md).")
        return web.json_response(self._verifier.start(run, folder, step, stage))


def _constant(kind: str, text: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind, charset="utf-8")

    return answer


def _values(answer: Callable[[Asked], Any]) -> Handler:
    """Answers with values of JSON, made by another thread."""

    async def handler(request: web.Request) -> web.StreamResponse:
        value = await asyncio.to_thread(answer, Asked(request.query))
        return web.json_response(jsonl.plain(value))

    return handler


async def _lines(request: web.Request, path: Path) -> web.StreamResponse:
    """A file's whole lines from where it is asked for, "BYTE-MARK", and where the next ones begin."""
    wanted = request.query.get("from", "0")
    start_of_it, _, mark = wanted.partition("-")
    first = Asked({"from": start_of_it}).number("from")

    def read() -> tuple[bytes, str, str]:
        before, start, came_from, content = b"", 0, "0", b""
        if path.is_file():
            with path.open("rb") as file:
                if first <= file.seek(0, os.SEEK_END):
                    file.seek(max(0, first - MARK_BYTES))
                    before = file.read(min(first, MARK_BYTES))
                if mark == str(zlib.crc32(before)):
                    start, came_from = first, wanted
                else:  # the run has gone back, and perhaps on again
                    before = b""
                file.seek(start)
                content = file.read(MOST_BYTES)
        content = content[: content.rfind(b"\n") + 1]
        following = f"{start + len(content)}-{zlib.crc32((before + content)[-MARK_BYTES:])}"
        return content, came_from, following

    content, start, following = await asyncio.to_thread(read)
    answer = web.Response(body=content, content_type="application/x-ndjson")
    answer.headers.update({"X-From": start, "X-Next": following})
    return answer


def _error(status: int, why: str | None) -> web.Response:
    return web.json_response({"error": (why or "")[:1000]}, status=status)
