"""Scripted experts, and whole episodes of an orchestrator with experts that work and experts that fail. No engine."""

import asyncio
import dataclasses

import pytest

from configs import tool_orchestra
from jaxagent import config as schema
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message
from jaxagent.envs.orchestra import experts, tools
from jaxagent.envs.orchestra.environment import OrchestraAttempt
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.roles.base import Reply, TextRole
from jaxagent.rollout.cast import Roles
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task, TokenKind
from tests.rollout.scripted import ScriptedPolicy

TASK = Task("t", "What is 347 times 52?", ("18044",), "two_step/x", {"program": "print(347 * 52)", "query": "ghana"})
ANSWERS = [tools.call_text("search", "search-3"), tools.call_text("answer", "answer-1")]


class Index:
    async def search(self, queries, topk):
        return [[Passage("1", "Ghana", "The capital of Ghana is Accra.")] for _ in queries]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken(TextRole):
    how: str = "error"

    def speaker(self, task, sample, number):
        return self

    async def reply(self, messages, stop_strings, max_tokens):
        if self.how == "error":
            raise ConnectionError("refused")
        await asyncio.Event().wait()
        return Reply("")


def episode(actions, **changed):
    config = schema.parse(tool_orchestra.get_config())
    changes = dict(reasoners={}, searchers={"search-3": ""}, price_prompt=0.0, price_reply=0.0)
    env = dataclasses.replace(config.env, **changes)
    cast = {name: changed.get(name, config.roles[name]) for name in env.roles}
    tokenizer = Tokenizer.train([experts.question("answer", TASK.prompt, ""), *actions] * 20, 400, env.tokens)
    policy = ScriptedPolicy(tokenizer, lambda task, sample: actions)
    rollout = MultiTurn(
        lambda task, cast: OrchestraAttempt(task, cast, env, Index(), None),
        policy, tokenizer, Plain(), env, config.rl.sampling, 5.0,
        company=Roles(cast, {name: role.speaker for name, role in cast.items()}),
    )  # fmt: skip
    return asyncio.run(rollout(TASK, 0)), tokenizer


def test_an_episode_with_scripted_experts():
    found, tokenizer = episode(ANSWERS)
    assert found.stop_reason is StopReason.ANSWER and found.reward == 1.0 and not found.error
    (one,) = found.trajectories
    assert tokenizer.decode(one.tokens[one.kinds == TokenKind.ACTION]).replace("<eos>", "") == "".join(ANSWERS)
    assert [heard.role for heard in found.heard] == ["search-3", "answer-1"]
    by_role = found.metrics["search-3_cost"] + found.metrics["answer-1_cost"]
    assert found.metrics["cost"] == pytest.approx(by_role) and by_role > 0
    asked, said = found.heard[1].turns[0]
    tokens = len(tokenizer.encode(asked)) * 1.25 + len(tokenizer.encode(said)) * 10
    assert found.metrics["answer-1_cost"] == pytest.approx(tokens / 1e6)


@pytest.mark.parametrize(
    ("how", "reason", "told"), [("error", StopReason.ENV_ERROR, "refused"), ("hang", StopReason.TIMEOUT, "")]
)
def test_an_expert_that_fails_is_a_failure_and_no_zero(how, reason, told):
    found, _ = episode(ANSWERS, **{"answer-1": Broken(how=how, timeout_s=0.05, price_prompt=1.0)})
    assert found.stop_reason is reason and found.stop_reason.is_failure and found.rewards == {}
    assert "answer-1: " in found.error and told in found.error


def test_scripted_experts_know_what_they_are_said_to_know_and_read_the_rest():
    made = schema.parse(tool_orchestra.get_config()).roles
    easy = dataclasses.replace(TASK, kind="one_step/add")

    def says(name, task, context="", number=0):
        question = Message("user", experts.question("answer", task.prompt, context))
        return asyncio.run(made[name].speaker(task, number, 0).reply([question], (), 100)).text

    assert experts.answer_of(says("answer-3", easy)) == "18044" == experts.answer_of(says("answer-3", easy, number=5))
    assert experts.answer_of(says("answer-3", TASK)) == "unknown"
    assert experts.answer_of(says("answer-3", TASK, "```output\n18044\n```\n\n")) == "18044"
    # Not out of other numbers and words, nor out of the numbers of documents.
    small = dataclasses.replace(TASK, answers=("2",))
    shown = "Documents:\nDoc 1: Ghana\nIts code is +233.\nDoc 2: Togo\n12, 2.5 and -2, 1,2x.\n\n"
    assert experts.answer_of(says("answer-3", small, shown)) == "unknown"
    for shown in ("Doc 2: Togo\nIt has 2.\n", "```output\n2\n```\n\n", "Doc 1: 2\n"):
        assert experts.answer_of(says("answer-3", small, shown)) == "2"
    assert experts.query_of(says("search-3", TASK)) == "ghana"
    assert experts.program_of(says("reasoner-3", TASK)) == "print(347 * 52)"
    tasks = [dataclasses.replace(TASK, id=str(i)) for i in range(300)]
    known = sum(experts.answer_of(says("answer-1", task)) == "18044" for task in tasks)
    assert 250 < known < 290  # nine of ten
    assert len(says("answer-1", TASK).split()) > 2 * len(says("answer-3", TASK).split())
