"""A closed world of facts for the laptop task: entities, passages, questions and warm-start demonstrations.

`geography.build` fills a `World`; everything here is independent of where the facts come from. Countries are split into
train and held-out, and a city always goes with its country, so no held-out question can be answered from anything a
training sequence said: only by searching and copying.

Demonstrations swap names: every sequence draws a fresh, consistent renaming of all its entities (question, query,
passages and answer together), so what can be learned is copying, not recall. The pool of names holds held-out
names as strings, never a fact about them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

from jaxagent.envs.search.research import SearchProtocol

# Relation -> (question templates, sentence templates, search query). {s} = subject, {o} = object.
RELATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "country": (
        ("In which country is {s}?", "Which country is {s} in?"),
        ("{s} is a city in {o}.", "{s} is located in {o}.", "The city of {s} lies in {o}."),
        "country of {s}",
    ),
    "capital": (
        ("What is the capital of {s}?", "Which city is the capital of {s}?"),
        ("The capital of {s} is {o}.", "{s} has its capital in {o}."),
        "capital of {s}",
    ),
    "currency": (
        ("What is the currency of {s}?", "Which currency is used in {s}?"),
        ("The currency of {s} is the {o}.", "People in {s} pay in the currency {o}."),
        "currency of {s}",
    ),
    "calling_code": (
        ("What is the calling code of {s}?", "Which calling code belongs to {s}?"),
        ("The calling code of {s} is {o}.", "Numbers in {s} have the calling code {o}."),
        "calling code of {s}",
    ),
    "domain": (
        ("What is the internet domain of {s}?", "Which internet domain belongs to {s}?"),
        ("The internet domain of {s} is {o}.", "Sites from {s} use the internet domain {o}."),
        "internet domain of {s}",
    ),
}
COUNTRY_RELATIONS = ("capital", "currency", "calling_code", "domain")
PASSAGE_PAIRS = (("capital", "currency"), ("calling_code", "domain"))  # the two facts of each country passage
TWO_HOP_SUBJECT = "the country where {s} is"


@dataclasses.dataclass(frozen=True)
class Country:
    """One country and its facts. `currency` is "" where several countries share the name: it would be guessable."""

    name: str
    capital: str
    currency: str
    calling_code: str
    domain: str
    cities: tuple[str, ...]
    heldout: bool


@dataclasses.dataclass(frozen=True)
class World:
    """All countries, and the seed of every choice of template."""

    countries: tuple[Country, ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class Passage:
    """A passage as references to entities, so that a renaming can be applied before it becomes text."""

    title: str
    sentences: tuple[tuple[str, str, str], ...]  # (template, subject, object)

    def render(self, name: Callable[[str], str]) -> tuple[str, str]:
        """Returns (title, text) with every entity renamed by `name`."""
        return name(self.title), " ".join(t.format(s=name(s), o=name(o)) for t, s, o in self.sentences)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with the hops that answer it: each hop is (relation, subject, object)."""

    template: str
    hops: tuple[tuple[str, str, str], ...]
    heldout: bool

    @property
    def kind(self) -> str:
        """ "one_hop/capital", "two_hop/capital", ..."""
        return f"{'one_hop' if len(self.hops) == 1 else 'two_hop'}/{self.hops[-1][0]}"

    def render(self, name: Callable[[str], str]) -> str:
        """The question's text with entities renamed."""
        subject = name(self.hops[0][1])
        return self.template.format(s=subject if len(self.hops) == 1 else TWO_HOP_SUBJECT.format(s=subject))

    @property
    def answer(self) -> str:
        """The gold answer, under its real name."""
        return self.hops[-1][2]


def facts(country: Country) -> dict[str, str]:
    """Relation -> object of a country, without the facts that are left out."""
    every = {
        "capital": country.capital,
        "currency": country.currency,
        "calling_code": country.calling_code,
        "domain": country.domain,
    }
    return {relation: value for relation, value in every.items() if value}


def passages(world: World) -> list[Passage]:
    """Two facts each: a city with its country and a sister city (a true distractor); a country's facts in pairs."""
    rng = random.Random(f"passages/{world.seed}")
    out = []
    for country in world.countries:
        known = facts(country)
        for pair in PASSAGE_PAIRS:
            sentences = tuple((rng.choice(RELATIONS[r][1]), country.name, known[r]) for r in pair if r in known)
            out.append(Passage(country.name, sentences[:: rng.choice((1, -1))]))
        for i, city in enumerate(country.cities):
            sentences = [(rng.choice(RELATIONS["country"][1]), city, country.name)]
            if len(country.cities) > 1:
                sister = country.cities[(i + 1) % len(country.cities)]
                sentences.append(("Another city there is {o}.", country.name, sister))
            out.append(Passage(city, tuple(sentences)))
    return out


def questions(world: World) -> list[Question]:
    """Every one-hop and two-hop question of the world."""
    rng = random.Random(f"questions/{world.seed}")
    out = []
    for country in world.countries:
        known = facts(country)
        for relation, value in known.items():
            out.append(
                Question(rng.choice(RELATIONS[relation][0]), ((relation, country.name, value),), country.heldout)
            )
        for city in country.cities:
            first = ("country", city, country.name)
            out.append(Question(rng.choice(RELATIONS["country"][0]), (first,), country.heldout))
            for relation, value in known.items():
                hops = (first, (relation, country.name, value))
                out.append(Question(rng.choice(RELATIONS[relation][0]), hops, country.heldout))
    return out


