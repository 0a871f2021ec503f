"""Checks tasks before anything is trained on them: the task's own solution earns 1, and doing nothing earns 0.

    python -m jaxagent.envs.check tasks/                       a folder of terminal tasks: Harbor, terminal-bench, ...
    python -m jaxagent.envs.check data/bugs --config=coding_agent --jobs=4
    python -m jaxagent.envs.check --config=search_r1 --config.workdir=runs/check --tasks=200

Any source and any environment whose rows have solutions: a script, a patch, an answer, a program, the actions on a
shop; an environment of your own says it with `oracle(task)`. Both are judged as a run judges them. What became of each
task is a line of FOLDER/proven.jsonl (FILE.proven.jsonl beside a file), with a digest of the row; the same command goes
on with what is not there yet. A run says how many of its tasks are not proven; --config.data.unchecked=refuse refuses
them, and =ignore says nothing.

  SOURCE          as --config.data.source; of terminal tasks it needs no --config
  --tasks=N       the first N of each split; 0 = all
  --jobs=N        tasks at once
  --again         also those that failed before
  --out=FOLDER    write into this folder, where the data cannot be written; a run looks into its workdir, too
  --json          the table as one JSON object; what it is doing goes to stderr

Exit status: 0 where all that were looked at are proven, 1 where not (they are named), 2 for a mistake.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError, flags
from jaxagent.config.choice import Choice
from jaxagent.config.command import Parser, count, exit_code
from jaxagent.config.errors import Stopped, failure_line
from jaxagent.data import files, proofs, rows, sources
from jaxagent.data.dataset import Files
from jaxagent.data.sources import TaskSource
from jaxagent.envs.base import Environment, Opening, Transcript, Verdict
from jaxagent.envs.cast import RoleReply
from jaxagent.envs.own_thread import OwnLoop
from jaxagent.types import StopReason, Task

PROGRESS_S = 30.0  # between two lines that say how far it is
SHOWN_TASKS = 200  # of a larger table only those that are not proven are shown
_NO_SOLUTION = "the row has no solution that this environment can play"
# For sources that say what they are: a key of the rows' metadata, and terminal tasks on disk, with room for most.
CONFIGS = {"terminal": "endless_terminals:laptop", "coding": "coding_agent:laptop"}
ON_DISK = (
    *("--config=endless_terminals:laptop", "--config.env.agent_timeout_s=0", "--config.env.episode_timeout_s=7200"),
    *("--config.env.sandbox.memory_mb=2048", "--config.env.sandbox.disk_mb=2048", "--config.env.sandbox.files=100000"),
    *("--config.env.sandbox.processes=256", "--config.env.sandbox.warm=0"),
    "--config.env.sandbox.software.bases=('*=host',)",
)


class _Quiet:
    """Everybody who plays beside the policy: says one thing, whatever is asked."""

    def talk(self, role: str) -> _Quiet:
        return self

    async def say(self, *messages: Any, **limits: Any) -> RoleReply:
        return RoleReply("Hello.", "eos", None, 0, 0, 0.0, None)


async def check(environment: Environment, attempt_at: Callable[..., Any], task: Task) -> dict[str, Any]:
    """Plays the solution and nothing; what came of both, without the row's digest."""
    proof: dict[str, Any] = {"id": task.id, "oracle": None, "idle": None, "error": ""}
    try:
        for name, solved in (("oracle", True), ("idle", False)):
            async with asyncio.timeout(environment.episode_timeout_s):
                attempt = attempt_at(task, _Quiet()) if environment.roles else attempt_at(task)
                verdict = await _played(environment, attempt, task, solved)
            if verdict is None:
                return proof | {"error": _NO_SOLUTION}
            score = float(verdict.components.get(environment.score, verdict.reward))
            proof[name] = score if solved else max(score, verdict.reward)  # what is trained on pays for doing nothing
    except Exception as error:  # of the task, its sandbox or an environment of one's own: never the end of the rest
        return proof | {"error": failure_line(error)}
    return proof


