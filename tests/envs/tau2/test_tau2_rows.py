"""tau2-bench's tasks as rows: what they become, and every mistake by its file, row and column."""

import json
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.data import files, rows, sources
from jaxagent.data.fields import RowError
from jaxagent.envs.tau2.rows import AGENT, KEY, USER, ToolUse, parse

SHARED = Path(__file__).resolve().parents[3].parent / "shared/data/tau2-bench"
ACTION = {"name": "look", "arguments": {"a": 1}}
CALLS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "tool_calls": [{"id": "1", "name": "look", "arguments": {}}]},
    {"role": "tool", "id": "1", "content": "seen"},
]


def row(**changes):
    """A task."""
    return {"id": "t", "user_scenario": {"instructions": "Ask."}, **changes}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published tasks are not on this machine")
@pytest.mark.parametrize(("domain", "count"), [("mock", 10), ("retail", 114)])
def test_all_published_tasks_are_read(domain, count):
    tasks = [rows.to_task(one, need_answers=False) for one in json.loads((SHARED / domain / "tasks.json").read_text())]
    assert len({task.id for task in tasks}) == count
    assert all(parse(task.metadata[KEY]).id == task.id for task in tasks)


def test_a_task_and_its_own_row_again():
    task = rows.to_task(row(ticket="In short."), need_answers=False)
    assert (task.id, task.prompt, task.answers) == ("t", "In short.", ())
    again = rows.to_task(rows.to_row(task), need_answers=False)
    assert parse(again.metadata[KEY]) == parse(task.metadata[KEY])


def test_what_the_user_is_told():
    parts = {"domain": "d", "task_instructions": "do", "reason_for_call": "why\nso", "known_info": "k"}
    read = parse(row(user_scenario={"persona": "calm", "instructions": parts}))
    assert read.scenario == (
        "Persona:\n\tcalm\nInstructions:\n\tDomain: d\n\tReason for call:\n\t\twhy\n\t\tso\n"
        "\tKnown info:\n\t\tk\n\tTask instructions:\n\t\tdo"
    )
    assert read.about == "why\nso"
    assert parse(row()).scenario == "Instructions:\n\tAsk."


def test_defaults_and_what_is_absent():
    assert parse(row()).criteria is None
    assert parse(row()).user_tools is None
    criteria = parse(row(evaluation_criteria={})).criteria
    assert (criteria.actions, criteria.env_assertions, criteria.reward_basis) == (None, None, ("DB", "COMMUNICATE"))
    assert parse(row(evaluation_criteria={"actions": []})).criteria.actions == ()
    (action,) = parse(row(evaluation_criteria={"actions": [{**ACTION, "compare_args": []}]})).criteria.actions
    assert action == ToolUse(AGENT, "look", {"a": 1}, ())


def test_a_history_knows_whose_result_is_whose():
    user = [{**CALLS[1], "role": "user"}, CALLS[2]]
    history = parse(row(initial_state={"message_history": [*CALLS, *user]})).history
    assert [past.requestor for past in history if past.role == "tool"] == [AGENT, USER]
    assert [use.requestor for past in history for _, use in past.calls] == [AGENT, USER]


C, S, TOLD = "evaluation_criteria", "initial_state", "user_scenario.instructions"
ASSERTION = {"env_type": "user", "func_name": "f", "arguments": {}}


def criteria(**changes):
    """Of a task."""
    return {C: changes}


def state(**changes):
    """Before a task."""
    return {S: changes}


def told(**parts):
    """Structured instructions."""
    return {"user_scenario": {"instructions": parts}}


def without(name):
    """An assertion without a column."""
    return {key: value for key, value in ASSERTION.items() if key != name}


def past(*messages):
    """A history."""
    return state(message_history=list(messages))


