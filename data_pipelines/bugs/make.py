"""Goes through the candidates of packages and repositories, several at once, and writes what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.sources import load_tasks
from jaxagent.data_pipelines.bugs import bench, candidates, repositories, tasks
from jaxagent.data_pipelines.bugs.candidates import Candidate
from jaxagent.envs.coding.task import CodingTask, StatusMap, from_task
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import MIB, Limits, Sandbox, SandboxError, Spec
from jaxagent.sandbox.owner import Owner

LIMITS = Limits(memory_bytes=1024 * MIB, disk_bytes=256 * MIB, inodes=20_000, processes=128)  # the environment's own
TRIES_PER_TASK = 40  # candidates for each task that is wanted; then the repository has too few


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    out: Path
    count: int
    seed: int
    jobs: int
    source: str  # "mutations" or "commits"
    commits: int
    file_timeout_s: float
    needs: tuple[str, ...]


@contextlib.asynccontextmanager
async def sandboxes(names: Sequence[str]) -> AsyncIterator[bench.Take]:
    """Yields what gives sandboxes. Raises ConfigError where no back end works."""
    owner = Owner()
    try:
        backend = await choose.choose_backend(owner, names)
        print(backend.describe(), flush=True)
        try:

            async def take() -> Sandbox:
                return await backend.start(Spec(limits=LIMITS))

            yield take
        finally:
            await backend.close()
    finally:
        owner.close()


async def make_all(
    wanted: Wanted, packages: Sequence[str], places: Sequence[Path], options: tasks.Options, names: Sequence[str]
) -> int:
    """Makes tasks of everything that is named; returns the exit status: 1 where some have fewer than were wanted."""
    few = []
    async with sandboxes(names) as take:
        for package in packages:
            repository, needs = await asyncio.to_thread(repositories.from_package, package)
            tools = await asyncio.to_thread(repositories.pack_tools, wanted.out, (*needs, *wanted.needs))
            found = candidates.of_mutations(repository, wanted.seed)
            few += await _make(wanted, repository.name, repository.version, found, tools, take, options)
        for place in places:
            repository = repositories.from_git(place)
            tools = await asyncio.to_thread(repositories.pack_tools, wanted.out, wanted.needs)
            if wanted.source == "commits":
                found = candidates.of_commits(place, wanted.commits)
            else:
                found = candidates.of_mutations(repository, wanted.seed)
            few += await _make(wanted, repository.name, repository.version, found, tools, take, options)
    compose(wanted.out)
    for line in few:
        print(line, flush=True)
    return 1 if few else 0


async def _make(
    wanted: Wanted,
    name: str,
    version: str,
    found: Iterator[Candidate],
    tools: str,
    take: bench.Take,
    options: tasks.Options,
) -> list[str]:
    """One repository. Its tasks are the first so many in the order of the candidates, whichever ends first."""
    label = f"{name}-{version}-{wanted.source}-{wanted.seed}"
    log = wanted.out / "progress" / f"{label}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    done = _read_log(log)
    started, results = time.monotonic(), dict(done)
    counts = Counter(result["why"] or "task" for result in results.values())
    lock, numbered = asyncio.Lock(), enumerate(itertools.islice(found, TRIES_PER_TASK * wanted.count))
    places: dict[str, _Place] = {}

    def enough() -> bool:
        """Whether the candidates up to the first one without a result hold enough tasks."""
        tried = itertools.takewhile(lambda i: i in results, itertools.count())
        return sum(results[i]["why"] == "" for i in tried) >= wanted.count

    with log.open("a", encoding="utf-8") as file:

        async def worker() -> None:
            benches: dict[str, bench.Bench] = {}
            async with contextlib.AsyncExitStack() as opened:
                while not enough():
                    async with lock:  # the iterator runs git
                        number, candidate = await asyncio.to_thread(next, numbered, (-1, None))
                    if candidate is None:
                        return
                    if number in done:
                        continue
                    result = await _try(candidate, wanted, tools, take, options, places, benches, opened, lock)
                    results[number] = result
                    counts[result["why"] or "task"] += 1
                    file.write(json.dumps({"number": number, **result}) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                    if len(results) % 10 == 0:
                        print(_line(label, counts, started), flush=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(wanted.jobs):
                group.create_task(worker())
    print(_line(label, counts, started), flush=True)
    _write(wanted.out / "progress" / f"{label}.json", {"count": wanted.count, "seed": wanted.seed, "version": version})
    return [] if counts["task"] >= wanted.count else [f"{label}: {counts['task']} tasks, not {wanted.count}."]


@dataclasses.dataclass
class _Place:
    """A repository's tests as they are without a bug."""

    task: CodingTask
    tests: tuple[str, ...]
    base: list[bench.Run]


