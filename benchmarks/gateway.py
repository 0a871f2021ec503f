"""What does the gateway cost per request, and does it survive programs that misbehave?

    python -m benchmarks.gateway [--seconds=300] [--sessions=256] [--fuzzed=10000] [--engine]

The server runs in a process of its own, over a policy that answers at once, so that what a client waits for is the
gateway. Two phases:

  overhead   64 sessions of well-behaved programs, each thinking half a second between two requests; a quarter of the
             time. `overhead_p50_ms` and `overhead_p99_ms` are whole requests as their clients see them.
  chaos      `--sessions` sessions opened, played and closed by the admin routes for the rest of the time: histories
             go on, are edited and forked, requests are sent twice, and a quarter of the clients leave in the middle;
             beside them `--fuzzed` requests with random bodies, broken, cut off, oversized or deep.

At the end nothing may be left: `errors` counts wrong statuses, answers or trajectories with a word of another session,
sampled tokens that are in no trajectory or in two, sessions and policy sequences that are still open. With `--engine`
the policy is the engine with a tiny model, and slots and pages that are not free again count too.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import datetime
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import numpy as np

from benchmarks.gateway_policies import Instant, leaked, tiny_engine
from jaxagent.config import SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.server import Gateway
from jaxagent.gateway.session import Session, SessionLimits

ADMIN = "benchmark"
MEASURED_SESSIONS, MEASURED_SHARE, THINK_S = 64, 0.25, (0.25, 0.75)
STEPS = 12  # of a program in the chaos
PATH = "/v1/chat/completions"
START_TIMEOUT_S, END_TIMEOUT_S = 600.0, 120.0
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = "the policy looks at the files and says what it sees; then it runs a command and reads the result again. "


# -------------------------------------------------------------------- the server's process


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of 600 tokens."""
    return Tokenizer.train([WORDS] * 50, 600, ["<|im_start|>", "<|im_end|>"])


def serve(pipe: Connection, engine: bool) -> None:
    """Serves until told to end, and reports what is left."""
    tokenizer = make_tokenizer()
    policy = tiny_engine(tokenizer) if engine else Instant(tokenizer)
    renderer = Renderer(tokenizer, TEMPLATE, datetime.datetime(2026, 1, 1))
    limits = SessionLimits(turn_tokens=32, context_tokens=2000 if engine else 20_000, requests=1000)
    made: list[Session] = []

    def make(body: Any) -> Session:
        session = Session(policy, renderer, tokenizer, limits, SAMPLING, str(body["task_id"]), 0)
        made.append(session)
        return session

    async def main() -> None:
        gateway = Gateway(make=make, admin_token=ADMIN)
        await gateway.listen()
        pipe.send(gateway.url)
        await asyncio.to_thread(pipe.recv)
        left = {"sessions": gateway.sessions, "running": sum(session.running for session in made)}
        await gateway.stop()
        left |= leaked(policy)
        counters = collections.Counter()
        for session in made:
            counters.update(session.counters)
        pipe.send({"left": left, "counters": dict(counters), "processor_s": time.process_time()})

    asyncio.run(main())


# -------------------------------------------------------------------- clients


