"""A retrieval server that speaks the published `POST /retrieve` protocol, over BM25 or a dense index.

    python -m jaxagent.envs.search.retriever.server --corpus=corpus.jsonl --port=8000
    python -m jaxagent.envs.search.retriever.server --corpus=corpus.jsonl --index=INDEX_FOLDER --port=8000

Clients: `env.retriever.name="http"` of any number of runs, or Search-R1's own code. `GET /health` answers 200.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from aiohttp import web

from jaxagent.config.command import Parser, bound, exit_code, port, seconds
from jaxagent.envs.search.retriever.base import Retriever, RetrieverError, read_corpus

MAX_BODY_BYTES = 16 * 2**20
MAX_TOPK = 1000


def make_app(retriever: Retriever, timeout_s: float) -> web.Application:
    """The web application around any retriever. Malformed requests get 400, failing searches 500, slow ones 503."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.text())
            queries, topk, scores = body["queries"], body.get("topk", 3), body.get("return_scores", False)
            valid = isinstance(queries, list) and all(isinstance(q, str) for q in queries)
            if not valid or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
                raise ValueError(f"queries must be a list of texts and topk from 1 to {MAX_TOPK}")
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            return web.json_response({"error": f"{type(failure).__name__}: {failure}"}, status=400)
        try:
            async with asyncio.timeout(timeout_s):
                passages_of_queries = await retriever.search(queries, topk)
        except TimeoutError:
            return web.json_response({"error": f"no result in {timeout_s:g} s"}, status=503)
        except RetrieverError as failure:
            return web.json_response({"error": str(failure)}, status=500)
        result = []
        for passages in passages_of_queries:
            documents = [{"id": p.id, "contents": p.contents} for p in passages]
            if scores:
                documents = [{"document": d, "score": p.score} for d, p in zip(documents, passages, strict=True)]
            result.append(documents)
        return web.json_response({"result": result})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    return app


def open_local(corpus: str, index: str) -> Retriever:
    """BM25 over a jsonl corpus, or a dense index folder over it when `index` is not empty."""
    passages = read_corpus(corpus)
    if not index:
        from jaxagent.envs.search.retriever.bm25 import Bm25

        return Bm25(passages)
    from jaxagent.envs.search.retriever.dense import Dense

    return Dense.load(index, passages)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until interrupted. Returns the exit code: 2 for a user's mistake."""
    return exit_code(lambda: serve(arguments))


def serve(arguments: Sequence[str] | None) -> None:
    """Serves until interrupted, from an address taken before the corpus is read."""
    parser = Parser(prog="jaxagent.envs.search.retriever.server", description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", required=True, help='jsonl of {"id", "contents"}')
    parser.add_argument("--index", default="", help="folder of a dense index over that corpus; without it, BM25")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8000)
    parser.add_argument("--timeout_s", type=seconds, default=60.0, help="longest time for one request")
    options = parser.parse_args(arguments)
    with bound(options.host, options.port) as address:
        retriever = open_local(options.corpus, options.index)
        web.run_app(make_app(retriever, options.timeout_s), sock=address)


if __name__ == "__main__":
    sys.exit(main())
