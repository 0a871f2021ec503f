"""Makes datasets of task directories (Harbor, terminal-bench's older layout, Endless Terminals).

    python -m data_pipelines.harbor write DIR --out=data/endless_terminals --heldout=100
    python -m data_pipelines.harbor check DIR --images=FOLDER --base 'debian:12=debootstrap:bookworm'

write: a dataset to train on (`--config.data.source=OUT`) whose rows name the directories, which must stay where they
are. Shuffled with --seed; the last --heldout are the held-out split, as Endless Terminals has it (100, seed 42). What
is proven of DIR's tasks is proven of the dataset's.

check: `python -m jaxagent.envs.check DIR` with images that are kept in --images, on the bases that --base names.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.config.command import count, exit_code
from jaxagent.data import proofs
from jaxagent.data.sources import HELD_OUT, TRAIN
from jaxagent.data_pipelines import generated
from jaxagent.envs import check
from jaxagent.envs.terminal import folders, rows
from jaxagent.envs.terminal.task import TerminalTask


def write(tasks: Sequence[TerminalTask], out: Path | None, heldout: int, seed: int, source: Path | None = None) -> None:
    """Writes the dataset and says how many tasks are in it. Tasks that no test judges are left out, and counted.

    Args:
      source: the folder of the tasks, where its proofs are; None = there are none.

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
    if source is not None and (known := proofs.place(source)).is_file():
        shutil.copyfile(known, proofs.place(out))
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
    if args.action == "check":
        images = [f"--config.env.sandbox.software.images={args.images}"] if args.images else []
        bases = [f"--config.env.sandbox.software.bases={tuple(args.base)!r}"] if args.base else []
        network = ["--config.env.sandbox.software.build_network=True"] if args.network else []
        return check.main(["check", str(args.folder), f"--jobs={args.jobs}", *images, *bases, *network])
    try:
        write(folders.read_tasks(args.folder), args.out, args.heldout, args.seed, args.folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
