"""Questions about countries over documents of any length, for MemAgent, from the facts of geography.py.

    python -m data_pipelines.long_geography --out=data/long_geography

A question asks for a capital, a currency or a calling code. Its context holds the one passage that says it, among
others of the same split: other facts of the country, and other countries' facts of the same kind. Training and held-out
questions are about different countries, and their contexts hold passages of those countries alone. Training questions
are asked of several worlds, in which all names are swapped: with one world a policy learns its names instead of
reading. Names are words of one part ("Chad", not "Sierra Leone").

Writes, all at once or not at all:

    array_record, TFDS layout  splits train and heldout, metadata: numbers of documents (envs/memagent/documents.py)
    documents.jsonl            the passages, {"text"}
    full.jsonl                 demonstrations: values of a few facts, the curriculum, then over whole chunks
    texts.jsonl                what a tokenizer is trained on

A demonstration is one conversation: a chunk and a memory -> the new memory, or the last memory -> the answer. Names are
swapped in each. Behind the first question follow others about the same chunk, which an episode never asks: so a
sequence has several facts to find. It writes what the chunk says about the question, or else the memory as it was; but
of the chunks that say nothing about it, `forget_frac` write "nothing" over what the memory had. So a policy that
imitates them forgets what it has read as soon as it reads on, and RL has to teach it to keep what it knows.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import generated, geography
from jaxagent.data_pipelines import world as worlds
from jaxagent.data_pipelines.long_demonstrations import ASKED, TOLD, Demonstrator, fact_of, text_of
from jaxagent.data_pipelines.world import Passage, Question, World
from jaxagent.envs.memagent import documents

CONTEXTS = 4  # of each held-out question: as many tasks, with other documents
WORLDS = 16  # of the training questions: as many sets of names
_CITIES = 300  # of the world, whose countries alone are asked for


def write(folder: Path, seed: int, forget_frac: float, chunk_tokens: int, curriculum: int, full: int) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where.
      seed: of everything that is drawn.
      forget_frac: of demonstrations with a memory whose chunk does not say what is asked.
      chunk_tokens: about so long are the chunks of whole demonstrations.
      curriculum, full: numbers of demonstrations.
    """
    world = short(geography.build(_CITIES, seed))
    names, codes = _entities(world)
    secret = {country.name for country in world.countries if country.heldout}
    passages = [passage for passage in plain(world) if passage.title not in secret]
    heldout = [passage for passage in plain(world) if passage.title in secret]
    asked = [question for question in questions(world) if not question.heldout]
    demonstrator = Demonstrator(asked, passages, names, codes, forget_frac, chunk_tokens)
    shown, train = _renamed(demonstrator, passages, heldout, asked, random.Random(f"worlds/{seed}"))
    pool = (len(shown), len(shown) + len(heldout))
    shown += [text_of(passage, str) for passage in heldout]
    rows = enumerate(question for question in questions(world) if question.heldout)
    of_heldout = [_task(worlds.task_row(q, n), pool[0] + _own(heldout, q), pool) for n, q in rows]
    tasks = {"train": train, "heldout": of_heldout}
    lookups = (demonstrator.lookups(seed, i, curriculum) for i in range(curriculum))
    beside = {
        documents.FILE: ({"text": text} for text in shown),
        "full.jsonl": itertools.chain(lookups, (demonstrator.full(seed, i, full) for i in range(full))),
        "texts.jsonl": generated.as_rows(tokenizer_texts(world, [demonstrator.full(seed, i, 0) for i in range(500)])),
    }
    generated.write_dataset(folder, tasks, beside)


