"""tau2's mock domain: every published task, scored as its criteria say. The numbers were made by the published code."""

import asyncio
import json

import pytest
from tau2_people import MOCK, People, call, folder_of, opened, played, task_row

from jaxagent.config import ConfigError
from jaxagent.envs.forms import shaped
from jaxagent.envs.tau2 import mock
from jaxagent.envs.tau2.rows import AGENT, USER, parse
from jaxagent.envs.tau2.world import DOMAINS, World, gold
from jaxagent.types import StopReason

published = pytest.mark.skipif(not MOCK.is_dir(), reason="the published tasks are not on this machine")
STOP = "###STOP###"
# Task -> reward of: the task's actions and texts; nothing; its actions without texts; its actions and one more task;
# its actions and then the user's dismissal of its notification. By the published evaluators at commit a2c0247, with the
# published user_db.json; None where they raise: an assertion about a task that is not there, which is a 0 here.
PUBLISHED = {
    "create_task_1": (1, 0, 1, 0, 0),
    "create_task_1_with_env_assertions": (1, None, 1, 0, 0),
    "create_task_1_nl_eval": (1, 1, 1, 1, 1),
    "update_task_1": (1, 0, 1, 0, 0),
    "update_task_with_message_history": (1, 0, 1, 0, 0),
    "update_task_with_initialization_data": (1, 0, 0, 0, None),  # there the user has lost its own store, and we keep it
    "update_task_with_initialization_actions": (1, 0, 1, 0, 0),
    "update_task_with_history_and_env_assertions": (0, 0, 0, 0, 0),
    "update_task_with_user_tools": (0, 0, 0, 0, 0),  # wants the user's store changed and unchanged: nobody can solve it
    "impossible_task_1": (1, 0, 1, 0, 0),
}
NOTIFICATION = {"notification_id": "notif_1", "message": "m", "status": "unread", "task_id": "task_1"}


@pytest.fixture
def folder(tmp_path):
    """The published folder with a user's store, which is not among its files here."""
    for file in MOCK.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "user_db.json").write_text(json.dumps({"notifications": {"notif_1": NOTIFICATION}}))
    return tmp_path


@published
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_task_scores_as_published(folder, name):
    with opened(folder) as attempt_at:
        row = attempt_at(name, People(user=["Hello"]))._task
        actions = [call(one.name, **one.arguments) for one in row.criteria.actions or ()]
        texts = [" ".join(row.criteria.communicate_info)] if row.criteria.communicate_info else []
        dismiss = call("dismiss_notification", notification_id="notif_1")
        another = call("create_task", user_id="user_1", title="x")
        ways = [
            ([*actions, *texts, "Bye."], [STOP]),
            (["Bye."], [STOP]),
            ([*actions, "Bye."], [STOP]),
            ([*actions, *texts, another, "Bye."], [STOP]),
            ([*actions, *texts, "Bye."], [dismiss, STOP]),
        ]
        for (said, ends), wanted in zip(ways, PUBLISHED[name], strict=True):
            user = ["Hello", *["Go on."] * sum(one in texts for one in said), *ends]
            verdict, reason, _ = asyncio.run(played(attempt_at(name, People(user=user)), said))
            assert reason == StopReason.ANSWER
            assert verdict.reward == (wanted or 0), (said, verdict)
            assert verdict.components["solved"] == verdict.reward


@published
def test_a_basis_of_assertions_alone_is_solved_by_what_they_ask_for(folder):
    name = "update_task_with_history_and_env_assertions"
    with opened(folder) as attempt_at:
        people = People(user=["Please complete it.", STOP])
        done = call("update_task_status", task_id="task_2", status="completed")
        verdict, _, shown = asyncio.run(played(attempt_at(name, people), [done, "Done."]))
    assert verdict.components == {"solved": 1.0, "env_assertion": 1.0}
    assert "Q4 project status" in shown[0]
    heard = people.talks["user"].heard[0]
    assert "Q4 project status" not in str(heard)  # the agent's call is not the user's to see
    assert [message.role for message in heard] == ["system", "assistant", "user"]


@published
def test_the_task_that_contradicts_itself_is_seen_to(folder):
    """Dismissing makes the assertion true and the user's store another; not dismissing, the reverse."""
    name, update = "update_task_with_user_tools", call("update_task_status", task_id="task_1", status="completed")
    dismiss = call("dismiss_notification", notification_id="notif_1")
    with opened(folder) as attempt_at:
        asked, _, _ = asyncio.run(played(attempt_at(name, People(user=["Hi", dismiss, STOP])), [update, "Done."]))
        left, _, _ = asyncio.run(played(attempt_at(name, People(user=["Hi", STOP])), [update, "Done."]))
    assert asked.components == {"solved": 0.0, "db": 0.0, "action": 1.0, "env_assertion": 1.0}
    assert left.components == {"solved": 0.0, "db": 1.0, "action": 1.0, "env_assertion": 0.0}


@published
def test_published_hashes_of_both_stores(folder):
    store = json.loads((MOCK / "db.json").read_text())
    agent = {n: {k: shaped(r, mock.AGENT.forms[n], k) for k, r in v.items()} for n, v in store.items()}
    published = {**NOTIFICATION, "message": "Task 'Test task' has been assigned to you."}
    world = World(DOMAINS["mock"], {AGENT: agent, USER: {"notifications": {"notif_1": published}}})
    assert world.digest(AGENT) == "107f83a70b7bf4f616e283b0b0b8451346fe7681173398d4498a1ec15c5fdfc6"
    assert world.digest(USER) == "4cf3d22eed6962ba202c8738421d8a2286d2b5a0cad1372922c928be09ccbfac"


