"""Generates problems for an orchestrator, each with the cheapest way to a right answer, and demonstrations that waste.

    python -m data_pipelines.orchestra --out=data/orchestra

Problems are of three families, and the scripted experts of configs/tool_orchestra.py (envs/orchestra/roles.py) are
made for them:

    one_step   arithmetic of one step (arithmetic.py)        the cheap expert knows the answer, the expensive one too
    two_step   arithmetic of two steps                       the expensive one; or the cheap one after a program
    fact       about countries and cities (geography.py)     the expensive one mostly; or the cheap one after a search

Demonstrations mostly call the expensive expert, or call more than is needed: what reinforcement learning then has to
unlearn, without losing answers.

Writes, all at once or not at all:

    array_record, TFDS layout   splits train and heldout (numbers never seen together, countries never seen)
    corpus.jsonl                the facts' passages
    full.jsonl, texts.jsonl     whole episodes, and what a tokenizer is trained on
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import arithmetic, generated, geography
from jaxagent.data_pipelines import world as worlds
from jaxagent.envs.orchestra import experts, tools
from jaxagent.envs.orchestra.tools import ANSWER, REASON, SEARCH
from jaxagent.envs.search.retriever.base import Passage, passages_from_rows
from jaxagent.envs.search.retriever.bm25 import Bm25

TRAIN, HELDOUT = "train", "heldout"
ONE_STEP, TWO_STEP, FACT = FAMILIES = ("one_step", "two_step", "fact")
# The experts that demonstrations call; a config names who they are.
DEAR, CHEAP = "answer-1", "answer-3"
REASONER, SEARCHER, DEAR_SEARCHER = "reasoner-3", "search-3", "search-1"
Calls = tuple[tuple[str, str], ...]
# Family -> what is demonstrated, and how often. The first is the most frequent: what a greedy policy begins with.
SHOWN: dict[str, tuple[tuple[Calls, float], ...]] = {
    ONE_STEP: (
        (((ANSWER, DEAR),), 0.75),
        (((ANSWER, CHEAP),), 0.15),
        (((REASON, REASONER), (ANSWER, DEAR)), 0.10),
    ),
    TWO_STEP: (
        (((ANSWER, DEAR),), 0.70),
        (((REASON, REASONER), (ANSWER, CHEAP)), 0.20),
        (((ANSWER, CHEAP),), 0.10),
    ),
    FACT: (
        (((ANSWER, DEAR),), 0.50),
        (((SEARCH, DEAR_SEARCHER), (ANSWER, DEAR)), 0.20),
        (((SEARCH, SEARCHER), (ANSWER, CHEAP)), 0.20),
        (((ANSWER, CHEAP),), 0.10),
    ),
}


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Endless rows of arithmetic, of either split; every kind in turn."""
    for row in arithmetic.generate(seed):
        split = row["metadata"]["split"]
        if split in (TRAIN, HELDOUT):
            yield row | {"metadata": {"program": row["metadata"]["program"], "split": split}}


def facts(world: worlds.World) -> Iterator[dict[str, Any]]:
    """Every question of one hop, with the query that finds its passage."""
    for number, question in enumerate(worlds.questions(world)):
        if len(question.hops) == 1:
            relation, subject, answer = question.hops[0]
            yield {
                "id": f"fact/{number}",
                "prompt": question.render(lambda name: name),
                "answers": [answer],
                "kind": f"{FACT}/{relation}",
                "metadata": {
                    "query": worlds.RELATIONS[relation][2].format(s=subject),
                    "split": HELDOUT if question.heldout else TRAIN,
                },
            }


def demonstration(row: Mapping[str, Any], number: int, documents: Sequence[Passage]) -> dict[str, Any]:
    """An episode of a problem. What is called depends on the problem and on `number` alone.

    Args:
      row: the task.
      number: of the demonstration, for problems that are shown several times.
      documents: what the row's query finds.
    """
    family = row["kind"].partition("/")[0]
    ways, weights = zip(*SHOWN[family], strict=True)
    (calls,) = random.Random(f"shown/{row['id']}/{number}").choices(ways, weights)
    results = {REASON: row["answers"][0], SEARCH: experts.documents_text(documents), ANSWER: ""}
    turns = [{"action": tools.call_text(tool, expert), "observation": results[tool]} for tool, expert in calls]
    return {"prompt": row["prompt"], "turns": turns, "id": row["id"], "kind": row["kind"]}


