"""`Gateway`: one HTTP server for agent programs. Who asks is told by a secret token; every token is one session.

    async with Gateway() as gateway:
        token = gateway.add(session)          # give the program gateway.url and the token
        ...
        gateway.remove(token)
        trajectories = session.close()

The same application, with `one_shot` and an engine's own routes, is the server of `python -m jaxagent.serve`. See
docs/gateway.md for routes, rules and limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, Self

from aiohttp import web

from jaxagent.data import codec
from jaxagent.engine.requests import EngineError, QueueFullError
from jaxagent.gateway import talk
from jaxagent.gateway.chat import Ask, BadRequest
from jaxagent.gateway.forms import chat, completions, messages, responses
from jaxagent.gateway.forms.fields import parse_json
from jaxagent.gateway.forms.history import AnswerHistory
from jaxagent.gateway.service import Completions
from jaxagent.gateway.session import Session
from jaxagent.io import connections
from jaxagent.rollout.episode import one_line

logger = logging.getLogger(__name__)

FORMS: Mapping[str, ModuleType] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/completions": completions,
}
COUNT = "/v1/messages/count_tokens"
FINISH_S = 1.0  # for requests in hand when it stops
SESSION_HEADERS = ("x-api-key", "x-session-id")  # beside "Authorization: Bearer ..."


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A session that the gateway knows."""

    id: str  # for the admin routes
    token: str
    session: Session
    history: AnswerHistory = dataclasses.field(default_factory=AnswerHistory)


