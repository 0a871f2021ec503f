"""The engine as a server of its own: HTTP completions with token ids and log-probs, on one machine's devices.

    python -m jaxagent.engine.serve --model=runs/search_r1/policy --port=8001 --stop='</search>' --stop='</answer>'

    POST /v1/completions  {"prompt": "text" or [ids], "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                           "min_p": 0.0, "seed": 0, "n": 1, "stream": false, "user": ""}
    POST /v1/score        log-probs of given token ids, see engine/scoring.py: a teacher for on-policy distillation
    GET /v1/tokenizer, GET /health, GET /metrics (Prometheus text)

Choices carry `text`, `token_ids`, `logprobs` (of the distribution sampled), `finish_reason` and where the time went;
with "stream" they come as server-sent events, a few tokens each. With --exact the same seed and prompt give the same
tokens whatever else is served; without, shapes follow the load, and a draw may fall the other way in the last bits. A
stop string's text stays in the output, as the engine generated it. Users get equal shares of the slots; when more than
--max_waiting choices wait for one, the answer is 429. /health says 503 when generation has failed for good.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import hashlib
import json
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from aiohttp import web

from jaxagent.command import Parser, bound, count, number, port, seconds
from jaxagent.config import EngineConfig, LoraConfig, MeshConfig, ModelConfig, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import automaton, int8, scoring
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import BusyError, EngineError, Sampled
from jaxagent.engine.scoring import Scoring
from jaxagent.main import exit_code
from jaxagent.models import hf, params, sharding
from jaxagent.ranges import at_least

MAX_BODY_BYTES = 16 * 2**20
MAX_CHOICES = 128
MAX_SCORING = 64  # requests to /v1/score in hand
WARM_UP_TIMEOUT_S = 1800.0
STATISTICS = ("queue_s", "prefill_s", "decode_s", "cached_tokens")  # of a Generation, in every answer
FIELDS = {
    "prompt": (str, list),
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "seed": (int,),
    "n": (int,),
    "stream": (bool,),
    "model": (str,),
    "user": (str,),
}


class BadRequest(ValueError):
    """The client's mistake: answered with 400 and the message."""


