"""An attempt at a task of tau2: who is asked what, how steps and errors are counted, and how people misbehave."""

import asyncio
import json

import pytest
from tau2_people import People, call, folder_of, opened, played, task_row

from jaxagent.config import ConfigError
from jaxagent.envs.cast import RoleError
from jaxagent.envs.tau2 import words
from jaxagent.envs.tau2.attempt import CALLS_IN_A_ROW
from jaxagent.envs.tau2.environment import Tau2
from jaxagent.types import StopReason, TokenKind

STOP = "###STOP###"
DONE = call("update_task_status", task_id="task_1", status="completed")
LOST = call("update_task_status", task_id="task_9", status="completed")
CHECK = call("check_notifications")


def play(tmp_path, user, actions, row=None, people=None, **settings):
    """(verdict, reason or failure, shown, attempt, people)."""
    people = people or People(user=user)
    with opened(folder_of(tmp_path / "t", [row or task_row()]), **settings) as attempt_at:
        attempt = attempt_at("one", people)
        return *asyncio.run(played(attempt, actions)), attempt, people


def test_a_conversation(tmp_path):
    verdict, reason, shown, attempt, people = play(tmp_path, ["Mark it, please.", STOP], [DONE, "Done."])
    assert (verdict.reward, reason) == (1.0, StopReason.ANSWER)
    assert "Be kind." in shown[0] and "update_task_status" in shown[0] and "check_notifications" not in shown[0]
    assert shown[0].endswith(f"{words.GREETING}\nMark it, please.\n")
    assert json.loads(shown[1])["status"] == "completed"
    prompt, later = people.talks["user"].heard
    assert [message.role for message in prompt] == ["system", "user"]
    assert "You want task_1 to be completed." in prompt[0].content
    assert "check_notifications" in prompt[0].content and "update_task_status" not in prompt[0].content
    assert words.GREETING in prompt[1].content
    assert [message.content.strip() for message in later] == ["Done."]
    assert attempt.counters["steps"] == 5.0  # user; call, result; agent, user


@pytest.mark.parametrize("end", words.ENDS)
def test_the_words_that_end_a_conversation(tmp_path, end):
    verdict, reason, *_ = play(tmp_path, ["Hi", f"Thank you. {end}"], [DONE, "Done."])
    assert (verdict.reward, reason) == (1.0, StopReason.ANSWER)


def test_an_agent_that_says_the_word_ends_nothing(tmp_path):
    verdict, reason, shown, *_ = play(tmp_path, ["Hi", "What?", STOP], [STOP, DONE, "Done."])
    assert (verdict.reward, reason, shown[1].strip()) == (1.0, StopReason.ANSWER, "What?")


def test_only_an_end_is_judged(tmp_path):
    verdict, reason, *_ = play(tmp_path, ["Hi", "And?"], [DONE, "Done."])
    assert (verdict.reward, verdict.components, reason) == (0.0, {"solved": 0.0}, StopReason.TOKEN_LIMIT)


def test_a_user_who_never_stops_meets_the_last_step(tmp_path):
    verdict, reason, shown, attempt, _ = play(tmp_path, ["And?"], ["Yes."] * 50, max_steps=20)
    assert (verdict.reward, reason) == (0.0, StopReason.TURN_LIMIT)
    assert attempt.counters["steps"] == 20.0  # the user has the odd ones
    assert len(shown) == 10


@pytest.mark.parametrize(("limit", "reward"), [(5, 0.0), (6, 1.0)])
def test_an_end_with_the_last_step_comes_too_late(tmp_path, limit, reward):
    verdict, reason, *_ = play(tmp_path, ["Hi", STOP], [DONE, "Done."], max_steps=limit)
    assert verdict.reward == reward
    assert reason == (StopReason.ANSWER if reward else StopReason.TURN_LIMIT)


