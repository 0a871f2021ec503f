"""Proves tasks before anything is trained on them: the row's own solution scores 1, and doing nothing scores 0.

    python -m data_pipelines.prove --config=configs/coding_agent.py --config.data.source=data/swe.jsonl --jobs=4
    python -m data_pipelines.prove --config=configs/search_r1.py --config.data.source=data/nq --tasks=200

Any source and any environment of one policy. A solution is what the row has: a patch, a solution script, an answer, a
program; an environment of your own says it with `oracle(task)`. Both are judged as a run judges them. What became of
each task is a line of FOLDER/proven.jsonl (FILE.proven.jsonl beside a file), with a digest of the row; the same
command goes on with what is not there yet. A run says how many of its tasks are not proven, and
--config.data.only_proven=True refuses them.

  --tasks=N       the first N of each split; 0 = all
  --jobs=N        tasks at once
  --again         also those that failed before
  --out=FOLDER    write into this folder, where the data cannot be written; a run looks into its workdir, too

Exit status: 0 where all that were played are proven, 1 where not, 2 for a mistake.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError, flags
from jaxagent.config.command import Parser, count, exit_code
from jaxagent.config.errors import failure_line
from jaxagent.data import proofs, sources
from jaxagent.data.sources import TaskSource
from jaxagent.envs import Coding
from jaxagent.envs.base import Environment, Opening, Transcript, Verdict
from jaxagent.types import StopReason, Task

PROGRESS_S = 30.0  # between two lines that say how far it is
_NO_SOLUTION = "the row has no solution that this environment can play"


async def prove(environment: Environment, attempt_at: Callable[[Task], Any], task: Task) -> dict[str, Any]:
    """Plays the solution and nothing; what came of both, without the row's digest."""
    proof: dict[str, Any] = {"id": task.id, "oracle": None, "idle": None, "error": ""}
    try:
        for name, solved in (("oracle", True), ("idle", False)):
            async with asyncio.timeout(environment.episode_timeout_s):
                verdict = await _played(environment, attempt_at(task), task, solved)
            if verdict is None:
                return proof | {"error": _NO_SOLUTION}
            proof[name] = float(verdict.components.get(environment.score, verdict.reward))
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
    place: Path


def run(config: Config, options: argparse.Namespace, note: Callable[[str], None]) -> int:
    """Proves what is not proven yet; returns the exit status.

    Raises:
      ConfigError: bad data, or an environment whose attempts need more than one policy.
    """
    from jaxagent.rollout.workers import Workers  # late: loads jax

    environment = config.env
    if not isinstance(environment, Environment) or environment.roles:
        raise ConfigError("config.env is played by several roles: its rows have no solution of one policy's.")
    if isinstance(environment, Coding):  # the same judgement, by the tests also of nothing, and without a program
        environment = dataclasses.replace(environment, play="built_in", verify_empty=True)
    needs = environment.needs_answers, environment.takes_messages
    dataset = config.data.source.folder(config.workdir, config.data.seed, environment, note)
    train, held_out = sources.open_train_and_held_out(dataset, config.data, *needs, note)
    wanted: list[_Wanted] = []
    for source, path in ((train, dataset), (held_out, Path(config.data.eval_source or dataset))):
        place = proofs.place(options.out or path)
        known = proofs.read(place)
        indices = range(min(len(source), options.tasks or len(source)))
        wanted += [_Wanted(source, i, place) for i in indices if _is_due(known.get(source.digests[i]), options.again)]
    note(f"{len(wanted)} tasks to prove, of {len(train)} training and {len(held_out)} held-out ones")
    if not wanted:
        return 0
    tasks = [one.source[one.index] for one in wanted]
    counts: Counter[str] = Counter()
    with Workers(options.jobs) as workers:
        here = Opening(
            dataset, tasks, workers.run, note, Path(config.data.eval_source) if config.data.eval_source else None
        )
        with environment.open(here) as attempt_at:
            limit_s = len(tasks) * 2 * environment.episode_timeout_s
            workers.run(_all(environment, attempt_at, wanted, options.jobs, counts, note), limit_s)
    note(_line(counts, len(wanted)))
    return 0 if counts["proven"] == len(wanted) else 1


def _is_due(proof: Mapping[str, Any] | None, again: bool) -> bool:
    return proof is None or (again and not proofs.is_proven(proof))


async def _all(
    environment: Environment,
    attempt_at: Callable[[Task], Any],
    wanted: Sequence[_Wanted],
    jobs: int,
    counts: Counter[str],
    note: Callable[[str], None],
) -> None:
    left: Iterator[_Wanted] = iter(wanted)
    last_line_s = time.monotonic()

    async def worker() -> None:
        nonlocal last_line_s
        for one in left:
            task = one.source[one.index]
            proof = {"task": one.source.digests[one.index], **await prove(environment, attempt_at, task)}
            with one.place.open("a", encoding="utf-8") as file:
                file.write(json.dumps(proof, ensure_ascii=False) + "\n")
            counts[_what(proof)] += 1
            if not proofs.is_proven(proof):
                note(f"{task.id}: {_what(proof)}: {proof['error'] or 'solution ' + _shown(proof)}")
            if time.monotonic() - last_line_s > PROGRESS_S:
                last_line_s = time.monotonic()
                note(_line(counts, len(wanted)))

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(worker())


def _what(proof: Mapping[str, Any]) -> str:
    if proof["error"]:
        return "without a solution" if proof["error"] == _NO_SOLUTION else "failed"
    return "proven" if proofs.is_proven(proof) else "wrong"


def _shown(proof: Mapping[str, Any]) -> str:
    return f"{proof['oracle']:g}, nothing done {proof['idle']:g}"


def _line(counts: Counter[str], total: int) -> str:
    return f"{sum(counts.values())} of {total}: " + ", ".join(f"{n} {what}" for what, n in counts.most_common())


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    parser = Parser(prog="prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=0)
    parser.add_argument("--jobs", type=count, default=2)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path)
    if flags.wants_help(argv):
        print(parser.format_help())
        return 0

    def command() -> int:
        options, rest = parser.parse_known_args(argv[1:])
        if options.out is not None and not options.out.is_dir():
            raise ConfigError(f"--out={options.out} must be a folder that is there.")
        config = flags.parse_config([argv[0], *rest])
        return run(config, options, lambda line: print(line, flush=True))

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