class Completions:
    """Requests -> the driver -> answers. Lives as long as the server."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        context: int,
        timeout_s: float,
        gauges: Mapping[str, float],
        scoring: Scoring | None = None,
    ) -> None:
        self._driver, self._tokenizer, self._context, self._timeout_s = driver, tokenizer, context, timeout_s
        self._gauges = gauges  # what was measured once, for /metrics
        self._scoring, self._being_scored = scoring, 0

    def app(self) -> web.Application:
        """The web application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        routes = [web.post("/v1/completions", self._complete), web.get("/health", self._health)]
        routes += [web.post("/v1/score", self._score), web.get("/v1/tokenizer", self._describe_tokenizer)]
        app.add_routes([*routes, web.get("/metrics", self._metrics)])
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = _checked(await request.text(), self._tokenizer.vocab_size)
            prompt = self._prompt(body["prompt"])
            if body.get("stream"):
                return await self._stream(request, body, prompt)
            tasks = [asyncio.ensure_future(self._choice(body, prompt, i)) for i in range(body.get("n", 1))]
            try:
                choices = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # where one is refused, the others have no one to answer
                    task.cancel()
            return web.json_response({"object": "text_completion", "choices": choices, "prompt_token_ids": prompt})
        except BadRequest as mistake:
            return web.json_response({"error": str(mistake)}, status=400)
        except TimeoutError:
            return web.json_response({"error": f"no result in {self._timeout_s:g} s"}, status=503)
        except BusyError as failure:
            return web.json_response({"error": str(failure)}, status=429, headers={"Retry-After": "1"})
        except EngineError as failure:
            return web.json_response({"error": str(failure)}, status=500)

    async def _choice(self, body: dict[str, Any], prompt: list[int], number: int, on_tokens: Any = None) -> dict:
        # The prompt's own digest, so that randomness depends on what is asked and not on when.
        task = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8).hexdigest()
        session = await self._driver.open(f"{task}/{body.get('seed', 0)}", number, domain=body.get("user", ""))
        try:
            generation = await self._driver.generate(
                session, prompt, body.get("max_tokens", 16), _sampling(body), 0, self._timeout_s, on_tokens
            )
        finally:
            self._driver.close(session)
        return {
            "index": number,
            "text": self._tokenizer.decode(generation.tokens.tolist()),
            "token_ids": generation.tokens.tolist(),
            "logprobs": generation.logprobs.tolist(),
            "finish_reason": "length" if generation.finish == "length" else "stop",
            "stop_string": generation.stop_string,
            **{name: getattr(generation, name) for name in STATISTICS},
        }

    async def _stream(self, request: web.Request, body: dict[str, Any], prompt: list[int]) -> web.StreamResponse:
        if body.get("n", 1) != 1:
            raise BadRequest("'n' must be 1 with 'stream'")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(event: dict) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        async with contextlib.aclosing(self._events(body, prompt)) as events:
            first = await anext(events)  # what fails before the first token still has a status code
            await response.prepare(request)
            await send(first)
            try:
                async for event in events:
                    await send(event)
            except (TimeoutError, EngineError) as failure:  # too late for one
                await send({"error": str(failure) or "timeout"})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, body: dict[str, Any], prompt: list[int]) -> AsyncIterator[dict]:
        """Pieces as they are sampled, then one with the finish reason and no tokens."""
        queue: asyncio.Queue[Sampled | None] = asyncio.Queue()
        task = asyncio.create_task(self._choice(body, prompt, 0, queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may span several tokens
        try:
            while (new := await queue.get()) is not None:
                tokens = new.tokens.tolist()
                text = decoder.decode(self._tokenizer.decode_bytes(tokens))
                piece = {"index": 0, "text": text, "token_ids": tokens, "logprobs": new.logprobs.tolist()}
                yield {"object": "text_completion", "choices": [piece | {"finish_reason": None}]}
            end = await task
            last = {"index": 0, "text": decoder.decode(b"", final=True), "token_ids": [], "logprobs": []}
            last |= {name: end[name] for name in ("finish_reason", *STATISTICS)}
            yield {"object": "text_completion", "choices": [last]}
        finally:
            task.cancel()  # the client has gone: its slot and pages are free at once

    def _prompt(self, prompt: str | list) -> list[int]:
        ids = [*self._tokenizer.prefix_ids, *self._tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
        if not ids or not all(type(i) is int and 0 <= i < self._tokenizer.vocab_size for i in ids):
            raise BadRequest(f"'prompt' must be text or token ids below {self._tokenizer.vocab_size}, and not empty")
        if len(ids) >= self._context:
            raise BadRequest(f"the prompt has {len(ids)} tokens, the context is {self._context}")
        return ids

    async def _score(self, request: web.Request) -> web.Response:
        if self._scoring is None:
            return web.json_response({"error": "this server does not score (int8 matrices)"}, status=501)
        try:
            asked = scoring.parse(await request.text(), self._tokenizer.vocab_size, self._context)
        except ValueError as mistake:
            return web.json_response({"error": str(mistake)}, status=400)
        if self._being_scored >= MAX_SCORING:
            busy = f"{self._being_scored} requests are being scored already"
            return web.json_response({"error": busy}, status=429, headers={"Retry-After": "1"})
        self._being_scored += 1
        # In a thread: the device takes its time, and generation goes on meanwhile.
        work = asyncio.create_task(asyncio.to_thread(self._scoring, self._driver.params, asked))
        work.add_done_callback(self._scored)
        try:
            answers = await asyncio.wait_for(asyncio.shield(work), self._timeout_s)
        except TimeoutError:
            return web.json_response({"error": f"no result in {self._timeout_s:g} s"}, status=503)
        return web.json_response({"scores": answers})

    def _scored(self, work: asyncio.Task) -> None:
        self._being_scored -= 1
        work.cancelled() or work.exception()  # read: the client may have gone

    async def _describe_tokenizer(self, request: web.Request) -> web.Response:
        told = {"vocab_size": self._tokenizer.vocab_size, "digest": self._tokenizer.digest(), "context": self._context}
        return web.json_response(told)

    async def _health(self, request: web.Request) -> web.Response:
        try:
            self._driver.check()
        except EngineError as failure:
            return web.json_response({"status": "failed", "error": str(failure)}, status=503)
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [f"jaxagent_engine_{name}_total {value:.6f}" for name, value in sorted(self._driver.stats().items())]
        lines += [f"jaxagent_engine_{name} {value:.6g}" for name, value in self._gauges.items()]
        return web.Response(text="\n".join(lines) + "\n")


def _checked(text: str, vocab_size: int) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not JSON: {error}") from None
    if not isinstance(body, dict) or "prompt" not in body:
        raise BadRequest("the body must be an object with a 'prompt'")
    for name, value in body.items():
        if name not in FIELDS:
            raise BadRequest(f"unknown field '{name}'; known: {', '.join(FIELDS)}. Stop strings are set at start.")
        if type(value) not in FIELDS[name]:
            raise BadRequest(f"'{name}' must be {' or '.join(t.__name__ for t in FIELDS[name])}")
    if body.get("max_tokens", 1) < 1 or not 1 <= body.get("n", 1) <= MAX_CHOICES:
        raise BadRequest(f"'max_tokens' must be positive and 'n' from 1 to {MAX_CHOICES}")
    try:
        sampling = _sampling(body)
    except OverflowError:
        raise BadRequest("a number is too large") from None
    # Written so that NaN fails.
    fine = 0 <= sampling.temperature < math.inf and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
    if not fine or not 0 <= sampling.top_k <= vocab_size:
        raise BadRequest(
            f"temperature >= 0, 0 < top_p <= 1, 0 <= top_k <= {vocab_size} and 0 <= min_p <= 1 must hold, all finite"
        )
    return body


def _sampling(body: dict[str, Any]) -> SamplingConfig:
    return SamplingConfig(
        temperature=float(body.get("temperature", 1.0)),
        top_p=float(body.get("top_p", 1.0)),
        top_k=body.get("top_k", 0),
        min_p=float(body.get("min_p", 0.0)),
    )


def open_engine(options: argparse.Namespace) -> tuple[Driver, Tokenizer, dict[str, float]]:
    """A driver, not started, for a Hugging Face folder; its tokenizer; what was measured on the way.

    Raises:
      ConfigError: a folder that cannot be served.
    """
    model = ModelConfig(
        path=options.model, family="", num_layers=0, embed_dim=0, num_heads=0, num_kv_heads=0, head_dim=0, mlp_dim=0,
        vocab_multiple=64, rope_theta=0.0, tie_embeddings=False, embed_init_std=0.0, param_dtype=options.dtype,
        compute_dtype=options.dtype, remat="none", logprob_chunk_tokens=1024,
        lora=LoraConfig(rank=0, alpha=1.0, rank_stabilised=False, targets="all-linear"),
    )  # fmt: skip
    tokenizer = Tokenizer.load(options.model)
    spec = hf.read_spec(options.model, model)
    tokenizer.check_fits(spec.vocab_size)
    spec.check_context(options.context)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=options.tensor))
    cfg = EngineConfig(
        slots=options.slots,
        steps_per_dispatch=options.steps_per_dispatch,
        prefill_tokens=options.prefill_tokens,
        pages=options.pages or options.slots * -(-options.context // options.page_tokens),
        page_tokens=options.page_tokens,
        tile_rows=options.tile_rows,
        cache_dtype=options.dtype,
        kv_on_update="recompute",
        request_timeout_s=options.timeout_s,
    )
    weights = hf.load(options.model, spec, params.shardings(spec, mesh, sharding.COMPUTE))
    stops = automaton.build(options.stop, tokenizer.token_bytes(), spec.padded_vocab_size)
    language_model, gauges = LanguageModel(spec, cfg.cache_dtype), {}
    if options.int8:
        plain, language_model = language_model, int8.Int8LanguageModel(spec, cfg.cache_dtype)
        with jax.set_mesh(mesh):
            quantised = jax.jit(language_model.place)(weights)
            texts = [tokenizer.encode(text) for text in int8.TEXTS]
            gap = int8.measure(plain, jax.jit(plain.place)(weights), quantised, texts)
        weights, gauges = quantised, {"int8_logprob_gap_mean": gap.mean, "int8_logprob_gap_max": gap.max}
        print(f"int8: log-probs differ by {gap.mean:.4f} on average, {gap.max:.4f} at most", file=sys.stderr)
    eos_ids, waiting = tokenizer.eos_ids, options.max_waiting
    driver = Driver(
        language_model,
        weights,
        0,
        stops,
        eos_ids,
        cfg,
        options.context,
        mesh,
        0,
        True,
        options.exact,
        max_waiting=waiting,
    )
    return driver, tokenizer, gauges


def open_scoring(driver: Driver, int8_matrices: bool) -> Scoring | None:
    """What scores with the driver's own weights; None where they are no plain arrays."""
    return None if int8_matrices else Scoring(driver.model.spec, driver.mesh)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""

    class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Defaults shown, the text above left as it is."""

    parser = Parser(prog="jaxagent.engine.serve", description=__doc__, formatter_class=Help)
    parser.add_argument("--model", required=True, help="Hugging Face folder: weights, config.json, tokenizer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=8001, help="port to listen on")
    parser.add_argument("--stop", action="append", default=[], help="a string that ends generation; may be repeated")
    parser.add_argument("--context", type=count, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--slots", type=count, default=64, help="requests that generate at once")
    parser.add_argument(
        "--max_waiting", type=number(int, at_least(0)), default=256, help="requests that may wait for a slot"
    )
    parser.add_argument(
        "--pages",
        type=number(int, at_least(0)),
        default=0,
        help="of the cache; 0 = enough for all slots at full length",
    )
    parser.add_argument("--page_tokens", type=count, default=64, help="tokens per page")
    parser.add_argument("--tile_rows", type=count, default=64, help="rows computed together")
    parser.add_argument("--prefill_tokens", type=count, default=2048, help="prefilled between two dispatches, at most")
    parser.add_argument("--steps_per_dispatch", type=count, default=8, help="tokens per slot and dispatch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    parser.add_argument("--exact", action="store_true", help="tokens that do not depend on what else is served; slower")
    parser.add_argument("--int8", action="store_true", help="matrices in 8 bits; how far off they are is measured")
    parser.add_argument("--tensor", type=count, default=1, help="devices over which heads are split")
    parser.add_argument("--timeout_s", type=seconds, default=600.0, help="longest time for one request")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until interrupted. Returns the exit code: 2 for a user's mistake."""
    return exit_code(lambda: serve(arguments(argv)))


def serve(options: argparse.Namespace) -> None:
    """Serves until interrupted, from an address taken before anything slow begins."""
    with bound(options.host, options.port) as address:
        driver, tokenizer, gauges = open_engine(options)
        with driver:
            print(f"compiling for {jax.devices()[0].platform} ...", file=sys.stderr)
            driver.start(WARM_UP_TIMEOUT_S)
            service = Completions(
                driver, tokenizer, options.context, options.timeout_s, gauges, open_scoring(driver, options.int8)
            )
            web.run_app(service.app(), sock=address)


if __name__ == "__main__":
    sys.exit(main())
