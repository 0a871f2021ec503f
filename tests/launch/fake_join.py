"""A stand-in for `python -m jaxagent.join`: the same flags and roles, the real coordinator's rules, and no jax.

Weights are a chain of digests and an episode's digest tells its weights (tests/fleet/world.py), so that one wrong, lost
or doubled episode shows in `versions.json`. FAKE_FAULT=ROLE:WHAT makes a role misbehave once.
"""

import argparse
import http.client
import http.server
import json
import os
import pathlib
import signal
import sys
import threading
import time
import urllib.parse

from jaxagent.fleet.admission import Coordinator, UnknownWorkerError
from jaxagent.fleet.events import from_line, to_line
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from tests.fleet.world import Oracle, digest, episode

EPISODE_S = float(os.environ.get("FAKE_EPISODE_S", "0.02"))
HOLD = int(os.environ.get("FAKE_HOLD", "-1"))  # the step before which the trainer waits for a file `finish`
PLAN = Plan(int(os.environ.get("FAKE_STEPS", "6")), groups_per_step=4, attempts=2, staleness=1, lease_s=3.0)


def expected() -> list[str]:
    """The versions of an undisturbed run."""
    return Oracle(PLAN, lambda group: True).versions


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--role", choices=("coordinator", "trainer", "engine"), required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--config.workdir", required=True, type=pathlib.Path, dest="workdir")
    parser.add_argument("--config.fleet", dest="fleet")
    parser.add_argument("--config.fleet.trainers", dest="trainers")
    parser.add_argument("--coordinator")
    parser.add_argument("--listen")
    parser.add_argument("--name")
    parser.add_argument("--host")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--meet")
    return parser.parse_args()


class State:
    """The coordinator, its events on disk, and one lock."""

    def __init__(self, path: pathlib.Path):
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a torn last line was never answered
        path.write_text(whole)
        events = [from_line(json.loads(line)) for line in whole.splitlines()]
        self.file, self.lock = open(path, "a"), threading.Lock()  # noqa: SIM115
        self.coordinator = Coordinator(PLAN, "initial", time.monotonic_ns(), events)
        self.ended = self.coordinator.record.published == PLAN.steps
        for group in self.coordinator.unjudged():
            self.coordinator.close(group, True)
        self.write()

    def write(self) -> None:
        for event in self.coordinator.take_events():
            self.file.write(json.dumps(to_line(event)) + "\n")
        self.file.flush()

    def answer(self, call: str, of: dict) -> object:
        now, c = time.monotonic(), self.coordinator
        c.expire(now)
        versions = c.record.versions
        if call == "join":
            return c.join(now)[0]
        if call == "take":
            c.beat(now, of["name"], of["holding"])
            works = [] if self.ended else c.take(now, of["name"], of["places"], of["holding"])
            out = [[work.episode, work.lease, work.version, versions[work.version]] for work in works]
            return {"works": out, "ended": self.ended}
        if call == "put":
            which = EpisodeId(GroupId(*of["episode"][0]), of["episode"][1])
            answer = c.put(which, of["lease"], of["version"], of["digest"])
            if answer.complete:
                c.close(which.group, True)
            return answer.outcome.name
        if call == "batch":
            batch = c.batch(of["step"])
            groups = set(batch.groups) if batch else ()
            return batch and [result.digest for which, result in batch.results.items() if which.group in groups]
        if call == "publish":
            return c.publish(of["version"], of["digest"]).outcome.name
        if call == "end":
            self.ended = True
        return {"ended": self.ended, "published": c.record.published}


def coordinator(args: argparse.Namespace) -> None:
    state = State(args.workdir / "fleet" / "events.jsonl")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code, out = 401, None
            if self.headers["Authorization"] == os.environ["JAXAGENT_FLEET_TOKEN"]:
                with state.lock:
                    try:
                        code, out = 200, state.answer(self.path[1:], json.loads(body))
                    except UnknownWorkerError:
                        code = 410
                    state.write()
            text = json.dumps(out).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    host, port = args.listen.rsplit(":", 1)
    http.server.ThreadingHTTPServer.allow_reuse_address = True
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    until = None
    while until is None or time.monotonic() < until:
        sign("serves", 120.0)
        time.sleep(0.2)
        if state.ended and until is None:
            until = time.monotonic() + 5.0  # for engines to hear of it