async def _try(
    candidate: Candidate,
    wanted: Wanted,
    tools: str,
    take: bench.Take,
    options: tasks.Options,
    places: dict[str, _Place],
    benches: dict[str, bench.Bench],
    opened: contextlib.AsyncExitStack,
    lock: asyncio.Lock,
) -> dict[str, Any]:
    """A candidate's row, or why there is none."""
    key = f"{candidate.repository.version} {candidate.tests}"
    try:
        async with lock:
            if key not in places:
                places[key] = await _place(candidate, wanted, tools, take, options)
        place = places[key]
        if key not in benches:
            benches.clear()
            await opened.aclose()  # of the repository before
            benches[key] = await opened.enter_async_context(bench.Bench(take, place.task, options.timeout_s))
        candidate = dataclasses.replace(candidate, tests=place.tests)
        row = await tasks.make(candidate, place.base, benches[key], take, wanted.out, tools, options)
    except tasks.Rejected as rejected:
        return {"id": candidate.id, "why": str(rejected), "row": None}
    except (SandboxError, RuntimeError) as failure:
        return {"id": candidate.id, "why": f"failed: {' '.join(str(failure).split())[:200]}", "row": None}
    return {"id": candidate.id, "why": "", "row": row}


async def _place(candidate: Candidate, wanted: Wanted, tools: str, take: bench.Take, options: tasks.Options) -> _Place:
    """Runs the tests without a bug: file by file, to leave out those that are slow or do not work here; then twice."""
    repository = candidate.repository
    task = CodingTask(
        id=f"{repository.name}-{repository.version}",
        statement="",
        check=StatusMap("", {}),
        archive=wanted.out / repository.pack(wanted.out),
        tools=wanted.out / tools,
    )
    quick: list[str] = []
    async with bench.Bench(take, task, wanted.file_timeout_s) as alone:
        for path in candidate.tests:
            if "PASSED" in (await alone.run({}, {}, [path])).outcomes.values():
                quick.append(path)
    left_out = len(candidate.tests) - len(quick)
    async with bench.Bench(take, task, options.timeout_s) as together:
        base = [await together.run({}, {}, quick) for _ in range(2)] if quick else [bench.Run({}, {})] * 2
    green = len(tasks.passed(base))
    print(f"{task.id}: {green} tests in {len(quick)} files pass; {left_out} files are left out", flush=True)
    return _Place(task, tuple(quick), base)


def compose(out: Path) -> None:
    """Writes the splits and the manifest from what became of all candidates so far.

    Raises:
      ConfigError: there is no task.
    """
    splits: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "heldout": {}}
    manifest: dict[str, Any] = {"repositories": {}}
    for about in sorted((out / "progress").glob("*.json")):
        settings = json.loads(about.read_text(encoding="utf-8"))
        results = _read_log(about.with_suffix(".jsonl"))
        rows = [results[i]["row"] for i in sorted(results) if not results[i]["why"]][: settings["count"]]
        for row in rows:
            splits[row["metadata"]["split"]].setdefault(row["id"], row)
        why = Counter(result["why"] or "task" for result in results.values())
        manifest["repositories"][about.stem] = {**settings, "tasks": len(rows), "candidates": dict(why.most_common())}
    if not any(splits.values()):
        raise ConfigError(f"{out}: no candidate became a task; progress/ says why.")
    manifest["splits"] = {name: len(rows) for name, rows in splits.items()}
    for name, rows in splits.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
        if rows:
            _replace(out / f"{name}.jsonl", text)
    _write(out / "manifest.json", manifest)
    print(f"{out}: {', '.join(f'{name} {count}' for name, count in manifest['splits'].items())}", flush=True)
    if not all(splits.values()):
        print("One split has no task: more packages, or another --heldout_frac, give it modules.", flush=True)


async def check_all(folder: Path, names: Sequence[str], jobs: int, timeout_s: float) -> int:
    """Judges the oracle's patch and no change of every task; returns the exit status: 0 when all are 1 and 0."""
    found = [
        from_task(task, folder)
        for split in ("train", "heldout")
        if (folder / f"{split}.jsonl").is_file()
        for task in load_tasks(folder, split, need_answers=False)
    ]
    gate, bad = asyncio.Semaphore(jobs), Counter[str]()
    async with sandboxes(names) as take:

        async def one(task: CodingTask) -> None:
            async with gate:
                try:
                    oracle = await bench.check(take, task, task.patch, timeout_s)
                    idle = await bench.check(take, task, "", timeout_s)
                except RuntimeError as failure:
                    bad["error"] += 1
                    print(f"{task.id}: {failure}", flush=True)
                    return
                bad["oracle"] += not oracle.resolved
                bad["idle"] += idle.resolved
                if idle.resolved or not oracle.resolved:
                    print(f"{task.id}: oracle {oracle.why or 'resolved'}, idle {idle.why or 'resolved'}", flush=True)

        started = time.monotonic()
        await asyncio.gather(*map(one, found))
    total, errors = len(found), bad["error"]
    print(
        f"{total} tasks: the oracle is 1 on {total - errors - bad['oracle']}, nothing done is 0 on "
        f"{total - errors - bad['idle']}, {errors} errors; {time.monotonic() - started:.0f} s"
    )
    return 0 if found and not sum(bad.values()) else 1


def _read_log(path: Path) -> dict[int, dict[str, Any]]:
    """Results by number. A last line that a kill has cut off is cut away."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    results = {}
    for line in whole.splitlines():
        result = json.loads(line)
        results[result.pop("number")] = result
    return results


def _line(label: str, counts: Counter[str], started: float) -> str:
    what = ", ".join(f"{count} {why if len(why) < 40 else why[:37] + '...'}" for why, count in counts.most_common())
    return f"{label}: {what}; {time.monotonic() - started:.0f} s"


def _write(path: Path, value: Any) -> None:
    _replace(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)