def test_errors_of_both_sides_count_together(tmp_path):
    bad = call("dismiss_notification", notification_id="none")
    user = ["Hi", bad, bad, "No.", STOP]
    verdict, reason, _, attempt, _ = play(tmp_path, user, [LOST, "Look, please.", LOST, DONE, "Done."], max_errors=4)
    assert (verdict.reward, reason) == (0.0, StopReason.TURN_LIMIT)
    assert (attempt.counters["failed_calls"], attempt.counters["user_failed_calls"]) == (2.0, 2.0)
    verdict, reason, *_ = play(tmp_path, user, [LOST, "Look, please.", LOST, DONE, "Done."], max_errors=5)
    assert (verdict.reward, reason) == (1.0, StopReason.ANSWER)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("<tool_call>{not json}</tool_call>", "Error: write"),
        ('<tool_call>{"name": 5}</tool_call>', "Error: write"),
        ('<tool_call>{"name": "create_task", "arguments": "x"}</tool_call>', "Error: write"),
        ("</tool_call>", "Error: write"),
        ("  ", "Error: say something"),
        ("<think>Hm.</think>", "Error: say something"),
        (call("nothing"), "Error: Tool 'nothing' not found."),
        (call("create_task", title="t"), "Error: create_task needs the argument 'user_id'"),
        (call("create_task", user_id="user_1", title="t", colour="red"), "has no argument 'colour'"),
        (call("create_task", user_id=["user_1"], title="t"), "'user_id' must be text"),
        (call("create_task", user_id="user_1", title={"a": 1}), "'title' must be text"),
        (call("create_task", data="x", user_id="user_1", title="t"), "has no argument 'data'"),
        (call("assert_task_status", task_id="task_1", expected_status="x"), "not found"),
        (call("__init__"), "not found"),
    ],
)
def test_bad_actions_are_answered_and_counted(tmp_path, action, told):
    verdict, _, shown, attempt, _ = play(tmp_path, ["Hi", STOP], [action, DONE, "Done."])
    assert told in shown[1]
    assert verdict.reward == 1.0
    assert attempt.counters["failed_calls"] + attempt.counters["invalid_actions"] == 1.0


def test_a_bad_action_is_a_warning(tmp_path):
    with opened(folder_of(tmp_path / "t", [task_row()])) as attempt_at:
        attempt = attempt_at("one", People(user=["Hi"]))
        asyncio.run(attempt.start())
        bad, good = asyncio.run(attempt.step("")), asyncio.run(attempt.step(DONE))
    assert [step.observation.parts[0][1] for step in (bad, good)] == [TokenKind.WARNING, TokenKind.OBSERVATION]
    assert good.observation.role == "tool"


def test_reasoning_is_not_said(tmp_path):
    action = "<think>secret</think>Hello."
    _, _, _, attempt, people = play(tmp_path, ["Hi", STOP], [action])
    assert "secret" not in str(people.talks["user"].heard)
    assert attempt._agent_texts == [words.GREETING, "Hello."]


def test_words_beside_a_call_are_not_shown_to_the_user(tmp_path):
    *_, people = play(tmp_path, ["Hi", STOP], [f"One moment. {DONE}", "Done."])
    assert "One moment" not in str(people.talks["user"].heard)


@pytest.mark.parametrize(
    ("user", "told"),
    [
        (["  "], "user: an empty message"),
        (["<think>nothing</think>"], "user: an empty message"),
        ([STOP], "user: ended the conversation before the agent had said a word"),
        ([RoleError("user: no connection")], "user: no connection"),
        (["Hi", TimeoutError("user: no reply in its time")], "user: no reply in its time"),
        (["Hi", CHECK], f"user: {CALLS_IN_A_ROW} calls of tools in a row"),
        (["Hi", call("get_users")], "user: 10 failed calls"),
        (["Hi", "<tool_call>{</tool_call>"], "user: 10 failed calls"),
        (["Hi", call("dismiss_notification", notification_id=5)], "user: 10 failed calls"),
    ],
)
def test_what_is_the_users_failure_is_no_reward(tmp_path, user, told):
    verdict, failure, *_ = play(tmp_path, user, ["Hello.", "Hello?"])
    assert verdict is None
    assert told in str(failure)


