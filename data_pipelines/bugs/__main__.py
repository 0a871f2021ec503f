"""Makes software tasks from packages and repositories that have tests, for the coding environment.

    python -m data_pipelines.bugs --out=data/bugs --package=toolz --package=tinydb --count=20
    python -m data_pipelines.bugs --out=data/bugs --repository=../my_project --count=20 --needs=numpy
    python -m data_pipelines.bugs --out=data/fixes --repository=../my_project --from=commits
    python -m data_pipelines.bugs check data/bugs                    # every oracle 1, nothing done 0

A bug is put into a file of the sources (mutate.py), or a commit that changed sources and tests is taken back in the
sources. It becomes a task if tests that passed now fail, the same ones three times, and pass again with the oracle's
patch. Tests run in sandboxes only.

    train.jsonl, heldout.jsonl   rows; modules, not tasks, are divided between them
    archives/                    the repositories, and what their tests need, as tar files
    progress/                    what became of every candidate; a second start goes on from there
    manifest.json                seeds, versions and counts

Starting again with another --package adds to what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.config.command import count, exit_code, part, seconds
from jaxagent.data_pipelines.bugs import make, tasks
from jaxagent.sandbox import choose


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("make", "check"), default="make")
    parser.add_argument("folder", type=Path, nargs="?", help="a data set (check)")
    parser.add_argument("--out", type=Path, help="the data set")
    parser.add_argument("--package", action="append", default=[], help="of PyPI, perhaps with a version: toolz==1.0.0")
    parser.add_argument("--repository", action="append", default=[], type=Path, help="a folder with a git repository")
    parser.add_argument("--from", dest="source", choices=("mutations", "commits"), default="mutations")
    parser.add_argument("--needs", action="append", default=[], help="a further package that tests need")
    parser.add_argument("--count", type=count, default=20, help="tasks of each package or repository")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=count, default=2, help="candidates at once")
    parser.add_argument("--commits", type=count, default=500, help="that are looked at, newest first (--from=commits)")
    parser.add_argument("--test_timeout_s", type=seconds, default=120.0, help="of one run of a repository's tests")
    parser.add_argument("--file_timeout_s", type=seconds, default=20.0, help="test files that take longer are left out")
    parser.add_argument("--max_failing", type=count, default=20, help="failing tests of a task, at most")
    parser.add_argument("--heldout_frac", type=part, default=0.2, help="of modules")
    parser.add_argument("--sandbox", default="auto", help="auto, or names of back ends, best first")
    args = parser.parse_args(argv)
    if args.action == "check" and args.folder is None:
        parser.error("check needs the folder of a data set")
    if args.action == "make" and (args.folder is not None or args.out is None):
        parser.error("give the folder as --out")
    if args.action == "make" and not (args.package or args.repository):
        parser.error("name a --package or a --repository")
    if args.source == "commits" and args.package:
        parser.error("--from=commits needs a --repository: a source distribution has no history")
    names = choose.SAFE if args.sandbox == "auto" else args.sandbox.split(",")
    options = tasks.Options(args.test_timeout_s, args.max_failing, args.heldout_frac)
    try:
        if args.action == "check":
            return asyncio.run(make.check_all(args.folder, tuple(names), args.jobs, args.test_timeout_s))
        wanted = make.Wanted(
            args.out,
            args.count,
            args.seed,
            args.jobs,
            args.source,
            args.commits,
            args.file_timeout_s,
            tuple(args.needs),
        )
        return asyncio.run(make.make_all(wanted, args.package, args.repository, options, tuple(names)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(exit_code(main))
