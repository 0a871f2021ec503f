"""Terminal tasks written by a language model, kept when a model can solve them (Endless Terminals, arXiv 2601.16443).

    python -m data_pipelines.terminal_written --out=data/written --num=100 --url=http://127.0.0.1:8000/v1 --model=M \\
        --images=images --base 'ubuntu:22.04=debootstrap:jammy' --attempts=16
    python -m data_pipelines.harbor write data/written --out=data/endless_terminals     # then train on them

The model behind an OpenAI-style chat endpoint (a key, if it needs one, in $CHAT_API_KEY) writes for each of --num ideas
a task with its truth, a test of the initial state, a test of the final state, and a container. A task is kept when

    its image builds within 180 s, and the initial test passes in it
    an agent that does nothing fails the final test
    --solver solves it in one or more of --attempts attempts, as an agent of configs/endless_terminals.py:qwen2.5-7b

What models write runs in sandboxes only. Containers start from the first --base, which must have the command pytest.
OUT gets a folder per kept task, and written.jsonl: what became of every idea, and why. The same command again goes on
with the ideas that are missing, and with those of which the endpoint answered nothing: it was away, or it refused a
field (--send_seed=False and others mend that). Ideas and seeds follow from --seed; the rest is the model's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import time
import typing
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxagent import config as schema
from jaxagent.config import ConfigError
from jaxagent.config.command import count, exit_code, seconds
from jaxagent.configs import endless_terminals
from jaxagent.data_pipelines.sandbox_workspaces import ImageWorkspaces
from jaxagent.data_pipelines.terminal_written import solve
from jaxagent.data_pipelines.terminal_written.task import MODEL, STAGES, Rejected, checked, written
from jaxagent.observe import jsonl
from jaxagent.rewards.chat_client import CallError, ChatClient, Endpoint
from jaxagent.rewards.judge import LimitField
from jaxagent.sandbox.images import bases

LOG, PARTIAL = "written.jsonl", ".partial"
KEPT = "kept"
RETRIES = 5  # of a request


class Pipeline:
    """What ideas share. Used on one asyncio loop."""

    def __init__(self, args: argparse.Namespace, writer: ChatClient, solver: ChatClient, workspaces: ImageWorkspaces):
        self._args, self._writer, self._solver, self._places = args, writer, solver, workspaces
        self._env = schema.parse(endless_terminals.get_config("qwen2.5-7b")).env  # the published recipe's

    async def idea(self, index: int) -> dict[str, Any]:
        """Takes one idea as far as it goes; returns its record."""
        started = time.monotonic()
        record: dict[str, Any] = {"index": index, "stage": KEPT}
        try:
            record |= await self._keep(index)
        except Rejected as no:
            record |= {"stage": no.stage, "why": str(no)}
        return record | {"seconds": round(time.monotonic() - started, 1)}

    async def _keep(self, index: int) -> dict[str, Any]:
        args = self._args
        files = await written(self._writer, args.seed, index, args.image, args.max_tokens)
        partial = args.out / PARTIAL / files.name(index)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            files.write(partial)
            task = await checked(partial, self._places)
            plays = (
                solve.attempt(
                    self._solver, task, self._env, self._places.take, sample, args.temperature, args.max_tokens
                )
                for sample in range(args.attempts)
            )
            found = solve.summary(await asyncio.gather(*plays))
            if not found["num_success"]:
                most = Counter(attempt["ended"] for attempt in found["results"]).most_common(1)[0][0]
                why = f"none of {found['num_runs']} attempts, {found['failed']} failed; most ended with: {most}"
                unanswered = all(attempt["ended"].startswith(CallError.__name__) for attempt in found["results"])
                raise Rejected(MODEL if unanswered else "solve", why)
            solve.write_summary(partial, args.solver or args.model, found)
            for old in args.out.glob(f"task_{index:06d}_*"):  # of a call that was killed before it wrote the log
                shutil.rmtree(old)
            partial.rename(args.out / partial.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return {"id": partial.name, "num_runs": found["num_runs"], "num_success": found["num_success"]}


async def run(args: argparse.Namespace, log: jsonl.JsonlLog, todo: Sequence[int]) -> None:
    """Works on the ideas, `args.jobs` at once; a record is on disk when its idea has ended."""
    key, solver_name = os.environ.get("CHAT_API_KEY", ""), args.solver or args.model
    ends = [endpoint(args, model, key) for model in (args.model, solver_name)]
    workspaces = ImageWorkspaces(args.images, args.base, args.network)
    rest, counts, started = iter(todo), Counter(), time.monotonic()

    async def work(pipeline: Pipeline) -> None:
        for index in rest:  # shared by all workers: each takes the next
            record = await pipeline.idea(index)
            await asyncio.to_thread(log.append, record)
            counts[record["stage"]] += 1
            said = record.get("why") or "{num_success} of {num_runs} attempts succeeded".format(**record)
            done = f"{counts.total()} of {len(todo)}, {counts[KEPT]} kept, {time.monotonic() - started:.0f} s"
            print(f"[{done}] idea {index}: {record['stage']}: {said}", flush=True)

    try:
        async with ChatClient(ends[0]) as writer, ChatClient(ends[1]) as solver, asyncio.TaskGroup() as workers:
            pipeline = Pipeline(args, writer, solver, workspaces)
            for _ in range(min(args.jobs, len(todo))):
                workers.create_task(work(pipeline))
    finally:
        workspaces.close()


def newest(log: jsonl.JsonlLog) -> dict[int, dict[str, Any]]:
    """What became of every idea, by its number: of one that was tried again, the last time."""
    return {record["index"]: record for record in jsonl.read(log.path)}


def endpoint(args: argparse.Namespace, model: str, key: str) -> Endpoint:
    """Where a model is, and which fields its requests have."""
    sends = {"send_seed": args.send_seed == "True", "send_temperature": args.send_temperature == "True"}
    return Endpoint(args.url, model, key, args.timeout_s, RETRIES, limit_field=args.limit_field, **sends)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0 when a task was kept, in this call or before."""
    args = parser().parse_args(argv)
    try:
        if not args.base:
            raise ConfigError("--base NAME=SOURCE says what containers start from; there must be one.")
        args.image = bases.parse(args.base)[0][0]
        args.out.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(jsonl.JsonlLog(args.out / LOG, None)) as log:
            known = {index for index, record in newest(log).items() if record["stage"] != MODEL}
            shutil.rmtree(args.out / PARTIAL, ignore_errors=True)
            (args.out / PARTIAL).mkdir()
            todo = [index for index in range(args.num) if index not in known]
            print(f"{len(todo)} ideas to write, {args.num - len(todo)} are done", flush=True)
            try:
                asyncio.run(run(args, log, todo))
            except* ConfigError as errors:  # no back end works here
                raise errors.exceptions[0] from None
            shutil.rmtree(args.out / PARTIAL, ignore_errors=True)
            counts = Counter(record["stage"] for record in newest(log).values())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    lost = ", ".join(f"{counts[stage]} {stage}" for stage in STAGES if counts[stage])
    print(f"{counts.total()} ideas: {counts[KEPT]} kept in {args.out}; lost at: {lost or 'none'}")
    return 0 if counts[KEPT] else 1