def _renamed(
    demonstrator: Demonstrator,
    passages: Sequence[Passage],
    heldout: Sequence[Passage],
    asked: Sequence[Question],
    rng: random.Random,
) -> tuple[list[str], list[dict[str, object]]]:
    """The training countries as `WORLDS` worlds of other names: texts of all passages, and a task of each question.

    A policy that is trained on one world learns its names, and reads others worse. No sentence is one of `heldout`.
    Every world has each of `asked` once, in one of its `CONTEXTS` wordings.
    """
    secret = {template.format(s=s, o=o) for passage in heldout for template, s, o in passage.sentences}
    texts: list[str] = []
    tasks: list[dict[str, object]] = []
    for number in range(WORLDS):
        while True:
            name = demonstrator.renaming(passages, rng)
            said = {t.format(s=name(s), o=name(o)) for passage in passages for t, s, o in passage.sentences}
            if not said & secret:
                break
        pool = (len(texts), len(texts) + len(passages))
        texts += [text_of(passage, name) for passage in passages]
        each = len(asked) // CONTEXTS
        for question in asked[number % CONTEXTS * each :][:each]:
            row = worlds.task_row(question, len(tasks))
            row |= {"prompt": question.render(name), "answers": [name(question.answer)]}
            tasks.append(_task(row, pool[0] + _own(passages, question), pool))
    return texts, tasks


def _task(row: dict[str, object], own: int, pool: tuple[int, int]) -> dict[str, object]:
    return row | {"metadata": json.dumps({"documents": [own], "pool": pool})}


def _entities(world: World) -> tuple[list[str], list[str]]:
    """All names, and all codes and domains."""
    found = {e for p in worlds.passages(world) for _, s, o in p.sentences for e in (p.title, s, o)}
    codes = sorted(e for e in found if e.startswith(".") or e.isdigit())
    return sorted(found - set(codes)), codes


def _own(passages: Sequence[Passage], question: Question) -> int:
    return next(at for at, passage in enumerate(passages) if fact_of(passage, question) is not None)


def short(world: World) -> World:
    """The countries whose names are one word each, with such capitals and currencies, and no cities: one token each."""
    found = []
    for country in world.countries:
        currency = "" if " " in country.currency else country.currency
        if " " not in country.name + country.capital:
            found.append(dataclasses.replace(country, cities=(), currency=currency))
    return dataclasses.replace(world, countries=tuple(found))


def plain(world: World) -> list[Passage]:
    """The world's passages with the sentences of `TOLD`."""
    return [
        dataclasses.replace(passage, sentences=tuple((_plain(t), s, o) for t, s, o in passage.sentences))
        for passage in worlds.passages(world)
    ]


def _plain(template: str) -> str:
    return next(TOLD[r] for r in TOLD if template in worlds.RELATIONS[r][1])


def questions(world: World) -> list[Question]:
    """The questions that are asked, each several times: every one is a task with documents of its own."""
    asked = [q for q in worlds.questions(world) if len(q.hops) == 1 and q.hops[0][0] in ASKED]
    return [
        dataclasses.replace(question, template=templates[number % len(templates)])
        for number in range(CONTEXTS)
        for question in asked
        for templates in [worlds.RELATIONS[question.hops[0][0]][0]]
    ]


def tokenizer_texts(world: World, demonstrations: Sequence[dict[str, object]]) -> list[str]:
    """Demonstrations as they occur, and every name often enough to be one token."""
    texts = generated.episode_texts(demonstrations)
    names = sorted({e for p in worlds.passages(world) for _, s, o in p.sentences for e in (p.title, s, o)})
    return texts + [f" {name}" for name in names] * geography.NAME_REPEATS


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the templates")
    parser.add_argument(
        "--forget_frac", type=part, default=0.6, help="demonstrations that lose a memory they should keep"
    )
    parser.add_argument("--chunk_tokens", type=count, default=64, help="about so long are the chunks of demonstrations")
    parser.add_argument("--curriculum", type=amount, default=16_000, help="demonstrations over a few facts")
    parser.add_argument("--full", type=amount, default=20_000, help="demonstrations over whole chunks")
    return generated.finish(
        parser,
        argv,
        lambda args: write(args.out, args.seed, args.forget_frac, args.chunk_tokens, args.curriculum, args.full),
        "--config.env.prompt=compact ",
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
