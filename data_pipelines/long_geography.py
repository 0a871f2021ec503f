"""Questions about countries over documents of any length, for MemAgent, from the facts of geography.py.

    python -m data_pipelines.long_geography --out=data/long_geography

A question asks for a capital, a currency or a calling code. Its context holds the one passage that says it, among
others of the same split: other facts of the country, and other countries' facts of the same kind. Training and held-out
questions are about different countries, and their contexts hold passages of those countries alone. Names are words of
one part ("Chad", not "Sierra Leone").

Writes, all at once or not at all:

    array_record, TFDS layout  splits train and heldout, metadata: numbers of documents (envs/memagent/documents.py)
    documents.jsonl            the passages, {"text"}
    full.jsonl                 demonstrations: values of a few facts, the curriculum, then over whole chunks
    texts.jsonl                what a tokenizer is trained on

A demonstration is one conversation: a chunk and a memory -> the new memory, or the last memory -> the answer. Names are
swapped in each. Behind the first question follow others about the same chunk, which an episode never asks: so a
sequence has several facts to find. It writes what the chunk says about the question, or else the memory as it was; but
of the chunks that say nothing about it, `forget_frac` lose what the memory had. So a policy that imitates them forgets
what it has read as soon as it reads on, and RL has to teach it to keep what it knows.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxagent.config.command import exit_code
from jaxagent.data_pipelines import generated, geography
from jaxagent.data_pipelines import world as worlds
from jaxagent.data_pipelines.world import Passage, Question, World
from jaxagent.envs.memagent import documents, prompts

ASKED = ("capital", "currency", "calling_code")
# How passages say it, every sentence in one form. A value stands right before its subject: a tiny policy that has just
# written "Togo" finds "Togo" again and says what stood before it, long before it learns to say what stands behind.
TOLD = {
    "capital": "The capital {o} {s}.",
    "currency": "The currency {o} {s}.",
    "calling_code": "The calling code {o} {s}.",
    "domain": "The internet domain {o} {s}.",
}
# How a memory has it: the value comes last, and so much of it as comes before is known from the question.
KEPT = {
    "capital": "capital of {s} {o}",
    "currency": "currency of {s} {o}",
    "calling_code": "calling code of {s} {o}",
}
NOTHING = "nothing"  # in place of a value, and the memory before the first chunk
_LOOKUPS = ((0.15, 1), (0.75, 2), (1.0, 4))  # how many facts a text has, up to which part of the curriculum
_SMALL_FRAC = 0.3  # of the demonstrations behind the curriculum, from the first: a few documents instead of a chunk
_MORE = 2  # questions about the same chunk that it answers
_AGAIN = prompts.STYLES["compact"].update.replace("Text:{chunk}\n", "")  # another question about the same chunk
MOST_DOCUMENTS = 128  # whose numbers demonstrations show
CONTEXTS = 4  # of each question: as many tasks, with other documents
_CITIES = 300  # of the world, whose countries alone are asked for
_WORD = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+(?!\S)|\s+")  # as a tokenizer that is trained here cuts text
# Of demonstrations, those with no memory, one without the value, one with a wrong value, and one with the right value.
_MEMORIES = (0.12, 0.38, 0.0, 0.5)
_TOLD_MEMORIES = (0.15, 0.45, 0.4, 0.0)  # the same, where the chunk says what is asked
_FINAL_FRAC = 0.12  # demonstrations that answer
_TOLD_FRAC = 0.35  # of the others, those whose chunk says what is asked


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
    heldout = {country.name for country in world.countries if country.heldout}
    passages = sorted(plain(world), key=lambda passage: passage.title in heldout)
    first = sum(passage.title not in heldout for passage in passages)
    pools = {False: (0, first), True: (first, len(passages))}
    tasks: dict[str, list[dict[str, object]]] = {"train": [], "heldout": []}
    for question in questions(world):
        split = tasks["heldout" if question.heldout else "train"]
        own = next(at for at, passage in enumerate(passages) if _fact(passage, question) is not None)
        metadata = {"documents": [own], "pool": pools[question.heldout]}
        split.append(worlds.task_row(question, len(split)) | {"metadata": json.dumps(metadata)})
    demonstrator = Demonstrator(world, passages[:first], forget_frac, chunk_tokens)
    lookups = (demonstrator.lookups(seed, i, curriculum) for i in range(curriculum))
    beside = {
        documents.FILE: ({"text": _text(passage, str)} for passage in passages),
        "full.jsonl": itertools.chain(lookups, (demonstrator.full(seed, i, full) for i in range(full))),
        "texts.jsonl": generated.as_rows(tokenizer_texts(world, [demonstrator.full(seed, i, 0) for i in range(500)])),
    }
    generated.write_dataset(folder, tasks, beside)


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


class Demonstrator:
    """Writes warm-start demonstrations, deterministic in (seed, index).

    Args:
      world: all of it; no fact of held-out countries is shown.
      passages: of the training countries.
      forget_frac, chunk_tokens: see `write`.
    """

    def __init__(self, world: World, passages: Sequence[Passage], forget_frac: float, chunk_tokens: int):
        self._passages, self._forget, self._chunk = passages, forget_frac, chunk_tokens
        self._by_kind: dict[str, list[Question]] = {}
        for question in questions(world):
            if not question.heldout:
                self._by_kind.setdefault(question.kind, []).append(question)
        self._kinds = sorted(self._by_kind)
        self._facts = {r: [f for p in passages for f in p.sentences if _relation(f) == r] for r in ASKED}
        entities = {e for p in worlds.passages(world) for _, s, o in p.sentences for e in (p.title, s, o)}
        self._codes = sorted(e for e in entities if e.startswith(".") or e.isdigit())
        self._calling = [code for code in self._codes if code.isdigit()]
        self._names = sorted(entities - set(self._codes))

    def lookups(self, seed: int, index: int, rows: int) -> dict[str, object]:
        """Row `index` of `rows` of the curriculum: facts, and all of them again; values alone are demonstrated."""
        rng = random.Random(f"curriculum/{seed}/{index}")
        question = self._question(index, rng)
        count = next(number for end, number in _LOOKUPS if index < end * rows)
        # Of one kind: a policy that tells a name from a number would be content with that.
        facts = rng.sample(self._facts[question.hops[0][0]], count)
        name, _ = self._renaming([Passage(facts[0][1], tuple(facts))], question, rng)
        text = " ".join(template.format(s=name(s), o=name(o)) for template, s, o in facts)
        asked = rng.sample(facts, count)
        begins = [f"\n {KEPT[_relation(fact)].format(s=name(fact[1]), o='').rstrip()}" for fact in asked]
        turns = [
            {"action": f" {name(fact[2])}", "observation": following}
            for fact, following in zip(asked, [*begins[1:], ""], strict=True)
        ]
        return {"kind": question.kind, "prompt": f"Text: {text}{begins[0]}", "turns": turns}

    def full(self, seed: int, index: int, rows: int) -> dict[str, object]:
        """A chunk with several questions, of which the first is as in an episode, or an answer; kinds drawn evenly.

        The first of `rows` have shorter chunks.
        """
        rng = random.Random(f"full/{seed}/{index}")
        question = self._question(index, rng)
        if rng.random() < _FINAL_FRAC:
            return self._final(question, rng)
        told = rng.random() < _TOLD_FRAC
        words = round(self._chunk * (rng.uniform(0.8, 1.0) if rng.random() < 0.85 else rng.uniform(0.2, 0.8)))
        few = index < _SMALL_FRAC * rows
        shown = self._some(question, told, rng.randint(1, 2) if few else 2 + self._chunk // 16, rng)
        name, free = self._renaming(shown, question, rng)
        chunk = " " + _documents(shown, name, rng)
        chunk = _window(chunk, words, _sentence_of(shown, question, name) if told else "", rng)
        return self._reading(question, chunk, told, shown, (name, free), rng)

    def _question(self, index: int, rng: random.Random) -> Question:
        return rng.choice(self._by_kind[self._kinds[index % len(self._kinds)]])

    def _reading(
        self,
        question: Question,
        chunk: str,
        told: bool,
        shown: Sequence[Passage],
        names: tuple[Callable[[str], str], Callable[[], str]],
        rng: random.Random,
    ) -> dict[str, object]:
        """The question about a chunk, then some that the chunk answers, and some that it nearly does."""
        name, free = names
        relation, subject, value = question.hops[0]
        asked = [(relation, name(subject), name(value), told)]
        facts = [fact for passage in shown for fact in passage.sentences if _said(fact, name) in chunk]
        others = [(r, name(fact[1]), name(fact[2]), True) for fact in facts if (r := _relation(fact))]
        others = [other for other in others if other[:2] != asked[0][:2]]
        asked += rng.sample(others, min(len(others), _MORE))
        asked += [(relation, subject, "", False) for relation, subject in self._missed(shown, chunk, names, rng)]
        turns, prompt = [], ""
        for relation, subject, value, said in asked:
            put = {"prompt": " " + rng.choice(worlds.RELATIONS[relation][0]).format(s=subject), "chunk": chunk}
            other = rng.choice(self._calling) if relation == "calling_code" else free()
            put["memory"], new = self._memories(KEPT[relation], subject, (value or other, other), said, rng)
            if turns:
                turns[-1]["observation"] = "\n" + prompts.text(_AGAIN, **put)
            else:
                prompt = prompts.text(prompts.STYLES["compact"].update, **put)
            turns.append({"action": new, "observation": ""})
        return {"kind": question.kind, "prompt": prompt, "turns": turns}

    def _missed(
        self,
        shown: Sequence[Passage],
        chunk: str,
        names: tuple[Callable[[str], str], Callable[[], str]],
        rng: random.Random,
    ) -> list[tuple[str, str]]:
        """Two questions that a chunk nearly answers: its relation of another country, its country's other relation.

        Most chunks of an episode are such, and a policy that has seen few of them takes what they say.
        """
        name, free = names
        there = sorted(
            {r for passage in shown for f in passage.sentences if (r := _relation(f)) and _said(f, name) in chunk}
        )
        found = [(rng.choice(there or ASKED), free())]
        said = {(_relation(f), f[1]) for passage in shown for f in passage.sentences}
        titles = sorted({passage.title for passage in shown if name(passage.title) in chunk})
        unsaid = [(r, name(title)) for title in titles for r in ASKED if (r, title) not in said]
        return [*found, rng.choice(unsaid)] if unsaid else found

    def _memories(
        self, template: str, subject: str, values: tuple[str, str], told: bool, rng: random.Random
    ) -> tuple[str, str]:
        """The memory before a chunk, and after it."""
        right, wrong, empty = (template.format(s=subject, o=value) for value in (*values, NOTHING))
        # Where the chunk says it, the memory does not have it yet: else a copy of the memory would do.
        (memory,) = rng.choices((NOTHING, empty, wrong, right), _TOLD_MEMORIES if told else _MEMORIES)
        if told:
            return f" {memory}", f" {right}"
        forgets = memory in (NOTHING, empty) or rng.random() < self._forget
        return f" {memory}", f" {empty if forgets else memory}"

    def _some(self, question: Question, told: bool, count: int, rng: random.Random) -> list[Passage]:
        """Different passages in random order: with the one that answers, or without it."""
        own = [passage for passage in self._passages if _fact(passage, question) is not None]
        others = [passage for passage in rng.sample(self._passages, count + 1) if passage not in own]
        shown = (own if told else []) + others[: count - told]
        rng.shuffle(shown)
        return shown

    def _final(self, question: Question, rng: random.Random) -> dict[str, object]:
        name, _ = self._renaming((), question, rng)
        relation, subject, value = question.hops[0]
        answer = name(value) if rng.random() < 0.9 else NOTHING
        memory = KEPT[relation].format(s=name(subject), o=answer)
        style = prompts.STYLES["compact"]
        prompt = prompts.text(style.final, prompt=f" {question.render(name)}", memory=f" {memory}")
        turns = [{"action": f"\\boxed{{ {answer}}}", "observation": ""}]
        return {"kind": question.kind, "prompt": prompt, "turns": turns}

    def _renaming(
        self, shown: Iterable[Passage], question: Question, rng: random.Random
    ) -> tuple[Callable[[str], str], Callable[[], str]]:
        """A name for every entity that is shown or asked about, and a source of names that no other has."""
        _, subject, value = question.hops[0]
        used = dict.fromkeys([subject, value])
        for passage in shown:
            used |= dict.fromkeys([passage.title, *(e for _, s, o in passage.sentences for e in (s, o))])
        names = worlds.renaming(self._names, self._codes, list(used), rng)
        rest = [name for name in rng.sample(self._names, len(names) + 16) if name not in names.values()]
        return names.__getitem__, rest.pop


def tokenizer_texts(world: World, demonstrations: Sequence[dict[str, object]]) -> list[str]:
    """Demonstrations as they occur, and every name often enough to be one token."""
    texts = generated.episode_texts(demonstrations)
    names = sorted({e for p in worlds.passages(world) for _, s, o in p.sentences for e in (p.title, s, o)})
    return texts + [f" {name}" for name in names] * geography.NAME_REPEATS


def _text(passage: Passage, name: Callable[[str], str]) -> str:
    return passage.render(name)[1]


def _documents(shown: Iterable[Passage], name: Callable[[str], str], rng: random.Random) -> str:
    """Passages as a piece of a long context."""
    return "\n\n".join(f"Document {rng.randrange(1, MOST_DOCUMENTS)}:\n{_text(p, name)}" for p in shown)


def _relation(fact: tuple[str, str, str]) -> str:
    """Which relation, of those that are asked, a sentence's template is of; "" for others."""
    return next((r for r in ASKED if fact[0] == TOLD[r]), "")


