"""Writes what is to be bought in generated web shops, for the environment `browser`, and demonstrations of buying it.

    python -m data_pipelines.web_shop --out=data/web_shop --num=4000 --demonstrations=12000
    python -m jaxagent.main --config=configs/web_agent.py --config.data.source=data/web_shop

A task is the seed of a shop (`jaxagent/envs/browser/shop`) and a goal, such as "Buy 2 Alto lamp, red.". Each task has
a shop of its own. Exactly one of its products fits, in one combination of its options. The kinds:

    maker/one, maker/more    a thing by a maker, one of it or several
    price/one, price/more    a thing by anybody that costs at most so much
    both/one, both/more      with both; only with --scale=full

What is wanted, a kind of thing by this maker or for this price, is in one split only: held-out goals are never a goal
of training or of a demonstration.

A right agent searches for the kind of thing, with the maker and the price that the goal names, takes a result that
fits, and selects the options. A flawed one makes two mistakes that are natural and sometimes cost nothing,
independently of each other:

    it does not look       it searches for the kind of thing alone, and takes the first result
    it does not choose     it puts the thing into the basket with the options and the quantity that the page shows

Writes, all at once or not at all:

    array_record, TFDS layout           splits train and heldout
    full.jsonl, curriculum.jsonl        whole episodes, and single turns of right ones
    texts.jsonl                         what a tokenizer is trained on
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines.web_shop_reader import Reader
from jaxagent.envs.browser.shop import site, wares
from jaxagent.envs.browser.shop.shopping import Shopping
from jaxagent.envs.browser.shop.wares import Goal, Product, Wares

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_FRAC = 0.25  # of what is wanted
MORE_FRAC = 0.25  # of goals, those of several
MOST_TURNS = 40  # of a demonstration
WORD_REPEATS = 200  # in the tokenizer's texts


def split_of(goal: Goal) -> str:
    """The split that a goal belongs to, by what is wanted; options and quantity do not count."""
    key = f"{goal.kind}/{goal.maker}/{goal.most}"
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return HELDOUT if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32 else TRAIN


def draw_goal(shop: Wares, family: str, split: str, random_: random.Random) -> Goal | None:
    """A goal of a split that exactly one product of the shop fits; None where there is none.

    Args:
      shop: to buy from.
      family: "maker", "price" or "both".
      split: `TRAIN` or `HELDOUT`.
      random_: of all choices.
    """
    most = 0 if family == "maker" else random_.choice(shop.scale.bounds)
    quantity = random_.randint(2, len(wares.QUANTITIES)) if random_.random() < MORE_FRAC else 1
    of_kind: dict[str, list[Product]] = {}
    for product in shop.products:
        of_kind.setdefault(product.kind, []).append(product)
    for product in random_.sample(shop.products, len(shop.products)):
        options = tuple((name, random_.choice(values)) for name, values in product.options)
        goal = Goal(product.kind, "" if family == "price" else product.maker, most, options, quantity)
        if split_of(goal) == split and sum(map(goal.fits, of_kind[product.kind])) == 1:
            return goal
    return None


def rows(seed: str, scale: str, split: str) -> Iterator[dict[str, Any]]:
    """Endless stream of task rows of a split, the kinds in turn, each with a shop of its own."""
    families = ("maker", "price", "both") if wares.SCALES[scale].full else ("maker", "price")
    for number, family in zip(itertools.count(), itertools.cycle(families)):
        name = f"{seed}/{split}/{number}"
        goal = draw_goal(wares.draw(name, scale), family, split, random.Random(f"goal/{name}"))
        if goal is not None:
            fields = dataclasses.asdict(goal) | {"options": dict(goal.options)}
            yield {
                "id": f"web_shop/{name}",
                "prompt": goal.text(),
                "answers": [],
                "kind": f"{family}/{'one' if goal.quantity == 1 else 'more'}",
                "metadata": {"shop": name, "scale": scale, "goal": fields},
            }


def mistakes(row: Mapping[str, Any], flawed_frac: Mapping[str, float]) -> dict[str, bool]:
    """What the agent of a task's demonstration does right, each as often as `flawed_frac` says; by the task alone."""
    random_ = random.Random(f"mistakes/{row['id']}")
    return {name: random_.random() >= flawed_frac[name] for name in ("looks", "chooses")}