class Caller:
    """Calls that wait for a coordinator that is away, for 60 s."""

    def __init__(self, url: str):
        self.address = urllib.parse.urlsplit(url).netloc

    def __call__(self, call: str, **of):
        until = time.monotonic() + 60.0
        while True:
            try:
                connection = http.client.HTTPConnection(self.address, timeout=5)
                connection.request(
                    "POST", f"/{call}", json.dumps(of), {"Authorization": os.environ["JAXAGENT_FLEET_TOKEN"]}
                )
                reply = connection.getresponse()
                text = reply.read()
            except (OSError, http.client.HTTPException):
                if time.monotonic() > until:
                    sys.exit(1)
                time.sleep(0.1)
                continue
            finally:
                connection.close()
            if reply.status == 410:
                raise UnknownWorkerError
            assert reply.status == 200, reply.status
            return json.loads(text)


def engine(args: argparse.Namespace) -> None:
    call = Caller(args.coordinator)
    name = None
    while True:
        sign("plays", 120.0)
        try:
            name = name or call("join")
            answer = call("take", name=name, places=2, holding=[])
            if answer["ended"]:
                return
            for which, lease, version, weights in answer["works"]:
                time.sleep(EPISODE_S)
                fault("engine")
                text = episode(EpisodeId(GroupId(*which[0]), which[1]), weights)
                call("put", episode=which, lease=lease, version=version, digest=text)
        except UnknownWorkerError:
            name = None
        time.sleep(0.02)


def trainer(args: argparse.Namespace) -> None:
    call = Caller(args.coordinator)
    if args.rank:
        while not call("status")["ended"]:
            sign("follows", 120.0)
            if ASKED:
                sys.exit(143)
            time.sleep(0.1)
        return
    saved = args.workdir / "versions.json"
    versions = json.loads(saved.read_text()) if saved.exists() else ["initial"]
    while (step := len(versions) - 1) < PLAN.steps:
        sign("waits", 120.0)
        if ASKED:
            sys.exit(143)  # it has saved
        if step == HOLD and not (args.workdir / "finish").exists():
            time.sleep(0.05)
            continue
        learnt = call("batch", step=step)
        if learnt is None:
            time.sleep(0.02)
            continue
        fault("trainer")
        versions.append(digest(versions[-1], learnt))
        assert call("publish", version=step + 1, digest=versions[-1]) in ("STORED", "DUPLICATE")
        saved.with_suffix(".new").write_text(json.dumps(versions))
        os.replace(saved.with_suffix(".new"), saved)
        print(f"step {step + 1}", flush=True)
    call("end")


ASKED = []


def fault(role: str) -> None:
    """Once per run, in whichever process comes first: FAKE_FAULT=engine:exit, trainer:hang, ..."""
    who, _, what = os.environ.get("FAKE_FAULT", "").partition(":")
    if who == role:
        try:
            (ARGS.workdir / f"fault_{role}").touch(exist_ok=False)
        except FileExistsError:
            return
        if what == "hang":
            sign("hangs", 0.5)
            time.sleep(600)
        os._exit(int(what.removeprefix("exit")))


def sign(phase: str, budget_s: float) -> None:
    if path := os.environ.get("JAXAGENT_VITALS"):
        text = {"pid": os.getpid(), "phase": phase, "budget_s": budget_s, "at": time.monotonic(), "done": 0}
        pathlib.Path(f"{path}.new").write_text(json.dumps(text))
        os.replace(f"{path}.new", path)


if __name__ == "__main__":
    ARGS = arguments()
    signal.signal(signal.SIGTERM, lambda *_: ASKED.append(1) if ARGS.role == "trainer" else sys.exit(143))
    (ARGS.workdir / "fleet").mkdir(parents=True, exist_ok=True)
    with open(ARGS.workdir / "started.txt", "a") as started:
        started.write(f"{ARGS.role} {os.getpid()} {' '.join(sys.argv[1:])}\n")
    {"coordinator": coordinator, "trainer": trainer, "engine": engine}[ARGS.role](ARGS)