def test_each_side_has_its_own_tools_and_its_own_store(tmp_path):
    dismissed = {"requestor": "user", "name": "dismiss_notification", "arguments": {"notification_id": "n"}}
    start = {"env_type": "user", "func_name": "add_notification", "arguments": {"notification_id": "n", "message": "m"}}
    row = task_row(
        initial_state={"initialization_actions": [start]},
        evaluation_criteria={"actions": [dismissed]},
    )
    own, theirs = call("dismiss_notification", notification_id="n"), call("get_users")
    with opened(folder_of(tmp_path / "t", [row])) as attempt_at:
        attempt = attempt_at("one", People(user=["Hi", own, STOP]))
        good, _, _ = asyncio.run(played(attempt, ["Please dismiss it."]))
        people = People(user=["Hi", theirs, STOP])
        other = attempt_at("one", people)
        bad, _, shown = asyncio.run(played(other, [own, "Please dismiss it."]))
    assert (good.reward, attempt.counters["user_calls"], attempt.counters["calls"]) == (1.0, 1.0, 0.0)
    assert bad.reward == 0.0
    assert "Tool 'dismiss_notification' not found" in shown[1]
    assert "Tool 'get_users' not found" in str(people.talks["user"].heard[-1])
    assert (other.counters["failed_calls"], other.counters["user_failed_calls"]) == (1.0, 1.0)


def test_attempts_do_not_see_each_other(tmp_path):
    with opened(folder_of(tmp_path / "t", [task_row()])) as attempt_at:
        done = call("update_task_status", task_id="task_1", status="completed")
        for actions, wanted in (([done, "Done."], 1.0), (["Done."], 0.0), ([done, "Done."], 1.0)):
            verdict, _, _ = asyncio.run(played(attempt_at("one", People(user=["Hi", STOP])), actions))
            assert verdict.reward == wanted


def test_initial_data_is_laid_over_the_store(tmp_path):
    data = {"users": {"user_1": {"tasks": ["task_1", "task_2"]}}, "tasks": {"task_2": {"status": "pending"}}}
    whole = {"task_id": "task_2", "title": "Second", "status": "pending"}
    row = task_row(initial_state={"initialization_data": {"agent_data": {**data, "tasks": {"task_2": whole}}}})
    with opened(folder_of(tmp_path / "t", [row])) as attempt_at:
        world = attempt_at("one", People(user=["Hi"]))._world
    assert world._tables[AGENT]["users"]["user_1"] == {
        "user_id": "user_1",
        "name": "One",
        "tasks": ["task_1", "task_2"],
    }
    assert world._tables[AGENT]["tasks"]["task_2"]["description"] is None
    assert len(world._tables[AGENT]["tasks"]) == 2


@pytest.mark.parametrize(
    ("status", "value", "task_id", "holds"),
    [
        ("pending", True, "task_1", 1.0),
        ("pending", False, "task_1", 0.0),
        ("completed", True, "task_1", 0.0),
        ("completed", False, "task_1", 1.0),
        ("completed", True, "task_9", 0.0),  # about a task that is not there, whatever is wanted
        ("completed", False, "task_9", 0.0),
    ],
)
def test_assertions(tmp_path, status, value, task_id, holds):
    asked = {"env_type": "assistant", "func_name": "assert_task_status", "assert_value": value}
    asked["arguments"] = {"task_id": task_id, "expected_status": status}
    row = task_row(evaluation_criteria={"env_assertions": [asked], "reward_basis": ["ENV_ASSERTION"]})
    with opened(folder_of(tmp_path / "t", [row])) as attempt_at:
        verdict, _, _ = asyncio.run(played(attempt_at("one", People(user=["Hi", STOP])), ["Hello."]))
    assert verdict.components == {"solved": holds, "env_assertion": holds}


def test_gold_takes_errors_as_they_come():
    stock = {
        AGENT: {"tasks": {}, "users": {"u": {"user_id": "u", "name": "n", "tasks": []}}},
        USER: {"notifications": {}},
    }
    lost = {"name": "update_task_status", "arguments": {"task_id": "task_9", "status": "completed"}}
    made = {"name": "create_task", "arguments": {"user_id": "u", "title": "t"}}
    row = parse(task_row(evaluation_criteria={"actions": [lost, made]}))
    left = gold(DOMAINS["mock"], stock, row)
    assert sorted(left) == [(AGENT, "tasks", "task_1"), (AGENT, "users", "u")]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"arguments": {"title": "t", "user": "u"}}, "actions[0].arguments: create_task has no argument 'user'"),
        ({"compare_args": ["titel"]}, "actions[0].compare_args: create_task has no argument 'titel'"),
    ],
)
def test_an_action_with_arguments_that_no_tool_takes_would_be_solved_by_doing_nothing(tmp_path, changes, told):
    action = {"name": "create_task", "arguments": {"user_id": "u", "title": "t"}} | changes
    folder = folder_of(tmp_path / "t", [task_row(evaluation_criteria={"actions": [action]})])
    with pytest.raises(ConfigError) as error, opened(folder):
        pass
    assert told in str(error.value).replace("'evaluation_criteria.", "").replace("': ", ": ")


def test_a_record_that_stands_twice_in_the_store_is_told(tmp_path):
    folder = folder_of(tmp_path / "t", [task_row()])
    store = (folder / "db.json").read_text().strip()
    (folder / "db.json").write_text(f"{store[:-1]}, {store[1:]}")
    with pytest.raises(ConfigError, match=r"db\.json.* stands twice in one object"), opened(folder):
        pass
