"""Row layouts against rows written by hand, and the column that a malformed row is blamed on."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.config import Columns, ConfigError
from jaxagent.data import rows
from jaxagent.types import Task

OURS = {"id": "t/0", "prompt": "Where?", "answers": ["here"], "kind": "one_hop/place", "metadata": '{"hops": 1}'}
SEARCH_R1 = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer the given question. You must think. Question: who is it?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["A", "B"]}},
    "extra_info": {"split": "train", "index": 7},
}
FLASHRAG = {"id": "test_3", "question": " who wrote it ", "golden_answers": ["X"]}


def without(row, column):
    return {k: v for k, v in row.items() if k != column}


def test_our_layout():
    assert rows.to_task(OURS, True) == Task("t/0", "Where?", ("here",), "one_hop/place", {"hops": 1})
    assert rows.to_task({"id": "a", "prompt": "p", "answers": ["x"]}, True) == Task("a", "p", ("x",))


def test_search_r1_layout_without_the_question_column_takes_it_out_of_the_prompt():
    assert rows.to_task(SEARCH_R1, True) == Task(
        "nq/train/7", "who is it?", ("A", "B"), "nq", {"split": "train", "index": 7}
    )


def test_search_r1_layout_prefers_the_question_column():
    assert rows.to_task(SEARCH_R1 | {"question": "who is she"}, True).prompt == "who is she?"


def test_a_chat_row_without_search_r1s_template_keeps_its_whole_user_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 1 and 2."}]
    row = SEARCH_R1 | {"prompt": messages, "reward_model": {"ground_truth": "3"}}
    assert rows.to_task(row, True).prompt == "Add 1 and 2."  # and gets no question mark: that is Search-R1's clean-up
    assert rows.to_task(row, True).answers == ("3",)


def test_verls_rows_without_a_place_are_called_by_the_files():
    for extra, id in (
        ({"split": "dev", "index": 3}, "nq/dev/3"),
        ({"split": "dev"}, "nq/dev/7"),
        ({"index": "9a9b"}, "nq/train/9a9b"),
        ({"split": None, "index": None}, "nq/train/7"),
        (None, "nq/train/7"),
    ):
        row = SEARCH_R1 | {"extra_info": extra}
        for one in (row, without(row, "extra_info") if extra is None else row):
            assert rows.to_task(one, True, made_id="train/7").id == id
    for truth, answers in ((3, ("3",)), ([3, "4"], ("3", "4")), ("[0, 1]", ("[0, 1]",)), ({"target": 3}, ("3",))):
        row = SEARCH_R1 | {"reward_model": {"ground_truth": truth}}
        assert rows.to_task(row, True).answers == answers


def test_flashrag_layout():
    assert rows.to_task(FLASHRAG, True) == Task("test_3", "who wrote it?", ("X",), "")
    assert rows.to_task(FLASHRAG | {"data_source": "nq"}, True).id == "nq/test_3"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (without(OURS, "id"), "id"),
        (without(OURS, "prompt"), "prompt"),
        (without(OURS, "answers"), "answers"),
        (OURS | {"prompt": "  "}, "prompt"),
        (OURS | {"prompt": 3}, "prompt"),
        (OURS | {"id": True}, "id"),
        (OURS | {"answers": True}, "answers"),
        (OURS | {"answers": [True]}, "answers[0]"),
        (OURS | {"answers": [float("nan")]}, "answers[0]"),
        (OURS | {"answers": float("nan")}, "answers"),
        (without(OURS, "id") | {"ID": "a"}, "ID"),
        (OURS | {"answers": {"text": ["a"]}}, "answers"),
        (OURS | {"answers": []}, "answers"),
        (OURS | {"answers": ["here", None]}, "answers[1]"),
        (OURS | {"answers": [""]}, "answers[0]"),
        (OURS | {"metadata": "{"}, "metadata"),
        (OURS | {"metadata": "[1]"}, "metadata"),
        (OURS | {"kind": ["a"]}, "kind"),
        (without(SEARCH_R1, "data_source"), "data_source"),
        (without(SEARCH_R1, "extra_info"), "extra_info.split"),
        (SEARCH_R1 | {"extra_info": 3}, "extra_info"),
        (SEARCH_R1 | {"reward_model": {"ground_truth": True}}, "reward_model.ground_truth"),
        (SEARCH_R1 | {"extra_info": {"split": "train"}}, "extra_info.index"),
        (SEARCH_R1 | {"reward_model": {}}, "reward_model.ground_truth"),
        (SEARCH_R1 | {"reward_model": {"ground_truth": {}}}, "reward_model.ground_truth.target"),
        (SEARCH_R1 | {"reward_model": {"ground_truth": {"target": []}}}, "reward_model.ground_truth"),
        (SEARCH_R1 | {"prompt": "text"}, "prompt"),
        (SEARCH_R1 | {"prompt": [{"role": "system", "content": "x"}]}, "prompt"),
        (
            SEARCH_R1 | {"prompt": [{"role": "user", "content": "Answer the given question. Question: "}]},
            "prompt[-1].content",
        ),
        (FLASHRAG | {"golden_answers": None}, "golden_answers"),
        (without(FLASHRAG, "question"), "question"),
        ("text", "*"),
    ],
)
def test_a_malformed_row_names_its_column(row, column):
    with pytest.raises(rows.RowError) as error:
        rows.to_task(row, True)
    assert error.value.column == column
    with pytest.raises(ConfigError, match=r"^data/x, row 5: ") as told:
        rows.check(row, "data/x, row 5", True)
    assert f"column '{column}'" in str(told.value) and "\n" not in str(told.value)


# What stands under `answers`, or what a map says is it -> the answers; None: an error that says the rule
ANSWERS = [
    ("4", ("4",)), (4, ("4",)), (4.5, ("4.5",)), ([4, "5"], ("4", "5")), ("", "must be non-empty text"), ([], ()),
    ('["a", "b"]', ("a", "b")), ("['a', \"b's\"]", ("a", "b's")), (" ['a',\n 'b',] ", ("a", "b")), ("[]", ()),
    ("['a' 'b']", None), ("['a'\n 'b']", None), ('["a", 1]', None), ("[1, 'a']", None), ("[0, 1]", None),
    ("[1 2]", None), ("[-0.5]", None), ('["[0, 1]"]', ("[0, 1]",)), ("[x]", ("[x]",)), ("[0, 1)", ("[0, 1)",)),
    ("[a, b]", ("[a, b]",)), ("it's [sic]", ("it's [sic]",)), ("[" * 10_000, ("[" * 10_000,)),
]  # fmt: skip


@pytest.mark.parametrize(("value", "wanted"), ANSWERS)
def test_numbers_and_texts_of_lists_as_answers(value, wanted):
    mapped = rows.Reading(columns=Columns(answers="golden", id="number"))
    for row, how in ((OURS | {"answers": value, "id": 7}, rows.AS_IT_IS), (
        {"number": 7, "prompt": "p", "golden": value}, mapped)):  # fmt: skip
        if isinstance(wanted, tuple):
            task = rows.to_task(row, False, how)
            assert (task.id, task.answers) == ("7", wanted)
        else:
            with pytest.raises(
                rows.RowError, match=wanted or r'may be a list or .*such as an interval, is \["\[0, 1\]"'
            ):
                rows.to_task(row, False, how)
    if not isinstance(wanted, tuple | str):  # a list of tests that NumPy printed is not one test, too
        with pytest.raises(rows.RowError, match="column 'FAIL_TO_PASS'"):
            rows.to_task(OF_LAYOUT["software"] | {"FAIL_TO_PASS": value}, False)


def test_of_a_solution_as_gsm8k_writes_it_the_number_is_the_gold_answer():
    how = rows.Reading(columns=Columns(prompt="question", answers="answer", id="id"))
    for gold, number in (
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        ("a\n#### 1,234,567\n", "1234567"),
        ("#### -3.5", "-3.5"),
        ("#### Step 2\nso x\n", "#### Step 2\nso x\n"),
        ("see #### 72", "see #### 72"),
    ):
        assert rows.to_task({"id": "a", "question": "q", "answer": gold}, True, how).answers == (number,)


def test_a_number_is_a_kind_as_its_text():
    assert rows.to_task(OURS | {"kind": 3, "id": 1.5}, True) == Task("1.5", "Where?", ("here",), "3", {"hops": 1})


def test_answers_may_be_absent_only_where_the_verifier_needs_none():
    assert rows.to_task(OURS | {"answers": []}, False).answers == ()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
texts = st.text(min_size=1).filter(str.strip)


@given(
    texts,
    texts,
    st.lists(texts, min_size=1, max_size=3),
    st.text(),
    st.dictionaries(st.text(), json_values, max_size=3),
)
def test_to_row_and_back_is_the_same_task(id, prompt, answers, kind, metadata):
    task = Task(id, prompt, tuple(answers), kind, metadata)
    assert rows.to_task(rows.to_row(task), True) == task


COLUMNS = sorted(
    {*OURS, *SEARCH_R1, *FLASHRAG, "index", "context", "input", "instance_id", "problem_statement", "user_scenario"}
)


@given(
    st.dictionaries(
        st.sampled_from(COLUMNS), json_values | st.sampled_from([SEARCH_R1["prompt"], {"ground_truth": "4"}])
    )
    | json_values,
    st.sampled_from(["auto", *rows.GENERAL, *rows.LAYOUTS]),
)
def test_no_row_of_json_values_fails_in_any_other_way(row, layout):
    """Neither as its columns say nor as a config says."""
    with contextlib.suppress(rows.RowError):
        rows.to_task(row, True, rows.Reading(layout=layout))


OF_LAYOUT = {
    "verl": SEARCH_R1,
    "flashrag": FLASHRAG,
    "long_text": {"context": "c", "input": "q", "answers": ["a"]},
    "tau_bench": {"index": 0, "metadata": {"user_id": "u", "instruction": "i", "actions": [], "outputs": []}},
    "toolrl": SEARCH_R1 | {"data_source": "rlla", "reward_model": {"ground_truth": "<response>r"}},
    "tau2": {"id": "a", "user_scenario": {"instructions": "i"}, "ticket": "t"},
    "software": {"instance_id": "i", "problem_statement": "p", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": []},
    "nemo_gym": {"responses_create_params": {"input": "q"}, "expected_answer": "a"},
    "kernelbench": {
        "level": 1,
        "name": "1_Square",
        "code": "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...",
    },
    "ours": OURS,
}


@pytest.mark.parametrize("layout", [*rows.GENERAL, *rows.LAYOUTS])
def test_a_named_layout_tells_what_it_lacks(layout):
    """The columns of every row, under every layout's name, whole and without one column."""
    for row in OF_LAYOUT.values():
        for column in (*row, None):
            with contextlib.suppress(rows.RowError):
                rows.to_task(without(row, column), False, rows.Reading(layout=layout))
    if layout != "toolrl":
        assert rows.to_task(OF_LAYOUT[layout], False) == rows.to_task(
            OF_LAYOUT[layout], False, rows.Reading(layout=layout)
        )