def expert_demonstration(row: Mapping[str, Any], number: int, documents: Sequence[Passage]) -> dict[str, Any]:
    """A conversation of an expert: a question as the environment asks it, and a reply in the form that it reads.

    For experts that an engine plays with the warm start's own weights (`--config.roles.answer-3=engine`).
    """
    tool = random.Random(f"expert/{row['id']}/{number}").choice((ANSWER, ANSWER, REASON, SEARCH))
    metadata, programs = row["metadata"], []
    if tool == ANSWER and "program" in metadata and number % 2:
        programs.append((metadata["program"], row["answers"][0]))
    said = {
        ANSWER: f"\\boxed{{{row['answers'][0]}}}",
        REASON: f"```python\n{metadata.get('program', 'print(0)')}\n```",
        SEARCH: f"<query>{metadata.get('query', row['prompt'])}</query>",
    }
    context = experts.context(documents if tool == ANSWER else (), programs)
    prompt = [{"role": "user", "content": experts.question(tool, row["prompt"], context)}]
    turns = [{"action": said[tool], "observation": ""}]
    return {"prompt": prompt, "turns": turns, "id": row["id"], "kind": f"expert/{tool}"}


def write(
    folder: Path, num: int, seed: int, num_cities: int, num_demonstrations: int, topk: int, expert_frac: float
) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: problems of arithmetic, both splits together. Of facts there are as many as the world has, or half as many
        as of arithmetic, whichever is less.
      seed: of the draws; the same seed gives the same bytes.
      num_cities: size of the world of the facts.
      num_demonstrations: rows of full.jsonl: a third of each family.
      topk: documents per search in the demonstrations.
      expert_frac: further rows of full.jsonl that are an expert's conversations, as a part of `num_demonstrations`.
    """
    world = geography.build(num_cities, seed)
    corpus = list(worlds.corpus_rows(world))
    passages = passages_from_rows(corpus)
    index = Bm25(passages)

    def documents(row: Mapping[str, Any]) -> list[Passage]:
        query = row["metadata"].get("query")
        return [passages[i] for i, _ in index.ranking(query, topk)] if query else []

    drawn = list(itertools.islice(sums(seed), num))
    asked = list(facts(world))
    random.Random(f"facts/{seed}").shuffle(asked)
    rows = [*drawn, *asked[: num // 2]]
    splits = {split: [row for row in rows if row["metadata"]["split"] == split] for split in (TRAIN, HELDOUT)}
    if missing := [f for f in FAMILIES for split in splits.values() if not _of(split, f)]:
        raise ConfigError(f"--num={num} is too few for both splits of {missing[0]}.")
    shown = _interleaved(splits[TRAIN], num_demonstrations)
    full = [demonstration(row, i, documents(row)) for i, row in enumerate(shown)]
    more = round(expert_frac * num_demonstrations)
    full += [expert_demonstration(row, i, documents(row)) for i, row in enumerate(shown[:more])]
    if more:
        random.Random(f"mixed/{seed}").shuffle(full)
    beside = {"corpus.jsonl": corpus, "full.jsonl": full, "texts.jsonl": generated.as_rows(_texts(full[:3000]))}
    generated.write_dataset(folder, splits, beside)


def _interleaved(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """`count` rows, a family after the other, each from its beginning again when it is through."""
    families = [itertools.cycle(_of(rows, family)) for family in FAMILIES]
    return [next(families[i % len(families)]) for i in range(count)]


def _of(rows: Sequence[Mapping[str, Any]], family: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"].startswith(f"{family}/")]


def _texts(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """What occurs in episodes and in the conversations of experts, and every number of up to three digits."""
    texts = []
    for row in shown:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
        texts += [f"Problem: {prompt}\n", *(turn[part] for turn in row["turns"] for part in ("action", "observation"))]
    texts += [f"{how}\n" for how in experts.HOW.values()] * 20
    return [text for text in texts if text] + [str(number) for number in range(1000)] * arithmetic.NUMBER_REPEATS


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--num", type=count, default=3_000, help="problems of arithmetic, both splits together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_cities", type=count, default=300, help="of the facts' world")
    parser.add_argument("--demonstrations", type=amount, default=9_000)
    parser.add_argument("--topk", type=count, default=2, help="documents per search in the demonstrations")
    parser.add_argument("--expert_frac", type=part, default=0.0, help="conversations of experts, beside these")
    return generated.finish(
        parser,
        argv,
        lambda args: write(
            args.out, args.num, args.seed, args.num_cities, args.demonstrations, args.topk, args.expert_frac
        ),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