async def _played(environment: Environment, attempt: Any, task: Task, solved: bool) -> Verdict | None:
    """The verdict of an attempt that does what the row says, or nothing; None where the row says nothing."""
    turns: list[tuple[str, str]] = []
    ended: StopReason | None = StopReason.ANSWER
    try:
        await attempt.start()
        if hasattr(attempt, "solve"):
            if solved and not await attempt.solve():
                return None
            if not solved and hasattr(attempt, "idle"):
                await attempt.idle()
        else:
            actions = environment.oracle(task) if solved else ("",)
            if actions is None:
                return None
            for action in actions:
                step = await attempt.step(action)
                turns.append((action, step.observation.text if step.observation else ""))
                ended = step.stop_reason or StopReason.TURN_LIMIT
                if step.stop_reason is not None:
                    break
        return await attempt.verify(Transcript(task.prompt, tuple(turns), (), ended))
    finally:
        await attempt.close()


@dataclasses.dataclass(frozen=True)
class _Wanted:
    source: TaskSource
    index: int
    place: Path  # of its proof
    content: str  # a digest of what the row only names; "" = it names nothing


def run(config: Config, options: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    """Checks what is not checked yet; gives {"tasks": [proofs of all that were looked at], "proven", "of"}.

    Args:
      options: of the command line.

    Raises:
      ConfigError: bad data.
    """
    environment = config.env
    if not isinstance(environment, Environment) or not environment.has_solutions:
        raise ConfigError(f"config.env: {type(environment).__name__}'s rows do not say how they are solved.")
    environment = environment.as_checked()
    dataset = config.data.source.folder(config.workdir, config.data.seed, environment, note)
    looked_at: list[tuple[_Wanted, Mapping[str, Any] | None]] = []
    for source, path in _sources(dataset, config, environment, note):
        on_disk = (
            path if path != dataset or not isinstance(config.data.source, Files) else Path(config.data.source.path)
        )
        place = proofs.place(options.out or on_disk)
        proof_of = proofs.read(place)
        for index in range(min(len(source), options.tasks or len(source))):
            one = _Wanted(source, index, place, environment.content(source[index]))
            proof = proof_of.get(source.digests[index])
            looked_at.append((one, proof if proof and proof.get("content", "") == one.content else None))
    wanted = [one for one, proof in looked_at if proof is None or (options.again and not proofs.is_proven(proof))]
    note(f"{len(wanted)} tasks to check, of {len(looked_at)}")
    made: dict[int, Mapping[str, Any]] = {}
    if wanted:
        for place in {one.place for one in wanted}:
            proofs.drop_cut_line(place)
        tasks = [one.source[one.index] for one in wanted]
        held_out = Path(config.data.eval_source) if config.data.eval_source else None

        def on_loop(work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
            return loop.begin(asyncio.wait_for(work, limit_s)).result()

        with OwnLoop() as loop, environment.open(Opening(dataset, tasks, on_loop, note, held_out)) as attempt_at:
            limit_s = len(tasks) * 2 * environment.episode_timeout_s
            on_loop(_all(environment, attempt_at, wanted, options.jobs, made, note), limit_s)
    table = [made.get(id(one)) or proof or {} for one, proof in looked_at]
    return {"tasks": table, "proven": sum(map(proofs.is_proven, table)), "of": len(table)}


def _sources(
    dataset: Path, config: Config, environment: Environment, note: Callable[[str], None]
) -> Iterator[tuple[TaskSource, Path]]:
    """The splits that a run reads, each with the path that it is in."""
    needs = environment.needs_answers, environment.takes_messages
    if config.data.eval_source:
        train, held_out = sources.open_train_and_held_out(dataset, config.data, *needs, note)
        yield from ((train, dataset), (held_out, Path(config.data.eval_source)))
        return
    how = rows.Reading(config.data.layout, config.data.columns, environment.takes_messages)
    splits = files.splits(dataset)
    wanted = [name for name in splits if name in ("", sources.TRAIN, *sources.HELD_OUT) or name.startswith("heldout")]
    for name in sorted(wanted, key=lambda name: (name not in ("", sources.TRAIN), name)) or list(splits)[:1]:
        yield sources.load_tasks(dataset, name, environment.needs_answers, how), dataset


async def _all(
    environment: Environment,
    attempt_at: Callable[..., Any],
    wanted: Sequence[_Wanted],
    jobs: int,
    made: dict[int, Mapping[str, Any]],
    note: Callable[[str], None],
) -> None:
    """Checks all, `jobs` at once; each proof goes to its file at once, and into `made` by the id of what is wanted."""
    left: Iterator[_Wanted] = iter(wanted)
    last_line_s = time.monotonic()
    counts: Counter[str] = Counter()

    async def worker() -> None:
        nonlocal last_line_s
        for one in left:
            task = one.source[one.index]
            proof = {"task": one.source.digests[one.index], **await check(environment, attempt_at, task)}
            proof |= {"content": one.content} if one.content else {}
            with one.place.open("a", encoding="utf-8") as file:
                file.write(json.dumps(proof, ensure_ascii=False) + "\n")
            made[id(one)] = proof
            counts[what(proof)] += 1
            if time.monotonic() - last_line_s > PROGRESS_S:
                last_line_s = time.monotonic()
                note(f"{sum(counts.values())} of {len(wanted)}: " + _counted(counts))

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(worker())


def what(proof: Mapping[str, Any]) -> str:
    """What came of a task, in a word or two."""
    if proof["error"]:
        return "without a solution" if proof["error"] == _NO_SOLUTION else "failed"
    return "proven" if proofs.is_proven(proof) else "wrong"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in counts.most_common())


def as_text(result: Mapping[str, Any]) -> str:
    """The table, a line per task, and how many are proven; of a large one only what is not proven."""
    shown = [proof for proof in result["tasks"] if result["of"] <= SHOWN_TASKS or not proofs.is_proven(proof)]
    width = max([len(proof["id"]) for proof in shown], default=0)
    lines = [f"{'task':{width}}  oracle   idle  "] if shown else []
    for proof in shown:
        oracle, idle = ("-" if proof[name] is None else f"{proof[name]:g}" for name in ("oracle", "idle"))
        why = f": {proof['error']}" if proof["error"] else ""
        lines.append(f"{proof['id']:{width}}  {oracle:>6} {idle:>6}  {what(proof)}{why}")
    counts = Counter(map(what, result["tasks"]))
    return "\n".join([*lines, f"{result['of']} tasks: {_counted(counts)}"])


def _fields(options: argparse.Namespace, rest: Sequence[str], temporary: Path) -> list[str]:
    """The command line of a config: `rest` after what the source needs."""
    if not options.source:
        return list(rest)
    source = Path(options.source).expanduser()
    has_config = any(arg.lstrip("-").partition("=")[0] == "config" for arg in rest)
    config = [] if has_config else _config_for(source, temporary)
    return [*config, f"--config.data.source={source}", *rest]


def _config_for(source: Path, temporary: Path) -> list[str]:
    """The flags for tasks that say what they are; those of terminal tasks on disk have images and rows in a temporary
    folder. Raises ConfigError: they do not say it."""
    terminal: Any = Choice("jaxagent.envs:ENVIRONMENTS").entry("terminal", "config.env")
    if terminal().rows_of(source) is not None:
        return [
            *ON_DISK,
            f"--config.env.sandbox.software.images={temporary}/images",
            f"--config.workdir={temporary}/run",
        ]
    about = sources.load_tasks(source, next(iter(files.splits(source))), need_answers=False)[0].metadata
    for key, config in CONFIGS.items():
        if key in about:
            return [f"--config={config}"]
    raise ConfigError(f"Which environment plays the rows of {source}? Say --config=FILE, for example --config=toolrl.")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    parser = Parser(prog="check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="")
    parser.add_argument("--tasks", type=int, default=0)
    parser.add_argument("--jobs", type=count, default=2)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    if flags.wants_help(argv):
        print(parser.format_help())
        return 0

    def command() -> int:
        options, rest = parser.parse_known_args(argv[1:])
        if options.out is not None and not options.out.is_dir():
            raise ConfigError(f"--out={options.out} must be a folder that is there.")
        with tempfile.TemporaryDirectory(prefix="jaxagent-check-", ignore_cleanup_errors=True) as temporary:
            Path(temporary).chmod(0o711)  # the sandboxes' user passes through to images
            config = flags.parse_config([argv[0], *_fields(options, rest, Path(temporary))])
            result = run(
                config, options, lambda line: print(line, file=sys.stderr if options.json else None, flush=True)
            )
        print(json.dumps(result, ensure_ascii=False) if options.json else as_text(result))
        return 0 if result["of"] and result["proven"] == result["of"] else 1

    def stop(number: int, frame: object) -> None:
        raise Stopped(signal.SIGTERM, ": the same command goes on")

    before = signal.signal(signal.SIGTERM, stop)  # so that sandboxes and images go
    try:
        return exit_code(command)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
