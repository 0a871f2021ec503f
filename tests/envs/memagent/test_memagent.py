"""MemAgent by hand: chunks, published prompts, memory as the ids that were sampled, masks, documents of a context."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.data.sources import load_tasks
from jaxagent.envs.base import Opening
from jaxagent.envs.cast import RoleReply, Tokens
from jaxagent.envs.memagent import documents, prompts
from jaxagent.envs.memagent.environment import MemAgent, centre_truncated
from jaxagent.types import StopReason, Task

SAMPLED = 1_000_000  # added to a letter's code: the same letter by another id, as BPE has many ids for one text


class LetterCast:
    """A cast whose tokens are letters. The policy says what `replies` has, in ids that no encoder would give."""

    names = ()

    def __init__(self, replies, cut=()):
        self.replies, self.cut = list(replies), cut
        self.shown: list[list[int]] = []
        self.texts: list[str] = []
        self.trained: list[bool] = []

    def tokens(self, text):
        return Tokens(tuple(map(ord, text)), text)

    def decoded(self, ids):
        return Tokens(tuple(ids), "".join(chr(i % SAMPLED) for i in ids))

    def talk(self, role, trained=True):
        assert role == "policy"
        self.trained.append(trained)
        return self

    async def say(self, *messages, stop_strings=(), max_tokens=None):
        (message,) = messages
        assert message.role == "user" and not stop_strings
        ids = [i for piece in message.pieces for i in (map(ord, piece) if isinstance(piece, str) else piece.ids)]
        self.shown.append(ids)
        self.texts.append(message.content)
        text = self.replies[len(self.shown) - 1]
        finish = "length" if len(self.shown) - 1 in self.cut else "eos"
        reply = Tokens(tuple(SAMPLED + ord(c) for c in text), text)
        return RoleReply(text, finish, reply, len(ids), len(text), 0.0, None)


def play(env, task, cast, dataset=None, tasks=()):
    async def whole():
        with env.open(Opening(dataset, tasks, lambda *_: None, lambda _: None)) as attempt_at:
            attempt = attempt_at(task, cast)
            ended = await attempt.play()
            return attempt, ended, await attempt.verify(ended)

    return asyncio.run(whole())


def small(**changes):
    settings = dict(prompt="compact", max_turns=5, chunk_tokens=4, turn_tokens=5, context_tokens=100) | changes
    return MemAgent(**settings)


def task_with(context, answers=("ab",)):
    return Task("t/0", "who?", answers, metadata={"context": context})


def test_centre_truncation_by_hand():
    assert centre_truncated(np.arange(6), 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert centre_truncated(np.arange(10), 6).tolist() == [0, 1, 2, 7, 8, 9]
    assert centre_truncated(np.arange(10), 5).tolist() == [0, 1, 8, 9]  # as published: one id less


def test_the_published_texts():
    put = {"prompt": "Q?", "memory": "M", "chunk": "C"}
    assert prompts.text(prompts.STYLES["memagent"].update, **put) == (
        "You are presented with a problem, a section of an article that may contain the answer to the problem, and a "
        "previous memory. Please read the provided section carefully and update the memory with the new information "
        "that helps to answer the problem. Be sure to retain all relevant details from the previous memory while "
        "adding any new, useful information.\n\n<problem> \nQ?\n</problem>\n\n<memory>\nM\n</memory>\n\n<section>\nC\n"
        "</section>\n\nUpdated memory:\n"
    )
    assert prompts.text(prompts.STYLES["memagent"].final, **put) == (
        "You are presented with a problem and a previous memory. Please answer the problem based on the previous "
        "memory and put the answer in \\boxed{}.\n\n<problem> \nQ?\n</problem>\n\n<memory>\nM\n</memory>\n\n"
        "Your answer:\n"
    )
    assert prompts.STYLES["memagent"].no_memory == "No previous memory"


@pytest.mark.parametrize("style", prompts.STYLES)
def test_spliced_and_plain_prompts_say_the_same(style):
    put = {"prompt": "{chunk}", "memory": "{prompt} M", "chunk": "C {memory}"}  # braces of a text are no places
    for template in (prompts.STYLES[style].update, prompts.STYLES[style].final):
        spliced = prompts.message(template, **{name: Tokens((1,), text) for name, text in put.items()})
        assert spliced.content == prompts.text(template, **put)
        assert all(isinstance(piece, Tokens) for piece in spliced.pieces if piece in put.values())


def test_an_episode_by_hand():
    cast = LetterCast([" m1", " m2", " m3", "\\boxed{ab}"])
    attempt, ended, verdict = play(small(), task_with("abcdefghi"), cast)  # " abcdefghi" is 4 + 4 + 2 letters
    assert ended is StopReason.ANSWER
    assert cast.texts == [
        "Question: who?\nText: abc\nMemory: nothing\nNew memory:",
        "Question: who?\nText:defg\nMemory: m1\nNew memory:",
        "Question: who?\nText:hi\nMemory: m2\nNew memory:",
        "Question: who?\nMemory: m3\nAnswer:",
    ]
    assert (verdict.reward, dict(verdict.components)) == (1.0, {"boxed": 1.0, "sub_em": 1.0})
    assert attempt.counters == {
        "chunks": 3.0, "document_tokens": 10.0, "dropped_tokens": 0.0, "replies_cut": 0.0, "memory_tokens": 3.0,
    }  # fmt: skip


def test_a_memory_goes_on_as_the_ids_that_were_sampled():
    cast = LetterCast([" xy", " z", "\\boxed{b}"])
    play(small(), task_with("abcdef"), cast)
    first, second, final = cast.shown
    assert not any(i >= SAMPLED for i in first)
    assert [i for i in second if i >= SAMPLED] == [SAMPLED + ord(c) for c in " xy"]
    assert [i for i in final if i >= SAMPLED] == [SAMPLED + ord(c) for c in " z"]


def test_the_masks_of_both_published_variants():
    for train_answer in (True, False):
        cast = LetterCast([" m1", " m2", " m3", "\\boxed{c}"])
        _, _, verdict = play(small(train_answer=train_answer), task_with("abcdefghi"), cast)
        assert cast.trained == [True, True, True, train_answer]
        assert verdict.reward == 0.0


def test_the_middle_of_a_document_that_is_too_long_is_left_out_or_refused():
    cast = LetterCast([" m"] * 4 + ["\\boxed{c}"])
    attempt, _, _ = play(small(), task_with("0123456789abcdefghi"), cast)  # 20 letters, 4 chunks of 4
    assert [text.split("Text:")[1].split("\n")[0] for text in cast.texts[:4]] == [" 012", "3456", "bcde", "fghi"]
    assert (attempt.counters["document_tokens"], attempt.counters["dropped_tokens"]) == (20, 4)
    with pytest.raises(
        ValueError, match=r"the document has 20 tokens, and 4 chunks of 4 hold 16: raise env\.max_turns"
    ):
        play(small(overlong="refuse"), task_with("0123456789abcdefghi"), LetterCast([]))


def test_replies_that_run_out_of_tokens_are_counted_and_kept():
    cast = LetterCast([" abcd", " m", "\\box"], cut=(0, 2))
    attempt, ended, verdict = play(small(), task_with("abcdef"), cast)
    assert "Memory: abcd\n" in cast.texts[1]
    assert (ended, verdict.reward, attempt.counters["replies_cut"]) == (StopReason.ANSWER, 0.0, 2.0)


def test_a_prompt_without_room_for_a_reply_is_no_empty_memory():
    with pytest.raises(ValueError, match=r"leaves no room for a reply in env.context_tokens=100"):
        play(small(), task_with("abcdef"), LetterCast([""], cut=(0,)))


def test_a_question_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="the question has 5 tokens"):
        play(small(question_tokens=3), task_with("abc"), LetterCast([]))


def test_reward_and_metric_are_choices():
    task = task_with("abc", answers=("Chief of Protocol",))
    _, _, verdict = play(small(reward="sub_em", metric="sub_em"), task, LetterCast([" m", "\\boxed{Protocol}"]))
    assert (verdict.reward, verdict.components["boxed"], verdict.components["sub_em"]) == (1.0, 0.0, 1.0)
    assert small(metric="sub_em").score == "sub_em" and small().score == "boxed"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_turns": 1}, "at least one chunk and the answer"),
        ({"context_tokens": 14}, "must hold a chunk"),
        ({"num_docs": 1, "length_tokens": 1}, "exclude each other"),
    ],
)
def test_settings_that_cannot_work(changes, told):
    with pytest.raises(ConfigError, match=told):
        small(**changes)


@pytest.fixture
def folder(tmp_path):
    texts = [f"text {i}" for i in range(40)]
    (tmp_path / documents.FILE).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def numbered(**metadata):
    return Task("t/1", "who?", ("a",), metadata={"documents": [3, 17], "pool": [0, 30], "num_docs": 5} | metadata)


def count_letters(text):
    return len(text)


def contexts(folder, task, num_docs=0, length_tokens=0):
    found = documents.Documents(folder / documents.FILE)
    documents.check(task, found, num_docs, length_tokens)
    return documents.texts_of_context(task, found, num_docs, length_tokens, count_letters)


def test_a_context_holds_the_tasks_own_documents_and_others_of_its_pool(folder):
    texts = contexts(folder, numbered())
    assert len(set(texts)) == 5 and {"text 3", "text 17"} < set(texts)
    assert all(int(text.split()[1]) < 30 for text in texts)
    assert contexts(folder, numbered()) == texts  # the same for every attempt
    assert documents.numbered(["a", "b"]) == "Document 1:\na\n\nDocument 2:\nb"


def test_more_documents_add_to_fewer_and_the_order_is_not_that_of_the_file(folder):
    sets = [set(contexts(folder, numbered(), num_docs=n)) for n in (2, 8, 20, 30)]
    assert [len(s) for s in sets] == [2, 8, 20, 30]
    assert sets[0] < sets[1] < sets[2] < sets[3]
    places = {contexts(folder, numbered(), num_docs=8).index("text 3") for _ in range(1)}
    other = Task("t/2", "who?", ("a",), metadata=numbered().metadata)
    assert set(contexts(folder, other, num_docs=8)) != sets[1]
    assert places | {contexts(folder, Task(f"t/{i}", "q", ("a",), metadata=numbered().metadata), 8).index("text 3")
                     for i in range(40)} == set(range(8))  # fmt: skip


def test_a_context_of_so_many_tokens(folder):
    texts = contexts(folder, numbered(), length_tokens=120)
    parts = [len(f"\n\nDocument {i}:\n{text}") for i, text in enumerate(texts, 1)]
    assert sum(parts) <= 120 < sum(parts) + max(parts) + 2
    assert {"text 3", "text 17"} < set(texts)
    assert contexts(folder, numbered(), length_tokens=1) in (["text 3", "text 17"], ["text 17", "text 3"])


def test_tasks_whose_documents_end_before_the_length(folder):
    found = documents.Documents(folder / documents.FILE)
    tasks = [numbered(), numbered(pool=[0, 3]), numbered(pool=[0, 0])]  # of 30, 5 and 2 documents

    def short(length_tokens):
        return [
            tasks.index(task) for task in documents.tasks_with_short_pools(tasks, found, length_tokens, count_letters)
        ]

    reached = [sum(len(f"\n\nDocument {n + 1}:\ntext {n}") for n in numbers) for numbers in ([3, 17], [0, 1, 2, 3, 17])]
    assert short(1) == short(reached[0]) == []
    assert short(reached[0] + 25) == [2] and short(reached[1]) == [2]
    assert short(reached[1] + 25) == [1, 2] and short(600) == [1, 2] and short(700) == [0, 1, 2]
    assert found.bytes(0, 40) == (folder / documents.FILE).stat().st_size
    with pytest.raises(ConfigError, match=r"Task 't/1' has a pool that ends before env.length_tokens=2000: .* bytes"):
        contexts(folder, numbered(), length_tokens=2000)


@pytest.mark.parametrize(
    ("metadata", "num_docs", "told"),
    [
        ({"documents": [3, 40]}, 0, "'metadata.documents' must be different line numbers of documents.jsonl, from 0 "),
        ({"documents": [3, 3]}, 0, "'metadata.documents'"),
        ({"documents": []}, 0, "'metadata.documents'"),
        ({"documents": "3"}, 0, "'metadata.documents'"),
        ({"pool": [0]}, 0, "'metadata.pool'"),
        ({"pool": [0, 41]}, 0, "'metadata.pool'"),
        ({"num_docs": 1}, 0, "metadata.num_docs=1 is not between"),
        ({"num_docs": "5"}, 0, "metadata.num_docs='5' is not between"),
        ({}, 31, "2 documents of its own and 30 with its pool: env.num_docs=31 is not between"),
    ],
)
def test_tasks_whose_documents_cannot_be(folder, metadata, num_docs, told):
    with pytest.raises(ConfigError, match=r"Task 't/1'") as refused:
        contexts(folder, numbered(**metadata), num_docs)
    assert told in str(refused.value)


def test_documents_that_cannot_be_read(folder, tmp_path):
    (tmp_path / documents.FILE).write_text('{"text": "a"}\n{"txt": "b"}\n{\n')
    found = documents.Documents(tmp_path / documents.FILE)
    assert (len(found), found.texts([0])) == (3, ["a"])
    with pytest.raises(ConfigError, match=r"documents.jsonl, row 2: column 'text' must be text"):
        found.texts([1])
    with pytest.raises(ConfigError, match=r"documents.jsonl, row 3: not JSON"):
        found.texts([2])
    with pytest.raises(ConfigError, match=r"Tasks have 'documents', and .* cannot be read: No such file"):
        documents.Documents(tmp_path / "none" / documents.FILE)


def test_held_out_tasks_are_looked_at_when_a_run_opens(folder):
    def opened(task, **changes):
        with small(**changes).open(Opening(folder, [task], lambda *_: None, lambda _: None)):
            pass

    opened(numbered())
    opened(task_with("abc"))
    with pytest.raises(ConfigError, match=r"must have a 'context' or 'documents'"):
        opened(Task("t/1", "who?", ("a",)))
    with pytest.raises(ConfigError, match=r"brings its context as one text: env.num_docs"):
        opened(task_with("abc"), num_docs=3)
    with pytest.raises(ConfigError, match=r"env.num_docs=1 is not between"):
        opened(numbered(), num_docs=1)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"documents": [3, 99], "pool": [0, 30]}, "'metadata.documents' must be different line numbers"),
        ({"document": [3, 17], "pool": [0, 30]}, "'metadata' must have a 'context' or 'documents'"),
        ({"documents": [3, 17], "pool": [0, 30], "num_docs": 99}, "metadata.num_docs=99 is not between"),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_training_tasks_are_looked_at_when_a_run_opens_and_their_rows_named(folder, metadata, told, elsewhere):
    rows = [{"id": f"t/{i}", "prompt": "who?", "answers": ["a"], "metadata": numbered().metadata} for i in range(2)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, rows[0] | {"id": "t/9"})))
    train = load_tasks(folder / "train.jsonl")
    place = folder / "there" if elsewhere else None
    here = Opening(folder, [task_with("abc")], lambda *_: None, lambda _: None, place, train, train.place)
    with small().open(here):
        pass
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (*rows, rows[0] | {"id": "t/9", "metadata": metadata}))
    )
    train = load_tasks(folder / "train.jsonl")
    with pytest.raises(ConfigError) as refused, small().open(dataclasses.replace(here, train=train, place=train.place)):
        pass
    assert str(refused.value).startswith(f"{folder}/train.jsonl, line 3: Task 't/9'") and told in str(refused.value)


def test_looking_at_a_task_does_not_go_through_its_pool():
    class Many:
        def __len__(self):
            return 2**40

    metadata = {"documents": [3, 17], "pool": [10, 2**40], "num_docs": 2**40 - 9}
    documents.check(Task("t/0", "who?", ("a",), metadata=metadata), Many(), 0, 0)  # one of its own is in no pool
    with pytest.raises(ConfigError, match=f"has 2 documents of its own and {2**40 - 9} with its pool"):
        documents.check(Task("t/0", "who?", ("a",), metadata=metadata), Many(), 2**40 - 8, 0)


@pytest.mark.parametrize("name", ["", "tasks.jsonl"])  # a folder, and a file in it
def test_held_out_tasks_from_elsewhere_have_the_documents_beside_them(folder, name):
    there = folder / "there"
    there.mkdir()
    (there / documents.FILE).write_text("".join(json.dumps({"text": f"other {i}"}) + "\n" for i in range(40)))
    (there / name).write_text("") if name else None
    held_out = Task("t/2", "who?", ("a",), metadata=numbered().metadata)

    async def shown(place, task):
        here = Opening(folder, [held_out], lambda *_: None, lambda _: None, place)
        with small(max_turns=100, chunk_tokens=400, context_tokens=500).open(here) as attempt_at:
            cast = LetterCast([" m"] * 99)
            await attempt_at(task, cast).play()
        return "".join(cast.texts)

    places = (there / name, held_out, "other"), (there / name, numbered(), "text"), (None, held_out, "text")
    for place, task, word in (*places, (folder, held_out, "text")):
        found = asyncio.run(shown(place, task))
        assert f"{word} 3\n" in found and f"{word} 17\n" in found
        assert ("other" in found) == (word == "other") and ("text" in found) == (word == "text")


def test_documents_are_a_part_of_what_a_run_is_about(folder, tmp_path):
    before, beside = small().identity(folder), small().held_out_identity(folder)
    assert list(before) == ["documents"] and list(beside) == ["held_out_documents"]
    (folder / "train.jsonl").write_text("")
    assert small().identity(folder / "train.jsonl") == before  # a file has those beside it
    with (folder / documents.FILE).open("a") as file:
        file.write('{"text": "more"}\n')
    assert small().identity(folder) != before and small().held_out_identity(folder) != beside
    (tmp_path / "texts").mkdir()
    assert small().identity(tmp_path / "texts") == {} == small().held_out_identity(tmp_path / "texts")


def test_attempts_at_a_task_share_its_tokens(folder):
    env, task = small(max_turns=100, length_tokens=60), numbered()
    encoded = []

    class Counting(LetterCast):
        def tokens(self, text):
            if text.startswith(" Document 1"):
                encoded.append(text)
            return super().tokens(text)

    async def group():
        with env.open(Opening(folder, [task], lambda *_: None, lambda _: None)) as attempt_at:
            casts = [Counting([" m"] * 99) for _ in range(3)]
            await asyncio.gather(*(attempt_at(task, cast).play() for cast in casts))
        return casts

    casts = asyncio.run(group())
    assert len(encoded) == 1
    assert casts[0].texts == casts[1].texts == casts[2].texts
    shown = "".join(text.split("Text:")[1].split("\nMemory:")[0] for text in casts[0].texts[:-1])
    assert shown == encoded[0]