def test_the_user_mends_a_call_and_is_told_of_results(tmp_path):
    user = ["Hi", "<tool_call>{</tool_call>", CHECK, "There is nothing.", STOP]
    verdict, _, shown, attempt, people = play(tmp_path, user, ["Look, please.", DONE, "Done."])
    assert verdict.reward == 1.0
    assert shown[1].strip() == "There is nothing."  # neither the calls nor their results
    heard = [messages[0].content for messages in people.talks["user"].heard[1:]]
    assert "Error: write" in heard[1] and "<tool_response>\n[]\n</tool_response>" in heard[2]
    assert (attempt.counters["user_calls"], attempt.counters["user_failed_calls"]) == (2.0, 1.0)


def test_a_task_may_leave_the_user_some_tools_or_none(tmp_path):
    user = ["Hi", CHECK, STOP]
    *_, people = play(tmp_path, user, ["Hello."], task_row(user_tools=["dismiss_notification"]))
    assert "check_notifications" not in people.talks["user"].heard[0][0].content
    assert "Tool 'check_notifications' not found" in people.talks["user"].heard[2][0].content
    *_, shown, _, people = play(tmp_path, user, ["Hello.", "Hello."], task_row(user_tools=[]))
    assert "tools" not in people.talks["user"].heard[0][0].content
    assert shown[1].strip() == CHECK  # without tools, nothing is a call


HISTORY = [
    {"role": "user", "content": "See to my notifications."},
    {"role": "user", "tool_calls": [{"id": "1", "name": "check_notifications", "arguments": {}}]},
    {"role": "tool", "id": "1", "content": "[]"},
]


def test_a_history_that_ends_with_the_users_result_has_the_user_go_on(tmp_path):
    row = task_row(initial_state={"message_history": HISTORY})
    *_, shown, _, people = play(tmp_path, ["There are none.", STOP], [DONE, "Done."], row)
    roles = [message.role for message in people.talks["user"].heard[0]]
    assert roles == ["system", "assistant", "assistant", "user"]
    assert shown[0].endswith("See to my notifications.\nThere are none.\n")


def test_a_history_that_ends_with_the_user_has_the_agent_go_on(tmp_path):
    row = task_row(initial_state={"message_history": HISTORY[:1]})
    verdict, _, shown, _, people = play(tmp_path, [STOP], [DONE, "Done."], row)
    assert verdict.reward == 1.0
    assert shown[0].endswith("See to my notifications.\n")
    assert [message.role for message in people.talks["user"].heard[0]] == ["system", "assistant", "user"]


def asked_judge(tmp_path, reply, basis=("DB", "NL_ASSERTION"), actions=(DONE, "All is done.")):
    """An episode that a judge has a word in; the role's messages come to `reply`."""
    criteria = task_row()["evaluation_criteria"]
    statements = ["The agent confirmed it.", "The agent was kind."]
    row = task_row(evaluation_criteria={**criteria, "nl_assertions": statements, "reward_basis": list(basis)})
    people = People(user=["Hi", STOP], judge=[reply])
    return play(tmp_path, None, actions, row, people, nl_assertions="judge")


def answering(first, second):
    """A judge that gives these scores."""

    def reply(messages):
        nonce = messages[0].content.split('"nonce": "')[1].split('"')[0]
        return json.dumps({"nonce": nonce, "reason": "r", "scores": {"statement_1": first, "statement_2": second}})

    return reply


@pytest.mark.parametrize(("scores", "reward"), [((1, 1), 1.0), ((1, 0), 0.0)])
def test_a_judge_has_a_word(tmp_path, scores, reward):
    verdict, *_, people = asked_judge(tmp_path, answering(*scores))
    assert verdict.components == {"solved": reward, "db": 1.0, "nl_assertion": reward}
    (asked,) = people.talks["judge"].heard
    assert "The agent was kind." in asked[0].content and "assistant: All is done." in asked[1].content


def test_a_judge_whose_reply_is_no_judgement_is_a_failure(tmp_path):
    for reply in ("All true.", '{"nonce": "0", "reason": "r", "scores": {}}', answering(2, 1), answering(True, 1)):
        verdict, failure, *_ = asked_judge(tmp_path, reply)
        assert verdict is None and str(failure).startswith("judge: ")


