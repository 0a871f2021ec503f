"""The engine as a server of its own: completions and conversations over HTTP, on one machine's devices.

    python -m jaxagent.serve --model=runs/search_r1/policy --port=8001 --stop='</search>' --stop='</answer>'

    POST /v1/completions  {"prompt": "text" or [ids] or a list of either, "max_tokens": 16, "temperature": 1.0,
                           "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "n": 1, "stop": [], "stream": false,
                           "stream_options": {"include_usage": false}, "logprobs": 0, "model": "...", "user": ""}
    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
                          conversations with tools, in OpenAI's and Anthropic's forms; see docs/gateway.md
    GET /v1/models        the one model, by the name that --model gave it
    POST /v1/score        log-probs of given token ids, see engine/scoring.py: a teacher for on-policy distillation
    GET /v1/tokenizer, GET /health, GET /metrics (Prometheus text)

Answers and errors have OpenAI's form, so that its clients work. Choices carry `token_ids` too, `logprobs` always (of
the distribution sampled; no other tokens' beside them), and where the time went; with "stream" they come as server-sent
events, a few tokens each. With --exact the same seed and prompt give the same tokens whatever else is served; without,
shapes follow the load, and a draw may fall the other way in the last bits. A request's own stop strings are left out of
the text, and what the engine sampled beyond one is dropped; those of --stop stay in the text. Users get equal shares of
the slots; when more than --max_waiting choices wait for one, the answer is 429. A client that goes away gives up its
slots. /health says 503 when generation has failed for good.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Mapping, Sequence

import jax

from jaxagent.config import ConfigError, EngineConfig, MeshConfig
from jaxagent.config.command import Parser, amount, bound_socket, count, exit_code, port, seconds
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import automaton, int8
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.engine.scoring import AnswerScores, scorer
from jaxagent.gateway.chat import Ask, BadRequest
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.server import Gateway
from jaxagent.gateway.service import Completions
from jaxagent.gateway.session import Session, SessionLimits
from jaxagent.io import connections
from jaxagent.models import hf, lora, params, peft, sharding
from jaxagent.models.spec import Computing
from jaxagent.runs import devices

WARM_UP_TIMEOUT_S = 1800.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def open_engine(options: argparse.Namespace) -> tuple[Driver, Tokenizer, dict[str, float]]:
    """A driver, not started, for a Hugging Face folder; its tokenizer; what was measured of it, by gauge.

    Raises:
      ConfigError: a folder that cannot be served.
    """
    tokenizer = Tokenizer.load(options.model)
    computing = Computing(
        vocab_multiple=64,
        compute_dtype=options.dtype,
        param_dtype=options.dtype,
        remat="none",
        logprob_chunk_tokens=1024,
    )
    spec = hf.read_spec(options.model, computing)
    tokenizer.check_fits(spec.vocab_size)
    spec.check_context(options.context)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=options.tensor, context=1))
    cfg = EngineConfig(
        slots=options.slots,
        steps_per_dispatch=options.steps_per_dispatch,
        prefill_tokens=options.prefill_tokens,
        pages=options.pages,
        page_tokens=options.page_tokens,
        tile_rows=options.tile_rows,
        cache_dtype=options.dtype,
        kv_on_update="recompute",
        request_timeout_s=options.timeout_s,
    ).for_platform(mesh.devices.flat[0].platform, shards=1)
    pages = cfg.pages or cfg.slots * -(-options.context // cfg.page_tokens)
    cfg = dataclasses.replace(cfg, pages=pages)
    weights = hf.load(options.model, spec, params.shardings(spec, mesh, sharding.COMPUTE))
    if options.adapter:
        adapters, config = peft.load_adapters(options.adapter, spec)
        where = params.shardings_of(lora.adapter_specs(spec, config), mesh, sharding.COMPUTE)
        with jax.set_mesh(mesh):
            weights = lora.merge(weights, jax.device_put(adapters, where), config, options.dtype)
    model, gauges = LanguageModel(spec, cfg.cache_dtype), {}
    if options.int8:
        plain, model = model, LanguageModel(spec, cfg.cache_dtype, int8=True)
        with jax.set_mesh(mesh):
            quantised = model.place(weights)
            texts = [tokenizer.encode(text) for text in int8.TEXTS]
            gaps = int8.logprob_gaps(plain, plain.place(weights), quantised, texts)
        weights, mean, most = quantised, float(gaps.mean()), float(gaps.max())
        gauges = {"int8_logprob_gap_mean": mean, "int8_logprob_gap_max": most}
        print(f"int8: log-probs differ by {mean:.4f} on average, {most:.4f} at most", file=sys.stderr)
    setup = EngineSetup(
        cfg=cfg,
        context=options.context,
        stops=automaton.build(options.stop, tokenizer.token_bytes(), spec.padded_vocab_size),
        eos_ids=tokenizer.eos_ids,
        exact=options.exact,
        truncation=True,
        max_waiting=options.max_waiting,
    )
    return Driver(model, weights, 0, setup, mesh), tokenizer, gauges


def open_gateway(
    driver: Driver,
    tokenizer: Tokenizer,
    context: int,
    timeout_s: float,
    scoring: AnswerScores | None = None,
    name: str = "policy",
    gauges: Mapping[str, float] | None = None,
) -> Gateway:
    """The server of an engine: nothing is kept of a request, and each is sampled as it asks."""
    refused = ""
    try:
        now = datetime.datetime.now()
        renderer = Renderer(tokenizer, tokenizer.chat_template, now, tokenizer.tool_template)
    except ConfigError as error:  # completions need none
        renderer, refused = None, f"this model's chat template cannot be used: {error}"
        print(refused, file=sys.stderr)

    def one_shot(ask: Ask) -> Session:
        if renderer is None:
            raise BadRequest(refused, status=501)
        limits = SessionLimits(turn_tokens=context, context_tokens=context, requests=ask.n)
        task = f"conversation/{ask.seed}"  # the context itself is in the key of a session's randomness
        return Session(driver, renderer, tokenizer, limits, None, task, 0, 1, ask.user, timeout_s, patient=False)

    completions = Completions(driver, tokenizer, context, timeout_s, scoring, name, gauges)
    return Gateway(name, strict_name=True, one_shot=one_shot, also=completions, timeout_s=timeout_s)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""

    class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Shows the defaults of flags and leaves the line breaks of the text above them."""

    parser = Parser(prog="jaxagent.serve", description=__doc__, formatter_class=Help)
    parser.add_argument("--model", required=True, help="Hugging Face folder: weights, config.json, tokenizer")
    parser.add_argument("--adapter", default="", help="folder of LoRA adapters to it, as PEFT and a run write them")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=8001, help="port to listen on")
    parser.add_argument(
        "--stop", action="append", type=_stop, default=[], help="a string that ends generation; may be repeated"
    )
    parser.add_argument("--context", type=count, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--slots", type=count, default=64, help="requests that generate at once")
    parser.add_argument("--max_waiting", type=amount, default=256, help="requests that may wait for a slot")
    parser.add_argument(
        "--pages",
        type=amount,
        default=0,
        help="of the cache; 0 = enough for all slots at full length",
    )
    parser.add_argument("--page_tokens", type=amount, default=0, help="tokens per page; 0 = by platform")
    parser.add_argument("--tile_rows", type=amount, default=0, help="rows computed together; 0 = by platform")
    parser.add_argument("--prefill_tokens", type=amount, default=0, help="most between two dispatches; 0 = by platform")
    parser.add_argument("--steps_per_dispatch", type=amount, default=0, help="tokens per slot each; 0 = by platform")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    parser.add_argument("--exact", action="store_true", help="tokens that do not depend on what else is served; slower")
    parser.add_argument("--int8", action="store_true", help="matrices in 8 bits; how far off they are is measured")
    parser.add_argument("--tensor", type=count, default=1, help="devices over which heads are split")
    parser.add_argument("--timeout_s", type=seconds, default=600.0, help="longest time for one request")
    return parser.parse_args(argv)


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until interrupted. Returns the exit code: 2 for a user's mistake."""
    return exit_code(lambda: serve(arguments(argv)))


def serve(options: argparse.Namespace) -> None:
    """Serves until interrupted, from an address taken before anything slow begins."""
    devices.keep_compiled_programs()
    with bound_socket(options.host, options.port) as address:
        platform = devices.available()[0].platform
        driver, tokenizer, gauges = open_engine(options)
        with driver:
            print(f"compiling for {platform} ...", file=sys.stderr)
            driver.start(WARM_UP_TIMEOUT_S)
            scores = None if options.int8 else scorer(driver.model.spec, driver.mesh)  # it takes plain arrays only
            gateway = open_gateway(driver, tokenizer, options.context, options.timeout_s, scores, options.model, gauges)
            if options.host not in LOOPBACK:
                print(f"--host={options.host}: there is no token, so whoever reaches it may use it", file=sys.stderr)
            print(f"serving '{options.model}' on http://{options.host}:{options.port}", file=sys.stderr)
            connections.run(gateway.app(), address)


if __name__ == "__main__":
    sys.exit(main())
