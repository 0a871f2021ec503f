"""tau2 in the rollout: tokens of the policy and of nobody else, roles' counters, and failures that are no rewards."""

import asyncio
import json

import pytest
from scripted import Lines, ScriptedPolicy

from jaxagent.config import SamplingConfig
from jaxagent.data import sources
from jaxagent.envs.base import Opening
from jaxagent.envs.tau2.environment import Tau2
from jaxagent.rollout.cast import Roles
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, TokenKind

TASK = {
    "id": "one",
    "user_scenario": {"instructions": "Ask for task_1 to be completed, then dismiss n."},
    "initial_state": {
        "initialization_actions": [
            {"env_type": "user", "func_name": "add_notification", "arguments": {"notification_id": "n", "message": "m"}}
        ]
    },
    "evaluation_criteria": {
        "actions": [
            {"name": "update_task_status", "arguments": {"task_id": "task_1", "status": "completed"}},
            {"name": "dismiss_notification", "arguments": {"notification_id": "n"}, "requestor": "user"},
        ],
        "reward_basis": ["DB", "ACTION"],
    },
}
STORE = {
    "tasks": {"task_1": {"task_id": "task_1", "title": "t", "status": "pending"}},
    "users": {"u": {"user_id": "u", "name": "n", "tasks": ["task_1"]}},
}
UPDATE = (
    '<tool_call>{"name": "update_task_status", "arguments": {"task_id": "task_1", "status": "completed"}}</tool_call>'
)
DISMISS = '<tool_call>{"name": "dismiss_notification", "arguments": {"notification_id": "n"}}</tool_call>'


def episode(tokenizer, folder, actions, lines):
    """One episode, with its policy."""
    for name, value in {"tasks": [TASK], "split_tasks": {"base": ["one"]}, "db": STORE}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "policy.md").write_text("Be kind.")
    (task,) = sources.load_tasks(folder, need_answers=False)
    policy = ScriptedPolicy(tokenizer, lambda task, sample: actions)
    user = Lines(lines=lines)
    environment = Tau2(context_tokens=20_000, turn_tokens=500, episode_timeout_s=5.0)
    here = Opening(folder, (task,), lambda work, timeout_s: asyncio.run(work), lambda line: None)
    with environment.open(here) as attempt_at:
        rollout = MultiTurn(
            attempt_at,
            policy,
            tokenizer,
            Plain(),
            environment,
            SamplingConfig(1.0, 1.0, 0, 0.0),
            2.0,
            company=Roles({"user": user}, {"user": user.speaker}),
        )
        return asyncio.run(rollout(task, 0)), policy


def test_an_episode_with_a_user_who_owns_tools(trained, tmp_path):
    lines = ("Please complete it.", DISMISS, "Thank you. ###STOP###")
    played, policy = episode(trained, tmp_path, [UPDATE, "Done."], lines)
    assert (played.stop_reason, played.reward) == (StopReason.ANSWER, 1.0)
    assert played.rewards == {"solved": 1.0, "db": 1.0, "action": 1.0}
    (trajectory,) = played.trajectories
    (session,) = policy.sessions
    assert trajectory.tokens.tolist() == session.tokens
    said = trained.decode(trajectory.tokens[trajectory.kinds == TokenKind.ACTION])
    assert "update_task_status" in said and "dismiss_notification" not in said
    assert "dismiss_notification" not in trained.decode(trajectory.tokens)
    (heard,) = played.heard
    assert heard.role == "user" and [line for _, line in heard.turns] == list(lines)
    assert played.metrics["user_replies"] == 3 and played.metrics["user_calls"] == 1


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("fail",), "user: "),
        (("Please.", "fail"), "user: "),
        (("Please.", ""), "user: an empty message"),
        (("###STOP###",), "user: ended the conversation before"),
        (("Please.", *[DISMISS] * 30), "calls of tools in a row"),
    ],
)
def test_a_user_that_fails_is_no_reward(trained, tmp_path, lines, told):
    played, _ = episode(trained, tmp_path, [UPDATE, "Done.", "Hm?"], lines)
    assert played.stop_reason is StopReason.ENV_ERROR and played.stop_reason.is_failure
    assert told in played.error and played.rewards == {}


def test_stores_and_policy_are_part_of_a_runs_identity(trained, tmp_path):
    episode(trained, tmp_path, [UPDATE, "Done."], ("Hi", "###STOP###"))
    first = Tau2().identity(tmp_path)
    (tmp_path / "policy.md").write_text("Be very kind.")
    assert {name for name, value in Tau2().identity(tmp_path).items() if value != first[name]} == {"policy"}
    (tmp_path / "user_db.json").write_text(json.dumps({"notifications": {}}))
    (tmp_path / "db.json").write_text(json.dumps({**STORE, "tasks": {}}))
    changed = {name for name, value in Tau2().identity(tmp_path).items() if value != first[name]}
    assert changed == {"policy", "store"}