@pytest.mark.parametrize(
    ("changes", "column", "problem"),
    [
        ({"id": ""}, "id", "must not be empty"),
        ({"id": 5}, "id", "must be text"),
        ({"user_scenario": "x"}, "user_scenario", "must be an object"),
        ({"user_scenario": {}}, TOLD, "missing"),
        (told(reason_for_call="r"), f"{TOLD}.task_instructions", "missing"),
        (told(reason="r"), f"{TOLD}.reason", "unknown field"),
        ({"evaluation_critera": {}}, "evaluation_critera", "unknown field. Did you mean 'evaluation_criteria'"),
        ({"required_documents": ["d"]}, "required_documents", "not supported"),
        ({"user_tools": "all"}, "user_tools", "must be a list"),
        ({C: []}, C, "must be an object"),
        (criteria(reward_basis=["DB", "ACT"]), f"{C}.reward_basis[1]", "'ACTION'"),
        (criteria(actions={}), f"{C}.actions", "must be a list"),
        (criteria(actions=[ACTION, {"name": "x"}]), f"{C}.actions[1].arguments", "missing"),
        (criteria(actions=[{**ACTION, "requestor": "me"}]), f"{C}.actions[0].requestor", "'user'"),
        (criteria(communicate_info=[5]), f"{C}.communicate_info[0]", "must be text"),
        (criteria(env_assertions=[without("arguments")]), f"{C}.env_assertions[0].arguments", "missing"),
        (criteria(env_assertions=[{**ASSERTION, "assert_value": 1}]), f"{C}.env_assertions[0].assert_value", "true or"),
        (state(history=[]), f"{S}.history", "unknown field"),
        (state(initialization_data={"data": {}}), f"{S}.initialization_data.data", "unknown field"),
        (state(initialization_actions=[without("env_type")]), f"{S}.initialization_actions[0].env_type", "missing"),
        (past({"role": "system", "content": "x"}), f"{S}.message_history[0].role", "must be one of 'user'"),
        (past({"role": "user", "content": " "}), f"{S}.message_history[0].content", "must be text"),
        (past(CALLS[2]), f"{S}.message_history[0]", "is the result of no call"),
        (past(*CALLS[:2]), f"{S}.message_history", "ends before the result"),
        (past(*CALLS[:2], CALLS[0]), f"{S}.message_history[2]", "must come before it"),
        (past(*CALLS[:2], {**CALLS[2], "id": "2"}), f"{S}.message_history[2].id", "must be that of its call"),
    ],
)
def test_mistakes_name_their_column(changes, column, problem):
    with pytest.raises(RowError) as raised:
        parse(row(**changes))
    assert raised.value.column == column
    assert problem in str(raised.value)


def written(folder, tasks, splits):
    """A folder of tasks."""
    (folder / "tasks.json").write_text(tasks if isinstance(tasks, str) else json.dumps(tasks))
    (folder / "split_tasks.json").write_text(json.dumps(splits))
    return folder


def test_splits_name_tasks_by_their_ids(tmp_path):
    folder = written(
        tmp_path, [row(id=name) for name in "abcd"], {"train": ["d", "a"], "test": ["b"], "base": list("abcd")}
    )
    assert list(files.splits(folder)) == ["train", "test", "base"]
    assert [task.id for task in sources.load_tasks(folder, "train", need_answers=False)] == ["a", "d"]
    with pytest.raises(ConfigError, match=r"no split 'trian'. Did you mean 'train'"):
        sources.load_tasks(folder, "trian", need_answers=False)


def test_mistakes_name_their_file_and_row(tmp_path):
    folder = written(tmp_path, [row(id="a"), row(id="b", user_scenario=5)], {"train": ["b"]})
    with pytest.raises(ConfigError, match=r"tasks.json, row 1: column 'user_scenario': must be an object"):
        sources.load_tasks(folder, "train", need_answers=False)
    folder = written(tmp_path, [row(id="a")], {"train": ["a", "z"]})
    with pytest.raises(ConfigError, match=r"split_tasks.json: split 'train' names 'z'"):
        sources.load_tasks(folder, "train", need_answers=False)
    for tasks, problem in (("{}", "must be a list"), ("[", "not JSON")):
        with pytest.raises(ConfigError, match=rf"tasks.json.*{problem}"):
            sources.load_tasks(written(tmp_path, tasks, {"train": []}), "train", need_answers=False)
    with pytest.raises(ConfigError, match=r"split_tasks.json must be an object"):
        files.splits(written(tmp_path, [], ["train"]))
    (tmp_path / "tasks.json").unlink()
    with pytest.raises(ConfigError, match=r"has split_tasks.json and no tasks.json"):
        files.splits(tmp_path)
