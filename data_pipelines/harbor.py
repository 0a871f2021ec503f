"""Checks task directories (Harbor, terminal-bench's older layout, Endless Terminals) by running them; makes datasets.

    python -m data_pipelines.harbor check DIR
    python -m data_pipelines.harbor check DIR --images=FOLDER --base 'debian:12=debootstrap:bookworm'
    python -m data_pipelines.harbor write DIR --out=data/endless_terminals --heldout=100

check: every oracle solution must score 1 and an idle agent 0. DIR is one task or a folder of tasks. Each task runs in a
sandbox with its own image, which is built first: on the bases that --base names, and kept in --images. Without --images
every base is this machine's own /usr (`--base '*=host'`) and nothing is kept.

write: a dataset to train on (`--config.data.source=OUT`) whose rows name the directories, which must stay where they
are. Shuffled with --seed; the last --heldout are the held-out split, as Endless Terminals has it (100, seed 42).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.config.command import count, exit_code
from jaxagent.data.sources import HELD_OUT, TRAIN
from jaxagent.data_pipelines import generated, terminal_check
from jaxagent.data_pipelines.sandbox_workspaces import ImageWorkspaces
from jaxagent.envs.terminal import folders, rows
from jaxagent.envs.terminal.task import TerminalTask


def check(tasks: Sequence[TerminalTask], images: Path, table: Sequence[str], network: bool, jobs: int) -> int:
    """Checks every task in a sandbox with its own image; returns the exit status.

    Args:
      images: where built images are kept.
      table: what FROM may name, as `sandbox.images.bases` has it.
      network: whether build steps have this machine's network.
      jobs: tasks at once.

    Raises:
      ConfigError: the table is wrong, or no back end works here.
    """
    workspaces = ImageWorkspaces(images, table, network)
    try:
        return terminal_check.report(tasks, workspaces.open, jobs)
    finally:
        workspaces.close()


def write(tasks: Sequence[TerminalTask], out: Path | None, heldout: int, seed: int) -> None:
    """Writes the dataset and says how many tasks are in it. Tasks that no test judges are left out, and counted.

    Raises:
      ConfigError: `out` is missing or exists, or too few tasks for two splits.
    """
    if out is None:
        raise ConfigError("write needs --out.")
    if out.exists():
        raise ConfigError(f"{out} exists; remove it or choose another --out")
    found = [rows.folder_row(task) for task in tasks if task.final_test is not None]
    if not 1 <= heldout < len(found):
        raise ConfigError(f"--heldout={heldout} must be 1 or more and less than the {len(found)} tasks with a test.")
    random.Random(seed).shuffle(found)
    splits = {TRAIN: found[:-heldout], HELD_OUT[0]: found[-heldout:]}
    generated.write_dataset(out, splits, {}, need_answers=False)
    left_out = len(tasks) - len(found)
    print(f"wrote {out}: {len(splits[TRAIN])} and {heldout} held-out tasks, {left_out} without a test left out")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("check", "write"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="dataset (write); must not exist")
    parser.add_argument("--heldout", type=count, default=100, help="tasks that are not trained on (write)")
    parser.add_argument("--seed", type=int, default=42, help="of the shuffle (write)")
    parser.add_argument("--jobs", type=count, default=2, help="tasks at once")
    parser.add_argument("--images", type=Path, help="folder in which built images are kept")
    parser.add_argument("--base", action="append", default=[], metavar="NAME=SOURCE", help="what FROM may name")
    parser.add_argument("--network", action="store_true", help="build steps have this machine's network")
    args = parser.parse_args(argv)
    try:
        tasks = folders.read_tasks(args.folder)
        if args.action == "write":
            write(tasks, args.out, args.heldout, args.seed)
            return 0
        if args.images:
            return check(tasks, args.images, args.base, args.network, args.jobs)
        with tempfile.TemporaryDirectory(prefix="jaxagent-images-", ignore_cleanup_errors=True) as folder:
            Path(folder).chmod(0o711)  # the sandboxes' user passes through
            return check(tasks, Path(folder), args.base or ["*=host"], args.network, args.jobs)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(exit_code(main))
