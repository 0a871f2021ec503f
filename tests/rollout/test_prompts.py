"""Prompts that do not fit are told when a run starts."""

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.prompts import check_prompts, some
from jaxagent.rollout.templates import Plain
from jaxagent.types import Task


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["some words of some text"] * 9, 300, ["</answer>"])


def said(tokenizer, context, turn, *texts):
    raw = get_config()
    raw.env.update(context_tokens=context, turn_tokens=turn)
    notes = []
    check_prompts(
        "held-out",
        [Task(f"t{i}", text, ()) for i, text in enumerate(texts)],
        lambda task: (Message("user", f"Q: {task.prompt}"),),
        lambda: Conversation(tokenizer, Plain(), 9),
        config.parse(raw).env,
        notes.append,
    )
    return notes


def test_a_prompt_without_room_for_a_turn_is_a_mistake(tokenizer):
    long = "z" * 40
    tokens = len(tokenizer.encode(f"Q: {long}"))
    assert said(tokenizer, tokens + 8, 8, "z", long) == []
    (note,) = said(tokenizer, tokens + 7, 8, "z", long, "z")
    assert "1 of 3 held-out tasks" in note and "'t1'" in note and f"{tokens + 8} or more" in note
    assert said(tokenizer, tokens + 1, 8, long)  # one token can be sampled
    with pytest.raises(ConfigError) as error:
        said(tokenizer, tokens, 8, "z", long, long)
    for part in (f"env.context_tokens={tokens} ", "2 of 3 held-out", "'t1'", f"has {tokens} tokens"):
        assert part in str(error.value)
    assert said(tokenizer, 1, 1) == []


def test_a_sample_is_spread_over_all_tasks():
    assert some(range(10), 4) == [0, 2, 5, 7] and some(range(3), 4) == [0, 1, 2]
