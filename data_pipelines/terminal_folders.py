"""Writes the tasks of `data_pipelines.terminal` as Harbor's task folders, with demonstrations of other such tasks.

    python -m data_pipelines.terminal_folders --out=data/harbor --laptop --num=1000 --demonstrations=6000
    python -m jaxagent.envs.check data/harbor

OUT/ID              a task in the published format (task.toml 1.4): one step whose workdir/setup.sh brings the initial
                    state about, so that all tasks share one image, IMAGE
OUT/full.jsonl      demonstrations for a warm start; none has the instruction of a task in OUT
OUT/tokenizer       of 1,024 tokens, trained on what occurs in the demonstrations

Tasks whose test looks at processes are left out: Harbor has no word for what setup started.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.data_pipelines import generated, terminal
from jaxagent.data_pipelines.terminal_demonstrations import demonstrations
from jaxagent.envs.terminal import dialogue
from jaxagent.envs.terminal.environment import Terminal
from jaxagent.envs.terminal.rows import KEY, LIMITS

VOCABULARY = 1024
IMAGE, HOME = "python:3.12", "/root"  # the image has python3 and git
DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard"}
_TASK = f"""schema_version = "1.4"

[metadata]
difficulty = "{{difficulty}}"
template = "{{template}}"

[environment]
docker_image = "{IMAGE}"
workdir = "{HOME}"

[[steps]]
name = "work"

[steps.agent]
timeout_sec = {LIMITS.agent_timeout_s}

[steps.verifier]
timeout_sec = {LIMITS.verifier_timeout_s}
"""
# A status that is neither 0 nor 1 is a mistake of the test: it says no reward, which is an error and not a 0.
_TEST = """#!/bin/bash
python3 -I /tests/final_state.py
case $? in
0) echo 1 > /logs/verifier/reward.txt ;;
1) echo 0 > /logs/verifier/reward.txt ;;
esac
"""


def write_folder(folder: Path, row: Mapping[str, Any]) -> None:
    """One task's folder, which must not exist, of a row of `terminal.generate`."""
    about, step = row["metadata"][KEY], folder / "steps" / "work"
    words = {"difficulty": DIFFICULTIES[about["level"]], "template": about["template"]}
    files = {
        folder / "task.toml": _TASK.format(**words),
        step / "instruction.md": row["prompt"],
        step / "workdir" / "setup.sh": f'#!/bin/bash\nrm -- "$0"\n{about["setup"]}',
        step / "tests" / "test.sh": _TEST,
        step / "tests" / "final_state.py": about["final_test"],
        step / "solution" / "solve.sh": "\n".join(["#!/bin/bash", *about["commands"], ""]),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def write(
    out: Path, num: int, seed: int, laptop: bool, shown: int, style: dialogue.Style, early_done_frac: float
) -> None:
    """Writes what the module's docstring says into `out`, which must not exist yet: all at once or not at all.

    Args:
      out: the folder.
      num: tasks, no two of one instruction.
      seed: of the draws; the same seed gives the same bytes.
      laptop: the narrow distribution.
      shown: demonstrations.
      style: of the demonstrations.
      early_done_frac: demonstrations of two operations that say they have finished after the first.
    """
    stream = (row for row in terminal.generate(seed, laptop) if not row["metadata"][KEY]["processes"])
    tasks: dict[str, Mapping[str, Any]] = {}
    while len(tasks) < num:
        row = next(stream)
        tasks.setdefault(row["prompt"], row)

    def others() -> Iterator[Mapping[str, Any]]:
        wanted = (row for row in stream if row["prompt"] not in tasks)
        for _ in range(shown):
            yield next(wanted)

    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for row in tasks.values():
            write_folder(partial / row["id"], row)
        if shown:
            demos = list(demonstrations(others(), style, early_done_frac))
            generated.write_jsonl(partial / "full.jsonl", demos)
            texts, tokens = terminal.tokenizer_texts(demos[:2000]), Terminal(tools=style).tokens
            Tokenizer.train(texts, VOCABULARY, tokens).save(partial / "tokenizer")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--num", type=count, default=500, help="tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--laptop", action="store_true", help="short tasks over a small vocabulary")
    parser.add_argument("--demonstrations", type=amount, default=0, help="also write so many")
    parser.add_argument("--style", choices=("plain", "endless", "qwen3_xml"), default="plain", help="of demonstrations")
    parser.add_argument(
        "--early_done_frac", type=part, default=0.0, help="demonstrations of two operations that stop after one"
    )

    def write_all(args: argparse.Namespace) -> None:
        write(args.out, args.num, args.seed, args.laptop, args.demonstrations, args.style, args.early_done_frac)

    return generated.finish(parser, argv, write_all)


if __name__ == "__main__":
    sys.exit(exit_code(main))
