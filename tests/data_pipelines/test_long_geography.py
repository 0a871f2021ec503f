"""Contexts over the world's facts: they answer, held-out facts stay held out, demonstrations do what they say."""

import json
import re

import pytest

from data_pipelines import long_demonstrations, long_geography
from data_pipelines import world as worlds
from jaxagent.data import sources
from jaxagent.envs.memagent import documents

FORGET, LOOKUPS = 0.5, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("long") / "data"
    long_geography.write(out, 0, FORGET, 64, LOOKUPS, 900)
    return out


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def full(folder):
    """The demonstrations behind the curriculum."""
    return lines(folder / "full.jsonl")[LOOKUPS:]


def test_contexts_answer_their_questions_and_splits_share_nothing(folder):
    found = documents.Documents(folder / documents.FILE)
    seen = {}
    for split in ("train", "heldout"):
        tasks = sources.load_tasks(folder, split)
        assert {task.kind for task in tasks} == {"one_hop/capital", "one_hop/currency", "one_hop/calling_code"}
        for task in tasks:
            documents.check(task, found, 0, 300)
            texts = documents.texts_of_context(task, found, 0, 300, lambda text: len(text.split()))
            assert any(task.answers[0] in text for text in texts)
        first, last = tasks[0].metadata["pool"]
        seen[split] = set(found.texts(range(first, last)))
    assert not seen["train"] & seen["heldout"]
    shown = " ".join([*seen["train"], (folder / "full.jsonl").read_text()])
    facts = {text.split(". ")[0] for text in seen["heldout"]}
    assert len(facts) > 60 and not [fact for fact in facts if fact in shown]


def test_a_held_out_question_has_several_contexts(folder):
    heldout = sources.load_tasks(folder, "heldout")
    tasks = [task for task in heldout if task.answers == heldout[0].answers and task.kind == heldout[0].kind]
    assert len(tasks) == long_geography.CONTEXTS
    found = documents.Documents(folder / documents.FILE)
    assert len({tuple(documents.texts_of_context(task, found, 8, 0, len)) for task in tasks}) == len(tasks)


def test_training_questions_are_asked_of_worlds_of_other_names(folder):
    by_pool = {}
    for task in sources.load_tasks(folder, "train"):
        by_pool.setdefault(tuple(task.metadata["pool"]), []).append(task)
    assert len(by_pool) == long_geography.WORLDS
    assert len({len(tasks) for tasks in by_pool.values()}) == 1
    found = documents.Documents(folder / documents.FILE)
    first, *others = (set(found.texts(range(*pool))) for pool in by_pool)
    assert all(len(first & other) < 0.02 * len(first) for other in others)
    answers = {tuple(sorted(task.answers for task in tasks)) for tasks in by_pool.values()}
    assert len(answers) == long_geography.WORLDS


def read(row):
    """Question, chunk, memory and reply of a demonstration that reads a chunk."""
    question, rest = row["prompt"].removeprefix("Question: ").split("\nText:")
    chunk, memory = rest.removesuffix("\nNew memory:").split("\nMemory:")
    return question, chunk, memory.strip(), row["turns"][0]["action"].strip()


def told(question, chunk):
    """What is asked, "capital of Ghana", and every fact of that relation that the chunk says: {"Ghana": "Accra"}."""
    relation, subject = next(
        (relation, found[1])
        for relation in long_demonstrations.ASKED
        for template in worlds.RELATIONS[relation][0]
        if (found := re.fullmatch(re.escape(template).replace(r"\{s\}", "(.+)"), question))
    )
    begin, _ = long_demonstrations.TOLD[relation].removeprefix("The ").split("{o}")
    said = re.findall(rf"{begin}(\S+) ([^\s.]+)", chunk)
    return f"{begin}of ", subject, {country: value for value, country in said}


def test_demonstrations_say_what_the_chunk_says_or_keep_the_memory_or_lose_it(folder):
    said, kept, lost, rivals = 0, 0, 0, 0
    for row in full(folder):
        if "\nText:" not in row["prompt"]:
            continue
        question, chunk, memory, new = read(row)
        begin, subject, facts = told(question, chunk)
        empty = f"{begin}{subject} nothing"
        if subject in facts:
            assert new == f"{begin}{subject} {facts[subject]}" != memory, row
            said += 1
            rivals += len(facts) > 1
        elif memory in ("nothing", empty):
            assert new == empty, row
        else:
            assert memory.startswith(f"{begin}{subject} ") and new in (memory, "nothing"), row
            kept += new == memory
            lost += new == "nothing"
    assert said > 200 and rivals > 0.4 * said
    assert abs(lost / (lost + kept) - FORGET) < 0.1


