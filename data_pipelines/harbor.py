"""Checks task directories (Harbor, terminal-bench's older layout, Endless Terminals) by running them.

    python -m data_pipelines.harbor check DIR
    python -m data_pipelines.harbor check DIR --images=FOLDER --base 'debian:12=debootstrap:bookworm'

Every oracle solution must score 1 and an idle agent 0. DIR is one task or a folder of tasks. With --images each task's
own image is built, kept in that folder, and the task runs in a sandbox with it. Without, the tasks run with this
machine's programs as their image (`local_place.RootPlace`) and no sandbox: only for tasks that you trust.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_pipelines import terminal_check
from data_pipelines.image_place import ImagePlaces
from data_pipelines.local_place import RootPlace, has_user_namespaces
from jaxagent.config import ConfigError
from jaxagent.envs.terminal_tasks import folders
from jaxagent.envs.terminal_tasks.task import TerminalTask


async def open_root(task: TerminalTask) -> RootPlace:
    """A new place with the task's image built in it."""
    place = RootPlace(task.image)
    try:
        await place.build(task.limits.build_timeout_s)
    except BaseException:
        await place.close()
        raise
    return place


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("check",))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="tasks at once")
    parser.add_argument("--images", type=Path, help="folder of built images; then tasks run in sandboxes")
    parser.add_argument("--base", action="append", default=[], metavar="NAME=SOURCE", help="what FROM may name")
    parser.add_argument("--network", action="store_true", help="build steps have this machine's network")
    args = parser.parse_args(argv)
    try:
        tasks = folders.read_tasks(args.folder)
        places = ImagePlaces(args.images, args.base, args.network) if args.images else None
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if places is not None:
        try:
            return terminal_check.report(tasks, places.open, args.jobs)
        except ConfigError as error:  # no back end works here
            print(error, file=sys.stderr)
            return 2
        finally:
            places.close()
    if not has_user_namespaces():
        print("No user name spaces (unshare) here: tasks with absolute paths need a sandbox.", file=sys.stderr)
        return 2
    return terminal_check.report(tasks, open_root, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
