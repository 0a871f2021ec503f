"""Demonstrations of reading a long document chunk by chunk, for MemAgent's warm start: how one row is made.

Which files they go into, and what they are for, is long_geography.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence

from jaxagent.data_pipelines import world as worlds
from jaxagent.data_pipelines.world import Passage, Question
from jaxagent.envs.memagent import prompts

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
_LOOKUPS = ((0.06, 1), (0.7, 2), (1.0, 4))  # how many facts a text has, up to which part of the curriculum
_SMALL_FRAC = 0.3  # of the demonstrations behind the curriculum, from the first: a few documents instead of a chunk
_RIVAL_FRAC = 0.5  # of the demonstrations, those all of whose passages say what is asked, of different countries
_MORE = 2  # questions about the same chunk that it answers
_AGAIN = prompts.STYLES["compact"].update.replace("Text:{chunk}\n", "")  # another question about the same chunk
MOST_DOCUMENTS = 128  # whose numbers demonstrations show
_WORD = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+(?!\S)|\s+")  # as a tokenizer that is trained here cuts text
# Of demonstrations, those with no memory, one without the value, one with a wrong value, and one with the right value.
_MEMORIES = (0.12, 0.38, 0.0, 0.5)
_TOLD_MEMORIES = (0.15, 0.45, 0.4, 0.0)  # the same, where the chunk says what is asked
_FINAL_FRAC = 0.12  # demonstrations that answer
_TOLD_FRAC = 0.35  # of the others, those whose chunk says what is asked


class Demonstrator:
    """Writes warm-start demonstrations, deterministic in (seed, index).

    Args:
      asked: the training questions.
      passages: of the training countries.
      names, codes: of all entities, whichever are swapped in.
      forget_frac, chunk_tokens: see `long_geography.write`.
    """

    def __init__(
        self,
        asked: Iterable[Question],
        passages: Sequence[Passage],
        names: Sequence[str],
        codes: Sequence[str],
        forget_frac: float,
        chunk_tokens: int,
    ):
        self._passages, self._forget, self._chunk = passages, forget_frac, chunk_tokens
        self._names, self._codes = names, codes
        self._calling = [code for code in codes if code.isdigit()]
        self._domains = [code for code in codes if not code.isdigit()]
        self._by_kind: dict[str, list[Question]] = {}
        for question in asked:
            self._by_kind.setdefault(question.kind, []).append(question)
        self._kinds = sorted(self._by_kind)
        self._facts = {r: [f for p in passages for f in p.sentences if _relation(f) == r] for r in ASKED}
        self._saying = {r: [p for p in passages if any(_relation(f) == r for f in p.sentences)] for r in ASKED}

    def renaming(self, passages: Sequence[Passage], rng: random.Random) -> Callable[[str], str]:
        """Another name for every entity of all passages."""
        used = dict.fromkeys(e for passage in passages for _, s, o in passage.sentences for e in (passage.title, s, o))
        return worlds.renaming(self._names, self._codes, list(used), rng).__getitem__

    def lookups(self, seed: int, index: int, rows: int) -> dict[str, object]:
        """Row `index` of `rows` of the curriculum: facts, and all of them again; values alone are demonstrated.

        Between them is what is not asked for: where every fact has its place, some seeds learn the places of two facts
        instead of looking for a name, and find neither more facts nor those of a chunk well.
        """
        rng = random.Random(f"curriculum/{seed}/{index}")
        question = self._question(index, rng)
        count = next(number for end, number in _LOOKUPS if index < end * rows)
        # Of one kind: a policy that tells a name from a number would be content with that.
        facts = rng.sample(self._facts[question.hops[0][0]], count)
        name, free = self._renaming([Passage(facts[0][1], tuple(facts))], question, rng)
        said = [template.format(s=name(s), o=name(o)) for template, s, o in facts]
        titles = [name(subject) for _, subject, _ in facts]
        others = [r for r in ASKED if r != question.hops[0][0]] if count == _LOOKUPS[-1][1] else []
        between = [self._between(others, titles, free, rng) for _ in range(count + 1)]
        text = "".join(before + sentence for before, sentence in zip(between, [*said, ""], strict=True)).strip()
        asked = rng.sample(facts, count)
        begins = [f"\n {KEPT[_relation(fact)].format(s=name(fact[1]), o='').rstrip()}" for fact in asked]
        turns = [
            {"action": f" {name(fact[2])}", "observation": following}
            for fact, following in zip(asked, [*begins[1:], ""], strict=True)
        ]
        return {"kind": question.kind, "prompt": f"Text: {text}{begins[0]}", "turns": turns}

    def _between(
        self, others: Sequence[str], titles: Sequence[str], free: Callable[[], str], rng: random.Random
    ) -> str:
        """What stands before a fact, or behind the last: a space, a document's head, or what nothing is asked of.

        That is a country's domain or, where there are `others`, one of these relations of one of the `titles`.
        """
        what = rng.choice(["space", "head", "domain", "relation"] if others else ["space", "head", "domain"])
        if what == "space":
            return " "
        if what == "head":
            return f"\n\nDocument {rng.randrange(1, MOST_DOCUMENTS)}:\n"
        if what == "domain":
            return f" {TOLD['domain'].format(s=free(), o=rng.choice(self._domains))} "
        relation = rng.choice(others)
        value = rng.choice(self._calling) if relation == "calling_code" else free()
        return f" {TOLD[relation].format(s=rng.choice(titles), o=value)} "

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
        if memory in (NOTHING, empty):
            return f" {memory}", f" {empty}"
        # A memory is lost as a whole: were it the value alone, what stands in its place would be chance, and what RL
        # does against losing could change how values are read.
        return f" {memory}", f" {NOTHING if rng.random() < self._forget else memory}"

    def _some(self, question: Question, told: bool, count: int, rng: random.Random) -> list[Passage]:
        """Different passages in random order: with the one that answers, or without it; often all on what is asked."""
        own = [passage for passage in self._passages if fact_of(passage, question) is not None]
        among = self._saying[question.hops[0][0]] if rng.random() < _RIVAL_FRAC else self._passages
        others = [passage for passage in rng.sample(among, count + 1) if passage not in own]
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


def text_of(passage: Passage, name: Callable[[str], str]) -> str:
    """A passage's text, with swapped names."""
    return passage.render(name)[1]


def _documents(shown: Iterable[Passage], name: Callable[[str], str], rng: random.Random) -> str:
    """Passages as a piece of a long context."""
    return "\n\n".join(f"Document {rng.randrange(1, MOST_DOCUMENTS)}:\n{text_of(p, name)}" for p in shown)


def _relation(fact: tuple[str, str, str]) -> str:
    """Which relation, of those that are asked, a sentence's template is of; "" for others."""
    return next((r for r in ASKED if fact[0] == TOLD[r]), "")


def fact_of(passage: Passage, question: Question) -> tuple[str, str, str] | None:
    """The sentence of a passage that answers the question."""
    relation, subject, _ = question.hops[0]
    return next((fact for fact in passage.sentences if _relation(fact) == relation and fact[1] == subject), None)


def _said(fact: tuple[str, str, str], name: Callable[[str], str]) -> str:
    """A sentence without article and full stop: a chunk that has so much of it says it."""
    template, subject, value = fact
    return template.format(s=name(subject), o=name(value)).removeprefix("The ").removesuffix(".")


def _sentence_of(shown: Iterable[Passage], question: Question, name: Callable[[str], str]) -> str:
    fact = next(found for passage in shown if (found := fact_of(passage, question)) is not None)
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