def test_the_curriculum_asks_for_more_and_more_facts(folder):
    """And a fact's place says nothing: a policy that finds the second of two facts by it does not look for a name."""
    counts, places, beside = [], {1: set(), 2: set(), 4: set()}, 0
    for row in lines(folder / "full.jsonl")[:LOOKUPS]:
        asked = row["kind"].split("/")[1].split("_")[-1]
        found = list(re.finditer(r"(capital|currency|code) (\S+) ([^\s.]+)\.", row["prompt"]))
        facts = {fact[3]: fact for fact in found if fact[1] == asked}
        others = [fact for fact in found if fact[1] != asked]
        assert {fact[3] for fact in others} <= set(facts), row
        shown = [row["prompt"], *(turn["observation"] for turn in row["turns"])]
        assert len(row["turns"]) == len(facts) and not shown.pop()
        for before, turn in zip(shown, row["turns"], strict=True):
            assert turn["action"].strip() == facts[before.split()[-1]][2], row
        places[len(facts)].add(len(row["prompt"][: [*facts.values()][-1].start()].split()))
        counts.append(len(facts))
        beside += bool(others)
    assert counts == sorted(counts) and {1, 2, 4} == set(counts)
    assert len(places[2]) > 5 and len(places[4]) > 5 and LOOKUPS / 4 < beside < LOOKUPS


def test_further_questions_are_about_the_same_chunk(folder):
    further = [turn for row in full(folder) for turn in row["turns"][1:]]
    assert len(further) > 1000
    for row in full(folder):
        for before, turn in zip(row["turns"], row["turns"][1:], strict=False):
            assert before["observation"].startswith("\nQuestion: ") and before["observation"].endswith("New memory:")
            memory = before["observation"].split("Memory:")[1].split("\n")[0]
            says = turn["action"].split()[-1] in row["prompt"]
            assert says or turn["action"] == memory or turn["action"].endswith(" nothing"), row


def test_many_further_questions_are_nearly_answered_and_memories_are_of_their_kind(folder):
    """The relation of another country, or another relation of the country: neither is to be taken."""
    other_country = other_relation = told_wrong = 0
    for row in full(folder):
        chunk = row["prompt"].split("\nText:")[-1].split("\nMemory:")[0]
        for before, turn in zip(row["turns"], row["turns"][1:], strict=False):
            question, rest = before["observation"].removeprefix("\nQuestion: ").split("\nMemory: ")
            memory, new = rest.split("\n")[0], turn["action"].strip()
            begin, subject, facts = told(question, chunk)
            for value in (memory.split()[-1], new.split()[-1]):
                assert value == "nothing" or value.isdigit() == begin.startswith("calling"), row
            if subject in facts:
                assert new == f"{begin}{subject} {facts[subject]}", row
                told_wrong += memory.split()[-1] not in ("nothing", facts[subject])
            else:
                has_value = memory.split()[-1] != "nothing"
                assert new in ((memory, "nothing") if has_value else (f"{begin}{subject} nothing",)), row
                other_country += bool(facts)
                other_relation += f" {subject}." in chunk
    assert other_country > 500 and other_relation > 300 and told_wrong > 300


def test_answers_are_the_value_of_the_memory(folder):
    finals = [row for row in full(folder) if "\nText:" not in row["prompt"]]
    assert 60 < len(finals) < 160
    for row in finals:
        memory = row["prompt"].split("\nMemory:")[1].removesuffix("\nAnswer:")
        value = memory.split()[-1]
        assert row["turns"] == [{"action": f"\\boxed{{ {value}}}", "observation": ""}]


def test_the_same_seed_writes_the_same(folder, tmp_path):
    long_geography.write(tmp_path / "again", 0, FORGET, 64, LOOKUPS, 900)
    for name in ("full.jsonl", "texts.jsonl", documents.FILE):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert (
        sources.load_tasks(tmp_path / "again", "train").fingerprint == sources.load_tasks(folder, "train").fingerprint
    )
