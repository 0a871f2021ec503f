"""Whole episodes of tau_bench, token by token: a scripted policy, and customers who answer, are slow, or fail."""

import asyncio
import json

from scripted import Lines, ScriptedPolicy

from jaxagent.config import SamplingConfig
from jaxagent.envs import TauBench
from jaxagent.envs.base import Opening
from jaxagent.rollout.cast import Roles
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task

ADDRESS = {"address1": "1 A St", "address2": "", "city": "Rome", "country": "USA", "state": "NY", "zip": "10001"}
TABLES = {
    "orders": {"#p": {
        "order_id": "#p", "user_id": "ann_1", "address": ADDRESS, "items": [], "fulfillments": [], "status": "pending",
        "payment_history": [{"transaction_type": "payment", "amount": 1.5, "payment_method_id": "paypal_1"}],
    }},
    "products": {"cup": {"name": "Cup", "product_id": "cup", "variants": {}}},
    "users": {"ann_1": {
        "name": {"first_name": "Ann", "last_name": "Lee"}, "address": ADDRESS, "email": "ann@example.com",
        "payment_methods": {"paypal_1": {"source": "paypal", "id": "paypal_1"}}, "orders": ["#p"],
    }},
}  # fmt: skip
CANCEL = {"name": "cancel_pending_order", "kwargs": {"order_id": "#p", "reason": "no longer needed"}}
TASK = Task("t", "You are Ann.", (), "", {"user_id": "ann_1", "actions": [CANCEL], "outputs": []})
CALL = json.dumps({"name": CANCEL["name"], "arguments": CANCEL["kwargs"]})
DONE = [f"<tool_call>{CALL}</tool_call>", "Cancelled."]


def episode(folder, tokenizer, lines, said, **settings):
    for name, table in TABLES.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    environment = TauBench(context_tokens=8_192, episode_timeout_s=20.0, **settings)
    role = Lines(lines=lines, timeout_s=0.05)
    policy = ScriptedPolicy(tokenizer, lambda task, sample: {0: said})
    with environment.open(Opening(folder, [TASK], None, print)) as begin:
        company = Roles({"user": role}, {"user": role.speaker})
        sampling = SamplingConfig(1.0, 1.0, 0, 0.0)
        rollout = MultiTurn(begin, policy, tokenizer, Plain(), environment, sampling, 5.0, company=company)
        return asyncio.run(rollout(TASK, 0)), policy


def test_an_episode_is_the_policys_tokens_and_the_customers_words(tmp_path, trained):
    played, policy = episode(tmp_path, trained, ("Hi.", "###STOP###"), DONE)
    assert (played.stop_reason, played.reward, played.error) == (StopReason.ANSWER, 1.0, "")
    (trajectory,) = played.trajectories
    assert trajectory.tokens.tolist() == policy.sessions[0].tokens
    assert played.metrics["tool_calls"] == 1 and played.metrics["user_replies"] == 2
    (heard,) = played.heard
    assert heard.role == "user" and heard.turns[1] == ("Cancelled.", "###STOP###")
    assert "You are Ann." in heard.turns[0][0] and "You are Ann." not in played.text


def test_a_customer_who_never_stops_reaches_the_turn_limit(tmp_path, trained):
    played, _ = episode(tmp_path, trained, ("Hi.",) + ("And?",) * 9, [DONE[0], *["Done."] * 9], max_turns=10)
    assert played.stop_reason is StopReason.TURN_LIMIT and not played.stop_reason.is_failure
    assert played.reward == 0.0 and played.rewards["data"] == 1.0 and played.turns == 10