def corpus_rows(world: World) -> Iterator[dict[str, str]]:
    """Rows of the retriever's corpus: {"id", "contents": '"Title"\\ntext'}."""
    for i, passage in enumerate(passages(world)):
        title, text = passage.render(lambda s: s)
        yield {"id": str(i), "contents": f"{title}\n{text}"}


def evened(pool: Sequence[Question], seed: int) -> list[Question]:
    """`pool` with as many two-hop as one-hop questions in each split: a policy that is asked two-hop questions most of
    the time learns to search twice whatever it is asked."""
    out = []
    for heldout in (False, True):
        split = [q for q in pool if q.heldout == heldout]
        one_hop, two_hop = ([q for q in split if len(q.hops) == hops] for hops in (1, 2))
        random.Random(f"evened/{seed}/{heldout}").shuffle(two_hop)
        out += one_hop + two_hop[: len(one_hop)]
    return out


def task_row(question: Question, index: int) -> dict[str, object]:
    """A task as jaxagent/data reads it."""
    split = "heldout" if question.heldout else "train"
    return {
        "id": f"{split}/{index}",
        "prompt": question.render(lambda s: s),
        "answers": [question.answer],
        "kind": question.kind,
        "metadata": "{}",
    }


def renaming(names: Sequence[str], codes: Sequence[str], used: Sequence[str], rng: random.Random) -> dict[str, str]:
    """A fresh one-to-one renaming of `used` entities: names to names, codes and domains to their own kind."""
    out: dict[str, str] = {}
    taken: set[str] = set()
    domains = [c for c in codes if c.startswith(".")]
    numbers = [c for c in codes if not c.startswith(".")]
    for entity in used:
        pool = domains if entity.startswith(".") else numbers if entity.isdigit() else names
        while (new := rng.choice(pool)) in taken:
            pass
        taken.add(new)
        out[entity] = new
    return out


class Demonstrator:
    """Writes warm-start demonstrations of the world, deterministic in (seed, index).

    `search(query) -> list of passage ids` is the retriever that the environment will use, and `protocol` the
    environment's own, so that demonstrations look exactly like episodes.
    """

    def __init__(
        self,
        world: World,
        search: Callable[[str], Sequence[int]],
        protocol: SearchProtocol,
        early_answer_frac: float,
    ):
        self._passages = passages(world)
        self._search = search
        self._protocol = protocol
        self._early = early_answer_frac
        self._cache: dict[str, Sequence[int]] = {}
        self._by_kind: dict[str, list[Question]] = {}
        for question in questions(world):
            if not question.heldout:
                self._by_kind.setdefault(question.kind, []).append(question)
        entities = {e for p in self._passages for _, s, o in p.sentences for e in (s, o)}
        entities |= {p.title for p in self._passages}
        self._codes = sorted(e for e in entities if e.startswith(".") or e.isdigit())
        self._names = sorted(entities - set(self._codes))
        self._one_hop = sorted(k for k in self._by_kind if k.startswith("one_hop"))
        self._two_hop = sorted(k for k in self._by_kind if k.startswith("two_hop"))

    def full(self, seed: int, index: int) -> dict[str, object]:
        """A whole episode; kinds drawn evenly, half of them two-hop, of which a fraction answers a search too early."""
        rng = random.Random(f"full/{seed}/{index}")
        kinds = self._one_hop if index % 2 == 0 or not self._two_hop else self._two_hop
        question = rng.choice(self._by_kind[kinds[index // 2 % len(kinds)]])
        hops = question.hops
        if len(hops) == 2 and rng.random() < self._early:
            hops = hops[:1]
        documents = [self._retrieve(relation, subject) for relation, subject, _ in hops]
        return self._write(f"full/{seed}/{index}", question, hops, documents, rng)

    def curriculum(self, seed: int, index: int) -> dict[str, object]:
        """One hop, one passage: the short sequences on which copying appears first."""
        rng = random.Random(f"curriculum/{seed}/{index}")
        question = rng.choice(self._by_kind[self._one_hop[index % len(self._one_hop)]])
        _, subject, value = question.hops[0]
        document = next(p for p in self._passages if any(s == subject and o == value for _, s, o in p.sentences))
        return self._write(f"curriculum/{seed}/{index}", question, question.hops, [[document]], rng)

    def _retrieve(self, relation: str, subject: str) -> list[Passage]:
        query = RELATIONS[relation][2].format(s=subject)
        if query not in self._cache:
            self._cache[query] = self._search(query)
        return [self._passages[i] for i in self._cache[query]]

    def _write(self, id, question, hops, documents, rng) -> dict[str, object]:
        used = dict.fromkeys([e for _, s, o in hops for e in (s, o)])
        for passage in (p for docs in documents for p in docs):
            used |= dict.fromkeys([passage.title, *(e for _, s, o in passage.sentences for e in (s, o))])
        name = renaming(self._names, self._codes, list(used), rng).__getitem__
        turns = []
        for (relation, subject, _), docs in zip(hops, documents, strict=True):
            action = self._protocol.write_search(RELATIONS[relation][2].format(s=name(subject)))
            turns.append({"action": action, "observation": self._protocol.render([p.render(name) for p in docs])})
        turns.append({"action": self._protocol.write_answer(name(hops[-1][2])), "observation": ""})
        return {"id": id, "kind": question.kind, "prompt": question.render(name), "turns": turns}