def demonstration(row: Mapping[str, Any], looks: bool, chooses: bool) -> dict[str, Any]:
    """An episode of one task.

    Args:
      row: of the task.
      looks: whether the agent searches for all that the goal names; if not, for the kind of thing alone.
      chooses: whether it selects options and quantity.
    """
    about = row["metadata"]
    goal = wares.goal_of(about["goal"])
    believed = goal if looks else dataclasses.replace(goal, maker="", most=0)
    if not chooses:
        believed = dataclasses.replace(believed, options=(), quantity=1)
    state = Shopping(wares.draw(about["shop"], about["scale"]))
    reader = Reader(state)
    prompt, turns = f"{row['prompt']}\n\n{reader.shown()}", []
    while not state.orders:
        action = site.next_action(believed, reader.shown())
        if action is None or len(turns) == MOST_TURNS:
            raise ConfigError(f"task {row['id']}: the agent of its demonstration cannot go on from {reader.shown()!r}")
        reader.act(action)
        turns.append({"action": _in_tags(action), "observation": "" if state.orders else reader.shown()})
    return {"prompt": prompt, "turns": turns, "id": row["id"], "kind": row["kind"], "solved": state.has_met(goal)}


def _in_tags(action: str) -> str:
    return f"<action>{action}</action>"


def excerpt(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The turn `number`, round and round, of a right agent's episode: the goal, a page, what it does and then sees."""
    whole = demonstration(row, looks=True, chooses=True)
    turns = whole["turns"]
    at = number % len(turns)
    if at:
        whole["prompt"] = f"{row['prompt']}\n\n{turns[at - 1]['observation']}"
    return whole | {"turns": turns[at : at + 1]}


def tokenizer_texts(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """What occurs in episodes, with every name and number often enough to be one token."""
    names = [*wares.MAKERS, *wares.KINDS, *(value for values in wares.OPTIONS.values() for value in values)]
    numbers = [str(number) for number in range(100)]
    words = [word for name in names + numbers for word in (name, f" {name}")]
    return generated.episode_texts(shown) + words * WORD_REPEATS


def write(
    folder: Path,
    num: int,
    seed: int,
    scale: str,
    num_demonstrations: int,
    num_curriculum: int,
    flawed_frac: Mapping[str, float],
) -> None:
    """Writes the dataset that this file describes into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: tasks, both splits together.
      seed: of the draws; the same seed gives the same bytes.
      scale: of the shops, one of `wares.SCALES`.
      num_demonstrations: whole ones in full.jsonl.
      num_curriculum: rows of curriculum.jsonl.
      flawed_frac: how often a demonstration makes each mistake: "looks", "chooses".
    """
    held_out = max(1, round(HELDOUT_FRAC * num))
    splits = {
        split: list(itertools.islice(rows(str(seed), scale, split), number))
        for split, number in ((TRAIN, num - held_out), (HELDOUT, held_out))
    }
    further = rows(f"{seed}/shown", scale, TRAIN)
    episodes = [
        demonstration(row, **mistakes(row, flawed_frac)) for row in itertools.islice(further, num_demonstrations)
    ]
    excerpts = (excerpt(row, number // 2) for number, row in enumerate(itertools.islice(further, num_curriculum)))
    texts = generated.as_rows(tokenizer_texts(episodes[:2000]))
    beside = {"full.jsonl": episodes, "curriculum.jsonl": excerpts, "texts.jsonl": texts}
    generated.write_dataset(folder, splits, beside, need_answers=False)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--num", type=count, default=4000, help="tasks, both splits together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", choices=tuple(wares.SCALES), default="compact", help="of the shops")
    parser.add_argument("--demonstrations", type=amount, default=12_000)
    parser.add_argument("--curriculum", type=amount, default=6_000, help="single turns of right demonstrations")
    parser.add_argument("--hasty_frac", type=part, default=0.0, help="demonstrations that do not look")
    parser.add_argument("--careless_frac", type=part, default=0.0, help="demonstrations that do not choose")

    def run(args: argparse.Namespace) -> None:
        flawed = {"looks": args.hasty_frac, "chooses": args.careless_frac}
        write(args.out, args.num, args.seed, args.scale, args.demonstrations, args.curriculum, flawed)

    return generated.finish(parser, argv, run)


if __name__ == "__main__":
    sys.exit(exit_code(main))
