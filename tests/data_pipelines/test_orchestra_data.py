"""Problems for an orchestrator: every demonstrated way does what it says, and splits share nothing."""

import asyncio
import json
import re

import pytest

from configs import tool_orchestra
from data_pipelines import orchestra
from jaxagent import config as schema
from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message
from jaxagent.envs.orchestra import experts, tools
from jaxagent.rollout import demonstrations
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.templates import Plain
from jaxagent.types import TokenKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("orchestra") / "data"
    orchestra.write(made, 240, 0, 250, 90, 2, 0.2)
    return made


def tasks_of(folder, split):
    found = sources.load_tasks(folder, split)
    return [found[i] for i in range(len(found))]


def test_splits_and_families(folder):
    train, heldout = (tasks_of(folder, split) for split in ("train", "heldout"))
    families = ["fact", "one_step", "two_step"]
    assert sorted({t.kind.partition("/")[0] for t in train}) == families
    assert sorted({t.kind.partition("/")[0] for t in heldout}) == families
    assert not {t.prompt for t in train} & {t.prompt for t in heldout}


def test_the_cheap_way_is_right_on_every_problem_and_the_cheap_expert_alone_only_on_easy_ones(folder):
    roles = schema.parse(tool_orchestra.get_config()).roles
    documents = {json.loads(line)["contents"] for line in (folder / "corpus.jsonl").open()}

    def says(name, task, tool, context=""):
        question = Message("user", experts.question(tool, task.prompt, context))
        return asyncio.run(roles[name].speaker(task, 0, 0).reply([question], (), 100)).text

    for task in tasks_of(folder, "train")[::7]:
        family, (gold,) = task.kind.partition("/")[0], task.answers
        alone = experts.answer_of(says("answer-3", task, "answer"))
        assert (alone == gold) == (family == "one_step")
        held = next((d for d in documents if re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", d)), "")
        context = f"Documents:\n{held}\n\n"
        if family == "two_step":
            program = experts.program_of(says("reasoner-3", task, "enhance_reasoning"))
            printed = []
            exec(program, {"print": printed.append})  # of our own pipeline
            assert [str(value) for value in printed] == [gold]
            context = experts.context((), [(program, gold)])
        if family != "one_step":
            assert experts.answer_of(says("answer-3", task, "answer", context)) == gold


def test_demonstrations_are_what_an_episode_would_be(folder):
    env = schema.parse(tool_orchestra.get_config()).env
    rows = demonstrations.load(folder / "full.jsonl")
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    tokenizer = Tokenizer.train(texts, 1024, env.tokens)
    offered = {name: tools.tool(name, able) for name, able in env.offers.items()}
    played = [row for row in rows if not row["kind"].startswith("expert/")]
    assert len(played) == 90 and len(rows) == 108
    for row in rows:
        made = demonstrations.trajectory(row, Conversation(tokenizer, Plain(), 112), env)
        assert len(made) <= 224
        if row in played:
            assert all(tools.read(turn["action"], offered)[0] for turn in row["turns"])
            assert row["turns"][-1]["action"].startswith('<tool_call>{"name": "answer"')
            results = [turn["observation"] for turn in row["turns"]]
            assert results[-1] == "" and all(results[:-1])
        else:  # an expert's, which ends its message itself
            assert made.kinds[-1] == TokenKind.ACTION and made.tokens[-1] in tokenizer.eos_ids
    dear = [row for row in played if "answer-1" in row["turns"][-1]["action"]]
    assert len(played) / 2 < len(dear) < len(played)


def test_it_repeats_and_too_few_are_refused(folder, tmp_path):
    orchestra.write(tmp_path / "again", 240, 0, 250, 90, 2, 0.2)
    assert (tmp_path / "again/full.jsonl").read_bytes() == (folder / "full.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="too few for both splits"):
        orchestra.write(tmp_path / "few", 3, 0, 250, 10, 2, 0.0)
    with pytest.raises(ConfigError, match=r"env\.prompt='plain'"):
        raw = tool_orchestra.get_config()
        raw.env.prompt = "orchestra"
        cfg = schema.parse(raw)
        cfg.data.source.settings(0, cfg.env)
