"""Trains tiny policies on environments of verifiers_package.py, in one process. Prints {name: [steps, largest gap]}.

VERIFIERS_SITE=SITE_PACKAGES python verifiers_training.py FOLDER NAME...
"""

import json
import os
import pathlib
import sys

sys.path.append(os.environ["VERIFIERS_SITE"])  # the package beside the trainer's own

from jaxagent import main as cli
from tests import tiny_run

SOURCE = ("data.source=verifiers", "data.source.num_heldout=2", "data.num_eval=2")
ENV = ("env=verifiers", "env.turn_tokens=6", "env.context_tokens=960", "rl.batch.row_tokens=960")  # tools take room
FLAGS = [f"--config.{flag}" for flag in ("stages=rl", *SOURCE, *ENV, "rl.steps=2", "eval.every=2")]


def train(folder, name):
    """(steps, the largest gap between engine and trainer) of a run of two steps."""
    assert cli.main(tiny_run.argv(folder, *FLAGS, f"--config.env.make=verifiers_package:{name}")) == 0
    _, last = tiny_run.ended(folder)
    return [last["step"], last["logprob_gap/max"]]


if __name__ == "__main__":
    made = {name: train(pathlib.Path(sys.argv[1]) / name, name) for name in sys.argv[2:]}
    print(json.dumps(made))