class Clients:
    """All clients of the run, and what they count."""

    def __init__(self, url: str, http: aiohttp.ClientSession, engine: bool, seed: int = 0) -> None:
        self.url, self.http, self.engine = url, http, engine
        self.random = random.Random(seed)
        self.tokenizer = make_tokenizer()
        self.errors: collections.Counter[str] = collections.Counter()
        self.times: list[float] = []
        self.played = self.sessions = self.fuzzed = 0

    async def open(self, secret: str) -> tuple[str, str]:
        """(id, token) of a new session."""
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with self.http.post("/sessions", json={"task_id": secret}, headers=headers) as response:
            told = await response.json()
        return told["id"], told["token"]

    async def close(self, name: str, secret: str) -> None:
        """Ends a session and checks what it gave."""
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with self.http.get(f"/sessions/{name}/trajectories", headers=headers) as response:
            given = json.loads(await response.read())
        sampled = 0
        for row in given["trajectories"]:
            sampled += sum(kind == 1 for kind in row["kinds"])
            self.check(self.tokenizer.decode(row["tokens"]), secret, "trajectory")
        self.errors["tokens not trained once"] += sampled != given["counters"]["sampled_tokens"]
        async with self.http.delete(f"/sessions/{name}", headers=headers) as response:
            self.errors["session not deleted"] += response.status != 200
        self.sessions += 1

    def check(self, text: str, secret: str, what: str) -> None:
        """Counts words of other sessions."""
        words = {word for word in text.replace("<", " ").split() if word.startswith("secret")}
        self.errors[f"{what} of another session"] += not words <= {secret}

    async def post(self, token: str, secret: str, body: Any, retry: bool = False) -> str | None:
        """The answer's text."""
        headers = {"Authorization": f"Bearer {token}"} | ({"x-stainless-retry-count": "1"} if retry else {})
        started = time.perf_counter()
        async with self.http.post(PATH, json=body, headers=headers) as response:
            raw = await response.read()
        self.times.append(time.perf_counter() - started)
        self.played += 1
        if response.status != 200:
            told = json.loads(raw)["error"]
            if told["code"] != "context_length_exceeded":
                self.errors[f"status {response.status}: {told['message'][:80]}"] += 1
            return None
        if body.get("stream"):
            lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: {")]
            text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
        else:
            text = json.loads(raw)["choices"][0]["message"]["content"] or ""
        if not self.engine:
            self.check(text, secret, "answer")
            self.errors["answer without its word"] += secret not in text
        return text

    def user(self, secret: str) -> dict[str, str]:
        """A message of a few hundred characters."""
        return {"role": "user", "content": f"{secret} {self.random.random():.4f} {WORDS * self.random.randint(1, 4)}"}

    async def well_behaved(self, number: int, end: float) -> None:
        """Plays one session until the time is over, resending its whole history."""
        secret = f"secret{number}m"
        name, token = await self.open(secret)
        await asyncio.sleep(self.random.uniform(*THINK_S))
        history = [self.user(secret)]
        while time.perf_counter() < end:
            text = await self.post(token, secret, {"messages": history, "stream": self.random.random() < 0.5})
            fresh = text is None or len(history) > 40
            history = [] if fresh else [*history, {"role": "assistant", "content": text}]
            history.append(self.user(secret))
            await asyncio.sleep(self.random.uniform(*THINK_S))
        await self.close(name, secret)

    async def misbehaved(self, number: int, end: float) -> None:
        """Plays one session after another until the time is over."""
        life = 0
        while time.perf_counter() < end:
            secret = f"secret{number}x{life}c"
            name, token = await self.open(secret)
            history = [self.user(secret)]
            for _ in range(STEPS):
                history = await self.step(token, secret, history)
                await asyncio.sleep(self.random.random() * 0.5)
            await self.close(name, secret)
            life += 1

    async def step(self, token: str, secret: str, history: list[dict[str, str]]) -> list[dict[str, str]]:
        """One step of a program that misbehaves; returns its history."""
        body = {"messages": history, "stream": self.random.random() < 0.5}
        match self.random.randrange(8):
            case 0:  # leaves for good
                with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                    await asyncio.wait_for(self.post(token, secret, body), self.random.choice((0, 0.001, 0.01)))
                text = None
            case 1:  # leaves, and comes back
                with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                    await asyncio.wait_for(self.post(token, secret, body), self.random.choice((0, 0.001, 0.01)))
                text = await self.post(token, secret, body, retry=self.random.random() < 0.5)
            case 2:  # a burst of the same
                text, *_ = await asyncio.gather(*(self.post(token, secret, body, i > 0) for i in range(4)))
            case 3:  # rewrites what was said
                history = [dict(message) for message in history]
                history[self.random.randrange(len(history))]["content"] += " edited"
                text = await self.post(token, secret, body | {"messages": history})
            case 4:  # begins anew with a summary
                history = [self.user(secret)]
                text = await self.post(token, secret, body | {"messages": history})
            case _:
                text = await self.post(token, secret, body)
        if text is None:
            return [self.user(secret)]
        return [*history, {"role": "assistant", "content": text}, self.user(secret)]

    async def fuzz(self, count: int, end: float) -> None:
        """Sends bodies that are no requests, evenly over the time that is left."""
        name, token = await self.open("secret-fuzz")
        each = max(0.0, end - time.perf_counter()) / max(count, 1)
        for number in range(count):
            await asyncio.sleep(max(0.0, end - time.perf_counter() - each * (count - number)))
            headers = {"Authorization": f"Bearer {token if self.random.random() < 0.8 else 'wrong'}"}
            path = self.random.choice((PATH, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/x"))
            try:
                async with asyncio.timeout(30), self.http.post(path, data=self.junk(), headers=headers) as response:
                    await response.read()
                    self.errors[f"fuzzed: status {response.status}"] += not 400 <= response.status < 500
            except aiohttp.ClientError:  # cut off in the middle of an oversized body
                pass
            self.fuzzed += 1
        await self.close(name, "secret-fuzz")

    def junk(self) -> bytes:
        """A body that no dialect accepts."""
        good = json.dumps({"model": 3, "messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}).encode()
        match self.random.randrange(6):
            case 0:
                return self.random.randbytes(self.random.randrange(2000))
            case 1:
                return good[: self.random.randrange(len(good))]
            case 2:
                broken = bytearray(good)
                broken[self.random.randrange(len(broken))] = self.random.randrange(128, 256)
                return bytes(broken)
            case 3:
                return b'{"messages": ' + b"[" * self.random.randrange(1, 100_000)
            case 4 if self.random.random() < 0.02:
                return b'{"messages": "' + b"x" * (17 * 2**20) + b'"}'
            case _:
                value = self.random.choice(('"x"', "3", "[3]", '[{"role": 3}]', '[{"role": "user", "content": [{}]}]'))
                return b'{"messages": ' + value.encode() + b', "input": 3, "model": 1, "max_tokens": "a"}'


async def drive(url: str, options: argparse.Namespace) -> tuple[Clients, dict[str, Any]]:
    """Both phases; (the clients, what was measured)."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        clients = Clients(url, http, options.engine)
        end = time.perf_counter() + MEASURED_SHARE * options.seconds
        await asyncio.gather(*(clients.well_behaved(i, end) for i in range(MEASURED_SESSIONS)))
        times, clients.times = 1000 * np.array(clients.times), []
        measured = {f"overhead_p{p}_ms": round(float(np.percentile(times, p)), 2) for p in (50, 99)}
        measured["measured_requests"] = len(times)
        end = time.perf_counter() + (1 - MEASURED_SHARE) * options.seconds
        programs = [clients.misbehaved(i, end) for i in range(options.sessions)]
        await asyncio.gather(*programs, *(clients.fuzz(options.fuzzed // 4, end) for _ in range(4)))
        await asyncio.sleep(2.0)  # clients that left are given up after a second
        measured["chaos_p50_ms"] = round(float(np.percentile(clients.times, 50)) * 1000, 2)
        return clients, measured


def main() -> None:
    """Runs the benchmark and prints one line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--fuzzed", type=int, default=10_000)
    parser.add_argument("--engine", action="store_true", help="the engine with a tiny model as the policy")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, options.engine), daemon=True)
    server.start()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise SystemExit("the server did not start")
        clients, measured = asyncio.run(drive(ours.recv(), options))
        ours.send("end")
        if not ours.poll(END_TIMEOUT_S):
            raise SystemExit("the server did not end")
        report = ours.recv()
    finally:
        server.terminate()
        server.join(10)
    wrong = {name: count for name, count in clients.errors.items() if count}
    wrong |= {f"left: {name}": count for name, count in report["left"].items() if count}
    print(f"requests {clients.played}, fuzzed {clients.fuzzed}, sessions played {clients.sessions}")
    print("counters", json.dumps(report["counters"]))
    print("errors", json.dumps(wrong))
    told = measured | {"sessions": options.sessions, "played": clients.sessions, "fuzzed": clients.fuzzed}
    per_request = 1000 * report["processor_s"] / max(1, clients.played + clients.fuzzed)
    print(json.dumps(told | {"processor_ms": round(per_request, 2), "errors": int(sum(wrong.values()))}))


if __name__ == "__main__":
    main()