def _fact(passage: Passage, question: Question) -> tuple[str, str, str] | None:
    """The sentence of a passage that answers the question."""
    relation, subject, _ = question.hops[0]
    return next((fact for fact in passage.sentences if _relation(fact) == relation and fact[1] == subject), None)


def _said(fact: tuple[str, str, str], name: Callable[[str], str]) -> str:
    """A sentence without article and full stop: a chunk that has so much of it says it."""
    template, subject, value = fact
    return template.format(s=name(subject), o=name(value)).removeprefix("The ").removesuffix(".")


def _sentence_of(shown: Iterable[Passage], question: Question, name: Callable[[str], str]) -> str:
    fact = next(found for passage in shown if (found := _fact(passage, question)) is not None)
    return _said(fact, name)


def _window(text: str, words: int, kept: str, rng: random.Random) -> str:
    """About `words` words and signs in a row, cut wherever they are cut, with all of `kept` inside."""
    # Not before a sign: behind the colon that a chunk follows in a prompt, the two would be one word.
    spans = [found.span() for found in _WORD.finditer(text)]
    last = max(0, len(spans) - words)
    at = text.index(kept)
    inside = [i for i, (start, end) in enumerate(spans) if end > at and start < at + len(kept)] or [last]
    words = max(words, len(inside)) if kept else words
    first = rng.randint(max(0, inside[-1] + 1 - words), min(last, inside[0])) if kept else rng.randint(0, last)
    end = min(first + words, len(spans))
    while first and not (text[spans[first][0]].isalnum() or text[spans[first][0]].isspace()):
        first -= 1
    return text[spans[first][0] : spans[end - 1][1]]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the templates")
    parser.add_argument(
        "--forget_frac", type=float, default=0.6, help="demonstrations that lose a memory they should keep"
    )
    parser.add_argument("--chunk_tokens", type=int, default=64, help="about so long are the chunks of demonstrations")
    parser.add_argument("--curriculum", type=int, default=16_000, help="demonstrations over a few facts")
    parser.add_argument("--full", type=int, default=20_000, help="demonstrations over whole chunks")
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.error(f"{args.out} exists; remove it or choose another --out")
    write(args.out, args.seed, args.forget_frac, args.chunk_tokens, args.curriculum, args.full)
    print(f"wrote {args.out}; train with --config.env.prompt=compact --config.data.source={args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