class Gateway:
    """The server.

    Args:
      name: of the policy, in /v1/models.
      strict_name: a request must name the policy, or nothing.
      one_shot: request -> a session for this request alone, where no known token comes with it; None: 401.
      make: body of POST /sessions -> a session; raises BadRequest. None: there are no admin routes.
      admin_token: for the admin routes; "" = there are none.
      also: an engine's own routes.
      timeout_s: longest time for reading a large body.
    """

    def __init__(
        self,
        name: str = "policy",
        strict_name: bool = False,
        one_shot: Callable[[Ask], Session] | None = None,
        make: Callable[[Mapping[str, Any]], Session] | None = None,
        admin_token: str = "",
        also: Completions | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._name, self._strict_name, self._one_shot = name, strict_name, one_shot
        self._make, self._admin_token, self._also = make, admin_token, also
        self._created = int(time.time())
        self._readers = talk.Readers(timeout_s)
        self._timeout_s = timeout_s
        self._by_token: dict[str, _Entry] = {}
        self._stack = contextlib.AsyncExitStack()
        self.url = ""  # while it listens

    # ---------------------------------------------------------------- sessions

    def add(self, session: Session) -> str:
        """Lets a program in. Returns the token that it has to send; nobody can guess it."""
        entry = _Entry(secrets.token_hex(8), secrets.token_urlsafe(32), session)
        self._by_token[entry.token] = entry
        return entry.token

    def remove(self, token: str) -> None:
        """Knows the session no more. It is not closed; what runs in it goes on. Twice is harmless."""
        self._by_token.pop(token, None)

    @property
    def sessions(self) -> int:
        """How many sessions it knows."""
        return len(self._by_token)

    def _entry(self, request: web.Request) -> _Entry | None:
        offered = [request.headers.get(name, "") for name in SESSION_HEADERS]
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        offered += [bearer.strip()] if kind.lower() == "bearer" else []
        return next((self._by_token[token] for token in offered if token in self._by_token), None)

    def _admitted(self, request: web.Request) -> _Entry | None:
        """Who asks, before anybody reads a body; None: somebody without a session, who is welcome."""
        entry = self._entry(request)
        if entry is None and self._one_shot is None:
            raise BadRequest("no session has this token", status=401, code="invalid_api_key")
        return entry

    @contextlib.contextmanager
    def _session(self, entry: _Entry | None, ask: Ask):
        if entry is not None:
            yield entry.session
            return
        assert self._one_shot is not None
        self._check_name(ask.model)
        session = self._one_shot(ask)
        try:
            yield session
        finally:
            session.close()

    # ---------------------------------------------------------------- life

    def app(self) -> web.Application:
        """The web application."""
        app = web.Application(client_max_size=talk.MAX_BODY_BYTES, middlewares=[self._errors])
        others = [] if self._also is None else list(self._also.routes())
        own_paths = {route.path for route in others}  # an engine's completions are its own: many prompts, many choices
        routes = [*others, *(web.post(path, self._talk) for path in FORMS if path not in own_paths)]
        routes += [web.post(COUNT, self._count), web.get("/v1/models", self._models)]
        routes += [web.get("/v1/models/{name:.+}", self._one_model), web.get("/", self._describe)]
        # Some clients take the base URL of the other vendor's for the place of the routes themselves.
        short = [(route, route.path.removeprefix("/v1")) for route in routes if route.path.startswith("/v1/")]
        app.add_routes([*routes, *(web.route(route.method, path, route.handler) for route, path in short)])
        if self._make is not None and self._admin_token:
            app.add_routes([web.post("/sessions", self._open), web.get("/sessions/{id}", self._show)])
            app.add_routes([web.delete("/sessions/{id}", self._delete)])
            app.add_routes([web.get("/sessions/{id}/trajectories", self._trajectories)])
        app.cleanup_ctx.append(self._ending)
        return app

    async def _ending(self, app: web.Application) -> AsyncIterator[None]:
        yield
        self._readers.close()
        if self._also is not None:
            self._also.close()

    async def listen(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Serves until `stop`, on any free port if it is 0."""
        sock = socket.create_server((host, port))
        self._stack.enter_context(sock)
        try:
            await self._stack.enter_async_context(connections.serving(self.app(), sock, finish_s=FINISH_S))
        except BaseException:
            await self._stack.aclose()
            raise
        self.url = f"http://{host}:{sock.getsockname()[1]}"

    async def stop(self) -> None:
        """Listens no more. Sessions stay as they are."""
        self.url = ""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.stop()

    # ---------------------------------------------------------------- requests

    async def _talk(self, request: web.Request) -> web.StreamResponse:
        entry, form = self._admitted(request), FORMS[_long(request.path)]
        before = None if entry is None else entry.history
        ask, digests = await talk.read_request(request, form, self._readers, before)
        with self._session(entry, ask) as session:
            return await talk.answer_request(request, form, session, ask, digests, self._name, before)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        entry = self._admitted(request)
        ask, _ = await talk.read_request(request, messages, self._readers, None if entry is None else entry.history)
        with self._session(entry, ask) as session:
            return talk.reply(messages.count(await session.count(ask)))

    async def _describe(self, request: web.Request) -> web.Response:
        return talk.reply({"name": "jaxagent", "model": self._name})

    def _check_name(self, name: str | None) -> None:
        if self._strict_name:
            talk.check_model(name, self._name)

    async def _models(self, request: web.Request) -> web.Response:
        return talk.reply(_vendor(request).models(self._name, self._created))

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_name(request.match_info["name"])
        return talk.reply(_vendor(request).model(request.match_info["name"], self._created))

    # ---------------------------------------------------------------- admin

    def _admit(self, request: web.Request) -> None:
        if not connections.has_token(request.headers, self._admin_token.encode()):
            raise BadRequest("this route needs the admin token", status=401, code="invalid_api_key")

    def _entry_of_id(self, request: web.Request) -> _Entry:
        self._admit(request)
        named = request.match_info["id"]
        entry = next((entry for entry in self._by_token.values() if entry.id == named), None)
        if entry is None:
            raise BadRequest("there is no such session", status=404, code="session_not_found")
        return entry

    async def _open(self, request: web.Request) -> web.Response:
        self._admit(request)
        body = parse_json(await talk.read_body(request))
        if not isinstance(body, dict):
            raise BadRequest("the body must be an object with a 'task_id'")
        assert self._make is not None
        token = self.add(self._make(body))
        return talk.reply({"id": self._by_token[token].id, "token": token}, 201)

    async def _show(self, request: web.Request) -> web.Response:
        session = self._entry_of_id(request).session
        state = {"running": session.running, "counters": session.counters}
        return talk.reply(state | {"stop": session.stop, "closed": session.is_closed})

    async def _trajectories(self, request: web.Request) -> web.Response:
        """Ends the session: what it gives is whole."""
        session = self._entry_of_id(request).session
        trajectories = session.close()
        failure = None if session.failure is None else one_line(session.failure, "")
        state = {"counters": session.counters, "stop": session.stop, "failure": failure, "refusal": session.refusal}
        rows = await self._readers.run(lambda: [codec.encode_trajectory(t) for t in trajectories])
        return await self._readers.run(talk.reply, {"trajectories": rows} | state)

    async def _delete(self, request: web.Request) -> web.Response:
        entry = self._entry_of_id(request)
        self.remove(entry.token)
        entry.session.close()
        return talk.reply({"id": entry.id, "deleted": True})

    # ---------------------------------------------------------------- errors

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Turns every error that comes before an answer has begun into a reply in the dialect's form."""
        param, code, headers = None, None, {}
        try:
            return await handler(request)
        except BadRequest as mistake:
            message, status, param, code = str(mistake), mistake.status, mistake.param, mistake.code
            if (entry := self._entry(request)) is not None:
                entry.session.refusal = message
        except QueueFullError as failure:
            message, status, headers = str(failure), 429, {"Retry-After": "1"}
        except TimeoutError:
            message, status = f"no result in {self._timeout_s:g} s", 503
        except EngineError as failure:
            message, status = str(failure), 500
        except web.HTTPException as answer:
            message, status = f"{request.method} {request.path}: {answer.reason}", answer.status
            headers = {name: answer.headers[name] for name in ("Allow",) if name in answer.headers}
        except ConnectionResetError:
            raise
        except Exception as failure:
            logger.exception("%s %s failed", request.method, request.path)
            message, status = f"the server failed: {type(failure).__name__}", 500
        path = _long(request.path)
        form = FORMS.get(path, messages if path == COUNT else None)
        body = (form or completions).error
        return talk.reply(body(message, status, param, code), status, headers)


def _vendor(request: web.Request) -> ModuleType:
    """One address serves both vendors' clients: Anthropic's send the header `anthropic-version`, OpenAI's do not."""
    return messages if "anthropic-version" in request.headers else completions


def _long(path: str) -> str:
    """The path of a route that was asked for with or without /v1."""
    return path if path.startswith("/v1/") else f"/v1{path}"