def parser() -> argparse.ArgumentParser:
    """The flags."""
    out = argparse.ArgumentParser(
        prog="python -m data_pipelines.terminal_written",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--out", type=Path, required=True, help="folder of tasks")
    out.add_argument("--num", type=count, default=100, help="ideas")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--url", required=True, help="of the chat endpoint, without /chat/completions")
    out.add_argument("--model", required=True, help="that writes")
    out.add_argument("--solver", default="", help="model that solves (default: --model)")
    out.add_argument("--attempts", type=count, default=16, help="of the solver at each task")
    out.add_argument("--temperature", type=float, default=1.0, help="of the solver")
    out.add_argument("--max_tokens", type=count, default=8192, help="of one reply")
    out.add_argument("--timeout_s", type=seconds, default=300.0, help="of one request")
    for name, who in (("send_seed", "Gemini's endpoint"), ("send_temperature", "models with one temperature")):
        out.add_argument(f"--{name}", choices=("True", "False"), default="True", help=f"False for {who}")
    limits = typing.get_args(LimitField)
    out.add_argument("--limit_field", choices=limits, default=limits[0], help="by which name a reply's limit is sent")
    out.add_argument("--images", type=Path, required=True, help="folder of built images")
    out.add_argument("--base", action="append", default=[], metavar="NAME=SOURCE", help="what containers start from")
    out.add_argument("--network", action="store_true", help="build steps have this machine's network")
    out.add_argument("--jobs", type=count, default=2, help="ideas at once, each with all of its attempts")
    return out


if __name__ == "__main__":
    sys.exit(exit_code(main))
