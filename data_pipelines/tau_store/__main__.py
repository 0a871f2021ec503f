"""Generates a retail store of tau-bench's schema, tasks about its users, and demonstrations of an agent.

    python -m data_pipelines.tau_store --out=data/tau_store --num=2000 --demonstrations=12000 --compact
    python -m jaxagent.main --config=configs/tau_bench.py --config.data.source=data/tau_store

A task is a user, an instruction for a simulated customer, the right actions, and what the customer must be told:
{"user_id", "instruction", "actions", "outputs"}, as in tau-bench, and beside them under "customer" the facts that the
scripted customer reveals. The kinds (`tasks.py`) are one wish over each tool that writes, two wishes, a question, and
wishes that must be refused. Training and held-out tasks share no user and no order.

With --compact ids have three digits, a product three variants and an order one or two items, so that a conversation
fits into a few hundred tokens. Demonstrations are of compact stores of their own, about which there are no tasks.

Writes, all at once or not at all:

    orders.json, products.json, users.json    the store
    array_record, TFDS layout                 splits train and heldout
    full.jsonl, curriculum.jsonl              whole episodes, and excerpts in which everything is copied
    texts.jsonl                               what a tokenizer is trained on
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines.tau_store import make


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--num", type=count, default=2000, help="tasks, both splits together")
    parser.add_argument("--users", type=count, default=300, help="of the store")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compact", action="store_true", help="short ids and small orders, for a small policy")
    parser.add_argument("--demonstrations", type=amount, default=12_000)
    parser.add_argument("--curriculum", type=amount, default=4_000, help="excerpts of demonstrations")
    parser.add_argument("--flawed_frac", type=part, default=0.0, help="demonstrations that make a mistake")

    def run(args: argparse.Namespace) -> None:
        make.write(
            args.out,
            args.num,
            args.seed,
            args.users,
            args.compact,
            args.demonstrations,
            args.curriculum,
            args.flawed_frac,
        )

    return generated.finish(parser, argv, run)


if __name__ == "__main__":
    sys.exit(exit_code(main))