def test_a_judge_is_not_asked_in_vain(tmp_path):
    verdict, *_, people = asked_judge(tmp_path, answering(1, 1), actions=("I did nothing.",))
    assert (verdict.reward, people.talks["judge"].heard) == (0.0, [])
    verdict, *_, people = asked_judge(tmp_path, answering(0, 0), basis=("DB",))
    assert (verdict.reward, people.talks["judge"].heard) == (1.0, [])


def test_without_a_judge_assertions_are_refused_or_counted(tmp_path):
    criteria = {**task_row()["evaluation_criteria"], "nl_assertions": ["Kind."], "reward_basis": ["DB", "NL_ASSERTION"]}
    row = task_row(evaluation_criteria=criteria)
    with pytest.raises(
        ConfigError, match=r"task 'one': column 'evaluation_criteria.nl_assertions'.*nl_assertions=judge"
    ):
        play(tmp_path, ["Hi"], [], row)
    verdict, *_, attempt, _ = play(tmp_path, ["Hi", STOP], [DONE, "Done."], row, nl_assertions="skip")
    assert verdict.components == {"solved": 1.0, "db": 1.0}
    assert attempt.counters["skipped_assertions"] == 1.0


def test_roles_follow_the_settings():
    assert tuple(Tau2().roles) == ("user",)
    assert tuple(Tau2(nl_assertions="judge").roles) == ("user", "judge")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"user_tools": ["check_notification"]}, r"user_tools\[0\]'.*Did you mean 'check_notifications'"),
        (
            {"evaluation_criteria": {"actions": [{"name": "update_task", "arguments": {}}]}},
            r"actions\[0\].name'.*'update_task_status'",
        ),
        (
            {"evaluation_criteria": {"env_assertions": [{"env_type": "user", "func_name": "x", "arguments": {}}]}},
            r"env_assertions\[0\].func_name'",
        ),
        (
            {
                "evaluation_criteria": {
                    "env_assertions": [{"env_type": "assistant", "func_name": "get_users", "arguments": {}}]
                }
            },
            "does not say yes or no",
        ),
        (
            {
                "evaluation_criteria": {
                    "env_assertions": [
                        {"env_type": "assistant", "func_name": "assert_task_status", "arguments": {"task": 1}}
                    ]
                }
            },
            r"env_assertions\[0\].arguments'",
        ),
        ({"initial_state": {"initialization_data": {"agent_data": {"task": {}}}}}, "agent_data.task'.*'tasks'"),
        (
            {"initial_state": {"initialization_data": {"agent_data": {"tasks": {"t": {"title": 1}}}}}},
            "agent_data.tasks.t.task_id': missing",
        ),
        (
            {
                "initial_state": {
                    "message_history": [
                        *({**one, "content": "[1]"} if one["role"] == "tool" else one for one in HISTORY)
                    ]
                }
            },
            r"message_history\[1\]'.*check_notifications gives",
        ),
    ],
)
def test_tasks_that_do_not_fit_the_domain_are_refused_at_once(tmp_path, changes, told):
    with pytest.raises(ConfigError, match=f"task 'one': column 'metadata.tau2.*{told}|task 'one': column '.*{told}"):
        play(tmp_path, ["Hi"], [], task_row(**changes))


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"db.json": {"tasks": {}}}, "db.json: the table 'users' is missing"),
        ({"db.json": {"tasks": {}, "users": {}, "userz": {}}}, "unknown table 'userz'"),
        ({"db.json": {"tasks": {"t": {"task_id": "t"}}, "users": {}}}, "db.json, tasks: column 't.title': missing"),
        ({"db.json": {"tasks": [], "users": {}}}, "'tasks' must be an object"),
        ({"user_db.json": []}, "user_db.json must be an object"),
    ],
)
def test_stores_that_do_not_fit_are_refused(tmp_path, others, told):
    folder = folder_of(tmp_path / "t", [task_row()], **others)
    with pytest.raises(ConfigError, match=told), opened(folder):
        pass


def test_missing_files_are_named(tmp_path):
    folder = folder_of(tmp_path / "t", [task_row()])
    (folder / "db.json").unlink()
    with pytest.raises(ConfigError, match=r"has no db.json.*config.env.store"), opened(folder):
        pass
    (folder / "policy.md").unlink()
    with pytest.raises(ConfigError, match=r"policy.md cannot be read: "), opened(folder):
        pass
